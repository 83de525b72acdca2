"""Processes of a study that is told to end."""

from __future__ import annotations

from tools.studies.processes import STOPPED, Processes


def test_nothing_starts_after_a_stop() -> None:
    processes = Processes()
    processes.stop()
    assert processes.wait_for(["no-such-program"]) == STOPPED
