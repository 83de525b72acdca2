"""Every Triton kernel is compiled for GPUs that need not be here; `tests/gpu` runs them."""

from __future__ import annotations

from pathlib import Path

from tests.triton_process import needs_triton, run_module

pytestmark = needs_triton


def test_every_kernel_compiles_as_it_is_launched(tmp_path: Path) -> None:
    cache = f"TRITON_CACHE_DIR={tmp_path}"
    assert "compiled" in run_module("tests.kernel_compilation", cache)
