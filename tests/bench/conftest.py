"""Fixtures of the tests of benchmarks."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that the test starts, in order."""
    found: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            found.append(self)

    monkeypatch.setattr("subprocess.Popen", Recorded)
    return found
