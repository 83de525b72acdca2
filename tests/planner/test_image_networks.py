"""The image networks of the SAMO paper: what exists of them at a sparsity, and its bytes."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from samo.memory import paper_bytes
from tools.planner.replay.image_networks import NAMES, network
from tools.planner.samo_equations import default_bytes

NINE_TENTHS = Fraction(9, 10)


def test_parameters_are_those_of_table_i() -> None:
    found = {network(name).title: network(name).parameters for name in NAMES}
    assert found == {"VGG-19": 143_667_240, "WideResnet-101": 126_886_696}


@pytest.mark.parametrize(
    ("name", "weights", "entries"),
    [("vgg19", 19, 143_652_544), ("wide_resnet101", 105, 126_747_840)],
)
def test_weights_are_pruned_and_vectors_are_not(name: str, weights: int, entries: int) -> None:
    made = network(name)
    sizes = [math.prod(shape) for shape in made.shapes.values() if len(shape) > 1]
    assert len(sizes) == weights and sum(sizes) == entries
    vectors = made.parameters - entries
    assert made.stored(Fraction(0)) == made.parameters
    # Each weight keeps a tenth, rounded up.
    assert 0 <= made.stored(NINE_TENTHS) - vectors - entries / 10 < weights


def test_bytes_with_momentum_are_those_of_the_papers_count() -> None:
    """2,299 and 2,030 MB dense, and a quarter of them at f = 0.1; vectors make f a little more."""
    megabytes = {
        name: (
            default_bytes(moments=1) * made.parameters / 1e6,
            paper_bytes(made.parameters, made.parameters // 10, moments=1) / 1e6,
            paper_bytes(made.parameters, made.stored(NINE_TENTHS), moments=1) / 1e6,
        )
        for name in NAMES
        for made in [network(name)]
    }
    assert [round(size) for size in megabytes["vgg19"]] == [2299, 575, 575]
    assert [round(size) for size in megabytes["wide_resnet101"]] == [2030, 508, 510]


def test_a_smaller_image_costs_less_and_has_the_same_parameters() -> None:
    for name in NAMES:
        whole, small = network(name), network(name, 64)
        assert small.shapes == whole.shapes
        assert 11 < whole.training_flops / small.training_flops < 13
