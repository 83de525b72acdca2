"""The tests of `tests/gpu` on the device that the CPU plays. Runs in a process that has it."""

from __future__ import annotations

import gc
import importlib
import inspect
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.gpu import sizes
from tests.rehearsal.device import install


def run(module: str, name: str) -> list[str]:
    """Run a test in small sizes; returns the findings that are no waits of the host."""
    device = install()
    device.memory.settle()
    device.findings.take()
    sizes.small = True
    test = getattr(importlib.import_module(f"tests.gpu.{module}"), name)
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {"device": torch.device("cuda", 0), "tmp_path": Path(folder)}
        test(**{key: given[key] for key in inspect.signature(test).parameters})
    # What the test frees at its end is judged here, and not in the next test.
    gc.collect()
    device.memory.settle()
    return [str(one) for one in device.findings.take() if one.kind != "wait"]
