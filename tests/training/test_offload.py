"""Whole runs with states in host memory, and with losses that are divided beforehand: those of the
plain ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.fault_tolerance import loss_spikes
from megatron.parallel.groups import ProcessGroups
from tests.ranks import Ranks, grid
from tests.tiers import sampled
from tests.training.harness import NO_DROPOUT, TINY, make_trainer, metrics_of, train

OFFLOADED = "--optimizer-cpu-offload --offload-bucket-size 2048 --offload-coarsening 2"
RESIDENT = "--ddp-bucket-size 4096"
"""Flags of a resident optimizer with the same buckets."""
PRUNED = "--grad-path samo --samo-sparsity 0.5 --samo-pruning random --dsr-interval 1"
KEYS = ("lm_loss", "grad_norm", "skipped", "loss_scale", "num_zeros")


def on_rank(groups: ProcessGroups, grids: dict[str, int], flags: str, run_dir: Path) -> Any:
    return train(grid(groups, **grids), flags, run_dir)


RUNS = [
    (2, {}, "--bf16 --grad-reduce-in-bf16 --clip-grad 0 --log-num-zeros-in-grad"),
    (2, {}, f"--fp16 --initial-loss-scale 16777216 {PRUNED} --clip-grad 0 --predivide-loss"),
    (4, {"tp": 2}, "--bf16 --tensor-model-parallel-size 2 --sequence-parallel --clip-grad 0"),
    (4, {"pp": 2}, "--bf16 --pipeline-model-parallel-size 2 --optimizer sgd"),
]


@pytest.mark.push
@pytest.mark.parametrize(
    ("world", "grids", "flags"),
    sampled(RUNS, [RUNS[1], RUNS[3]]),
    ids=["bf16", "pruned, rewired, fp16, predivided", "tp2 x dp2", "pp2 x dp2, clipped"],
)
def test_a_run_makes_the_same_bits_and_goes_on_either_way(
    ranks: Ranks, tmp_path: Path, world: int, grids: dict[str, int], flags: str
) -> None:
    base = f"{TINY} {NO_DROPOUT} --log-interval 1 {flags}"
    base += " --check-weight-hash-across-dp-replicas-interval 2"
    resident, offloaded = f"{base} {RESIDENT}", f"{base} {OFFLOADED}"
    plain = ranks.run(world, on_rank, grids, resident, tmp_path / "plain")
    for first, second in ((offloaded, resident), (resident, offloaded), (offloaded, offloaded)):
        folder = tmp_path / f"{len(first)}-{len(second)}"
        ranks.run(world, on_rank, grids, f"{first} --exit-interval 5", folder)
        found = ranks.run(world, on_rank, grids, second, folder)
        for mine, theirs in zip(found, plain, strict=True):
            assert mine["applied"] == theirs["applied"] and mine["scaler"] == theirs["scaler"]
            for kind in ("params", "state"):
                for name, tensor in theirs[kind].items():
                    assert torch.equal(mine[kind][name], tensor), (kind, name)
        for key in KEYS:
            assert metrics_of(folder, key) == metrics_of(tmp_path / "plain", key), key
        assert any(metrics_of(folder, "skipped")) == ("--fp16" in flags)


def on_rank_spike(groups: ProcessGroups, flags: str, run_dir: Path) -> dict[str, Any]:
    """The sixth loss counts as too far out."""
    usual, asked = loss_spikes.is_spike, []

    def spike(*args: Any, **kwargs: Any) -> bool:
        asked.append(args[0])
        return len(asked) == 6

    import megatron.training

    megatron.training.is_spike = spike
    try:
        return train(groups, f"{flags} --skip-loss-spikes 4", run_dir)
    finally:
        megatron.training.is_spike = usual


@pytest.mark.push
def test_a_spike_is_skipped_while_sums_are_under_way(ranks: Ranks, tmp_path: Path) -> None:
    flags = f"{TINY} {NO_DROPOUT} --bf16 --clip-grad 0"
    plain = ranks.run(2, on_rank_spike, f"{flags} {RESIDENT}", tmp_path / "a")
    other = ranks.run(2, on_rank_spike, f"{flags} {OFFLOADED}", tmp_path / "b")
    assert plain[0]["applied"] == other[0]["applied"] == 7
    for mine, theirs in zip(other, plain, strict=True):
        assert all(torch.equal(mine["state"][name], t) for name, t in theirs["state"].items())
    for key in KEYS:
        assert metrics_of(tmp_path / "a", key) == metrics_of(tmp_path / "b", key)


def on_rank_told(groups: ProcessGroups, flags: str, run_dir: Path) -> tuple[str, bool]:
    trainer = make_trainer(groups, flags, run_dir)
    trainer.metrics.close()
    trainer.engine.detach()
    return (run_dir / "log.txt").read_text(), trainer.engine.streams


@pytest.mark.parametrize(
    ("clip", "said"), [(0, "as soon as its sum has arrived"), (1, "--clip-grad 0 overlaps")]
)
def test_the_log_tells_where_states_are_and_what_updates_wait_for(
    ranks: Ranks, tmp_path: Path, clip: int, said: str
) -> None:
    flags = f"{TINY} --bf16 --clip-grad {clip} {OFFLOADED}"
    ((text, streams),) = ranks.run(1, on_rank_told, flags, tmp_path)
    assert "host memory" in text and text.count(said) == 1 and streams == (not clip)


def test_a_loss_divided_beforehand_trains_the_same(ranks: Ranks, tmp_path: Path) -> None:
    flags = f"{TINY} {NO_DROPOUT}"
    plain = ranks.run(2, train, flags, tmp_path / "a")
    other = ranks.run(2, train, f"{flags} --predivide-loss", tmp_path / "b")
    for name, tensor in plain[0]["state"].items():
        assert torch.equal(tensor, other[0]["state"][name]), name
    assert metrics_of(tmp_path / "a") == metrics_of(tmp_path / "b")
