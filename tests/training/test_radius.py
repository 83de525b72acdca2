"""Tests of `--grad-path radius` in whole runs.

They cover exact resume through checkpoints, the log and the metrics, and a start from a dense
checkpoint.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.checkpointer import Checkpointer
from megatron.errors import CheckpointError
from megatron.parallel.groups import ProcessGroups
from tests.contract.harness import copies
from tests.ranks import Ranks, grid
from tests.training.harness import NO_DROPOUT, TINY, make_trainer, metrics_of, train
from tests.training.test_resume import check_left_and_resumed

pytestmark = pytest.mark.push

LEAVES = (2, 3, 4, 6, 7)
"""Steps to leave after, with an interval of 3 from step 2 on.

Before the switch (2), right after it (3), and at each position of the next interval (4, 6, 7).
"""
RADIUS = (
    "--train-iters 9 --grad-path radius --radius-density 0.3 --radius-interval 3 "
    "--radius-start-iter 2 --eval-interval 100 --log-interval 1"
)


def flags(*more: str) -> str:
    return " ".join([TINY, RADIUS, *more])


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        "",
        "--bf16 --radius-select seeded",
        "--radius-schedule rolling --bf16",
        "--fp16 --initial-loss-scale 65536 --accumulate-allreduce-grads-in-fp32",
    ],
)
def test_left_and_resumed_is_uninterrupted(ranks: Ranks, tmp_path: Path, options: str) -> None:
    """Dropout is on."""
    check_left_and_resumed(ranks, 2, flags(options, "--eval-interval 4"), LEAVES, tmp_path)
    for key in ("density", "bytes_sent", "residual_norm", "index_kept"):
        values = metrics_of(tmp_path / "left", key)
        assert values == metrics_of(tmp_path / "through", key) and values, key


def on_rank_buckets(groups: ProcessGroups, flags: str, run_dir: Path) -> list[tuple[str, ...]]:
    """Train, and return the parameters of each bucket."""
    trainer = make_trainer(grid(groups, tp=2), flags, run_dir)
    trainer.train()
    trainer.metrics.close()
    trainer.engine.detach()
    return [bucket.names for bucket in trainer.engine.buckets]


def test_an_odd_vocabulary_gives_tensor_parallel_ranks_equal_buckets(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Ranks that share tensors select from the tensors of a bucket together."""
    model = TINY.replace("--hidden-size 32", "--hidden-size 256").replace("96", "257")
    more = "--tensor-model-parallel-size 2 --untie-embeddings-and-output-weights --train-iters 5 "
    more += "--ddp-bucket-size 300000"
    first, second = ranks.run(2, on_rank_buckets, f"{model} {RADIUS} {more}", tmp_path)
    assert first == second and len(first) > 2


def test_the_log_line_shows_what_it_does(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, train, flags(), tmp_path)
    log = (tmp_path / "log.txt").read_text().splitlines()
    (memory,) = [line for line in log if "radius: keeps" in line]
    assert "the paper" in memory
    (switch,) = [line for line in log if "radius: on from here" in line]
    steps = [line for line in log if "] iteration " in line]
    assert len(steps) == 9 and "density" not in steps[1]
    assert log.index(steps[1]) < log.index(switch) < log.index(steps[3])
    assert "density: 0.3" in steps[3] and "residual norm: " in steps[3]
    assert "index kept: " in steps[5] and "residual norm: 0 " not in steps[5]
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    lines = [line for line in lines if "bytes_sent" in line]
    sparse = [line for line in lines if line.get("density", 1) < 1]
    assert [line["iteration"] for line in sparse] == [4, 5, 7, 8]
    assert all(line["residual_norm"] > 0 for line in sparse)
    dense = lines[0]["bytes_sent"]
    for line in sparse:
        assert line["bytes_sent"] == pytest.approx(line["density"] * dense, rel=1e-3)


def test_a_dense_checkpoint_starts_it(ranks: Ranks, tmp_path: Path) -> None:
    dense = TINY.replace("--train-iters 8", "--train-iters 4")
    ranks.run(2, train, dense, tmp_path / "dense")
    load = f"--load {tmp_path / 'dense'}"
    (first, second) = ranks.run(2, train, flags(load), tmp_path / "radius")
    assert first["iteration"] == 9 and first["applied"] == 9
    for name in first["params"]:
        assert torch.equal(first["params"][name], second["params"][name])
    assert "gradient path radius starts here" in (tmp_path / "radius" / "log.txt").read_text()
    # Step 5 has no index yet, step 6 is the first resample.
    found = metrics_of(tmp_path / "radius", "density")
    assert [density < 1 for density in found] == [False, False, True, True, False]


