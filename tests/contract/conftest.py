"""The cases of the contract tests that have the mark `cases`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.contract import pairs
from tests.contract.harness import PathCase, case_id


def rows_of(law: pytest.Function) -> list[pairs.Row]:
    """Return the rows of a test with the mark `cases`: with `--all` those of every legal case."""
    mark = law.get_closest_marker("cases")
    assert mark is not None
    four = mark.kwargs["four"] or "world" not in law.fixturenames
    everything = law.config.getoption("--all")
    rows = pairs.product() if everything else pairs.table(four=four)
    return [row for row in rows if mark.kwargs["which"](*row)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with the mark `cases` for the pairwise table, with `--all` for every legal row."""
    if metafunc.definition.get_closest_marker("cases") is None:
        return
    rows = rows_of(metafunc.definition)
    if "world" in metafunc.fixturenames:
        ids = [f"{case_id(case)}-{world}" for case, world in rows]
        metafunc.parametrize(("case", "world"), rows, ids=ids)
    else:
        by_id = {case_id(case): case for case, _ in rows}
        metafunc.parametrize("case", by_id.values(), ids=by_id)


@pytest.fixture
def choices(request: pytest.FixtureRequest, case: PathCase, world: int) -> Sequence[Any]:
    """Return those values of a law's own parameter that its row is tested with."""
    if request.config.getoption("--all"):
        return request.param
    values = pairs.Row(case, world).values
    number = [row.values for row in rows_of(request.node)].index(values)
    return pairs.turn(number, values, request.param)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Leave out most choices of a law's own parameters, except for first lines on two ranks."""
    if config.getoption("--all"):
        return
    laws: dict[str, dict[pairs.Values, list[pytest.Item]]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("cases") is not None:
            params: dict[str, Any] = dict(item.callspec.params)
            values = pairs.Row(params["case"], params.get("world", 0)).values
            rows = laws.setdefault(f"{item.path}::{item.originalname}", {})
            rows.setdefault(values, []).append(item)
    several = {item for rows in laws.values() for found in rows.values() for item in found}
    kept = {item for rows in laws.values() for item in pairs.in_turns(rows)}
    items[:] = [item for item in items if item not in several or item in kept]
