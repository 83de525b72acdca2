"""The cases of a test that `scripts/test.sh --push` runs, of those that `--all` runs."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def sampled(cases: Iterable[T], on_push: Container[T]) -> list[Any]:
    """Return cases as parameters of a test; those that are not in `on_push` have the mark `full`.

    A tuple gives a test several parameters, as in `pytest.mark.parametrize`.
    """
    return [case if case in on_push else _only_on_all(case) for case in cases]


def _only_on_all(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.full)


def turns(places: Sequence[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Return those of the cases of a test in which the values of its parameters take turns.

    A case is given by the numbers of its values. The first case that is returned has the first
    value of each parameter, the next one the second values; a parameter with fewer values begins
    again. Each value of a parameter is in at least one of them.
    """
    counts = [len(set(values)) for values in zip(*places, strict=True)]
    return {tuple(turn % count for count in counts) for turn in range(max(counts))}
