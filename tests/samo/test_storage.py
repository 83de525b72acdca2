"""Bits of sparse networks, against a matrix counted by hand and the report's own memory table."""

from __future__ import annotations

import pytest

from samo.memory import csr_bits, model_bits

ROWS, WIDTH = 74_220, 512
"""Shape for the Transformer: 38.0 million entries are sparsified ("over 98 %" of 38.7 million)."""
TABLE_4 = {32: {100: 662, 50: 380, 40: 315, 30: 249}, 16: {100: 331, 50: 201, 40: 166, 30: 131}}
"""Megabytes by bits of a value and nonzeros in %; what is not sparse drops out of differences."""


def test_a_small_tensor_by_hand() -> None:
    # 3 rows of 2 x 2 x 3 columns, 5 nonzeros: 4 bits a column, 4 row pointers of 0 to 5 (3 bits).
    assert csr_bits((3, 2, 2, 3), 5, value_bits=16, copies=0) == 5 * 4 + 4 * 3
    assert csr_bits((3, 2, 2, 3), 5, value_bits=16, copies=3) == 5 * 4 + 4 * 3 + 3 * 16 * 5
    assert csr_bits((7, 1), 0, value_bits=32, copies=4) == 0
    shapes = {"weight": (3, 12), "bias": (3,)}
    both = model_bits(shapes, {"weight": 5}, value_bits=16, copies=3)
    assert both == csr_bits((3, 12), 5, value_bits=16, copies=3) + 3 * 3 * 16
    assert model_bits(shapes, {}, copies=4) == 4 * 32 * 39


@pytest.mark.parametrize("value_bits", TABLE_4)
@pytest.mark.parametrize(("more", "less"), [(100, 50), (50, 40), (40, 30), (100, 30)])
def test_differences_of_the_report_come_out(value_bits: int, more: int, less: int) -> None:
    shapes = {"weights": (ROWS, WIDTH)}

    def megabytes(percent: int) -> float:
        stored = {} if percent == 100 else {"weights": ROWS * WIDTH * percent // 100}
        return model_bits(shapes, stored, value_bits=value_bits, copies=4) / 8e6

    table = TABLE_4[value_bits]
    # Each of the two numbers is rounded to a megabyte.
    assert megabytes(more) - megabytes(less) == pytest.approx(table[more] - table[less], abs=1.0)
