"""A study as Slurm job arrays: forks wait for their bases; a second submission does the rest."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.limits import LIMIT
from tests.slurm.harness import REPO, Cluster
from tests.studies.files import NAMES, write_study
from tools.studies.rows import read_rows

pytestmark = [pytest.mark.push, pytest.mark.waits]

LONGEST = 1.5 * LIMIT
"""Seconds after which the jobs of the study must have ended."""


def study(cluster: Cluster, path: Path, *flags: str) -> str:
    """Call tools/study.py as a user of this Slurm, and return what it prints."""
    done = subprocess.run(
        [sys.executable, str(REPO / "tools" / "study.py"), str(path), *flags],
        env=cluster.environment(),
        capture_output=True,
        text=True,
        cwd=path.parent,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_for_jobs(cluster: Cluster) -> None:
    began = time.monotonic()
    while cluster.call("squeue", "--noheader").stdout.strip():
        assert time.monotonic() - began < LONGEST, cluster.call("squeue", "--long").stdout
        time.sleep(0.5)


def test_a_study_runs_as_arrays_and_is_collected(cluster: Cluster, tmp_path: Path) -> None:
    path = write_study(tmp_path)
    told = study(cluster, path, "--slurm", "--jobs", "2", "--time=5")
    assert "submitted 6 runs as jobs" in told
    wait_for_jobs(cluster)
    logs = "".join(log.read_text() for log in (tmp_path / "runs/study/console").iterdir())
    listed = study(cluster, path, "--list").split()
    assert listed == [word for name in NAMES for word in (name, "done")], logs
    results = tmp_path / "runs" / "study" / "results.jsonl"
    assert not results.exists(), "neither tasks nor --list write it"
    assert "all runs are done" in study(cluster, path, "--slurm")
    rows = read_rows(results)
    assert [row.name for row in rows] == NAMES and all(row.valid_loss for row in rows)
