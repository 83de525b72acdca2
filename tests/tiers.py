"""The cases of a test that `scripts/test.sh --push` runs, of those that `--all` runs."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Sequence
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


def turns(cases: Sequence[Sequence[Hashable]]) -> list[bool]:
    """Return for each case of a test whether it is one of those in which values take turns.

    A case consists of the values of the parameters of the test. The first case that is chosen has
    the first value of each parameter, the next one the second values; a parameter with fewer
    values begins again. Each value of a parameter is in at least one of them.
    """
    columns = [[*dict.fromkeys(column)] for column in zip(*cases, strict=True)]
    longest = max(map(len, columns))
    chosen = {tuple(each[turn % len(each)] for each in columns) for turn in range(longest)}
    return [tuple(case) in chosen for case in cases]
