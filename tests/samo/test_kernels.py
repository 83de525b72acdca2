"""The Triton kernels against plain torch by Triton's interpreter, and compiled for a GPU that need
not be here; `tests/gpu` runs the real ones."""

from __future__ import annotations

from pathlib import Path

from tests.triton_process import needs_triton, run_module

pytestmark = needs_triton


def test_kernels_equal_plain_torch() -> None:
    assert "all equal" in run_module("tests.samo.kernel_comparisons", "TRITON_INTERPRET=1")


def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    cache = f"TRITON_CACHE_DIR={tmp_path}"
    assert "all compiled" in run_module("tests.samo.kernel_compilation", cache)
