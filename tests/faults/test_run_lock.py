"""Tests that a folder has one run at a time; a lock without a living holder does not hinder."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.fault_tolerance import run_lock
from megatron.fault_tolerance.heartbeat import FOLDER, Heartbeat
from megatron.fault_tolerance.root_cause import find_out
from megatron.fault_tolerance.run_lock import (
    LOCK,
    STALE_SECONDS,
    RunFolderInUse,
    RunLock,
    check_free,
)
from megatron.run_dir import lock_run_dir
from megatron.status import Status, read_status, write_status
from tests import program
from tests.faults.starting import REPO, SCRIPT, environment, start_launcher
from tests.limits import LIMIT
from tests.training.harness import TINY

HOLD = """
import sys, time
from pathlib import Path
from megatron.errors import ConfigError
from megatron.run_dir import lock_run_dir
from megatron.fault_tolerance.run_lock import RunLock
assert not {"torch", "numpy"} & set(sys.modules)
RunLock.take(Path(sys.argv[1]), job={"SLURM_JOB_ID": "77"}, log=print)
print("held", flush=True)
time.sleep(600)
"""


def take(folder: Path, **job: str) -> tuple[RunLock | None, list[str]]:
    said: list[str] = []
    return RunLock.take(folder, job=job, log=said.append), said


def held(folder: Path, **job: str) -> list[str]:
    """Take the lock, give it back, and return the messages."""
    lock, said = take(folder, **job)
    assert lock is not None
    lock.release()
    return said


def hold_elsewhere(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], cwd=REPO, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def change(folder: Path, **values: object) -> None:
    path = folder / LOCK
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def no_flock(descriptor: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, "no locks here")


@pytest.mark.waits
@pytest.mark.push
@pytest.mark.parametrize("flock", [fcntl.flock, no_flock], ids=["flock", "no-flock"])
def test_refused_at_once_while_held_and_taken_over_when_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flock: Callable[[int, int], None]
) -> None:
    waits: list[bool] = []

    def noted(descriptor: int, operation: int) -> None:
        waits.append(not operation & fcntl.LOCK_NB)
        flock(descriptor, operation)

    monkeypatch.setattr(run_lock.fcntl, "flock", noted)
    holder = hold_elsewhere(tmp_path)
    try:
        words = rf"process {holder.pid} on .*, job 77;.*--run-dir"
        with pytest.raises(RunFolderInUse, match=words):
            take(tmp_path)
        if flock is not no_flock:
            with pytest.raises(RunFolderInUse, match=words):
                check_free(tmp_path)
        holder.send_signal(signal.SIGKILL)
    finally:
        holder.kill()
        holder.communicate()
    assert waits and not any(waits)
    check_free(tmp_path)
    (note,) = held(tmp_path)
    assert f"process {holder.pid} on" in note and "gone" in note
    assert list(tmp_path.iterdir()) == [] and held(tmp_path) == []


def test_one_process_does_not_hold_it_twice(tmp_path: Path) -> None:
    lock, _ = take(tmp_path)
    with pytest.raises(RunFolderInUse, match=f"process {os.getpid()} on"):
        take(tmp_path)
    assert lock is not None
    lock.release()
    assert held(tmp_path) == []


def leave_behind(folder: Path, **values: object) -> Path:
    """Leave the file of a holder that this host knows nothing of."""
    mine = dataclasses.asdict(run_lock._myself({}))
    (folder / LOCK).write_text(json.dumps(mine | values))
    return folder / LOCK


def test_another_host_counts_while_it_gives_signs_of_life(tmp_path: Path) -> None:
    path = leave_behind(tmp_path, host="elsewhere", pid=1)
    with pytest.raises(RunFolderInUse, match="process 1 on elsewhere"):
        take(tmp_path)
    old = time.time() - STALE_SECONDS - 5
    os.utime(path, (old, old))
    assert held(tmp_path) == ["run folder taken over from process 1 on elsewhere, which is gone"]


def test_a_job_that_slurm_restarted_does_not_wait_for_its_dead_self(tmp_path: Path) -> None:
    leave_behind(tmp_path, host="elsewhere", job="5", restarts=0)
    for other in ({"SLURM_JOB_ID": "6", "SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "5"}):
        with pytest.raises(RunFolderInUse, match="elsewhere, job 5"):
            take(tmp_path, **other)
    assert "job 5" in held(tmp_path, SLURM_JOB_ID="5", SLURM_RESTART_COUNT="1")[0]


def test_a_pid_given_to_another_process_holds_nothing(tmp_path: Path) -> None:
    leave_behind(tmp_path, started=1)
    assert len(held(tmp_path)) == 1
    leave_behind(tmp_path, boot="another boot")
    assert len(held(tmp_path)) == 1


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"host": 1}', '{"pid": "x"}', "\0"])
def test_a_file_of_nobody_counts_until_it_is_old(tmp_path: Path, text: str) -> None:
    path = tmp_path / LOCK
    path.write_text(text)
    with pytest.raises(RunFolderInUse, match="unknown process"):
        take(tmp_path)
    os.utime(path, (1, 1))
    assert "unknown process" in held(tmp_path)[0]


def test_a_live_holder_touches_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.01)
    lock, _ = take(tmp_path)
    os.utime(tmp_path / LOCK, (1, 1))
    deadline = time.monotonic() + LIMIT
    while (tmp_path / LOCK).stat().st_mtime == 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lock is not None and (tmp_path / LOCK).stat().st_mtime > 1
    lock.release()


def test_a_lock_lost_to_another_is_not_removed(tmp_path: Path) -> None:
    lock, _ = take(tmp_path)
    (tmp_path / LOCK).unlink()
    leave_behind(tmp_path, host="elsewhere")
    assert lock is not None
    lock.release()
    assert (tmp_path / LOCK).exists()


def test_a_disk_without_links_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(run_lock.os, "link", refuse)
    lock, said = take(tmp_path)
    assert lock is None and "second run" in said[0] and list(tmp_path.iterdir()) == []


@pytest.mark.waits
@pytest.mark.push
def test_a_second_start_is_refused_at_once_and_touches_nothing(tmp_path: Path) -> None:
    holder = hold_elsewhere(tmp_path)
    (tmp_path / "status.json").write_text("untouched")
    command = [sys.executable, "-X", "importtime", str(REPO / "pretrain_gpt.py"), *TINY.split()]
    try:
        done = subprocess.run(
            [*command, "--run-dir", str(tmp_path)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=LIMIT,
        )
    finally:
        holder.kill()
        holder.communicate()
    told = done.stderr.splitlines()
    (line,) = (text for text in told if not text.startswith("import time:"))
    assert done.returncode == 2 and f"in use by process {holder.pid} on" in line
    loaded = {text.rpartition("|")[2].strip() for text in told}
    assert "megatron.fault_tolerance.run_lock" in loaded and "torch" not in loaded, (
        "which takes seconds"
    )
    assert (tmp_path / "status.json").read_text() == "untouched"
    assert {path.name for path in tmp_path.iterdir()} == {"status.json", LOCK}


WAIT = f"""
import runpy, sys, time
from pathlib import Path
Path(__file__).with_name("waits").touch()
while not Path(__file__).with_name("go").exists():
    time.sleep(0.01)
