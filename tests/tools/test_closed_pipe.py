"""A program whose reader has left, as `head -1` leaves, ends as `cat` ends: silently."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import LIMIT

REPO = Path(__file__).resolve().parents[2]
TOOLS = ("check_data", "evaluate", "generate", "plan", "report", "simulate", "status") + (
    *("export_hf", "import_hf", "verify_checkpoint", "zero_shot"),
)
RUN = "--config configs/gpt_tiny.yaml --mock-data --dry-run"
COMMANDS = [
    *(f"tools/{name}.py --help" for name in TOOLS),
    *(f"pretrain_gpt.py {flags}" for flags in ("--help", "--help-compat", RUN)),
]


@pytest.mark.push
@pytest.mark.parametrize("command", COMMANDS)
def test_a_program_ends_silently_with_its_reader(command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, *command.split()],
            cwd=REPO,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LIMIT,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")
