"""A process with the device for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rehearsal.process import Rehearsal


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    process = Rehearsal(tmp_path_factory.mktemp("rehearsal") / "log")
    yield process
    process.close()
