"""A test module run in its own process, since Triton reads its settings when it is imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.limits import LIMIT

REPO = Path(__file__).resolve().parent.parent
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed; dev and gpu extras have it"
)


def run_module(module: str, variable: str, *arguments: str) -> str:
    """Run a module with `variable` (NAME=VALUE) in its environment, and return its output.

    Asserts that the process succeeds.
    """
    done = subprocess.run(
        ["env", variable, sys.executable, "-m", module, *arguments],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def compare_all(comparisons: Iterable[Callable[[torch.device], None]]) -> int:
    """Run comparisons of kernels with their reference on the CPU; each asserts on its own."""
    torch.manual_seed(0)
    for comparison in comparisons:
        comparison(torch.device("cpu"))
    print("all equal")
    return 0
