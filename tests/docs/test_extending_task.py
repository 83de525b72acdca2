"""The task that docs/extending.md writes trains, counts each sample once, and refuses mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.config import parse
from megatron.errors import ConfigError
from megatron.parallel.groups import ProcessGroups
from pretrain_gpt import GRADIENT_PATHS
from tests.ranks import Ranks
from tests.training.harness import metrics_of, train

FLAGS = "--micro-batch-size 8 --global-batch-size 16 --train-iters 80 --lr 0.05 --full-validation"


def on_rank_with_the_page(groups: ProcessGroups, flags: str, run_dir: Path) -> dict[str, Any]:
    from tests.docs import extending

    return train(groups, flags, run_dir, extending.MODULE.CircleTask())


@pytest.mark.push
@pytest.mark.parametrize("more", ["", "--grad-path topk", "--bf16 --use-distributed-optimizer"])
def test_the_page_trains(ranks: Ranks, tmp_path: Path, more: str) -> None:
    curves = []
    for world in (1, 2):
        run = tmp_path / str(world)
        ranks.run(world, on_rank_with_the_page, f"{FLAGS} {more}", run)
        curves.append(metrics_of(run, "loss"))
        assert metrics_of(run, "valid_accuracy")[-1] > 0.8
        assert metrics_of(run, "points") == [16] * 80
    if not more:
        assert curves[0] == pytest.approx(curves[1], rel=1e-4)


def test_the_page_refuses_a_wrong_radius() -> None:
    from tests.docs import extending

    flags = [*FLAGS.split(), "--radius", "4"]
    with pytest.raises(ConfigError, match="radius 4.0: hardly any point lies outside"):
        parse(flags, paths=GRADIENT_PATHS, task=extending.MODULE.CircleConfig)
