"""The process that the cases of a file of tests are asked in, and the files that they are about."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sweep.asking import Worker
from tests.sweep.samples import Samples, make_samples


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    found = Worker(tmp_path_factory.mktemp("asked"))
    yield found
    found.close()


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    folder: Path = tmp_path_factory.mktemp("samples")
    maker = Worker(folder)
    try:
        return make_samples(folder, maker)
    finally:
        maker.close()
