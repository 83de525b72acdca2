"""A run of thirty starts, each ended by a random signal, ends as a run that was left alone."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from megatron.checkpoint.store import Checkpoint
from tests.faults.starting import Started, losses, start_launcher
from tests.limits import SLOWNESS

pytestmark = [pytest.mark.waits, pytest.mark.full]

STARTS = 30
STEPS = 2 * STARTS + 40
FLAGS = f"--train-iters {STEPS} --save-interval 3 --keep-last 2 --async-save"
SLOW = "slow:0:1+:data"
"""A step lasts a second, so that no start comes to the end."""
ASKED, KILLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT), signal.SIGKILL
LONGEST = 8.0
"""Seconds after which a signal comes at the latest: while imports, ranks meet, or steps run."""


def ranks_of(started: Started) -> list[int]:
    """Return the processes of the run that are below the launcher, the latest ones last."""
    found, below = [], {started.processes[0].pid}
    for entry in sorted(int(e.name) for e in Path("/proc").iterdir() if e.name.isdigit()):
        try:
            stat = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(stat[1]) in below:
            below.add(entry)
            found.append(entry)
    return found


def end(started: Started, draw: random.Random) -> str:
    """End a start by a random signal at a random time; return the signal and the exit code."""
    time.sleep(draw.uniform(0.1, LONGEST * SLOWNESS))
    number = draw.choice([*ASKED, KILLED, None])
    if number is None and started.run_dir.is_dir():
        (started.run_dir / "STOP").touch()
        return f"STOP {started.finish().codes[0]}"
    number = number or signal.SIGTERM
    if number is KILLED:
        for pid in ranks_of(started)[-1:]:
            os.kill(pid, number)
    else:
        started.processes[0].send_signal(number)
    return f"{number.name} {started.finish().codes[0]}"


def tensors(run_dir: Path) -> dict[str, bytes]:
    """Return the entries of every tensor of the last checkpoint."""
    with Checkpoint.open(run_dir / "checkpoints" / f"step_{STEPS:08d}") as saved:
        return {name: saved.read(name).numpy().tobytes() for name in saved.names()}


def peaks(run_dir: Path) -> list[int]:
    """Return the peak memory of each step."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line["peak_memory_bytes"] for line in lines if "peak_memory_bytes" in line]


def test_thirty_starts_end_as_one_and_leave_nothing(tmp_path: Path) -> None:
    twin, run = tmp_path / "twin", tmp_path / "run"
    assert start_launcher(2, twin, FLAGS).finish().codes == [0]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    draw, how = random.Random(50), list[str]()
    for _ in range(STARTS):
        how.append(end(start_launcher(2, run, FLAGS, fault=SLOW, TMPDIR=str(scratch)), draw))
        reached = len(losses(run)) if (run / "metrics.jsonl").exists() else 0
        assert reached < STEPS, how
    last = start_launcher(2, run, FLAGS, TMPDIR=str(scratch)).finish()
    assert last.codes == [0], (how, last.all_stderr)
    codes = {"SIGINT": {"75", "130"}, "SIGKILL": {"1", "6", "137"}}
    for asked, code in map(str.split, how):
        assert code in codes.get(asked, {"75"}), how
    assert losses(run) == losses(twin) and tensors(run) == tensors(twin), how
    assert sorted(scratch.iterdir()) == [], how
    # Failures leave dumps of collectives, and lines of steps that were computed again.
    kept = r"(?!logs$|metrics\.jsonl\.cut-).*"
    names = [{p.name for p in folder.iterdir() if re.match(kept, p.name)} for folder in (run, twin)]
    assert names[0] == names[1], how
    found = peaks(run)
    assert max(found[-10:]) <= 1.1 * max(peaks(twin)), how
