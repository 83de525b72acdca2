"""A test module run in its own process, since Triton reads its settings when it is imported."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed; dev and gpu extras have it"
)


def run_module(module: str, variable: str) -> str:
    """Return the output of a module run with `variable` (NAME=VALUE) in its environment.

    Asserts that the process succeeds.
    """
    done = subprocess.run(
        ["env", variable, sys.executable, "-m", module],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