def test_moments_left_behind_do_not_leave_the_resamples_behind(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Updates are counted from 1 again, below the start of Radius."""
    late = flags("--radius-start-iter 6 --train-iters 12")
    ranks.run(1, train, f"{late} --exit-interval 7", tmp_path / "run")
    ranks.run(1, train, f"{late} --load {tmp_path / 'run'} --no-load-optim", tmp_path / "next")
    found = metrics_of(tmp_path / "next", "density")
    assert [density < 1 for density in found] == [True, True, False, True, True]


def test_a_checkpoint_too_late_for_any_resample_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    dense = TINY.replace("--train-iters 8", "--train-iters 7")
    ranks.run(1, train, dense, tmp_path / "dense")
    late = flags(f"--radius-interval 6 --load {tmp_path / 'dense'}")
    (said,) = ranks.run(1, on_rank_refused, late, tmp_path / "late")
    assert "with 2 steps left, radius_interval 6: no update from 8 to 9" in said
    assert said.endswith("--radius-interval 4 would do")
    anew = flags(f"--radius-start-iter 3 --load {tmp_path / 'dense'} --no-load-optim")
    (said,) = ranks.run(1, on_rank_refused, anew, tmp_path / "anew")
    assert "radius_start_iter 3 is past the last update of this run, 2" in said
    fits = late.replace("--radius-interval 6", "--radius-interval 4")
    ranks.run(1, train, fits, tmp_path / "fits")
    log = (tmp_path / "fits" / "log.txt").read_text()
    assert "radius: on from here, after update 8" in log


def test_resetting_the_same_path_says_what_becomes_of_it(ranks: Ranks, tmp_path: Path) -> None:
    reset = flags("--reset-grad-state")
    ranks.run(1, train, flags("--exit-interval 5"), tmp_path / "run")
    ranks.run(1, train, f"{reset} --load {tmp_path / 'run'}", tmp_path / "other")
    log = (tmp_path / "other" / "log.txt").read_text()
    assert (
        "gradient path radius starts with empty state" in log
        and "radius: on from here, after" in log
    )
    ranks.run(1, train, reset, tmp_path / "run")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "--reset-grad-state is ignored: this run resumes" in log
    assert log.count("radius: on from here, after") == 1


def on_rank_refused(groups: ProcessGroups, line: str, run_dir: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        make_trainer(groups, line, run_dir)
    return str(caught.value)


def test_other_settings_are_refused_and_leaving_takes_a_flag(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(1, train, flags("--exit-interval 5"), tmp_path / "run")
    (said,) = ranks.run(1, on_rank_refused, flags("--radius-interval 4"), tmp_path / "run")
    assert "radius.radius_interval: 3 there, 4 here" in said and "--reset-grad-state" in said
    dense = f"{TINY} --train-iters 9 --load {tmp_path / 'run'}"
    (said,) = ranks.run(1, on_rank_refused, dense, tmp_path / "dense")
    assert "gradient.grad_path: 'radius' there, 'dense' here" in said
    (found,) = ranks.run(1, train, f"{dense} --reset-grad-state", tmp_path / "dense")
    assert found["iteration"] == 9


def pending(groups: ProcessGroups, line: str, run_dir: Path) -> dict[str, Any]:
    """Return the residual and the shared state with which a run starts on this rank."""
    trainer = make_trainer(groups, line, run_dir)
    reducer = trainer.engine.reducer
    own, shared = copies(reducer.state_tensors()), copies(reducer.shared_tensors())
    trainer.engine.detach()
    trainer.metrics.close()
    return {"own": own, "shared": shared}


@pytest.mark.parametrize("schedule", ["paper", "rolling"])
def test_another_number_of_ranks_keeps_the_pending_update(
    ranks: Ranks, tmp_path: Path, schedule: str
) -> None:
    line = flags(NO_DROPOUT, f"--radius-schedule {schedule}")
    ranks.run(4, train, f"{line} --exit-interval 5", tmp_path / "left")
    by_world = {}
    for world in (1, 2, 4):
        shutil.copytree(tmp_path / "left", tmp_path / str(world))
        by_world[world] = ranks.run(world, pending, line, tmp_path / str(world))
    names = by_world[4][0]["own"].keys()
    assert names
    for world in (1, 2, 4):
        for found in by_world[world]:
            for name, tensor in by_world[4][0]["shared"].items():
                assert torch.equal(found["shared"][name], tensor), name
        for name in names:
            means = [
                torch.stack([found["own"][name] for found in by_world[w]]).mean(0)
                for w in (4, world)
            ]
            torch.testing.assert_close(means[1], means[0])
        ranks.run(world, train, line, tmp_path / str(world))
    expected = metrics_of(tmp_path / "4")
    for world in (1, 2):
        assert metrics_of(tmp_path / str(world)) == pytest.approx(expected, rel=0, abs=1e-5)


def on_rank_saving(groups: ProcessGroups, run_dir: Path, more: str) -> tuple[int, int]:
    """Return the bytes of the residuals to save, and of those that are copies at once."""
    trainer = make_trainer(groups, flags("--exit-interval 5", more), run_dir)
    trainer.train()
    assert isinstance(trainer.saver, Checkpointer)
    once, again = (list(trainer.saver._tensors.shards(moments=True)) for _ in range(2))
    residuals = [
        (one, other)
        for one, other in zip(once, again, strict=True)
        if one.name.startswith("residual/")
    ]
    copied = [
        one
        for one, other in residuals
        if one.tensor.untyped_storage().data_ptr() != other.tensor.untyped_storage().data_ptr()
    ]
    trainer.engine.detach()
    trainer.metrics.close()
    return sum(one.nbytes for one, _ in residuals), sum(one.tensor.nbytes for one in copied)


@pytest.mark.parametrize("more", ["", "--async-save"])
def test_residuals_are_copied_one_at_a_time_as_they_are_saved(
    ranks: Ranks, tmp_path: Path, more: str
) -> None:
    for saved, copied in ranks.run(2, on_rank_saving, tmp_path, more):
        assert saved > 0 and copied == 0
