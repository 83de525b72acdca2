"""Tests of the first cause among a thousand ranks, by counts of files opened and bytes read.

One rank looks for all of them: it reads the header of each, and the rings of the few that differ.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fault_tolerance import heartbeat
from megatron.fault_tolerance.desync import find_parting, find_parting_of
from megatron.fault_tolerance.heartbeat import FOLDER, LOOK, Heartbeat, calls, sightings
from megatron.fault_tolerance.root_cause import (
    _LOOK_BYTES,
    _POLL,
    PATIENCE,
    SILENT,
    RingCheck,
    RootCause,
)
from megatron.status import Status, read_status
from tests.faults.starting import REPO

WORLD = 1024
ODD = 611
PER_NODE = 8
STRACE = shutil.which("strace")


class Reads:
    """Counts of files opened and bytes asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files = self.bytes = 0
        read = heartbeat._read

        def counted(folder: Path, rank: int, place: int, size: int) -> bytes:
            self.files, self.bytes = self.files + 1, self.bytes + size
            return read(folder, rank, place, size)

        monkeypatch.setattr(heartbeat, "_read", counted)


def _rank(run_dir: Path, rank: int, odd: bool, steps: int = 20) -> Heartbeat:
    """Write the files of a rank in mid-step; an odd rank issued one collective too many."""
    beat = Heartbeat(run_dir / FOLDER, rank=rank, attempt="a")
    numbers = {"world": 0, f"tp of {rank - rank % 4}": 0, f"dp of {rank % 4}": 0}
    for step in range(1, steps + 1):
        beat.at("backward", step)
        extra = ["world"] * (odd and step == steps)
        for group in [*numbers, *extra, "world"]:
            numbers[group] += 1
            what = f"{len(extra)} too many" if group in extra else f"sum of 768 in {group[:2]}"
            beat.called(numbers[group], what, group)
    return beat


SLOW_DISK = """
import sys, threading, time
from pathlib import Path
from megatron.fault_tolerance.heartbeat import Heartbeat
beat = Heartbeat(Path(sys.argv[1]), attempt="a", across_hosts=True)
thread = threading.Thread(target=beat.alive)
turns = 0
thread.start()
while thread.is_alive():
    time.sleep(0.01)
    turns += 1
print(turns)
"""


