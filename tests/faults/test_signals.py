"""Signals and files that ask a run to save or to leave: one save, the right exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.fault_tolerance import exit_signals
from megatron.fault_tolerance.exit_signals import SIGTERM_SECONDS, ExitRequest, ExitSignals
from tests.faults.starting import (
    Ended,
    Started,
    losses,
    send,
    start_launcher,
    start_ranks,
    wait_for_step,
)
from tests.limits import LIMIT

LONG = "--train-iters 100000 --save-interval 50000"
SLOW = "slow:0:1+:data"
"""A fault that makes a step last a second, so that a signal surely falls into a step."""
LISTEN = "0A"
"""The state of /proc/net/tcp."""
LOOPBACK = f"{int.from_bytes(socket.inet_aton('127.0.0.1'), sys.byteorder):08X}"


def descendants(pid: int) -> list[int]:
    """Return the process and all that it and its children started and that have not ended."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(p for child in children for p in descendants(int(child)))]


def is_checking(pid: int) -> bool:
    """Return whether the program is a start that only checks."""
    try:
        return b"--dry-run" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def listening(pids: list[int]) -> list[str]:
    """Return the addresses at which the processes listen, `address:port` in the kernel's digits."""
    opened: set[str] = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                opened.add(os.readlink(link))
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [
        at
        for _, at, _, state, *more in lines
        if state == LISTEN and f"socket:[{more[5]}]" in opened
    ]


def saved(run_dir: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in run_dir.glob("checkpoints/step_????????"))


def check_left(ended: Ended, left: str) -> int:
    """Check that the run left for that reason and saved once, at its last step; return the step."""
    assert set(ended.codes) == {75}, (ended.codes, ended.all_stderr)
    status = ended.status
    assert (status["state"], status["left"], status["exit_code"]) == ("left", left, 75), status
    assert saved(ended.run_dir) == [status["iteration"]]
    assert not (ended.run_dir / "report.html").exists(), "the time before a limit is for saving"
    assert max(losses(ended.run_dir)) == status["iteration"]
    return status["iteration"]


