"""Tests of a rank that is killed, raises, leaves, stops or hangs.

The other ranks end in time, and the first cause is reported once. Rows marked `full` run in
tools/faults.sh.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.fault_tolerance import heartbeat, watchdog
from megatron.fault_tolerance.flight_recorder import explain
from megatron.fault_tolerance.heartbeat import Heartbeat
from megatron.fault_tolerance.root_cause import RootCause
from megatron.status import Status, read_status
from tests.faults.starting import (
    FLAGS,
    LONG_TIMEOUT,
    TIMEOUT,
    Ended,
    losses,
    send,
    start_launcher,
    start_ranks,
)
from tests.limits import LIMIT

STEPS = 10
FORCED = "forcefully exiting"
"""What torchrun says of ranks that its SIGTERM has not ended within 30 s."""


@dataclass(frozen=True)
class FailureCase:
    """A fault, exit codes of its rank, code and words of the first cause, and a timeout.

    Most faults are noticed at once, so that the timeout of collectives may be longer than the test
    waits. The others are noticed by it.
    """

    fault: str
    codes: tuple[int, ...]
    code: int
    words: tuple[str, ...]
    timeout: str = LONG_TIMEOUT

    @property
    def rank(self) -> int:
        return int(self.fault.split(":")[1])

    @property
    def step(self) -> int:
        return int(self.fault.split(":")[2])

    @property
    def phase(self) -> str:
        return self.fault.split(":")[3]


def rows(rank: int, step: int, phase: str) -> list[FailureCase]:
    """Return every way to fail in this phase."""
    where = f"{rank}:{step}:{phase}"
    return [
        FailureCase(f"kill:{where}", (-9,), 6, ("gone", "killed")),
        FailureCase(f"raise:{where}", (1,), 1, ("RuntimeError: injected fault",)),
        FailureCase(f"oom:{where}", (1,), 1, ("MemoryError", "--micro-batch-size")),
        FailureCase(f"exit0:{where}", (0,), 6, ("gone", "left early")),
        # The rank that reports the fault wakes this rank, so that both can leave.
        FailureCase(f"stop:{where}", (6,), 6, ("does not follow", "stopped"), TIMEOUT),
        # Reported by the rank that waits, or on a busy machine by the rank's own watchdog.
        FailureCase(f"hang:{where}", (6,), 6, ("in this phase for",), TIMEOUT),
    ]


def pick(kind: str, where: str) -> FailureCase:
    rank, step, phase = where.split(":")
    return next(r for r in rows(int(rank), int(step), phase) if r.fault.startswith(f"{kind}:"))


# Together the rows meet each way to fail and each phase.
FAST = [
    [pick("kill", "1:6:forward")],
    [pick("raise", "0:3:backward"), pick("exit0", "1:5:optimizer")],
    [pick("stop", "1:3:reduce"), pick("hang", "0:3:data")],
]
PHASES = [(0, 2, "data"), (1, 6, "forward"), (1, 6, "backward"), (0, 6, "reduce"),
          (1, 6, "optimizer"), (1, 4, "save"), (0, 8, "save")]  # fmt: skip
MATRIX = [row for where in PHASES for row in rows(*where)]


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the losses of the run without a fault."""
    run_dir = tmp_path_factory.mktemp("unbroken") / "run"
    ended = start_ranks(2, run_dir, f"--train-iters {STEPS}").finish()
    assert ended.codes == [0, 0], ended.all_stderr
    return losses(run_dir)


