"""Tests of Slurm jobs of several ranks: signalled, requeued, resumed, cancelled, failing."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.verify import read_manifest
from megatron.parallel.groups import ProcessGroups
from tests.limits import LIMIT
from tests.ranks import Ranks, grid
from tests.slurm.harness import CANARY, HERE, REPO, Cluster, SlurmJob
from tests.training.harness import TINY, metrics_of, train

pytestmark = [pytest.mark.push, pytest.mark.waits]

RADIUS = "--radius-start-iter 2 --radius-interval 2"
PATHS = {
    "dense": "",
    "samo": "--samo-sparsity 0.5",
    "radius": RADIUS,
    "samo+radius": f"--samo-sparsity 0.5 {RADIUS}",
    "topk": "--topk-density 0.1",
    "powersgd": "--powersgd-rank 2",
    "lowrank+sparse": "--lowrank-rank 2",
    "roundrobin": "--roundrobin-interval 3",
    "demo": "--demo-k 8 --optimizer sgd --sgd-momentum 0 --clip-grad 0",
    "diloco": "--local-steps 2",
}
FLAGS = {name: f"{TINY} --grad-path {name} {more}" for name, more in PATHS.items()}
SAVING = f"{FLAGS['dense']} --save-interval 2"
LAST = {name: 8 for name in PATHS} | {"dense": 80}
FLAGS["dense"] += f" --train-iters {LAST['dense']}"  # the last --train-iters counts
PIPELINE = f"{TINY} --pipeline-model-parallel-size 2"
MESSAGES = f"{PIPELINE} --pipeline-schedule message-driven"
BY_MPI = {
    "by-srun": ({"STEP_LAUNCHER": "srun"}, "srun ", " --mpi=pmi2 "),
    "by-mpiexec": ({"STEP_LAUNCHER": "mpiexec"}, "mpiexec ", " -n 2 "),
}
"""Pipeline jobs with MPI messages: launch.sh's variables and words of the start command."""
NO_PLUGIN = {"STEP_LAUNCHER": "srun", "SLURM_MPI_TYPE": "absent"}
NO_MPI = {"STEP_LAUNCHER": "srun", "SLURM_MPI_TYPE": "none"}
SLOWLY = "slow:0:3+:data"
"""A fault that slows a run down, so that it still runs when Slurm warns it."""
HELD = "held:0:{step}+:data"
"""A fault that holds a run until it is told to leave, however long the test takes to act."""


def status_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "status.json").read_text())


@pytest.fixture(scope="module")
def jobs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, SlurmJob]:
    """Run every job of this file at once, and return the jobs after all have ended."""
    folder = tmp_path_factory.mktemp("runs $(touch canary); `touch canary`")
    common = {"PROGRAM": str(HERE / "program.py"), "RANKS_PER_NODE": "1", "NODES": "2"}
    common |= {"LOST_STARTS": "5", "TIME": "10", "FIRST_FAULT": SLOWLY}

    def call(*command: str) -> None:
        done = cluster.call(*command)
        assert done.returncode == 0, done.stderr

    def warn(job: SlurmJob) -> None:
        # To the job script alone, as Slurm's own warning is sent.
        call("scancel", "--batch", "--signal=USR1", job.number)

    def submit(name: str, flags: str, **more: Any) -> SlurmJob:
        if "then" in more:
            more["FIRST_FAULT"] = HELD.format(step=more["at"] + 1)
        more = {**common, **more}
        return cluster.submit(folder / name.replace("+", "-"), flags, **more)

    pair, other = ("--nodelist=node[0-1]",), ("--nodelist=node[2-3]",)
    # Slurm warns the first job 210 of 240 seconds before its limit, so that slow machines have time
    # to obey; the test warns the other jobs as soon as they have something to lose.
    limited = {"TIME": "4", "SAVE_SECONDS": "75"}
    found = {"dense": submit("dense", FLAGS["dense"], sbatch=pair, **limited)}
    for name in [name for name in PATHS if name not in found]:
        found[name] = submit(name, FLAGS[name], sbatch=pair, at=3, then=warn)
    found["node"] = submit(
        "node",
        SAVING,
        sbatch=other,
        at=4,
        then=lambda job: call("scontrol", "update", "NodeName=node3", "State=DOWN", "Reason=test"),
    )
    found["cancelled"] = submit(
        "cancelled", SAVING, sbatch=pair, at=4, then=lambda job: call("scancel", job.number)
    )
    found["failing"] = submit("failing", SAVING, sbatch=pair, FIRST_FAULT="raise:1:4:forward")
    if find_spec("mpi4py"):
        # Without PROGRAM, launch.sh sees the flags and adds what the schedule needs.
        plain = {"PROGRAM": "", "FIRST_FAULT": ""}
        for name, (more, *_) in BY_MPI.items():
            found[name] = submit(name, MESSAGES, sbatch=pair, **plain, **more)
        found["no-plugin"] = submit("no-plugin", MESSAGES, sbatch=pair, **plain, **NO_PLUGIN)
        found["no-mpi"] = submit("no-mpi", MESSAGES, sbatch=pair, **plain, **NO_MPI)
    cluster.follow(limit=2.5 * LIMIT)
    return found


def unbroken(ranks: Ranks, flags: str, folder: Path) -> list[float]:
    """Return the losses of the same run on two ranks without interruption."""
    ranks.run(2, train, flags, folder)
    return metrics_of(folder)


def train_pipeline(groups: ProcessGroups, flags: str, folder: Path) -> None:
    """Call `train` on two stages."""
    train(grid(groups, pp=2), flags, folder)


