"""A tool whose reader has left, as `head -1` leaves, ends as `cat` ends: silently."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
PRINTING = ("check_data", "evaluate", "generate", "plan", "report", "simulate", "status") + (
    *("verify_checkpoint", "zero_shot"),
)


@pytest.mark.parametrize("name", PRINTING)
def test_a_tool_ends_silently_with_its_reader(name: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, str(TOOLS / f"{name}.py"), "--help"],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")
