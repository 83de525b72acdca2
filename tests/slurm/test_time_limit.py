"""Tests of the time limit of a job or an allocation, with a Slurm that may not answer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.limits import LIMIT
from tests.slurm.harness import REPO
from tests.slurm.test_job_script import dry

pytestmark = pytest.mark.push

WATCH = """
source {repo}/scripts/common.sh
source {repo}/scripts/slurm.sh
unset SECONDS  # from here on a variable that only `sleep` advances
SECONDS=0
sleep() {{ echo "slept $1"; SECONDS=$((SECONDS + $1)); }}
hand_on() {{ echo "sent $1"; }}
SLURM_JOB_ID=1 {settings}
{call}
"""


def watched(
    folder: Path, answers: list[str], settings: str = "", call: str = "watch_time_limit $$"
) -> list[str]:
    """Return the output of `call` for successive answers of squeue; "" stands for no answer."""
    (folder / "answers").write_text("".join(f"{answer}\n" for answer in answers))
    squeue = folder / "squeue"
    squeue.write_text(
        f"#!/bin/sh\ncd {folder}\necho $3 > asked\n"
        "head -n 1 answers | grep . || code=1\nsed -i 1d answers\n"
        "exit ${code:-0}\n"
    )
    squeue.chmod(0o755)
    program = WATCH.format(repo=REPO, settings=settings, call=call)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", program],
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_queue_that_does_not_answer_is_asked_again(tmp_path: Path) -> None:
    answers = ["", "2:00:00 1:00:00", "", "2:00:00 5:01", "2:00:00 5:00"]
    naps = ["slept 60", "slept 1800", "slept 60", "slept 1"]
    assert watched(tmp_path, answers) == [*naps, "sent USR1"]


def test_a_task_of_an_array_asks_for_itself(tmp_path: Path) -> None:
    """The last task of an array has the number of the array, whose tasks all would answer."""
    task = "SLURM_ARRAY_JOB_ID=1 SLURM_ARRAY_TASK_ID=3"
    assert watched(tmp_path, ["RUNNING"], call="job_state") == ["RUNNING"]
    assert (tmp_path / "asked").read_text() == "1\n"
    assert watched(tmp_path, ["RUNNING"], task, call="job_state") == ["RUNNING"]
    assert (tmp_path / "asked").read_text() == "1_3\n"


def test_a_jobs_state_is_asked_for_a_while(tmp_path: Path) -> None:
    naps = ["slept 5", "slept 10"]
    assert watched(tmp_path, ["", "", "RUNNING"], call="job_state") == [*naps, "RUNNING"]
    assert watched(tmp_path, ["COMPLETING"], call="job_state") == ["COMPLETING"]
    assert watched(tmp_path, [""] * 4, call="job_state")[-1] == "slept 0", "no state is told"


@pytest.mark.parametrize(
    ("answer", "settings", "done"),
    [
        ("UNLIMITED UNLIMITED", "", []),
        # Python does not know the signal yet when it has just been started.
        ("1:00:00 9:00", "LEAVE_SECONDS=540", ["slept 20", "sent USR1"]),
        ("1:00:00 0:00", "", ["slept 20", "sent USR1"]),
    ],
)
def test_what_an_answer_leads_to(
    tmp_path: Path, answer: str, settings: str, done: list[str]
) -> None:
    assert watched(tmp_path, [answer], settings) == done


def step(folder: Path, job: str = "") -> str:
    """Return the command that starts the ranks of a step, inside the job `job` if any."""
    shown = dry(folder, LAUNCHER="srun", RANKS_PER_NODE="2", TIME="24:00:00", SLURM_JOB_ID=job)
    return shown.stdout


def test_a_limit_is_for_jobs_and_not_for_steps_of_an_allocation(tmp_path: Path) -> None:
    """An allocation may be longer or shorter than the time that the scripts ask for a job."""
    assert "--time 24:00:00 --signal USR1@300" in step(tmp_path)
    inside = step(tmp_path, "7")
    assert "srun" in inside and "--time" not in inside and "--signal" not in inside


def test_a_job_that_asks_for_no_gpu_is_told_how(tmp_path: Path) -> None:
    def asked(*arguments: str, flags: tuple[str, ...] = (), site: str = "local") -> bool:
        said = dry(tmp_path, *arguments, flags=flags, SITE=site, RANKS_PER_NODE="4", RUN_DIR="a")
        assert said.returncode == 0, said.stderr
        return "if this Slurm wants one: --gpus-per-node=4" not in said.stderr

    assert not asked()
    assert asked("--gres=gpu:4") and asked("--gpus=4")
    assert asked(flags=("--device", "cpu")) and asked(flags=("--device=cpu",))
    assert asked(site="frontier")
    # A Slurm that answers knows whether it has GPUs.
    for resources, has_none in (("(null)", True), ("gpu:a100:4", False)):
        (tmp_path / "bin" / "sinfo").write_text(f"#!/bin/sh\necho '{resources}'\n")
        (tmp_path / "bin" / "sinfo").chmod(0o755)
        assert asked() == has_none