def found_or_skip(name: str, jobs: dict[str, SlurmJob]) -> SlurmJob:
    """Return a job that needs MPI; skip the test without MPI."""
    if name not in jobs:
        pytest.skip("needs the extra mpi")
    return jobs[name]


def assert_resumed(job: SlurmJob, wanted: list[float], *, limited: bool = False) -> None:
    """Assert that the job resumed once where it had left, with the losses of an unbroken run.

    A job that Slurm warns of its time limit may resume more often on a slow machine, where another
    start meets the limit too.
    """
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
    assert job.restarts >= 1 if limited else job.restarts == 1, job.log
    assert status_of(job.run_dir)["state"] == "done"
    assert metrics_of(job.run_dir) == wanted


@pytest.mark.parametrize("path", PATHS)
def test_a_warned_job_ends_as_one_that_was_never_stopped(
    path: str, jobs: dict[str, SlurmJob], ranks: Ranks, tmp_path: Path
) -> None:
    job = jobs[path]
    assert_resumed(job, unbroken(ranks, FLAGS[path], tmp_path), limited=path == "dense")
    assert re.search(r"exit code 75 at step \d+, from step 0: requeueing", job.log), job.log
    first = min((job.run_dir / "checkpoints").glob("step_*"))
    assert 1 <= read_manifest(first).step < LAST[path]
    if path == "dense":
        assert "are left of the job: asking the run" in job.log or "job.sh: USR1:" in job.log


def test_a_job_whose_node_went_down_is_taken_up_from_its_last_save(
    jobs: dict[str, SlurmJob], ranks: Ranks, tmp_path: Path
) -> None:
    assert_resumed(jobs["node"], unbroken(ranks, SAVING, tmp_path))
    assert "node2 does not resolve here" in jobs["node"].log


def test_a_cancelled_job_keeps_what_it_saved_and_does_not_come_back(
    jobs: dict[str, SlurmJob],
) -> None:
    job = jobs["cancelled"]
    assert (job.state, job.restarts) == ("CANCELLED", 0), job.log
    newest = find_checkpoint(job.run_dir / "checkpoints", log=print)
    assert newest is not None and read_manifest(newest).step >= 4
    assert status_of(job.run_dir)["state"] in ("left", "failed")


def test_a_failing_rank_fails_the_job_with_its_own_code(jobs: dict[str, SlurmJob]) -> None:
    job = jobs["failing"]
    status = status_of(job.run_dir)
    assert (status["state"], status["rank"], status["job_id"]) == ("failed", 1, job.number)
    assert (job.state, job.restarts) == ("FAILED", 0), job.log
    assert job.exit_code == status["exit_code"]
    assert re.search(rf"rank 1 on node\d: {re.escape(status['reason'])}", job.log), job.log
    assert f"not requeued: exit code {job.exit_code} is no reason" in job.log


@pytest.mark.parametrize("name", BY_MPI)
def test_a_message_driven_pipeline_of_two_nodes_computes_what_1f1b_does(
    name: str, jobs: dict[str, SlurmJob], ranks: Ranks, tmp_path: Path
) -> None:
    job = found_or_skip(name, jobs)
    assert (job.state, job.exit_code, job.restarts) == ("COMPLETED", 0, 0), job.log
    (command,) = [line for line in job.log.splitlines() if " --pipeline-schedule " in line]
    assert all(words in command for words in BY_MPI[name][1:])
    config = (job.run_dir / "config.yaml").read_text()
    assert "pipeline_schedule: message-driven" in config
    assert all(metrics_of(job.run_dir, "bytes_pp"))
    ranks.run(2, train_pipeline, PIPELINE, tmp_path)
    assert metrics_of(job.run_dir) == metrics_of(tmp_path)


def test_an_mpi_plugin_that_is_not_there_is_one_line(jobs: dict[str, SlurmJob]) -> None:
    job = found_or_skip("no-plugin", jobs)
    assert (job.state, job.exit_code, job.restarts) == ("FAILED", 2, 0), job.log
    (line,) = [line for line in job.log.splitlines() if "absent" in line]
    assert line.startswith(
        "launch.sh: srun --mpi=absent: Slurm cannot load that plugin; it lists: "
    )
    assert " none " in line and " pmi2" in line and "SLURM_MPI_TYPE" in line


def test_ranks_that_mpi_takes_for_one_each_are_refused(jobs: dict[str, SlurmJob]) -> None:
    job = found_or_skip("no-mpi", jobs)
    assert (job.state, job.exit_code, job.restarts) == ("FAILED", 2, 0), job.log
    assert "MPI sees rank 0 of 1, srun's variables say" in job.log
    assert "srun --mpi=pmi2" in job.log


def test_each_rank_has_a_log_and_none_tells_a_secret(jobs: dict[str, SlurmJob]) -> None:
    for name, job in jobs.items():
        for rank in range(0 if name in ("by-mpiexec", "no-plugin") else 2):
            assert (job.run_dir / "logs" / f"{job.run_dir.name}-{job.number}-{rank}.log").is_file()
        assert "OMP_NUM_THREADS=1" in job.log
        files = [path for path in job.run_dir.rglob("*") if path.is_file()]
        assert not [path for path in files if CANARY.encode() in path.read_bytes()]


def test_names_were_never_run(jobs: dict[str, SlurmJob], cluster: Cluster) -> None:
    folder = jobs["dense"].run_dir.parent
    assert not [*folder.rglob("canary"), *folder.parent.glob("canary")]
    assert not [*cluster.folder.glob("canary"), *REPO.glob("canary")]
