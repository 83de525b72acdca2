"""Tests of the peak of a process's memory."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.metrics import memory
from megatron.metrics.memory import peak_memory_bytes

CPU = torch.device("cpu")
LAUNCHER = """
import os, sys
launcher = bytearray(os.urandom(1 << 20) * 1024)
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""
LAUNCHED = """
import torch
from megatron.metrics.memory import peak_memory_bytes
print(peak_memory_bytes(torch.device("cpu")))
"""


@pytest.mark.push
@pytest.mark.skipif(not memory.STATUS.exists(), reason="needs Linux's /proc")
def test_a_peak_is_not_that_of_the_launcher() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, LAUNCHED], capture_output=True, text=True, check=True
    )
    assert 2**26 < int(done.stdout) < 1 << 30


@pytest.mark.parametrize("text", [None, "Name:\tpython\n"])
def test_a_system_without_proc_tells_its_own_peak(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = tmp_path / "status"
    monkeypatch.setattr(memory, "STATUS", status)
    if text is not None:
        status.write_text(text)
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert own <= peak_memory_bytes(CPU) < own + 2**26
