"""The order of the ranks decides where each stands, and nothing that it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config import parse, resolve
from megatron.launch import Launch
from megatron.parallel.groups import ProcessGroups
from megatron.pretrain import build_groups
from pretrain_gpt import GRADIENT_PATHS
from tests.pipeline.grids import masters
from tests.ranks import Ranks
from tests.tiers import sampled
from tests.training.harness import make_trainer, metrics_of

pytestmark = pytest.mark.push

MAPPING = "--use-tp-pp-dp-mapping"
MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data "
    "--vocab-size 96 --micro-batch-size 1 --global-batch-size 8 --train-iters 6 --lr 1e-3 "
    "--attention-dropout 0.1 --hidden-dropout 0.1 --clip-grad 0.5 --eval-iters 1 "
    "--eval-interval 4 --log-interval 1 --ddp-bucket-size 4000 --pipeline-model-parallel-size 2"
)
PATHS = {
    "dense": "",
    "sharded": "--use-distributed-optimizer",
    "in turns": "--num-layers-per-virtual-pipeline-stage 1",
    "radius": "--grad-path radius --radius-start-iter 1 --radius-interval 2",
}


def trained(groups: ProcessGroups, flags: str, run_dir: Path) -> dict[str, Any]:
    """The place of a rank in the grid that the flags ask for, and the weights it ends with."""
    config = resolve(parse(flags.split(), paths=GRADIENT_PATHS), groups.world.size)
    rank, size = groups.world.rank, groups.world.size
    launch = Launch(
        launcher="test", rank=rank, world_size=size, local_rank=rank, local_world_size=size
    )
    trainer = make_trainer(build_groups(config, launch), flags, run_dir)
    trainer.train()
    trainer.metrics.close()
    trainer.engine.detach()
    trainer.pipeline.transport.close()
    groups.world.barrier()
    mine = trainer.groups
    return {
        "place": (mine.tp.rank, mine.dp.rank, mine.pp.rank),
        "pipeline": mine.pp.ranks,
        "params": masters(trainer),
    }


def by_place(found: list[dict[str, Any]]) -> dict[tuple[int, ...], dict[str, torch.Tensor]]:
    return {each["place"]: each["params"] for each in found}


def assert_same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    mine, wanted = by_place(one), by_place(other)
    assert mine.keys() == wanted.keys() and len(mine) == len(one)
    for place, params in wanted.items():
        assert mine[place].keys() == params.keys()
        for name, weights in params.items():
            assert torch.equal(mine[place][name], weights), (place, name)


@pytest.mark.parametrize("path", sampled(PATHS, ("sharded", "in turns")))
def test_losses_and_weights_are_bitwise_the_same(ranks: Ranks, tmp_path: Path, path: str) -> None:
    usual, mapped = tmp_path / "usual", tmp_path / "mapped"
    flags = f"{MODEL} {PATHS[path]}"
    wanted = ranks.run(4, trained, flags, usual)
    found = ranks.run(4, trained, f"{flags} {MAPPING}", mapped)
    assert {each["pipeline"] for each in wanted} == {(0, 2), (1, 3)}
    assert {each["pipeline"] for each in found} == {(0, 1), (2, 3)}
    assert_same(found, wanted)
    for key in ("lm_loss", "grad_norm", "valid_loss"):
        assert metrics_of(mapped, key) == metrics_of(usual, key), key
    assert len(metrics_of(mapped)) == 6


@pytest.mark.parametrize("path", sampled(["dense", "radius"], ["radius"]))
def test_a_run_goes_on_bitwise_in_the_other_order(ranks: Ranks, tmp_path: Path, path: str) -> None:
    """State is saved by logical name, and what is a data-parallel rank's own by its place."""
    flags = f"{MODEL} {PATHS[path]}"
    wanted = ranks.run(4, trained, flags, tmp_path / "whole")
    for first, then in (("", MAPPING), (MAPPING, "")):
        run_dir = tmp_path / f"{first or 'usual'}"
        ranks.run(4, trained, f"{flags} --save-interval 3 --exit-interval 3 {first}", run_dir)
        assert len(metrics_of(run_dir)) == 3
        found = ranks.run(4, trained, f"{flags} {then}", run_dir)
        assert_same(found, wanted)
        assert metrics_of(run_dir) == metrics_of(tmp_path / "whole")
