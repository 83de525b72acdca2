"""The pairwise table of the contract tests has what it should, and the program refuses the rest."""

from __future__ import annotations

from itertools import combinations

import pytest

from pretrain_gpt import GRADIENT_PATHS
from tests.contract.harness import PATHS, WORLDS, PathCase, case_id
from tests.contract.pairs import Row, combined, covering, in_turns, lines, product, refusals, table

FLAGS = ("grad_wire", "use_distributed_optimizer", "dp_inner_size", "optimizer_cpu_offload")
"""The settings that a refused combination names."""


def test_a_covering_has_every_item_and_little_else() -> None:
    rows = [
        frozenset(combinations(enumerate((a, b, c)), 2)) for a in "ab" for b in "ab" for c in "ab"
    ]
    assert len(covering(rows)) == 4, "four rows have the twelve pairs of three factors"
    first = covering(rows, first=[7])
    assert 7 in first and frozenset().union(*(rows[n] for n in first)) == frozenset().union(*rows)
    # The row of two items first, then the only one that has 3.
    assert covering([{1}, {1, 2}, {2}, {3}]) == {1, 3}
    assert covering([{1}, {1}]) == {0}, "the first of those with equally many"


@pytest.mark.parametrize("four", [True, False])
def test_every_legal_pair_of_values_is_in_the_table(four: bool) -> None:
    """A wire, or states that are sharded, have to be in a row of several ranks.

    The table without four ranks leaves out pairs with this number of ranks, and no others.
    """
    legal, chosen = ([row.values for row in rows] for rows in (product(), table(four=four)))
    assert {*chosen} <= {*legal} and len({*chosen}) == len(chosen)
    legal, chosen = ([(row[0][0], *row[1:]) for row in rows] for rows in (legal, chosen))
    for one, other in combinations(range(4), 2):
        worlds = (2, 4) if other < 3 else (1, 2, 4) if four else (1, 2)
        pairs = {(row[one], row[other]) for row in legal if row[3] in worlds}
        assert pairs == {(row[one], row[other]) for row in chosen if row[3] in worlds}


def test_without_need_four_ranks_are_left_out() -> None:
    four = [row.case for row in table(four=False) if row.world == 4]
    assert four and all(2 in refusals(case) for case in four)


def test_every_path_runs_on_every_number_of_ranks_and_its_options_on_one_and_two() -> None:
    chosen = {row.values for row in table()}
    options = {Row(line, 1).values[0] for line in PATHS}
    firsts = {Row(line, 1).values[0] for line in PATHS if not line.is_variant}
    assert {path for path, *_ in chosen} == options and len(firsts) == len(GRADIENT_PATHS)
    assert {(each, None, "whole", world) for each in options for world in (1, 2)} <= chosen
    assert {(each, None, "whole", 4) for each in firsts} <= chosen


@pytest.mark.parametrize("four", [True, False])
def test_every_line_is_in_the_table_on_several_ranks(four: bool) -> None:
    chosen = {row.values[:3] for row in table(four=four) if row.world > 1}
    assert {Row(line, 2).values[:3] for line in PATHS} <= chosen


def test_what_is_not_legal_is_refused_with_a_message() -> None:
    legal = {row.values for row in product()}
    for case in combined():
        refused = refusals(case)
        for world in WORLDS:
            assert (Row(case, world).values in legal) == (world not in refused), case_id(case)
        for message in refused.values():
            assert message.isprintable() and any(flag in message for flag in FLAGS), message


def test_refusals_are_those_of_the_program() -> None:
    assert refusals(PathCase("dense", wire="int8", sharded=True)) == {}
    topk = PathCase("topk", {"topk_density": 0.1}, wire="int8")
    assert {*refusals(topk)} == {*WORLDS} and "baselines encode" in refusals(topk)[4]
    assert {*refusals(PathCase("dense", inner=2))} == {1, 2}, "two ranks are one group of two"


def test_a_rounding_wire_takes_the_laws_of_exact_sums_from_a_case() -> None:
    facts = {
        wire: (case.lossless, case.linear)
        for wire in (None, "fp32", "bf16", "int8", "int4")
        for case in [PathCase("dense", wire=wire)]
    }
    exact, rounded, fed_back = (True, True), (True, False), (False, False)
    assert list(facts.values()) == [exact, exact, rounded, fed_back, fed_back]
    assert not PathCase("topk", lossless=False).lossless


def test_the_parameters_of_a_law_take_turns_but_for_first_lines_on_two_ranks() -> None:
    complete = [row.values for row in lines() if not row.case.is_variant and row.world == 2]
    assert {path for (path, _), *_ in complete} == {*GRADIENT_PATHS}
    others = [row.values for row in table() if row.values not in complete]
    assert len(others) > 6, "enough for every one of three choices to come twice"
    chosen = list(in_turns({values: [(values, n) for n in range(3)] for values in others}))
    assert [values for values, _ in chosen] == others
    assert [n for _, n in chosen[:4]] == [0, 1, 2, 0]
    first = complete[0]
    assert list(in_turns({first: "abc", (*first[:3], 0): "de"})) == list("abcde")
