"""Ranks of a test that failed midway must not train on for ever."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest

from tests.faults import starting
from tests.limits import LIMIT

# A shell makes a background job ignore interrupts, and the runs that tests interrupt inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def nothing_outlives_its_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ends what `finish` was never called for."""
    started: list[starting.Process] = []

    def noting(start: Callable[..., starting.Process]) -> Callable[..., starting.Process]:
        def noted(*given: object) -> starting.Process:
            started.append(start(*given))
            return started[-1]

        return noted

    for name in ("_popen", "_fork"):
        monkeypatch.setattr(starting, name, noting(getattr(starting, name)))
    yield
    for process in started:
        if process.poll() is None:
            process.terminate()  # which launch.sh hands on
            try:
                process.communicate(timeout=LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
