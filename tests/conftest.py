"""Fixtures that every test may use."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import Ranks

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random tensors are the same whatever ran before; tests without torch stay without it."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real text and vocabularies, if this machine has one."""
    folder = Path(os.environ.get("SPARSETRON_SHARED_DATA", REPO.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("no shared data beside the repository")
    return folder


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Rank processes shared by all tests of the session."""
    pool = Ranks()
    yield pool
    pool.close()
