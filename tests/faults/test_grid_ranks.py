"""Tests of failures and NaNs on a grid: two stages of two ranks, with Radius.

The other ranks end in time, the first cause is reported, and a step that one rank cannot apply is
applied by no rank.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.store import Checkpoint
from megatron.fault_tolerance.heartbeat import FOLDER, Heartbeat
from megatron.fault_tolerance.root_cause import RootCause
from megatron.parallel.groups import ProcessGroups
from megatron.status import Status
from tests.faults.inject import arm, parse_faults
from tests.faults.starting import (
    FLAGS,
    LONG_TIMEOUT,
    Ended,
    losses,
    start_launcher,
    start_ranks,
)
from tests.faults.test_ranks_that_fail import FORCED, FailureCase, pick
from tests.ranks import Ranks, grid
from tests.training.harness import make_trainer, metrics_of

STEPS = 8
WORLD = 4
GRID = (
    "--num-layers 2 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--grad-path radius --radius-density 0.3 --radius-interval 3 --radius-start-iter 2 "
    f"--train-iters {STEPS} {LONG_TIMEOUT}"
)
"""Checkpoints are saved in steps 4 and 8; everything is sent in steps 3 and 6.

A rank that waited for the timeout would be too late: a missing rank is noticed at once.
"""
MATRIX = [
    pick("kill", "1:6:reduce"),
    pick("raise", "0:5:forward"),
    pick("exit0", "3:6:optimizer"),
    pick("oom", "2:2:backward"),
    pick("stop", "1:5:forward"),
    pick("hang", "3:6:backward"),
    pick("kill", "3:4:save"),
]


def on_rank(groups: ProcessGroups, run_dir: Path, faults: str) -> tuple[int, int]:
    """Train the run in the test's processes; return the steps tried and the steps applied."""
    trainer = make_trainer(grid(groups, tp=2, pp=2), f"{FLAGS} {GRID}", run_dir)
    if faults:
        arm(trainer, parse_faults(faults))
    trainer.train()
    trainer.metrics.close()
    trainer.engine.detach()
    groups.world.barrier()
    return trainer.progress.iteration, trainer.optimizer.applied


@pytest.fixture(scope="module")
def unbroken(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the losses of the run without a fault."""
    run_dir = tmp_path_factory.mktemp("unbroken")
    assert ranks.run(WORLD, on_rank, run_dir, "") == [(STEPS, STEPS)] * WORLD
    return losses(run_dir)


def saved(run_dir: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return every tensor of the last checkpoint, and the progress of the run."""
    with Checkpoint.open(run_dir / "checkpoints" / f"step_{STEPS:08d}") as step:
        return {name: step.read(name) for name in step.names()}, step.state["progress"]


def check_recovery(again: Ended, unbroken: dict[int, float]) -> None:
    assert set(again.codes) == {0}, again.all_stderr
    assert again.status["state"] == "done"
    assert losses(again.run_dir) == unbroken


@pytest.mark.waits
@pytest.mark.push
def test_a_killed_rank_ends_the_launched_run_which_goes_on_when_started_again(
    tmp_path: Path, unbroken: dict[int, float], record_property: Callable[[str, object], None]
) -> None:
    """Rank 2 has the head; the residuals are restored from the checkpoint."""
    row = pick("kill", "2:6:backward")
    run = start_launcher(WORLD, tmp_path, GRID, fault=row.fault).finish()
    assert run.codes == [row.code] and FORCED not in run.all_stderr, run.all_stderr
    status = run.status
    assert (status["rank"], status["iteration"], status["phase"]) == (2, 6, "backward"), status
    told = f"rank 2, step 6, backward: {status['reason']}"
    assert all(word in told for word in row.words) and run.all_stderr.count(told) == 1
    record_property("seconds", run.seconds_after_fault())
    check_recovery(start_ranks(WORLD, tmp_path, GRID).finish(), unbroken)


@pytest.mark.waits
@pytest.mark.push
def test_a_nan_on_one_stage_is_skipped_by_all_ranks(
    ranks: Ranks, tmp_path: Path, unbroken: dict[int, float]
) -> None:
    """Step 5 adds unsent entries to residuals; no rank may use any part of the skipped step."""
    run = start_ranks(WORLD, tmp_path / "3", GRID, fault="nan:3:5:backward").finish()
    assert run.codes == [0] * WORLD, run.all_stderr
    assert "nan strikes" in run.all_stderr
    assert ranks.run(WORLD, on_rank, tmp_path / "0", "inf:0:5:backward") == [(8, 7)] * WORLD
    found, progress = saved(tmp_path / "3")
    other, other_progress = saved(tmp_path / "0")
    assert progress == other_progress
    assert progress["consumed_samples"] - progress["applied_samples"] == 8
    assert found.keys() == other.keys() and any(name.startswith("residual/") for name in found)
    assert [name for name in found if not torch.equal(found[name], other[name])] == []
    assert all(tensor.isfinite().all() for tensor in found.values())
    assert metrics_of(tmp_path / "3", "skipped") == [False] * 4 + [True] + [False] * 3
    through = losses(tmp_path / "3")
    assert through == losses(tmp_path / "0") and len(through) == STEPS
    assert [through[step] for step in range(1, 6)] == [unbroken[step] for step in range(1, 6)]
    assert through[7] != unbroken[7]


def test_of_two_ranks_in_one_phase_the_one_that_waits_is_not_blamed(tmp_path: Path) -> None:
    """Rank 3 hangs where rank 2 has begun a sum that needs rank 3."""
    (tmp_path / FOLDER).mkdir()
    beats = [Heartbeat(tmp_path / FOLDER, rank=rank, attempt="a") for rank in range(WORLD)]
    for rank, beat in enumerate(beats):
        beat.at("data", 6)
        beat.at("receive" if rank < 2 else "backward")
        beat.called(1, "sum of 8 float32", f"tp of {rank - rank % 2}")
    beats[2].called(2, "sum of 8 float32", "tp of 2")
    causes = RootCause(
        run_dir=tmp_path, attempt="a", rank=0, world_size=WORLD, signed=Status(state="failed")
    )
    blamed = causes.blame(beats[0], "timed out")
    assert blamed is not None
    assert (blamed.rank, blamed.iteration, blamed.phase) == (3, 6, "backward")


@pytest.mark.waits
@pytest.mark.full
@pytest.mark.parametrize("row", MATRIX, ids=lambda row: row.fault)
def test_matrix(
    row: FailureCase,
    tmp_path: Path,
    unbroken: dict[int, float],
    record_property: Callable[[str, object], None],
) -> None:
    """Each rank of the grid fails in turn; every other rank ends by itself with exit code 6."""
    record_property("fault", f"{row.fault.split(':')[0]} in {row.phase}, on a grid")
    ended = start_ranks(WORLD, tmp_path, f"{GRID} {row.timeout}", fault=row.fault).finish()
    assert ended.codes[row.rank] in row.codes, (ended.codes, ended.all_stderr)
    others = [code for rank, code in enumerate(ended.codes) if rank != row.rank]
    assert others == [6] * (WORLD - 1), (ended.codes, ended.all_stderr)
    status = ended.status
    assert (status["state"], status["exit_code"]) == ("failed", row.code), status
    assert (status["rank"], status["iteration"]) == (row.rank, row.step), status
    assert status["phase"] == row.phase, status
    assert all(word in status["reason"] for word in row.words), status
    record_property("seconds", ended.seconds_after_fault(but=row.rank))
    record_property("detected", 1)
    check_recovery(start_ranks(WORLD, tmp_path, GRID).finish(), unbroken)
    record_property("recovered", 1)
