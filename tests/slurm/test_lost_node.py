"""Tests of the nodes that a requeued job does without, with a stand-in for Slurm's commands."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.limits import LIMIT
from tests.slurm.harness import REPO

pytestmark = pytest.mark.push

PROGRAM = """
source {repo}/scripts/common.sh
source {repo}/scripts/slurm.sh
scontrol() {{
  case $1 in
    show) echo "JobId=7 ReqNodeList=(null) ExcNodeList={excluded} Features=(null)" ;;
    write) echo "#!/bin/sh" ;;
    *) echo "scontrol $*" && {answer} ;;
  esac
}}
timeout() {{
  [[ "$*" == "60 sbatch --test-only --exclude="* ]] || echo "submits: $*"
  cat >/dev/null
  {answer}
}}
SLURM_JOB_ID=7
{call}
"""


def said(folder: Path, call: str, *, excluded: str = "(null)", answer: str = "true") -> list[str]:
    """Return the output of `call`, where Slurm's checks and updates end with `answer`."""
    program = PROGRAM.format(
        repo=REPO, excluded=excluded, answer=answer, call=f"{{ {call}; }} 2>&1"
    )
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


NODES = "nodes_to_exclude nid3 lost 2"


def test_what_was_excluded_stays_excluded(tmp_path: Path) -> None:
    assert said(tmp_path, NODES) == ["nid3"]
    assert said(tmp_path, NODES, excluded="nid[7-8]") == ["nid[7-8],nid3"]


def test_no_node_is_excluded_that_the_job_needs(tmp_path: Path) -> None:
    (line,) = said(tmp_path, NODES, answer="{ echo not available; false; }")
    assert line.endswith(
        "nid3 stays allowed: Slurm would not start the job without it (not available)"
    )


def test_no_more_nodes_are_excluded_than_starts_may_be_lost(tmp_path: Path) -> None:
    (tmp_path / "lost").write_text("nid1\n")
    assert said(tmp_path, NODES) == ["nid3"]
    (tmp_path / "lost").write_text("nid1\nnid2\n")
    (line,) = said(tmp_path, NODES)
    assert "nid3 stays allowed: nid1,nid2 lost ranks before" in line


def test_a_job_is_requeued_and_then_kept_off_the_nodes(tmp_path: Path) -> None:
    first, *rest = said(tmp_path, "requeue nid3 || true", answer="[[ $1 == requeue ]]")
    assert first == "scontrol requeue 7"
    (line,) = rest
    assert "Slurm refused to exclude nid3 (scontrol update JobId=7 ExcNodeList=nid3)" in line
    assert said(tmp_path, "requeue ''") == ["scontrol requeue 7"]
