"""Formats that users and files depend on are those that were recorded."""

from __future__ import annotations

import pytest

from tests.snapshots.formats import SNAPSHOTS
from tests.snapshots.record import RECORDED, compare

pytestmark = pytest.mark.push


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_the_format_is_the_recorded_one(name: str) -> None:
    if found := compare(name):
        pytest.fail(
            f"a format changed: {name}. If that is deliberate, record it again with\n"
            f"    python -m tests.snapshots.record {name}\n"
            f"and commit the difference with the reason.\n{found}",
            pytrace=False,
        )


def test_no_recorded_text_is_left_over() -> None:
    assert {path.stem for path in RECORDED.iterdir()} == set(SNAPSHOTS)
