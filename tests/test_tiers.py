"""Which cases of a test are left to `scripts/test.sh --all`."""

from __future__ import annotations

from itertools import product

import pytest

from tests.tiers import sampled, turns


def test_values_of_parameters_take_turns() -> None:
    cases = [*product("ab", "xyz", "1")]
    chosen = [case for case, is_chosen in zip(cases, turns(cases), strict=True) if is_chosen]
    assert chosen == [("a", "x", "1"), ("a", "z", "1"), ("b", "y", "1")]


@pytest.mark.turns
@pytest.mark.parametrize("place", range(2))
@pytest.mark.parametrize(("name", "options"), [("a", {}), ("b", {"x": 1}), ("c", {})])
def test_cases_out_of_turn_have_the_mark_full(
    request: pytest.FixtureRequest, name: str, options: dict[str, int], place: int
) -> None:
    """Names given together are one parameter, and values may be unhashable."""
    is_in_turn = (name, place) in {("a", 0), ("b", 1), ("c", 0)}
    assert (request.node.get_closest_marker("full") is None) == is_in_turn, options


@pytest.mark.parametrize("cases", [["a", "b"], [("a", 1), ("b", 2)]])
def test_a_sample_leaves_the_other_cases_to_all(cases: list[object]) -> None:
    first, second = sampled(cases, cases[:1])
    assert first == cases[0]
    values = cases[1] if isinstance(cases[1], tuple) else (cases[1],)
    assert second.values == values and [mark.name for mark in second.marks] == ["full"]
