"""The Triton kernels against plain torch, by Triton's interpreter; `tests/gpu` runs the real ones.

The interpreter is chosen when Triton is imported, so a process of its own runs the comparisons.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


def test_kernels_equal_plain_torch() -> None:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed; it comes with the dev and gpu extras")
    done = subprocess.run(
        ["env", "TRITON_INTERPRET=1", sys.executable, "-m", "tests.radius.kernel_comparisons"],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "all equal" in done.stdout
