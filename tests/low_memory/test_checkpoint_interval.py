"""The sqrt rule compared with Eq.

1 of AxoNN by brute force, in the configuration and in training.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from megatron.config import RecomputeConfig, resolve
from megatron.low_memory.checkpoint_interval import (
    activations_kept,
    checkpoint_interval,
    describe_interval,
    factors,
    recompute_spans,
)
from megatron.parallel.groups import ProcessGroups
from tests.config.helpers import read
from tests.ranks import Ranks, grid
from tests.training.harness import TINY, metrics_of, train

pytestmark = pytest.mark.push

SQRT = "--recompute-granularity full --recompute-method sqrt"
GRIDS = [(n, n // held) for n in range(1, 129) for held in factors(n)]


def test_factors() -> None:
    assert [factors(n) for n in (1, 7, 12)] == [[1], [1, 7], [1, 2, 3, 4, 6, 12]]


@pytest.mark.parametrize("num_layers", [1, 2, 12, 48, 96, 100])
def test_the_root_is_the_least_of_equation_1(num_layers: int) -> None:
    least = 2 * math.sqrt(num_layers) + 1
    values = [activations_kept(num_layers, interval) for interval in range(1, 2 * num_layers)]
    assert min(values) >= least - 1e-12
    root = math.isqrt(num_layers)
    if root**2 == num_layers:
        assert activations_kept(num_layers, root) == least == min(values)
    # Counted out: a stage's microbatches in flight, each with the outputs it keeps, and one run.
    for stages in factors(num_layers):
        for interval in factors(num_layers // stages):
            kept = stages * (num_layers // stages // interval) + 1 + interval
            assert activations_kept(num_layers, interval) == kept


def test_the_rule_minimises_equation_1_but_for_the_case_that_is_told() -> None:
    missed: list[tuple[int, int]] = []
    for num_layers, stages in GRIDS:
        legal = factors(num_layers // stages)
        found = checkpoint_interval(num_layers, num_layers // stages)
        assert found in legal
        nearest = min(abs(factor - math.sqrt(num_layers)) for factor in legal)
        assert abs(found - math.sqrt(num_layers)) == nearest
        least = min(activations_kept(num_layers, factor) for factor in legal)
        if activations_kept(num_layers, found) > least + 1e-9:
            missed.append((num_layers, stages))
            larger = legal[legal.index(found) + 1]
            assert activations_kept(num_layers, larger) == pytest.approx(least)
            root = math.sqrt(num_layers)
            assert math.sqrt(found * larger) < root <= (found + larger) / 2
    assert len(GRIDS) == 645 and len(missed) == 40 and missed[0] == (14, 2)
    assert [activations_kept(14, interval) for interval in (1, 7)] == [16, 10]


def test_of_two_factors_as_near_the_smaller_is_taken() -> None:
    assert checkpoint_interval(9, 4) == 2  # 2 and 4 are 1 from 3
    assert checkpoint_interval(1, 1) == 1


@pytest.mark.parametrize(
    ("layers", "stages", "interval"), [(48, 6, 8), (48, 12, 4), (96, 24, 4), (96, 48, 2)]
)
def test_intervals_of_the_papers_models(layers: int, stages: int, interval: int) -> None:
    """Tables I and II of AxoNN: on the larger ones a whole stage is one run."""
    assert checkpoint_interval(layers, layers // stages) == interval


# ------------------------------------------------------------------------------ configuration


def _resolved(flags: str, world: int) -> RecomputeConfig:
    return resolve(read(*SQRT.split(), *flags.split()), world).recompute


def test_sqrt_is_resolved_to_uniform() -> None:
    full = {"recompute_granularity": "full", "recompute_method": "uniform"}

    def uniform(count: int) -> RecomputeConfig:
        fields: dict[str, Any] = {**full, "recompute_num_layers": count}
        return RecomputeConfig(**fields)

    assert _resolved("--num-layers 12", 1) == uniform(3)
    assert _resolved("--num-layers 48 --pipeline-model-parallel-size 6", 6) == uniform(8)
    # 5 + 4 layers: the factor of 5 nearest to 3.
    assert _resolved("--num-layers 9 --pipeline-model-parallel-size 2", 2) == uniform(1)
    ends = "--num-layers 10 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 4"
    assert _resolved(ends, 2) == uniform(3)
    turns = "--num-layers 16 --pipeline-model-parallel-size 2"
    turns += " --num-layers-per-virtual-pipeline-stage 2 --global-batch-size 8"
    assert _resolved(turns, 2) == uniform(2)


def test_a_configuration_that_is_not_resolved_is_our_mistake() -> None:
    unresolved = RecomputeConfig(recompute_granularity="full", recompute_method="sqrt")
    with pytest.raises(AssertionError, match="resolve"):
        recompute_spans(4, unresolved)


def test_the_log_tells_the_interval_and_its_neighbours() -> None:
    assert describe_interval(48, 8, 8) == (
        "runs of 8 of 8 layers; by AxoNN's Eq. 1 a stage keeps 15 outputs of a layer (runs of 4: "
        "17)"
    )
    beside = describe_interval(12, 6, 2)
    assert beside.endswith("keeps 9 outputs of a layer (runs of 1: 14, of 3: 8)")
    assert describe_interval(1, 1, 1).endswith("keeps 3 outputs of a layer")


# ----------------------------------------------------------------------------------- training


def _train(groups: ProcessGroups, pp: int, flags: str, run_dir: Path) -> None:
    train(grid(groups, tp=1, pp=pp), flags, run_dir)


@pytest.mark.parametrize("pp", [1, 2])
def test_training_with_it_changes_no_bit(ranks: Ranks, tmp_path: Path, pp: int) -> None:
    flags = f"{TINY} --num-layers 6 --pipeline-model-parallel-size {pp}"
    for name, more in (("kept", ""), ("recomputed", SQRT)):
        ranks.run(pp, _train, pp, f"{flags} {more}", tmp_path / name)
    kept, recomputed = (metrics_of(tmp_path / name) for name in ("kept", "recomputed"))
    assert len(kept) == 8 and kept == recomputed
