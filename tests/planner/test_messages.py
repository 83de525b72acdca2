"""Tests of planned receives and sends in flight against the real transports."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.config import parse, resolve
from megatron.memory_estimate import (
    Activations,
    MessageCounts,
    RankGrid,
    message_bytes,
    message_counts,
    microbatches_of,
)
from megatron.parallel.groups import ProcessGroups
from pretrain_gpt import GRADIENT_PATHS
from tests.planner.grids import MODEL, planned
from tests.ranks import Ranks
from tests.ranks import grid as groups_of
from tests.training.harness import make_trainer

pytestmark = pytest.mark.push

PP, DRIVEN = "--pipeline-model-parallel-size", "--pipeline-schedule message-driven"
TURNS = "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
STEPS = 2


def counts_of(grid: RankGrid, stage: int) -> MessageCounts:
    in_flight = Activations(grid).of_stage(stage).in_flight
    return message_counts(grid, stage, microbatches_of(grid), in_flight)


def most_on_rank(groups: ProcessGroups, flags: str, run_dir: Path) -> tuple[int, int, int]:
    """Return this rank's stage and the most posted receives and kept sends after any call."""
    config = resolve(parse(flags.split(), paths=GRADIENT_PATHS), groups.world.size)
    parallel = config.parallel
    groups = groups_of(
        groups, tp=parallel.tensor_model_parallel_size, pp=parallel.pipeline_model_parallel_size
    )
    trainer = make_trainer(groups, flags, run_dir)
    transport: Any = trainer.pipeline.transport
    most = [0, 0]

    def watch(name: str) -> None:
        call = getattr(transport, name)

        def watched(*args: Any, **more: Any) -> Any:
            found = call(*args, **more)
            most[0] = max(most[0], _length(transport._posted))
            most[1] = max(most[1], _length(transport._sent))
            return found

        setattr(transport, name, watched)

    for name in ("expect", "receive", "send"):
        watch(name)
    for _ in range(STEPS):
        trainer.train_step()
    trainer.metrics.close()
    trainer.engine.detach()
    transport.close()
    return groups.pp.rank, most[0], most[1]


def _length(held: Any) -> int:
    """Return the length of a queue, or the sum over the queues of each kind."""
    return sum(map(len, held.values())) if isinstance(held, dict) else len(held)


def compare(flags: str, world: int, found: Iterable[tuple[int, int, int]], *, exact: bool) -> None:
    grid = planned(flags, world)
    for stage, posted, kept in found:
        counts = counts_of(grid, stage)
        assert posted == counts.posted, stage
        assert kept == counts.kept if exact else kept <= counts.kept, (stage, kept, counts)


@pytest.mark.parametrize(
    ("world", "more"), [(2, f"{PP} 2"), (4, f"{PP} 4 --num-layers 5"), (2, f"{PP} 2 {TURNS}")]
)
def test_1f1b_posts_and_keeps_as_planned(
    ranks: Ranks, tmp_path: Path, world: int, more: str
) -> None:
    flags = f"{MODEL} {more}"
    compare(flags, world, ranks.run(world, most_on_rank, flags, tmp_path), exact=True)


@pytest.mark.parametrize("limit", [1, 4, 8])
def test_message_driven_stages_post_and_keep_as_planned(
    mpi_ranks: Ranks, tmp_path: Path, limit: int
) -> None:
    flags = f"{MODEL} {PP} 4 --num-layers 5 {DRIVEN} --pipeline-limit {limit}"
    compare(flags, 4, mpi_ranks.run(4, most_on_rank, flags, tmp_path), exact=False)


# ---- on paper -----------------------------------------------------------------------------------


def on_cuda(more: str, *, aware: bool = False) -> RankGrid:
    flags = f"{MODEL} {PP} 4 --num-layers 8 --global-batch-size 32 {more}"
    return replace(planned(flags, 4), device="cuda", cuda_aware_mpi=aware)


def test_two_receives_of_each_kind_are_posted_where_either_may_come() -> None:
    driven, usual = on_cuda(DRIVEN), on_cuda("")
    assert [counts_of(driven, stage).posted for stage in range(4)] == [2, 4, 4, 2]
    assert [counts_of(usual, stage).posted for stage in range(4)] == [2, 2, 2, 2]
    # NCCL reports what is done; the last send of each direction is kept.
    assert [counts_of(usual, stage).kept for stage in range(4)] == [1, 2, 2, 1]
    assert counts_of(on_cuda(f"{DRIVEN} --pipeline-limit 9"), 2).kept == 9 - 2


def test_messages_that_mpi_cannot_read_wait_in_pinned_memory() -> None:
    """torch rounds pinned memory up to the next power of two."""
    size, more = 3000, f"{DRIVEN} --pipeline-limit 9"
    aware, staged = on_cuda(more, aware=True), on_cuda(more)
    found = [message_bytes(grid, 1, size, microbatches=16, in_flight=9) for grid in (aware, staged)]
    assert (found[0].device, found[0].pinned) == ((4 + 7) * size, 0)
    assert (found[1].device, found[1].pinned) == ((4 + 2) * size, (4 + 7) * 4096)
    usual = message_bytes(on_cuda(""), 1, size, microbatches=16, in_flight=3)
    assert (usual.device, usual.pinned) == (4 * size, 0)


def test_a_single_stage_has_none() -> None:
    found = Activations(planned(MODEL, 1)).of_stage(0)
    assert found.messages == found.pinned == 0
