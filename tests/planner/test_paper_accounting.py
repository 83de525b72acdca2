"""The report's own accounting: the totals of tables 3 and 4, from shapes alone."""

from __future__ import annotations

import math

import pytest

from megatron.low_memory.strategies import Strategy
from tools.planner.paper_accounting import (
    MB,
    TABLE_3,
    TABLE_4,
    TABLE_4_ACTIVATIONS_MB,
    TABLE_4_BASELINE_MB,
    CountedNetwork,
    PaperRow,
    account_of,
    column_bits,
    dynamic_conv_network,
    implied_activations,
    translation_total,
    wide_resnet_account,
    wide_resnet_network,
)


@pytest.mark.parametrize("row", TABLE_3, ids=lambda row: f"{row.printed_mb} MB")
def test_totals_of_table_3_come_out(row: PaperRow) -> None:
    total = account_of(row).bytes.total / MB
    assert total == pytest.approx(row.printed_mb, abs=0.07)
    if row.printed_reduction is not None:
        reduction = account_of(TABLE_3[0]).bytes.total / MB / total
        assert reduction == pytest.approx(row.printed_reduction, rel=0.015)


def test_the_baseline_is_404_8_mb_by_kind() -> None:
    counted = wide_resnet_account().bytes
    assert (counted.model, counted.optimizer) == (4 * 1_456_858, 8 * 1_456_858)
    assert f"{counted.total / MB:.1f}" == "404.8"
    shares = [f"{share:.1%}" for share in counted.shares.values()]
    assert shares == ["1.4%", "2.9%", "95.7%"]  # figure 1a


def test_thirty_percent_and_ten_images_reduce_each_kind_as_section_4_2_2_says() -> None:
    dense, sparse = account_of(TABLE_3[0]).bytes, account_of(TABLE_3[3]).bytes
    assert round(dense.activations / sparse.activations) == 115
    assert round(dense.model / sparse.model) == 4
    assert math.floor(dense.optimizer / sparse.optimizer) == 6


def test_a_sparse_tensor_shares_one_index_between_its_copies() -> None:
    network = CountedNetwork(
        shapes={"conv": (4, 3, 3, 3), "bn": (8,), "linear": (5, 16)},
        sparse=["conv", "linear"],
        full_precision=["bn"],
        optimizer="adam",
    )
    assert [column_bits(s) for s in ((4, 3, 3, 3), (5, 16), (5, 17))] == [5, 4, 5]
    # Half of 108 and 80 entries with 5 and 4 bits of column; the norm stays dense and in 32 bit.
    values, index = 2 * (54 + 40) + 4 * 8, (54 * 5 + 40 * 4 + 7) // 8
    assert network.states(bits=16, nonzero=0.5) == (values + index, 3 * values)
    assert network.states(bits=32) == (4 * 196, 12 * 196)


def test_the_networks_have_the_reports_parameters() -> None:
    wide, translation = wide_resnet_network(), dynamic_conv_network()
    assert (wide.parameters, wide.prunable) == (1_456_858, 1_451_520)
    assert (translation.parameters, translation.prunable) == (38_685_184, 38_060_032)
    assert len(wide.sparse) == 24


@pytest.mark.parametrize("row", TABLE_4, ids=lambda row: f"{row.printed_mb} MB")
def test_states_of_table_4_leave_the_same_activations_in_every_row(row: PaperRow) -> None:
    assert round(translation_total(row)) == row.printed_mb
    reduction = TABLE_4_BASELINE_MB / translation_total(row)
    assert reduction == pytest.approx(row.printed_reduction, abs=0.06)


def test_the_totals_of_table_4_leave_the_documented_range_for_activations() -> None:
    # A total is rounded to whole MB, and 16-bit activations are half of the 32-bit ones.
    ranges = [
        ((left - 0.5) * 32 / row.bits, (left + 0.5) * 32 / row.bits)
        for row in TABLE_4
        for left in [implied_activations(row)]
    ]
    low, high = max(low for low, _ in ranges), min(high for _, high in ranges)
    assert (round(low, 2), round(high, 2)) == (43.45, 43.54)
    assert low < TABLE_4_ACTIVATIONS_MB < high


def test_states_of_the_translation_baseline_are_those_of_figure_1b() -> None:
    model, optimizer = dynamic_conv_network().states(bits=32)
    assert (model + optimizer) / MB == pytest.approx(619.0, abs=0.05)
    assert f"{model / MB / TABLE_4_BASELINE_MB:.1%}" == "5.3%"
    assert f"{optimizer / MB / TABLE_4_BASELINE_MB:.1%}" == "16.0%"


def test_statistics_count_where_normalizations_are_recomputed_from_them() -> None:
    assert wide_resnet_account().bytes.statistics == 0
    assert wide_resnet_account(strategy=Strategy("residual", 2)).bytes.statistics == 0
    star = wide_resnet_account(strategy=Strategy("residual-star", 2)).bytes
    assert star.statistics == 4 * 3616
    assert star.statistics < 0.01 * star.total  # "less than 1 %" (appendix B)
