"""Tests that fp16 runs skip the same steps, however many ranks share a batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import Ranks
from tests.training.harness import NO_DROPOUT, TINY, metrics_of, train

pytestmark = pytest.mark.push

RADIUS = (
    "--grad-path radius --radius-interval 4 --radius-start-iter 0 "
    "--accumulate-allreduce-grads-in-fp32"
)


@pytest.mark.parametrize(
    "path",
    ["", "--use-distributed-optimizer", "--grad-path samo", RADIUS],
)
def test_ranks_that_share_a_batch_skip_the_steps_that_one_rank_skips(
    ranks: Ranks, tmp_path: Path, path: str
) -> None:
    """The loss scale is so large that backward overflows until it has been halved a few times."""
    flags = f"{TINY} {NO_DROPOUT} --fp16 --train-iters 12 --hysteresis 1 {path}"
    flags += f" --initial-loss-scale {2**26}"
    found = []
    for world in (1, 2):
        folder = tmp_path / str(world)
        ranks.run(world, train, flags, folder)
        found.append([metrics_of(folder, key) for key in ("skipped", "loss_scale", "lm_loss")])
    for skipped, scales, losses in found:
        assert any(skipped) and not all(skipped)
        assert (skipped, scales) == tuple(found[0][:2])
        assert losses == pytest.approx(found[0][2], abs=5e-3)