def check(row: FailureCase, ended: Ended) -> float:
    """Check the promises of a row; return the seconds from the fault to the end of the others.

    A rank that has a code of its own has ended within the limit of `Started.finish`.
    """
    other = 1 - row.rank
    assert ended.codes[row.rank] in row.codes, (ended.codes, ended.all_stderr)
    assert ended.codes[other] == 6, (ended.codes, ended.all_stderr)
    status = ended.status
    assert (status["state"], status["exit_code"]) == ("failed", row.code), status
    assert (status["rank"], status["iteration"]) == (row.rank, row.step), status
    assert status["phase"] == row.phase, status
    assert all(word in status["reason"] for word in row.words), status
    told = f"rank {row.rank}, step {row.step}, {row.phase}: {status['reason']}"
    assert ended.all_stderr.count(told) == 1, ended.all_stderr
    if row.fault.startswith("hang"):
        assert "stacks at step" in ended.stderr[row.rank] and "inject.py" in ended.all_stderr
        # The rank's own watchdog, or the rank that waits, names the collective that it was in.
        assert re.search(r"last in collective \d+ of world \(.+ of \d+ \w+\)", status["reason"])
        line = explain(ended.run_dir, 2)
        call = r"gloo all_reduce \d+ of world, \[[\d, ]+\] \w+"
        lag = rf"{call}: rank {other} waits, rank {row.rank} lags"
        assert re.fullmatch(f"{lag} behind it", line), line
    return ended.seconds_after_fault(but=row.rank)


def check_recovery(run_dir: Path, unbroken: dict[int, float]) -> None:
    """Check that the same command resumes from the last checkpoint and ends as if undisturbed."""
    again = start_ranks(2, run_dir, f"--train-iters {STEPS}").finish()
    assert again.codes == [0, 0], again.all_stderr
    assert again.status["state"] == "done"
    assert losses(run_dir) == unbroken


@pytest.mark.waits
@pytest.mark.push
@pytest.mark.parametrize("together", FAST, ids=lambda rows: "+".join(r.fault for r in rows))
def test_the_others_end_in_time_and_name_it(
    together: list[FailureCase],
    tmp_path: Path,
    unbroken: dict[int, float],
    record_property: Callable[[str, object], None],
) -> None:
    flags = f"--train-iters {STEPS}"
    started = [
        start_ranks(2, tmp_path / str(number), f"{flags} {row.timeout}", fault=row.fault)
        for number, row in enumerate(together)
    ]
    ended = [run.finish() for run in started]
    seconds = [check(row, run) for row, run in zip(together, ended, strict=True)]
    record_property("seconds", max(seconds))
    if len(together) == 1:
        check_recovery(tmp_path / "0", unbroken)


@pytest.mark.waits
@pytest.mark.full
@pytest.mark.parametrize("row", MATRIX, ids=lambda row: row.fault)
def test_matrix(
    row: FailureCase,
    tmp_path: Path,
    unbroken: dict[int, float],
    record_property: Callable[[str, object], None],
) -> None:
    record_property("fault", f"{row.fault.split(':')[0]} in {row.phase}")
    flags = f"--train-iters {STEPS} {row.timeout}"
    ended = start_ranks(2, tmp_path, flags, fault=row.fault).finish()
    record_property("seconds", check(row, ended))
    record_property("detected", 1)
    check_recovery(tmp_path, unbroken)
    record_property("recovered", 1)


@pytest.mark.waits
@pytest.mark.full
def test_four_ranks(
    tmp_path: Path, unbroken: dict[int, float], record_property: Callable[[str, object], None]
) -> None:
    """Three ranks blame the stopped fourth rank, once."""
    record_property("fault", "stop, one of four ranks")
    flags = f"--train-iters {STEPS} {TIMEOUT}"
    ended = start_ranks(4, tmp_path, flags, fault="stop:2:5:forward").finish()
    assert ended.codes == [6, 6, 6, 6]
    status = ended.status
    assert (status["rank"], status["iteration"], status["phase"]) == (2, 5, "forward")
    assert ended.all_stderr.count("does not follow") == 1
    record_property("seconds", ended.seconds_after_fault(but=2))
    record_property("detected", 1)
    again = start_ranks(4, tmp_path, flags).finish()
    assert again.codes == [0, 0, 0, 0], again.all_stderr
    assert losses(tmp_path) == pytest.approx(unbroken, abs=1e-4)
    record_property("recovered", 1)