sys.argv[0] = {SCRIPT!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.waits
@pytest.mark.push
def test_a_refused_start_leaves_the_run_that_its_launcher_saw_begin(tmp_path: Path) -> None:
    """The status is newer than the second launcher, which must not take it for its own run's."""
    run_dir, late = tmp_path / "run", tmp_path / "late.py"
    late.write_text(WAIT)
    flags = "--global-batch-size 2 --train-iters 8"
    second = start_launcher(1, run_dir, flags, PROGRAM=str(late))
    while not (tmp_path / "waits").exists() and second.processes[0].poll() is None:
        time.sleep(0.01)
    first = start_launcher(1, run_dir, flags)
    while (status := read_status(run_dir)) is None and first.processes[0].poll() is None:
        time.sleep(0.01)
    assert status is not None and status.state == "running"
    os.kill(status.pid, signal.SIGSTOP)
    try:
        (tmp_path / "go").touch()
        refused = second.finish()
    finally:
        os.kill(status.pid, signal.SIGCONT)
    assert refused.codes == [2] and f"in use by process {status.pid} on" in refused.all_stderr
    ended = first.finish()
    assert ended.codes == [0], ended.all_stderr
    assert (ended.status["state"], ended.status["attempt"]) == ("done", status.attempt)


@pytest.mark.waits
@pytest.mark.push
def test_torchrun_does_not_bury_that_a_folder_is_in_use(tmp_path: Path) -> None:
    """The run in the folder has status.json, and torchrun makes every code 1."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    holder = hold_elsewhere(run_dir)
    try:
        refused = start_launcher(2, run_dir, "--global-batch-size 4 --train-iters 8").finish()
    finally:
        holder.kill()
        holder.communicate()
    last = refused.all_stderr.splitlines()[-1]
    assert refused.codes == [2] and last.startswith(f"launch.sh: {run_dir}: in use by"), last


def test_a_run_of_another_host_is_cut_short_once_it_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk without locks between hosts shows the process of another host by its signs of life."""
    write_status(tmp_path, Status(state="running", attempt="a", host="elsewhere", pid=1))
    beat = Heartbeat(tmp_path / FOLDER, rank=1, attempt="a")
    beat.at("reduce", 6)
    monkeypatch.setattr("megatron.fault_tolerance.root_cause.HEARTBEAT_SECONDS", -1.5)
    monkeypatch.setattr("megatron.fault_tolerance.root_cause.time.sleep", lambda _: beat.alive())
    assert find_out(tmp_path) is None
    monkeypatch.setattr("megatron.fault_tolerance.root_cause.time.sleep", lambda _: None)
    assert find_out(tmp_path) == 6
    told = read_status(tmp_path)
    assert told is not None and (told.state, told.rank, told.phase) == ("failed", 1, "reduce")


@pytest.mark.parametrize(("nodes", "lost"), [("1", "nid5"), ("2", "")])
def test_a_job_whose_ranks_are_all_gone_has_lost_its_only_node(
    nodes: str, lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", nodes)
    monkeypatch.setenv("SLURMD_NODENAME", "nid5")
    write_status(tmp_path, Status(state="running", attempt="a", pid=2**22 - 3))
    assert find_out(tmp_path) == 6
    told = read_status(tmp_path)
    assert told is not None and (told.node, told.lost) == (lost, bool(lost))


@pytest.mark.waits
@pytest.mark.push
def test_one_folder_of_checkpoints_has_one_run(tmp_path: Path) -> None:
    saves = tmp_path / "saves"
    saves.mkdir()
    holder = hold_elsewhere(saves)
    flags = [*TINY.split(), "--save", str(saves), "--run-dir", str(tmp_path / "other")]
    try:
        done = program.run(SCRIPT, flags, env=environment(), cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        (line,) = done.stderr.splitlines()
        assert f"{saves}: in use by process {holder.pid} on" in line
        # A run that saves nothing needs no lock.
        done = program.run(SCRIPT, [*flags, "--skip-train"], env=environment(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    finally:
        holder.kill()
        holder.communicate()
    assert not list((tmp_path / "other").glob(LOCK)), "given back"


RACE = """
import sys, time
from pathlib import Path
from megatron.errors import ConfigError
from megatron.run_dir import lock_run_dir
from megatron.fault_tolerance.run_lock import RunLock, RunFolderInUse
folder = Path(sys.argv[1])
print("ready", flush=True)
while not (folder / "go").exists():
    time.sleep(0)
try:
    lock = RunLock.take(folder, job={}, log=lambda text: None)
    print("mine", flush=True)
except RunFolderInUse:
    print("refused", flush=True)
sys.stdin.read()  # held until all have answered
"""


@pytest.mark.waits
@pytest.mark.push
def test_of_many_that_find_a_stale_lock_one_gets_it(tmp_path: Path) -> None:
    leave_behind(tmp_path, started=1)
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(tmp_path)],
            cwd=REPO,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(6)
    ]

    def lines() -> list[str]:
        return [process.stdout.readline().strip() for process in starts if process.stdout]

    assert lines() == ["ready"] * 6
    (tmp_path / "go").touch()
    answers = lines()
    for process in starts:
        process.communicate()
    assert sorted(answers) == ["mine"] + ["refused"] * 5


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give folders away")
def test_a_run_folder_that_anyone_may_write_into_is_refused(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    lock_run_dir(tmp_path, log=print)()
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345 and anyone may write"):
        lock_run_dir(tmp_path, log=print)
