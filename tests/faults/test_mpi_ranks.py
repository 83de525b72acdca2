"""Tests of message-driven stages that mpiexec started.

A rank that fails is named although MPI would wait for it forever, and a step that one rank cannot
apply is applied by no rank.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.fault_tolerance.heartbeat import FOLDER, sightings
from megatron.parallel.groups import ProcessGroups
from tests.faults import starting
from tests.faults.inject import arm, parse_faults
from tests.faults.starting import FLAGS, LONG_TIMEOUT, Ended, Started, environment, losses
from tests.faults.test_grid_ranks import check_recovery, saved
from tests.faults.test_ranks_that_fail import FailureCase, pick
from tests.ranks import Ranks, grid
from tests.training.harness import make_trainer, metrics_of

pytestmark = pytest.mark.waits

STEPS = 8
WORLD = 4
GRID = (
    "--num-layers 2 --pipeline-model-parallel-size 2 --pipeline-schedule message-driven "
    "--micro-batch-size 1 --grad-path radius --radius-density 0.3 --radius-interval 3 "
    f"--radius-start-iter 2 --train-iters {STEPS} {LONG_TIMEOUT}"
)
"""Two stages of two data-parallel ranks, four microbatches; checkpoints in steps 4 and 8."""
MATRIX = [
    pick("kill", "1:6:reduce"),
    pick("kill", "0:6:receive"),
    pick("kill", "3:4:save"),
    pick("raise", "0:5:forward"),
    pick("exit0", "3:6:optimizer"),
    pick("oom", "2:2:backward"),
    pick("stop", "1:5:forward"),
    pick("hang", "0:3:forward"),
    pick("hang", "3:6:backward"),
]


@pytest.fixture(scope="module")
def unbroken(mpi_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the losses of the run without a fault."""
    run_dir = tmp_path_factory.mktemp("unbroken")
    assert mpi_ranks.run(WORLD, on_rank, run_dir, "") == [(STEPS, STEPS)] * WORLD
    return losses(run_dir)


def on_rank(groups: ProcessGroups, run_dir: Path, faults: str) -> tuple[int, int]:
    """Train the run in the test's processes; return the steps tried and the steps applied."""
    trainer = make_trainer(grid(groups, pp=2), f"{FLAGS} {GRID}", run_dir)
    if faults:
        arm(trainer, parse_faults(faults))
    trainer.train()
    trainer.metrics.close()
    trainer.engine.detach()
    groups.world.barrier()
    trainer.pipeline.transport.close()
    return trainer.progress.iteration, trainer.optimizer.applied


def launch(run_dir: Path, *, fault: str | None = None, flags: str = GRID) -> Started:
    return starting.start_launcher(WORLD, run_dir, flags, fault=fault, LAUNCHER="mpiexec")


def check(row: FailureCase, ended: Ended) -> float:
    """Check the promises of a row under a launcher; return seconds from fault to last end."""
    assert ended.codes == [row.code], ended.all_stderr
    status = ended.status
    assert (status["rank"], status["iteration"], status["phase"]) == (
        row.rank, row.step, row.phase,
    ), status  # fmt: skip
    assert all(word in status["reason"] for word in row.words), status
    told = f"rank {row.rank}, step {row.step}, {row.phase}: {status['reason']}"
    assert ended.all_stderr.count(told) == 1, ended.all_stderr
    folder = ended.run_dir / FOLDER
    left = sightings(folder, attempt=status["attempt"], ranks=range(WORLD))
    assert len(left) == WORLD and starting.alive([seen.pid for seen in left]) == []
    return ended.seconds_after_fault()


@pytest.mark.push
def test_a_killed_rank_is_named_and_the_run_goes_on_when_started_again(
    tmp_path: Path, unbroken: dict[int, float], record_property: Callable[[str, object], None]
) -> None:
    """The peers poll for messages of the rank; mpiexec lets the peers end by themselves."""
    row = pick("kill", "2:6:backward")
    record_property("seconds", check(row, launch(tmp_path, fault=row.fault).finish()))
    check_recovery(launch(tmp_path).finish(), unbroken)


@pytest.mark.full
def test_a_nan_on_one_stage_is_skipped_by_all_ranks(
    mpi_ranks: Ranks, tmp_path: Path, unbroken: dict[int, float]
) -> None:
    """Whichever rank has the NaN, the state afterwards is the same."""
    run = launch(tmp_path / "3", fault="nan:3:5:backward").finish()
    assert run.codes == [0], run.all_stderr
    assert "nan strikes" in run.all_stderr
    assert mpi_ranks.run(WORLD, on_rank, tmp_path / "0", "inf:0:5:backward") == [(8, 7)] * WORLD
    found, progress = saved(tmp_path / "3")
    other, other_progress = saved(tmp_path / "0")
    assert progress == other_progress and found.keys() == other.keys()
    assert progress["consumed_samples"] - progress["applied_samples"] == 8
    assert [name for name in found if not torch.equal(found[name], other[name])] == []
    assert all(tensor.isfinite().all() for tensor in found.values())
    assert metrics_of(tmp_path / "3", "skipped") == [False] * 4 + [True] + [False] * 3
    through = losses(tmp_path / "3")
    assert through == losses(tmp_path / "0") and len(through) == STEPS
    assert [through[step] for step in range(1, 6)] == [unbroken[step] for step in range(1, 6)]
    assert through[7] != unbroken[7]


@pytest.mark.push
def test_a_rank_that_never_comes_to_mpi_is_not_waited_for_for_ever(
    mpi_ranks: Ranks, tmp_path: Path
) -> None:
    """The other ranks wait inside the MPI library while they hold the interpreter's lock."""
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    code = "from megatron.launch import open_mpi; open_mpi(seconds=2)"
    script = f"[ $PMI_RANK = 1 ] || exec {shlex.quote(sys.executable)} -c '{code}'"
    command = [mpiexec or "mpiexec", "-n", "2", "sh", "-c", script]
    ended = Started(tmp_path, [starting._popen(command, environment())]).finish()
    assert ended.codes == [1] and "in open_mpi" in ended.all_stderr, ended.all_stderr
    assert "Timeout (0:00:02)!" in ended.all_stderr, "of the timer, once it has run for so long"


@pytest.mark.full
@pytest.mark.parametrize("row", MATRIX, ids=lambda row: row.fault)
def test_matrix(
    row: FailureCase,
    tmp_path: Path,
    unbroken: dict[int, float],
    record_property: Callable[[str, object], None],
) -> None:
    record_property("fault", f"{row.fault.split(':')[0]} in {row.phase}, over MPI")
    ended = launch(tmp_path, fault=row.fault, flags=f"{GRID} {row.timeout}").finish()
    record_property("seconds", check(row, ended))
    record_property("detected", 1)
    check_recovery(launch(tmp_path).finish(), unbroken)
    record_property("recovered", 1)