@pytest.mark.waits
def test_launcher_exits_with_the_first_causes_code(tmp_path: Path, unbroken: dict) -> None:
    """torchrun makes 1 of every code; its SIGTERM to the other ranks must not make them save."""
    flags = f"--train-iters {STEPS} {LONG_TIMEOUT}"
    run = start_launcher(2, tmp_path / "run", flags, fault="kill:1:6:backward").finish()
    assert run.codes == [6] and FORCED not in run.all_stderr, run.all_stderr
    status = run.status
    assert (status["rank"], status["iteration"], status["phase"]) == (1, 6, "backward")
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir() if p.is_dir())
    assert names == ["step_00000004"]


@pytest.mark.waits
@pytest.mark.push
@pytest.mark.parametrize(("kind", "code"), [("exit0", 6), ("sys-exit0", 1)])
def test_a_single_rank_that_leaves_early_is_no_success(
    tmp_path: Path, kind: str, code: int
) -> None:
    flags = FLAGS.replace("--global-batch-size 8", "--global-batch-size 2")
    fault = f"{kind}:0:2:data"
    run = start_launcher(1, tmp_path / "run", f"{flags} --train-iters 4", fault=fault).finish()
    assert run.codes == [code], run.all_stderr
    assert (run.status["state"], run.status["exit_code"]) == ("failed", code)


ON_A_STALLED_DISK = """
import os, sys, time
from pathlib import Path
from megatron.fault_tolerance import watchdog
from megatron.fault_tolerance.heartbeat import Heartbeat
from megatron.fault_tolerance.root_cause import RootCause
from megatron.status import Status

watchdog.TICK, watchdog.SLACK = 0.1, 2.0
run_dir, steps = Path(sys.argv[1]), int(sys.argv[2])
heartbeat = Heartbeat()
heartbeat.alive = lambda: time.sleep(60)
signed = Status(state="failed")
causes = RootCause(run_dir=run_dir, attempt="a", rank=0, world_size=2, signed=signed)
watchdog.Watchdog(heartbeat, causes, limit=4.0).watch()
for step in range(steps):
    heartbeat.at("forward", step)
    time.sleep(0.05)
if not steps:
    heartbeat.at("forward", 0)
    time.sleep(30)
os._exit(0)
"""