@pytest.mark.waits
@pytest.mark.push
@pytest.mark.skipif(
    not (STRACE and subprocess.run([STRACE, "-qq", "true"], capture_output=True).returncode == 0),
    reason="needs strace, and a machine that lets it trace",
)
def test_a_slow_disk_does_not_stop_the_main_thread(tmp_path: Path) -> None:
    calls = "fsync,fdatasync,msync"
    slow = ("-e", f"trace={calls}", "-e", f"inject={calls}:delay_enter=2000000")
    command = [str(STRACE), "-f", "-qq", "-o", str(tmp_path / "trace"), *slow]
    command += [sys.executable, "-c", SLOW_DISK, str(tmp_path)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "sync(" in (tmp_path / "trace").read_text()
    assert int(done.stdout) > 20, "the main thread runs during the two seconds of the call"


MOUNT = 'mount -t tmpfs -o size=64k none "$0" && exec "$@"'
FULL = """
import sys
from pathlib import Path
from megatron.errors import ConfigError
from megatron.launch import Launch
from megatron.pretrain import open_heartbeat
run_dir = Path(sys.argv[1]) / "run"
run_dir.mkdir()
try:
    (run_dir / "full").write_bytes(bytes(1 << 20))
except OSError:
    pass
launch = Launch(launcher="torchrun", rank=0, world_size=2, local_rank=0, local_world_size=2)
try:
    open_heartbeat(launch, run_dir, "a")
except ConfigError as error:
    print(error, list((run_dir / "heartbeat").iterdir()))
"""


@pytest.mark.waits
@pytest.mark.push
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_full_disk_refuses_the_start(tmp_path: Path) -> None:
    """Without blocks of its own a mapped file ends the process at its first write to a page."""
    command = ["unshare", "--mount", "sh", "-c", MOUNT, str(tmp_path)]
    command += [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    if "mount: " in done.stderr or "unshare: " in done.stderr:
        pytest.skip(f"this machine lets root mount nothing: {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert "run_dir: " in done.stdout and "No space left on device; free some" in done.stdout
    assert done.stdout.endswith(" []\n"), "no part of the file is left"


def test_a_disk_that_cannot_reserve_blocks_keeps_heartbeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    beat = Heartbeat(tmp_path, attempt="a")
    beat.at("reduce", 3)
    (seen,) = sightings(tmp_path, attempt="a", ranks=[0])
    beat.close()
    assert (seen.step, seen.phase) == (3, "reduce")


def _causes(run_dir: Path, rank: int) -> RootCause:
    first = rank - rank % PER_NODE
    return RootCause(
        run_dir=run_dir,
        attempt="a",
        rank=rank,
        world_size=WORLD,
        signed=Status(state="failed"),
        near=range(first, first + PER_NODE),
    )


@pytest.fixture(scope="module")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files of all ranks, one of which is desynchronised."""
    run_dir = tmp_path_factory.mktemp("thousand")
    for rank in range(WORLD):
        beat = _rank(run_dir, rank, odd=rank == ODD)
        assert isinstance(beat._memory, heartbeat.mmap.mmap)
        beat._memory.close()
    return run_dir


def test_headers_name_the_rank_that_parted(thousand: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (thousand / FOLDER / LOOK).unlink(missing_ok=True)
    reads = Reads(monkeypatch)
    parted = _causes(thousand, 5).parted()
    assert parted is not None and (parted.rank, parted.iteration) == (ODD, 20)
    assert "differs from the others at collective" in parted.reason
    # One header of each rank, the rings of the pairs that differ, one call of each.
    size = thousand.joinpath(FOLDER, "rank_0").stat().st_size
    assert reads.files <= 2 * WORLD + 16
    assert reads.bytes <= WORLD * 1024 + 8 * size
    # The next ranks that ask open no file of any rank.
    before = reads.files
    for rank in (0, 7, 700, 1023):
        told = _causes(thousand, rank).parted()
        assert told is not None and replace(told, time="") == replace(parted, time="")
    assert reads.files == before


def test_ranks_that_ask_together_look_once_or_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls all match, so that no verdict ends the looking."""
    few = 32
    beats = [_rank(tmp_path, rank, odd=False, steps=3) for rank in range(few)]
    looks: list[int] = []
    look = RootCause._look
    monkeypatch.setattr(RootCause, "_look", lambda self: looks.append(self.rank) or look(self))
    with open(tmp_path / FOLDER / LOOK, "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        asked = threading.Barrier(few + 1)
        told = RootCause._told

        def noted(self: RootCause, file: int) -> object:
            found = told(self, file)
            if not looks and not getattr(local, "asked", False):
                local.asked = True
                asked.wait()
            return found

        local = threading.local()
        monkeypatch.setattr(RootCause, "_told", noted)
        found: list[object] = []
        threads = [
            threading.Thread(
                target=lambda rank=rank: found.append(
                    replace(_causes(tmp_path, rank), world_size=few).parted()
                )
            )
            for rank in range(few)
        ]
        for thread in threads:
            thread.start()
        asked.wait()
    for thread in threads:
        thread.join()
    assert found == [None] * few and 1 <= len(looks) <= 2
    for beat in beats:
        beat.close()
    assert not (tmp_path / FOLDER).exists()


def test_the_rank_that_hangs_is_named_by_a_rank_of_another_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other ranks wait in the next sum.

    The number of files opened must not grow with the square of the number of ranks, whichever ranks
    ask and however often.
    """
    monkeypatch.setattr("megatron.fault_tolerance.root_cause.PATIENCE", 0.01)
    for rank in range(WORLD):
        beat = Heartbeat(tmp_path / FOLDER, rank=rank, attempt="a")
        beat.at("reduce" if rank != ODD else "backward", 7)
        beat.called(1, "sum")
        if rank != ODD:
            beat.at("leaving")
        assert isinstance(beat._memory, heartbeat.mmap.mmap)
        beat._memory.close()
    reads = Reads(monkeypatch)
    blamed = _causes(tmp_path, 5).blame(Heartbeat(), "timed out")
    assert blamed is not None
    assert (blamed.rank, blamed.iteration, blamed.phase) == (ODD, 7, "backward")
    assert "does not follow" in blamed.reason
    assert reads.files <= 4 * (WORLD + PER_NODE)


def test_a_process_that_is_gone_is_looked_for_on_its_own_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 2**22 - 3)
    Heartbeat(tmp_path / FOLDER, rank=6, attempt="a").at("forward", 3)
    monkeypatch.undo()
    reads = Reads(monkeypatch)
    gone = _causes(tmp_path, 5).gone()
    assert gone is not None and gone.rank == 6
    assert reads.files == PER_NODE - 1
    assert _causes(tmp_path, 15).gone() is None and read_status(tmp_path) is None


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.integers(1, 6),
    count=st.integers(0, 150),
    edits=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 150), st.sampled_from("ax")), max_size=4
    ),
    ends=st.lists(st.integers(0, 20), min_size=6, max_size=6),
)
def test_headers_tell_what_all_calls_tell(
    ranks: int,
    count: int,
    edits: list[tuple[int, int, str]],
    ends: list[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The headers lead to the same verdict for any calls, and however far each rank has come."""
    folder = tmp_path_factory.mktemp("ranks")
    for rank in range(ranks):
        plan = ["abc"[number % 3] for number in range(count)]
        for who, place, what in edits:
            if who == rank:
                plan.insert(place, what)
        beat = Heartbeat(folder, rank=rank, attempt="a")
        for number, what in enumerate(plan[: max(0, len(plan) - ends[rank])], 1):
            beat.at("reduce", number // 3)
            beat.called(number, what, "dp" if number % 2 else "world")
    seen = sightings(folder, attempt="a", ranks=range(ranks))
    every = find_parting(calls(folder, attempt="a", ranks=range(ranks)))
    by_header = find_parting_of(folder, seen)
    assert (every is None) == (by_header is None)
    if every is not None and by_header is not None:
        assert (every.odd.number, every.usual.number) == (
            by_header.odd.number,
            by_header.usual.number,
        )
        assert every.place.group == by_header.place.group
        assert {every.rank, every.other} == {by_header.rank, by_header.other} or ranks > 2


def _hung(run_dir: Path, late: int, few: int = 4) -> None:
    """Write the state in which all ranks but one have left a sum that failed."""
    for rank in range(few):
        beat = Heartbeat(run_dir / FOLDER, rank=rank, attempt="a")
        beat.at("backward" if rank == late else "reduce", 7)
        beat.called(1, "sum")
        if rank != late:
            beat.at("leaving")
        assert isinstance(beat._memory, heartbeat.mmap.mmap)
        beat._memory.close()


def _few(run_dir: Path, rank: int) -> RootCause:
    return replace(_causes(run_dir, rank), world_size=4, near=range(4))


def test_a_rank_that_stops_while_it_looks_does_not_make_its_peers_blame_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.fault_tolerance.root_cause.PATIENCE", 0.2)
    _hung(tmp_path, late=3)
    with open(tmp_path / FOLDER / LOOK, "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        blamed = _few(tmp_path, 1).blame(Heartbeat(), "socket closed")
    assert blamed is not None and blamed.rank == 3 and "does not follow" in blamed.reason


def test_without_locks_a_rank_looks_for_itself_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that hangs is the lowest of the host, which looks for the other ranks there."""
    monkeypatch.setattr("megatron.fault_tolerance.root_cause.PATIENCE", 0.2)
    monkeypatch.setattr(fcntl, "flock", _no_locks)
    _hung(tmp_path, late=0)
    blamed = _few(tmp_path, 1).blame(Heartbeat(), "socket closed")
    assert blamed is not None and blamed.rank == 0


def test_a_look_that_is_half_written_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that ignored such a look could accept one begun before the rank's own failure."""
    _hung(tmp_path, late=3)
    causes = _few(tmp_path, 1)
    causes.parted()
    whole = (tmp_path / FOLDER / LOOK).read_bytes()
    texts = [whole[:40], whole[:90], whole]
    monkeypatch.setattr(os, "pread", lambda file, size, place: texts.pop(0))
    told = causes._told(0)
    assert told is not None and told.number == 1 and not texts


class RanksClock:
    """A clock that advances only while a rank sleeps, so waits are counted and not measured."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None] | None = None
    ) -> None:
        self.now, self._meanwhile = 0.0, meanwhile
        monkeypatch.setattr("megatron.fault_tolerance.root_cause.time.monotonic", lambda: self.now)
        monkeypatch.setattr("megatron.fault_tolerance.root_cause.time.sleep", self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        if self._meanwhile is not None:
            self._meanwhile()


def _no_locks(file: int, how: int) -> None:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def test_a_held_lock_costs_no_more_than_the_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that looks for all is stopped; its peer waits once, not once for each look."""
    _hung(tmp_path, late=3)
    looks: list[int] = []
    look = RootCause._look
    monkeypatch.setattr(RootCause, "_look", lambda self: looks.append(self.rank) or look(self))
    clock = RanksClock(monkeypatch)
    with open(tmp_path / FOLDER / LOOK, "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        blamed = _few(tmp_path, 1).blame(Heartbeat(), "socket closed")
    assert blamed is not None and blamed.rank == 3
    assert PATIENCE <= clock.now <= PATIENCE + 2 * _POLL and len(looks) <= 2


@pytest.mark.parametrize("beats", [False, True])
@pytest.mark.parametrize("behind", [-60, 0, 9])
def test_a_rank_of_another_host_is_lost_once_it_is_silent(
    behind: float, beats: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node, which the job can do without, is named, whatever the clock of its host says.

    A rank that gives signs of life is just late.
    """
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(socket, "gethostname", lambda: "other.cluster")
        beat = Heartbeat(tmp_path / FOLDER, rank=1, attempt="a")
    beat.at("forward", 7)
    memory, began = beat._memory, time.time()
    assert isinstance(memory, heartbeat.mmap.mmap)

    def give_sign() -> None:
        heartbeat._ALIVE.pack_into(memory, heartbeat._ALIVE_AT, began + clock.now - behind)

    clock = RanksClock(monkeypatch, give_sign if beats else None)
    give_sign()
    monkeypatch.setattr("megatron.fault_tolerance.root_cause.time.time", lambda: began + clock.now)
    causes = replace(_causes(tmp_path, 0), world_size=2, near=[0], nodes=["nid0", "nid1"])
    blamed = causes.blame(Heartbeat(), "socket closed")
    memory.close()
    assert blamed is not None and (blamed.place, blamed.lost) == ("rank 1 on nid1", not beats)
    assert ("unreachable" in blamed.reason) == (not beats)
    assert "on other.cluster" in blamed.reason and clock.now <= SILENT + 2 * _POLL


def test_without_locks_the_last_look_names_the_rank_that_parted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that looks for this host is stopped, and another rank issued a call too many."""
    for rank in range(4):
        beat = _rank(tmp_path, rank, odd=rank == 2, steps=3)
        assert isinstance(beat._memory, heartbeat.mmap.mmap)
        beat._memory.close()
    monkeypatch.setattr(fcntl, "flock", _no_locks)
    RanksClock(monkeypatch)
    blamed = _few(tmp_path, 1).blame(Heartbeat(), "socket closed")
    assert blamed is not None and blamed.rank == 2 and "differs from the others" in blamed.reason


def test_a_process_that_ends_while_its_peer_waits_for_the_lock_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket closes a moment before its process counts as gone."""
    _hung(tmp_path, late=3)
    clock = RanksClock(monkeypatch)
    monkeypatch.setattr(
        "megatron.fault_tolerance.root_cause.is_gone", lambda peer: peer.rank == 2 and clock.now > 0
    )
    with open(tmp_path / FOLDER / LOOK, "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        blamed = _few(tmp_path, 1).blame(Heartbeat(), "socket closed")
    assert blamed is not None and blamed.rank == 2 and "gone without a report" in blamed.reason


def test_a_look_is_not_taken_over_where_it_is_unknown_which_came_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record stays half-written while it is read; the look may predate this rank's question."""
    _hung(tmp_path, late=3)
    causes = _few(tmp_path, 1)
    for _ in range(3):
        causes.parted()
    path = tmp_path / FOLDER / LOOK
    whole = path.read_bytes()
    path.write_bytes(whole[:40])
    flock = fcntl.flock

    def written_since(file: int, how: int) -> None:
        path.write_bytes(whole)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", written_since)
    RanksClock(monkeypatch)
    assert causes.look(until=PATIENCE).number == 4


@pytest.mark.parametrize("letter", ["a", "\0", '"', "\N{GRINNING FACE}"])
def test_a_look_fits_into_its_record_whatever_the_reason(
    letter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _hung(tmp_path, late=3)
    reason = letter * 9999
    found = RingCheck(attempt="a" * 16, parted=WORLD, step=2**40, phase="optimizer", reason=reason)
    monkeypatch.setattr(RootCause, "_look", lambda self: found)
    causes = replace(_few(tmp_path, 1), attempt=found.attempt)
    causes.parted()
    assert (tmp_path / FOLDER / LOOK).stat().st_size == _LOOK_BYTES
    told = replace(causes, rank=2).look(until=0.0)
    assert (told.parted, told.number, told.reason) == (WORLD, 1, letter * 512)
