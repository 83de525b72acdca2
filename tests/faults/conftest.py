"""Ranks of a test that failed midway must not train on for ever."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.faults import starting

# A shell makes a background job ignore interrupts, and the runs that tests interrupt inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def nothing_outlives_its_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ends what `finish` was never called for."""
    started: list[subprocess.Popen[str]] = []
    popen = starting._popen

    def noted(command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
        started.append(popen(command, env))
        return started[-1]

    monkeypatch.setattr(starting, "_popen", noted)
    yield
    for process in started:
        if process.poll() is None:
            process.terminate()  # which launch.sh hands on
            try:
                process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
