"""Tests of gaps beside those of other rows of the same runs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.studies.files import row
from tools.studies.reproduction import repeated_groups

BASELINES = {"dense": "dense", "near": "dense", "far": "dense", "lone": "dense"}
OTHERS = [
    *(row("dense", seed, 4.0) for seed in (1, 2, 3)),
    *(row("near", seed, 4.1 + 0.01 * seed) for seed in (1, 2, 3)),
    row("far", 1, 4.5),
    row("lone", 2, 4.2),
]


def test_gaps_are_compared_on_common_seeds_with_the_scatter_of_all() -> None:
    own = [
        *(row("dense", seed, 4.02) for seed in (1, 2)),
        *(row("near", seed, 4.13 + 0.01 * seed) for seed in (1, 2)),
        row("far", 1, 4.62),
        row("lone", 1, 4.2),
    ]
    near, far = repeated_groups(own, OTHERS, BASELINES)
    assert (near.name, near.seeds, far.name, far.seeds) == ("near", (1, 2), "far", (1,))
    # The other gaps of near are 0.11, 0.12 and 0.13, its own 0.12 and 0.13.
    assert (near.gap, near.other) == pytest.approx((0.125, 0.115))
    scatter = math.sqrt((2 * 0.01**2 + 0.005**2 * 2) / 3)
    assert near.error == pytest.approx(scatter)
    assert far.error == pytest.approx(scatter * math.sqrt(2))
    assert far.difference == pytest.approx(-0.1)
    assert far.is_apart and not near.is_apart
    # Three degrees of freedom need 3.18 errors, ten and more 2.23.
    closer = replace(far, other=far.gap - 3 * scatter * math.sqrt(2))
    assert far.degrees == 3 and not closer.is_apart and replace(closer, degrees=10).is_apart


def test_runs_of_other_settings_are_not_compared() -> None:
    other = [replace(one, settings="1") if one.group == "far" else one for one in OTHERS]
    assert [each.name for each in repeated_groups(OTHERS, other, BASELINES)] == ["near", "lone"]


def test_one_seed_of_each_has_no_error() -> None:
    alone = [one for one in OTHERS if one.seed == 1]
    (near, far) = repeated_groups(alone, alone, BASELINES)
    assert near.error is None and far.difference == 0.0 and not far.is_apart


def test_failed_runs_and_groups_without_their_baseline_have_no_gap() -> None:
    failed = [replace(one, valid_loss=None) if one.group == "far" else one for one in OTHERS]
    assert [each.name for each in repeated_groups(failed, OTHERS, BASELINES)] == ["near", "lone"]
    assert repeated_groups([row("near", 1, 4.1)], OTHERS, BASELINES) == []