@pytest.mark.waits
@pytest.mark.push
@pytest.mark.parametrize(("steps", "code"), [(200, 0), (0, 1)], ids=["trains", "hangs"])
def test_a_stalled_disk_ends_only_a_rank_whose_main_thread_hangs(
    tmp_path: Path, steps: int, code: int
) -> None:
    """The timer of faulthandler is what ends it, 4 + 2 x 2 s after it was set last."""
    command = [sys.executable, "-c", ON_A_STALLED_DISK, str(tmp_path), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == code, done.stderr
    assert ("Timeout" in done.stderr) == (code == 1), done.stderr


@pytest.mark.waits
@pytest.mark.push
def test_a_tracker_that_takes_long_to_close_does_not_fail_a_finished_run(tmp_path: Path) -> None:
    fault = "slow-tracker:0:2:forward"
    ended = start_ranks(2, tmp_path, "--train-iters 4", fault=fault).finish()
    assert ended.codes == [0, 0], ended.all_stderr
    assert (ended.status["state"], ended.status["exit_code"]) == ("done", 0)


@pytest.mark.waits
@pytest.mark.push
def test_a_tracker_that_takes_long_to_close_does_not_change_the_code_of_a_failure(
    tmp_path: Path,
) -> None:
    flags = "--global-batch-size 2 --train-iters 4"
    fault = "slow-tracker:0:1:forward,raise:0:2:forward"
    ended = start_ranks(1, tmp_path, flags, fault=fault).finish()
    assert ended.codes == [1] and ended.status["exit_code"] == 1, ended.all_stderr


@pytest.mark.waits
@pytest.mark.push
def test_a_lone_rank_survives_a_suspension(tmp_path: Path) -> None:
    """Slurm may suspend a job; no peer waits, so that the time does not count."""
    flags = "--global-batch-size 2 --train-iters 4 --distributed-timeout-minutes 0.02"
    run = start_ranks(1, tmp_path, flags, fault="stop:0:2:forward")
    run.wait_for_fault(0)
    time.sleep(1.2 + 2 * watchdog.SLACK + 2)
    send(run, signal.SIGCONT, 0)
    ended = run.finish()
    assert ended.codes == [0], ended.all_stderr
    assert (ended.status["state"], ended.status["iteration"]) == ("done", 4)


@pytest.mark.parametrize(("pauses", "ends"), [((0.05, 1.0, 0.05), False), ((0.05,) * 12, True)])
def test_only_the_time_in_which_the_watchdog_runs_counts(
    pauses: Sequence[float], ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pause of the watchdog's own thread shows that a lone rank was suspended."""
    now = time.monotonic()
    clock = SimpleNamespace(monotonic=lambda: now, time=time.time)
    for module in (watchdog, heartbeat):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(watchdog, "SLACK", 0.2)
    signed = Status(state="failed")
    causes = RootCause(run_dir=tmp_path, attempt="a", rank=0, world_size=1, signed=signed)
    beat = Heartbeat(attempt="a")
    beat.at("forward", 1)
    guard = watchdog.Watchdog(beat, causes, limit=0.1)
    left = list(pauses)

    def pause(milliseconds: float) -> None:
        nonlocal now
        now += left.pop(0)
        if not left:
            guard._ended.set()

    polling = SimpleNamespace(register=lambda *_: None, poll=pause)
    select = SimpleNamespace(poll=lambda: polling, POLLIN=1)
    monkeypatch.setattr(watchdog, "select", select)
    monkeypatch.setattr(guard, "_end", guard._ended.set)
    guard.run()
    guard._signals.close()
    guard._wakeup.close()
    assert (read_status(tmp_path) is not None) == ends


@pytest.mark.waits
@pytest.mark.push
def test_a_lone_rank_that_hangs_is_ended(tmp_path: Path) -> None:
    """The watchdog of the rank is all that waits for it, and shows where the rank hangs."""
    flags = "--global-batch-size 2 --train-iters 4 --distributed-timeout-minutes 0.03"
    ended = start_ranks(1, tmp_path, flags, fault="hang:0:2:forward").finish()
    assert ended.codes == [6], ended.all_stderr
    assert "hangs: in this phase" in ended.status["reason"]
    assert "inject.py" in ended.stderr[0] and ended.status["phase"] == "forward"


@pytest.mark.waits
@pytest.mark.full
@pytest.mark.parametrize("launcher", ["torchrun", "mpiexec"])
@pytest.mark.parametrize("kind", ["kill", "raise", "exit0", "stop", "hang"])
def test_matrix_of_launchers(
    launcher: str,
    kind: str,
    tmp_path: Path,
    unbroken: dict[int, float],
    record_property: Callable[[str, object], None],
) -> None:
    """`scripts/launch.sh` ends with the first cause's code and leaves no process behind."""
    if launcher == "mpiexec":
        pytest.importorskip("mpi4py", reason="needs the extra mpi")
    record_property("fault", f"{kind} under {launcher}")
    row = pick(kind, "1:6:forward")
    flags = f"--train-iters {STEPS} {row.timeout}"
    ended = start_launcher(2, tmp_path, flags, fault=row.fault, LAUNCHER=launcher).finish()
    assert ended.codes == [row.code] and FORCED not in ended.all_stderr, ended.all_stderr
    assert ended.status["rank"] == 1 and ended.status["iteration"] == 6
    record_property("seconds", ended.seconds_after_fault())
    record_property("detected", 1)
    check_recovery(tmp_path, unbroken)
    record_property("recovered", 1)
