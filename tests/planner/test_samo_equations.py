"""The SAMO paper's equations agree with each other and with its figure 2."""

from __future__ import annotations

from fractions import Fraction

import pytest

from tools.planner.samo_equations import (
    FIGURE,
    break_even,
    default_bytes,
    eq_1,
    eq_2,
    eq_4,
    saved,
)


@pytest.mark.parametrize("sparsity", [Fraction(1, 4), *FIGURE])
def test_equations_of_the_samo_paper_agree(sparsity: Fraction) -> None:
    parameters, f = 2_651_553_280, 1 - sparsity
    for moments, each in ((0, 16), (1, 20), (2, 24)):
        count = each * f * parameters + 2 * parameters
        assert eq_1(parameters, sparsity, moments) == count
        assert eq_2(parameters, sparsity, moments) == eq_4(parameters, sparsity, moments) == count
    assert saved(sparsity) == (24 * sparsity - 6) / 20
    assert saved(sparsity, 1) == (20 * sparsity - 6) / 16


def test_figure_2() -> None:
    assert saved(Fraction(1, 4)) == 0
    assert [round(100 * saved(Fraction(p, 10))) for p in (8, 9)] == [66, 78]


def test_what_pruning_must_save_before_it_pays() -> None:
    assert [default_bytes(moments) for moments in (0, 1, 2)] == [12, 16, 20]
    for moments, sparsity in ((1, Fraction(3, 10)), (2, Fraction(1, 4))):
        assert break_even(moments) == sparsity and saved(sparsity, moments) == 0
