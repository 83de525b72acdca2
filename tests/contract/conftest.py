"""The cases of the contract tests that have the mark `cases`."""

from __future__ import annotations

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
