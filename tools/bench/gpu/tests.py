"""Run tests/gpu, by pytest if it is installed.

    python -m tools.bench.gpu.tests [--smoke]

`--smoke` runs the tests on the CPU. Exit code 1 if a test failed, 2 without a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import subprocess
import sys
import tempfile
import traceback
import unittest
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

REPO = Path(__file__).resolve().parents[3]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    smoke = "--smoke" in (sys.argv[1:] if arguments is None else arguments)
    if not smoke and not torch.cuda.is_available():
        print("error: no CUDA device is seen; --smoke runs on the CPU", file=sys.stderr)
        return 2
    if not smoke and importlib.util.find_spec("pytest") is not None:
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "tests/gpu"], cwd=REPO
        ).returncode
    device = torch.device("cpu" if smoke else "cuda:0")
    return 1 if [name for name, test in _tests() if not _passes(name, test, device)] else 0


def _tests() -> Iterator[tuple[str, Callable[..., Any]]]:
    for file in sorted((REPO / "tests" / "gpu").glob("test_*.py")):
        module = importlib.import_module(f"tests.gpu.{file.stem}")
        for name, test in inspect.getmembers(module, inspect.isfunction):
            if name.startswith("test_"):
                yield f"{file.stem}::{name}", test


def _passes(name: str, test: Callable[..., Any], device: torch.device) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        console = Path(folder) / "console"
        given = {"device": device, "tmp_path": Path(folder)}
        wanted = inspect.signature(test).parameters
        try:
            with open(console, "w") as stream, contextlib.redirect_stdout(stream):
                test(**{key: given[key] for key in wanted})
        except unittest.SkipTest as reason:
            print(f"skipped {name}: {reason}", flush=True)
            return True
        except Exception:
            print(f"FAILED {name}\n{traceback.format_exc()}", flush=True)
            return False
    print(f"passed {name}", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
