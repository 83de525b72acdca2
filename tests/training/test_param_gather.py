"""Runs with --overlap-param-gather are the runs without it, bit by bit and byte by byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.parallel.groups import ProcessGroups
from tests.ranks import Ranks, grid
from tests.tiers import sampled
from tests.training.harness import NO_DROPOUT, TINY, make_trainer, metrics_of

pytestmark = pytest.mark.push

OVERLAP = "--overlap-param-gather"
SHARDED = "--use-distributed-optimizer"
SHORT = (
    "--hidden-size 16 --seq-length 8 --train-iters 6 --global-batch-size 8 --ddp-bucket-size 600 "
    "--clip-grad 0.5"
)
RADIUS = "--grad-path radius --radius-density 0.3 --radius-interval 3 --radius-start-iter 2"
REWIRED = "--grad-path samo --samo-sparsity 0.5 --samo-pruning random --dsr-interval 1"
CASES = {
    # The loss scale grows until a step is skipped, every third time.
    "dp2, fp16, rewired": (
        2,
        {},
        f"{SHARDED} --fp16 --initial-loss-scale 500000 --loss-scale-window 2 --hysteresis 1 "
        f"{REWIRED}",
    ),
    "dp4, bf16 weights": (4, {}, f"{SHARDED} --bf16 --main-params-dtype bf16"),
    "dp4 on two nodes, radius": (4, {"inner": 2}, f"--dp-inner-size 2 {RADIUS}"),
    "tp2 x dp2, recomputed": (
        4,
        {"tp": 2},
        f"{SHARDED} --sequence-parallel --recompute-granularity full --recompute-num-layers 1 "
        "--recompute-method uniform",
    ),
    "pp2 x dp2, radius": (4, {"pp": 2}, f"{SHARDED} {RADIUS} --log-params-norm"),
    "pp2 x dp2, interleaved": (
        4,
        {"pp": 2},
        f"{SHARDED} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1 --micro-batch-size 1",
    ),
}
ON_PUSH = ("dp2, fp16, rewired", "dp4 on two nodes, radius", "pp2 x dp2, interleaved")
SIZES = {"tp": "tensor-model-parallel-size", "pp": "pipeline-model-parallel-size"}


def on_rank(
    groups: ProcessGroups, shape: dict[str, int], flags: str, run_dir: Path
) -> dict[str, Any]:
    """Train, and count each step's collectives and the gathers that it leaves in progress."""
    groups = grid(groups, **shape)
    sizes = " ".join(f"--{SIZES[axis]} {size}" for axis, size in shape.items() if axis in SIZES)
    trainer = make_trainer(groups, f"{flags} {sizes}", run_dir)
    updates, train_step = trainer.optimizer._updates, trainer.train_step
    left, collectives = list[int](), list[int]()

    def counted() -> Any:
        before = groups.shards.calls.count
        made = train_step()
        left.append(len(updates._sent))
        collectives.append(groups.shards.calls.count - before)
        return made

    trainer.train_step = counted  # type: ignore[method-assign]
    trainer.train()
    trainer.metrics.close()
    trainer.engine.detach()
    groups.world.barrier()
    assert not updates._sent, "the last save waits for all"
    found = {f"{kind} {name}": t.clone() for kind, name, t in trainer.optimizer.tensors()}
    found |= {info.name: info.param.detach().clone() for info, _, _ in trainer.engine.slices()}
    return {"tensors": found, "left": left, "collectives": collectives}


@pytest.mark.parametrize("name", sampled(CASES, ON_PUSH))
def test_gathers_that_overlap_change_no_bit(ranks: Ranks, tmp_path: Path, name: str) -> None:
    world, shape, flags = CASES[name]
    base = (
        f"{TINY} {NO_DROPOUT} {SHORT} --eval-interval 3 --log-interval 1 "
        f"--check-weight-hash-across-dp-replicas-interval 2 {flags}"
    )
    plain = ranks.run(world, on_rank, shape, base, tmp_path / "plain")
    ours = f"{base} {OVERLAP}"
    first = ranks.run(world, on_rank, shape, f"{ours} --exit-interval 4", tmp_path / "ours")
    resumed = ranks.run(world, on_rank, shape, ours, tmp_path / "ours")
    for one, two, three in zip(plain, first, resumed, strict=True):
        assert one["collectives"][:4] == two["collectives"]
        assert one["collectives"][5:] == three["collectives"][1:], "all but the first of a start"
        assert not any(one["left"])
        # Nothing is left in progress by a skipped step, and a rewired network has new buckets.
        assert max(two["left"]) > 1, "gathers run on into the next step"
        for tensor, wanted in one["tensors"].items():
            assert torch.equal(three["tensors"][tensor], wanted), tensor
    skipped = metrics_of(tmp_path / "plain", "skipped")
    assert any(skipped) == ("fp16" in flags)
    for key in ("lm_loss", "grad_norm", "skipped", "bytes_sent", "params_norm", "valid_loss"):
        wanted = metrics_of(tmp_path / "plain", key)
        assert metrics_of(tmp_path / "ours", key) == wanted, key
    assert saved(tmp_path / "ours") == saved(tmp_path / "plain") != {}


def saved(run_dir: Path) -> dict[str, bytes]:
    """The tensor files of the last checkpoint."""
    files = (run_dir / "checkpoints" / "step_00000006").glob("*.safetensors")
    return {file.name: file.read_bytes() for file in files}
