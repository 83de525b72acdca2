from __future__ import annotations

import os
import signal
import time

import pytest

from megatron.data.preprocess import Crew, WorkerError
from megatron.errors import DataError
from tests.limits import LIMIT

pytestmark = pytest.mark.push


def work(task: tuple[str, int]) -> bytes:
    what, number = task
    if what == "refuse":
        raise DataError(f"task {number}")
    if what == "fail":
        raise KeyError(f"task {number}\nmore")
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "sleep":
        time.sleep(LIMIT)
    return bytes([number % 256]) * 300_000  # far more than a pipe holds


def test_results_come_in_order_when_tasks_and_results_overfill_the_pipes() -> None:
    with Crew(work, size=2) as crew:
        tasks = [("x" * 300_000, number) for number in range(20)]
        answers = list(crew.map(tasks))
    assert [task for task, _ in answers] == tasks
    assert all(result == work(task) for task, result in answers)


def test_failures_stop_at_their_task_and_leave_no_process() -> None:
    cases = {
        "refuse": (DataError, "task 5"),
        "fail": (WorkerError, "KeyError: 'task 5"),
        "die": (WorkerError, "a worker process died"),
    }
    for what, (kind, message) in cases.items():
        tasks = [(what if number == 5 else "work", number) for number in range(40)]
        done: list[int] = []
        with pytest.raises(kind) as error, Crew(work, size=2) as crew:
            for task, _ in crew.map(tasks):
                done.append(task[1])
        assert done == list(range(len(done))) and len(done) <= 5
        assert message in str(error.value) and "\n" not in str(error.value)
        if what != "die":
            assert len(done) == 5


def test_leaving_does_not_wait_for_work() -> None:
    started = time.monotonic()
    with Crew(work, size=2) as crew:
        for number, _ in enumerate(crew.map([("work", 0)] + [("sleep", 1)] * 3)):
            assert number == 0
            break
    assert time.monotonic() - started < LIMIT
