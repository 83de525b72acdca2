"""The Triton kernels against plain torch by Triton's interpreter, and compiled for a GPU that need
not be here; `tests/gpu` runs the real ones.

Triton learns where to run and what to keep when it is imported, so each has a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed; dev and gpu extras have it"
)


def run(module: str, variable: str) -> str:
    done = subprocess.run(
        ["env", variable, sys.executable, "-m", module],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_equal_plain_torch() -> None:
    assert "all equal" in run("tests.radius.kernel_comparisons", "TRITON_INTERPRET=1")


def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    assert "all compiled" in run("tests.radius.kernel_compilation", f"TRITON_CACHE_DIR={tmp_path}")