def steps_after(run_dir: Path, when: float) -> int:
    """Return how many steps ended after a time, in seconds since the epoch."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return sum("lm_loss" in line and line["time"] > when for line in lines)


@pytest.mark.waits
@pytest.mark.push
def test_signals_to_any_rank_and_the_stop_file_save_once_and_leave(tmp_path: Path) -> None:
    """The runs of all cases go on in parallel, since each run mostly waits."""

    def begin(name: str, flags: str = LONG) -> Started:
        return start_ranks(2, tmp_path / name, flags, fault=SLOW)

    runs = {name: begin(name) for name in ("SIGTERM", "SIGUSR1", "STOP")}
    for run in runs.values():
        wait_for_step(run.run_dir, 2)
    (tmp_path / "STOP" / "STOP").touch()
    send(runs["SIGTERM"], signal.SIGTERM, 0, 1)
    send(runs["SIGUSR1"], signal.SIGUSR1, 1)
    asked = time.time()
    for name, run in runs.items():
        check_left(run.finish(), name)
        # The ranks had already voted on the step in which they were asked, or not.
        assert steps_after(run.run_dir, asked) <= 2
    assert not (tmp_path / "STOP" / "STOP").exists()
    again = start_ranks(2, tmp_path / "STOP", "--train-iters 12").finish()
    assert again.codes == [0, 0], again.all_stderr
    assert sorted(losses(tmp_path / "STOP")) == list(range(1, 13))
    assert (tmp_path / "STOP" / "report.html").is_file()


def is_pending(number: signal.Signals, pid: int) -> bool:
    """Return whether a process has yet to take a signal that was sent to it."""
    (mask,) = re.findall(r"^ShdPnd:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.waits
@pytest.mark.push
def test_a_second_interrupt_leaves_at_once_and_save_files_are_obeyed(tmp_path: Path) -> None:
    """The first rank hangs, so that only the thread of the watchdog can act."""
    flags = "--global-batch-size 2 --train-iters 3"
    hung = start_ranks(1, tmp_path / "hung", flags, fault="hang:0:2:data")
    asked = start_ranks(2, tmp_path / "asked", LONG, fault=SLOW)
    wait_for_step(asked.run_dir, 2)
    (tmp_path / "asked" / "SAVE").touch()
    deadline = time.monotonic() + LIMIT
    while (tmp_path / "asked" / "SAVE").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    first = saved(tmp_path / "asked")
    assert len(first) == 1
    hung.wait_for_fault(0)
    send(hung, signal.SIGINT, 0)
    # Two interrupts that wait for a process are one.
    while is_pending(signal.SIGINT, hung.processes[0].pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    send(hung, signal.SIGINT, 0)
    ended = hung.finish()
    assert ended.codes == [130], ended.all_stderr
    assert not (tmp_path / "hung" / "checkpoints").exists()
    assert ended.status["reason"].startswith("interrupted twice")
    send(asked, signal.SIGUSR1, 0)
    ended = asked.finish()
    assert ended.codes == [75, 75] and len(saved(tmp_path / "asked")) == 2
    assert saved(tmp_path / "asked")[0] == first[0]


@pytest.mark.waits
@pytest.mark.push
def test_launcher_hands_the_signal_on_and_exits_with_75(tmp_path: Path) -> None:
    """Until then nothing of the run listens but on loopback."""
    run = start_launcher(2, tmp_path / "run", LONG)
    wait_for_step(run.run_dir, 3)
    addresses = listening(descendants(run.processes[0].pid))
    assert len(addresses) >= 3 and {at.split(":")[0] for at in addresses} == {LOOPBACK}, addresses
    send(run, signal.SIGTERM, 0)
    ended = run.finish()
    check_left(ended, "SIGTERM")
    assert "death signal" not in ended.all_stderr, "torchrun would kill ranks that save for long"


@pytest.mark.waits
@pytest.mark.push
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
def test_a_request_while_the_launcher_checks_ends_it(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """A process that died of the signal would have no exit code."""
    run = start_launcher(2, tmp_path / "run", LONG)
    deadline = time.monotonic() + LIMIT
    while not any(map(is_checking, descendants(run.processes[0].pid))):
        assert time.monotonic() < deadline
    send(run, number, 0)
    assert run.finish().codes == [code] and not (tmp_path / "run").exists()


@pytest.mark.waits
@pytest.mark.push
def test_ctrl_c_ends_with_what_was_saved_and_how_to_go_on(tmp_path: Path) -> None:
    """torchrun calls such a run a failed one, and shows a traceback."""
    run = start_launcher(2, tmp_path / "run", LONG)
    wait_for_step(run.run_dir, 3)
    send(run, signal.SIGINT, 0)
    ended = run.finish()
    step = check_left(ended, "SIGINT")
    last = f"launch.sh: saved step {step} (SIGINT); the same command resumes the run"
    assert ended.all_stderr.splitlines()[-1] == last
    assert last.removeprefix("launch.sh: ") in (run.run_dir / "log.txt").read_text()


@pytest.mark.waits
@pytest.mark.push
def test_sigterm_that_a_failure_follows_saves_nothing(tmp_path: Path) -> None:
    """A launcher's SIGTERM reaches this rank before it can know that a peer is dead.

    The rank waits for a second before it saves. Where this test is kept from killing the peer in
    that second, which shows by two ranks that have left, it tries again.
    """
    for trial in range(5):
        run = start_ranks(2, tmp_path / str(trial), LONG)
        wait_for_step(run.run_dir, 3)
        send(run, signal.SIGTERM, 0)
        wait_for_step(run.run_dir, 3, "save")
        send(run, signal.SIGKILL, 1)
        ended = run.finish()
        if ended.codes != [75, 75]:
            break
    assert ended.codes == [6, -9], ended.all_stderr
    assert ended.status["rank"] == 1 and "gone" in ended.status["reason"]
    assert saved(run.run_dir) == []


@pytest.mark.waits
@pytest.mark.full
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
@pytest.mark.parametrize("phase", ["data", "reduce", "save", "evaluate"])
def test_matrix_of_signals(tmp_path: Path, name: str, phase: str, record_property) -> None:  # noqa: ANN001
    """Send the signal while a rank is in that phase."""
    record_property("fault", f"{name} in {phase}")
    flags = "--train-iters 500 --save-interval 2 --eval-iters 2 --eval-interval 2"
    run = start_ranks(2, tmp_path, flags, fault=f"slow:1:4+:{phase}")
    wait_for_step(run.run_dir, 4)
    time.sleep(0.5)
    send(run, signal.Signals[name], 0, 1)
    began = time.time()
    ended = run.finish()
    assert ended.codes == [75, 75], ended.all_stderr
    assert ended.status["left"] == name
    assert saved(tmp_path)[-1] == ended.status["iteration"]
    record_property("seconds", max(ended.ended.values()) - began)
    record_property("detected", 1)
    again = start_ranks(2, tmp_path, f"--train-iters {ended.status['iteration'] + 2}").finish()
    assert again.codes == [0, 0], again.all_stderr
    record_property("recovered", 1)


def test_requests_by_urgency(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    times = [100.0, 100.25, 100.0 + SIGTERM_SECONDS, 200.0]
    clock = SimpleNamespace(monotonic=lambda: times.pop(0), sleep=naps.append)
    monkeypatch.setattr(exit_signals, "time", clock)
    requests = ExitSignals(tmp_path)
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        requests.install()
        assert requests.pending() is ExitRequest.NONE
        (tmp_path / "SAVE").touch()
        assert requests.pending() is ExitRequest.SAVE
        requests.saved()
        assert requests.pending() is ExitRequest.NONE
        os.kill(os.getpid(), signal.SIGUSR1)
        assert requests.pending() is ExitRequest.SIGUSR1
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert requests.pending() is ExitRequest.SIGTERM
        while times:  # the first of which was that of the signal
            requests.wait_out_sigterm()
        assert naps == [SIGTERM_SECONDS - 0.25, 0.0, 0.0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    (tmp_path / "STOP").touch()
    assert ExitSignals(tmp_path).pending() is ExitRequest.STOP
    assert ExitSignals(None).pending() is ExitRequest.NONE
