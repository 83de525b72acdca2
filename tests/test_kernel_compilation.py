"""Every Triton kernel is compiled for GPUs that need not be here; `tests/gpu` runs them.

Launches take the architectures in turns; with `--all`, each launch is compiled for all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.triton_process import needs_triton, run_module

pytestmark = [needs_triton, pytest.mark.full]


def test_every_kernel_compiles_as_it_is_launched(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    cache = f"TRITON_CACHE_DIR={tmp_path}"
    asked = ["--all"] if pytestconfig.getoption("--all") else []
    assert "compiled" in run_module("tests.kernel_compilation", cache, *asked)
