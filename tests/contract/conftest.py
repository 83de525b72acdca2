"""The cases of the contract tests that have the mark `cases`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract import pairs
from tests.contract.harness import case_id


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with the mark `cases` for the pairwise table, with `--all` for every legal row."""
    mark = metafunc.definition.get_closest_marker("cases")
    if mark is None:
        return
    rows = pairs.product() if metafunc.config.getoption("--all") else pairs.table()
    rows = [row for row in rows if mark.kwargs["which"](*row)]
    if "world" in metafunc.fixturenames:
        ids = [f"{case_id(case)}-{world}" for case, world in rows]
        metafunc.parametrize(("case", "world"), rows, ids=ids)
    else:
        by_id = {case_id(case): case for case, _ in rows}
        metafunc.parametrize("case", by_id.values(), ids=by_id)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Leave out most choices of a law's own parameters, except for plain paths on two ranks."""
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
