"""Whole runs whose gradients travel over an encoded wire."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config import parse
from megatron.data_parallel.wire_format import format_of, mean_bytes
from megatron.errors import CheckpointError, ConfigError
from megatron.parallel.groups import ProcessGroups
from pretrain_gpt import GRADIENT_PATHS
from tests.ranks import Ranks, grid
from tests.training.harness import NO_DROPOUT, TINY, make_trainer, metrics_of, train

pytestmark = pytest.mark.push

BASE = f"{TINY} {NO_DROPOUT} --check-weight-hash-across-dp-replicas-interval 2 --log-interval 1"
WIRES = [
    "--grad-wire int8",
    "--grad-wire int4 --bf16 --use-distributed-optimizer",
    "--grad-wire int8 --fp16 --accumulate-allreduce-grads-in-fp32 --initial-loss-scale 1024",
    "--grad-wire int8 --grad-path samo --samo-sparsity 0.5 --samo-pruning random",
    "--grad-wire bf16 --grad-path radius --radius-interval 2 --radius-start-iter 2",
    "--grad-wire int8 --grad-path radius --radius-interval 4 --radius-start-iter 2",
    "--grad-wire int4 --grad-path radius --radius-interval 3 --radius-schedule rolling "
    "--radius-start-iter 2",
    "--grad-wire int8 --grad-path samo+radius --samo-sparsity 0.5 --samo-pruning random "
    "--radius-interval 4 --radius-start-iter 2",
]


def on_rank(groups: ProcessGroups, tp: int, flags: str, run_dir: Path) -> dict[str, Any]:
    return train(grid(groups, tp=tp), f"{flags} --tensor-model-parallel-size {tp}", run_dir)


@pytest.mark.full
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("world", "tp"), [(2, 1), (4, 2)], ids=["dp2", "tp2 x dp2"])
def test_a_run_that_stops_in_between_continues_bit_by_bit(
    ranks: Ranks, tmp_path: Path, world: int, tp: int, wire: str
) -> None:
    flags = f"{BASE} {wire}"
    whole = ranks.run(world, on_rank, tp, flags, tmp_path / "whole")
    ranks.run(world, on_rank, tp, f"{flags} --exit-interval 5", tmp_path / "halves")
    halves = ranks.run(world, on_rank, tp, flags, tmp_path / "halves")
    for mine, theirs in zip(whole, halves, strict=True):
        assert mine["iteration"] == theirs["iteration"]
        for name, weight in mine["params"].items():
            assert torch.equal(weight, theirs["params"][name]), name
    assert metrics_of(tmp_path / "whole", "lm_loss") == metrics_of(tmp_path / "halves", "lm_loss")


def on_rank_bytes(groups: ProcessGroups, flags: str, wire: str, run_dir: Path) -> int:
    """Return the bytes that this rank sends for the means of all buckets."""
    buckets = make_trainer(groups, flags, run_dir).engine.buckets
    ranks = groups.dp.size
    encoded = [
        mean_bytes(format_of(wire, matrix=each.matrix), each.numel, ranks) for each in buckets
    ]
    return sum(2 * (ranks - 1) * nbytes // ranks for nbytes in encoded)


def test_fewer_bits_send_fewer_bytes_and_train_alike(ranks: Ranks, tmp_path: Path) -> None:
    sent: dict[str, float] = {}
    losses: dict[str, list[float]] = {}
    for name in ("none", "fp32", "bf16", "int8", "int4"):
        ranks.run(2, on_rank, 1, f"{BASE} --grad-wire {name}", tmp_path / name)
        sent[name] = metrics_of(tmp_path / name, "bytes_sent")[-1]
        losses[name] = metrics_of(tmp_path / name, "lm_loss")
    # With two ranks a sum has one order, so only rounding could change a loss.
    assert losses["fp32"] == losses["none"]
    shares = {name: each / sent["none"] for name, each in sent.items()}
    # Beside values: scales of 1/64 of a byte a value, 1-D parameters in bf16, and padding.
    assert shares["bf16"] == pytest.approx(0.5, rel=0.01)
    # In so small a model 1-D parameters and gaps between slices are 3 % of the values.
    assert 0.25 < shares["int8"] < 0.29 and 0.125 < shares["int4"] < 0.17
    for name in ("fp32", "bf16", "int8", "int4"):
        flags = f"{BASE} --grad-wire {name}"
        planned = ranks.run(2, on_rank_bytes, flags, name, tmp_path / f"{name} built")
        assert planned == [sent[name]] * 2
    for name in ("bf16", "int8", "int4"):
        assert losses[name][0] == losses["none"][0], "the first loss precedes every mean"
        assert losses[name] != losses["none"]
        assert losses[name][-1] == pytest.approx(losses["none"][-1], abs=0.02)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--grad-wire int8 --grad-path radius --radius-residual none", "no residual to keep"),
        ("--grad-wire bf16 --grad-path topk", "in their own way"),
        ("--grad-wire bf16 --grad-path powersgd", "in their own way"),
        ("--grad-wire bf16 --bf16 --grad-reduce-in-bf16", "rounded already"),
        ("--grad-wire bf16 --predivide-loss", "means, not sums"),
        ("--grad-wire int8 --grad-path samo --samo-pruning random --dsr-interval 1", "rewiring"),
    ],
)
def test_settings_that_do_not_fit_the_wire_are_refused(flags: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"{TINY} {flags}".split(), paths=GRADIENT_PATHS)
    assert text in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("wire", ["--grad-wire int8", WIRES[3], WIRES[5]])
def test_what_was_rounded_off_continues_on_other_ranks(
    ranks: Ranks, tmp_path: Path, wire: str
) -> None:
    """Four ranks, then two, then one, which sends nothing, then two again."""
    flags = f"{BASE} {wire}"
    for world, stop in ((4, 2), (2, 4), (1, 6), (2, 8)):
        left = "" if stop == 8 else f"--exit-interval {stop}"
        found = ranks.run(world, on_rank, 1, f"{flags} {left}", tmp_path)
        assert found[0]["iteration"] == stop
    whole = ranks.run(4, on_rank, 1, flags, tmp_path / "whole")
    assert whole[0]["iteration"] == 8
    other = metrics_of(tmp_path / "whole", "lm_loss")
    assert metrics_of(tmp_path, "lm_loss") == pytest.approx(other, abs=0.02)


def test_stages_with_a_tied_embedding_agree_over_a_wire(ranks: Ranks, tmp_path: Path) -> None:
    flags = f"{BASE} --grad-wire int8 --pipeline-model-parallel-size 2"
    ranks.run(4, on_stage, flags, tmp_path / "pp2")
    ranks.run(2, on_rank, 1, f"{BASE} --grad-wire int8", tmp_path / "pp1")
    found, other = (metrics_of(tmp_path / name, "lm_loss") for name in ("pp2", "pp1"))
    assert found == pytest.approx(other, abs=0.02) and found[-1] < found[0]


def on_stage(groups: ProcessGroups, flags: str, run_dir: Path) -> dict[str, Any]:
    return train(grid(groups, pp=2), flags, run_dir)


def test_another_wire_is_another_path(ranks: Ranks, tmp_path: Path) -> None:
    flags = f"{BASE} --grad-wire int8"
    ranks.run(2, on_rank, 1, f"{flags} --exit-interval 5", tmp_path)
    with pytest.raises(AssertionError, match=CheckpointError.__name__):
        ranks.run(2, on_rank, 1, f"{BASE} --grad-wire bf16", tmp_path)
    ranks.run(2, on_rank, 1, f"{BASE} --grad-wire bf16 --reset-grad-state", tmp_path)
