"""Step, phase and latest collectives of each rank, in a memory-mapped file per rank.

A change of phase costs about a microsecond and no system call. The file keeps what a rank wrote
before it was killed or stopped, so that its peers can name the rank and its phase. The rendezvous
store would not serve: it lives in one rank and is lost with it.

    header, 704 bytes     process, host, phase, times; of each group: calls issued and their digest
    rings, 110 KB        the latest calls of each group

A digest covers all calls up to the latest, in order. Ranks with equal digests issued the same
calls, so a reader of a thousand headers needs the rings of the few ranks whose digests differ.
"""

from __future__ import annotations

import errno
import mmap
import os
import signal
import socket
import struct
import threading
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron.status import Status

FOLDER = "heartbeat"
LOOK = "look"
"""File in the folder with the finding of the rank that read all headers, for all ranks."""
PHASES = (
    "start", "data", "receive", "forward", "backward", "reduce", "optimizer", "evaluate", "save",
    "leaving", "done",
)  # fmt: skip
_NUMBER = {phase: number for number, phase in enumerate(PHASES)}
_OWNER = struct.Struct("<16sq64s")  # attempt, pid, host
_BEAT = struct.Struct("<qqqd")  # beats, step, phase, time of the last beat
_ALIVE = struct.Struct("<d")  # last time at which the rank's watchdog ran
_CALL = struct.Struct("<qqqq40s")  # number, digest, step, phase, what
_COUNT = struct.Struct("<q")
_TAIL = struct.Struct("<32sqq")  # name of a ring's connections; number and digest of the last call
_LAST = struct.Struct("<qq")
_NAME_BYTES = _TAIL.size - _LAST.size
_CALLS = 128
"""Number of collectives that a ring holds."""
_RINGS = 12
"""Maximum number of a rank's groups: every axis of the grid, and its pipeline neighbours."""
_RING = _CALLS * _CALL.size
_BEAT_AT = _OWNER.size
_ALIVE_AT = _BEAT_AT + _BEAT.size
_TAILS_AT = _ALIVE_AT + _ALIVE.size
_CALLS_AT = _TAILS_AT + _RINGS * _TAIL.size
_SIZE = _CALLS_AT + _RINGS * _RING
WORLD = "world"
_NO_FALLOCATE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


@dataclass(frozen=True, kw_only=True)
class LastCall:
    """The last call of a rank over the connections `group`, whose ring is number `ring`.

    `number` counts its calls; `digest` covers all calls up to it.
    """

    group: str
    ring: int
    number: int
    digest: int


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """The latest record of a rank.

    Times are in seconds since the epoch, by that rank's clock. `beats` counts changes of phase;
    `alive` is when its watchdog last ran; `tails` has one entry per group.
    """

    rank: int
    pid: int
    host: str
    beats: int
    step: int
    phase: str
    since: float
    alive: float
    tails: tuple[LastCall, ...] = ()

    @property
    def issued(self) -> int:
        """Number of collectives that the rank has begun."""
        return sum(tail.number for tail in self.tails)

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}"


@dataclass(frozen=True, kw_only=True)
class CollectiveCall:
    """One collective that a rank issued: its number over the connections `group`, step and phase.

    `digest` covers this call and all earlier ones.
    """

    number: int
    step: int
    phase: str
    what: str
    group: str = WORLD
    digest: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return f"{self.what} in step {self.step}, {self.phase}"


class Heartbeat:
    """The heartbeat of this rank.

    Args:
        folder: Folder of the heartbeat files; None keeps the record in this process.
        attempt: Name of this start of the run, at most 16 ASCII characters.
        across_hosts: Whether peers read the file over a network; `alive` then writes it out.

    Raises `OSError` if the file cannot be written or the disk has no room for it.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        rank: int = 0,
        attempt: str = "",
        across_hosts: bool = False,
    ) -> None:
        self.step, self.phase, self.changed = 0, "start", time.monotonic()
        self._beats, self._path = 0, None
        self._rings: dict[str, tuple[int, int]] = {}
        self._adding = threading.Lock()
        self.last_call = ""
        """Description of the collective or message issued last, after a comma; empty before."""
        self._file: int | None = None
        """Descriptor of a file that peers read over a network."""
        self._memory: mmap.mmap | bytearray = bytearray(_SIZE)
        if folder is not None:
            self._path = folder / f"rank_{rank}"
            self._memory = _mapped(self._path)
            if across_hosts:
                self._file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        host = socket.gethostname().encode()[:64]
        _OWNER.pack_into(self._memory, 0, attempt.encode(), os.getpid(), host)
        self.alive()
        self.at("start")

    def at(self, phase: str, step: int | None = None) -> None:
        """Record that the rank enters `phase`, of `step` if given."""
        if step is not None:
            self.step = step
        self.phase, self.changed = phase, time.monotonic()
        self._beats += 1
        beat = (self._beats, self.step, _NUMBER[phase], time.time())
        _BEAT.pack_into(self._memory, _BEAT_AT, *beat)

    def alive(self) -> None:
        """Record that the process runs, even if its main thread does not."""
        _ALIVE.pack_into(self._memory, _ALIVE_AT, time.time())
        if self._file is not None:
            # Linux writes mapped pages, too. The mapping's own flush would keep the interpreter's
            # lock, and with it the main thread, until a slow disk has answered.
            with suppress(OSError):
                os.fdatasync(self._file)

    def called(self, number: int, what: str, group: str = WORLD) -> None:
        """Record that the rank is about to issue its `number`-th collective over `group`."""
        with self._adding:  # The thread that averages between nodes calls this method, too.
            if group not in self._rings:
                ring = len(self._rings)
                assert ring < _RINGS, f"room for {_RINGS} groups, {group} is one more"
                self._rings[group] = ring, 0
                _TAIL.pack_into(self._memory, _TAILS_AT + ring * _TAIL.size, group.encode(), 0, 0)
        ring, digest = self._rings[group]
        self.last_call = f", last in collective {number} of {group} ({what})"
        name = what.encode()[:40]
        # The phase is not part of the digest: ranks may wait for the same collective in different
        # phases.
        digest = zlib.crc32(name, digest + self.step & 0xFFFFFFFF)
        self._rings[group] = ring, digest
        place = _CALLS_AT + ring * _RING + number % _CALLS * _CALL.size
        _CALL.pack_into(self._memory, place, 0, digest, self.step, _NUMBER[self.phase], name)
        # Numbers are written last: a reader that finds a number also finds the rest of the record.
        _COUNT.pack_into(self._memory, place, number)
        _LAST.pack_into(self._memory, _TAILS_AT + ring * _TAIL.size + _NAME_BYTES, number, digest)

    def seconds(self) -> float:
        """Return the seconds since the last change of phase."""
        return time.monotonic() - self.changed

    def close(self) -> None:
        """Remove the file at an orderly end, and the folder once it is empty."""
        self.at("done")
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()
                (self._path.parent / LOOK).unlink(missing_ok=True)
                self._path.parent.rmdir()


def sightings(folder: Path, *, attempt: str, ranks: Sequence[int]) -> list[RankStatus]:
    """Return the latest records of these ranks in this attempt, without unreadable ones.

    Reads the header of each file, not its rings.
    """
    found = []
    for rank in ranks:
        with suppress(OSError, struct.error, UnicodeError, IndexError):
            data = _read(folder, rank, 0, _CALLS_AT)
            name, pid, host = _OWNER.unpack_from(data)
            beats, step, phase, since = _BEAT.unpack_from(data, _BEAT_AT)
            if _text(name) != attempt:
                continue
            found.append(
                RankStatus(
                    rank=rank,
                    pid=pid,
                    host=_text(host),
                    beats=beats,
                    step=step,
                    phase=PHASES[phase],
                    since=since,
                    alive=_ALIVE.unpack_from(data, _ALIVE_AT)[0],
                    tails=_tails_in(data),
                )
            )
    return found


def calls(folder: Path, *, attempt: str, ranks: Sequence[int]) -> dict[int, list[CollectiveCall]]:
    """Return the latest collectives of these ranks in this attempt, in order, group by group.

    Ranks without a readable record are left out. Reads the whole files.
    """
    return {
        seen.rank: [call for tail in seen.tails for call in calls_of(folder, seen.rank, tail)]
        for seen in sightings(folder, attempt=attempt, ranks=ranks)
    }


def calls_of(folder: Path, rank: int, tail: LastCall) -> list[CollectiveCall]:
    """Return the latest collectives of a rank over the connections of `tail`, in order."""
    with suppress(OSError, struct.error, UnicodeError, IndexError):
        data = _read(folder, rank, _CALLS_AT + tail.ring * _RING, _RING)
        found = (_call(fields, tail.group) for fields in _CALL.iter_unpack(data) if fields[0])
        return sorted(found, key=lambda call: call.number)
    return []


def call_of(folder: Path, rank: int, tail: LastCall, number: int) -> CollectiveCall | None:
    """Return collective `number` of a rank over the connections of `tail`.

    None if the ring does not hold it any more.
    """
    with suppress(OSError, struct.error, UnicodeError, IndexError):
        place = _CALLS_AT + tail.ring * _RING + number % _CALLS * _CALL.size
        fields = _CALL.unpack(_read(folder, rank, place, _CALL.size))
        return _call(fields, tail.group) if fields[0] == number else None
    return None


def _read(folder: Path, rank: int, place: int, size: int) -> bytes:
    descriptor = os.open(f"{folder}/rank_{rank}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(descriptor, size, place)
    finally:
        os.close(descriptor)


def _tails_in(header: bytes) -> tuple[LastCall, ...]:
    rings = enumerate(_TAIL.iter_unpack(header[_TAILS_AT:_CALLS_AT]))
    return tuple(
        LastCall(group=_text(name), ring=ring, number=number, digest=digest)
        for ring, (name, number, digest) in rings
        if number
    )


def _call(fields: tuple[int, int, int, int, bytes], group: str) -> CollectiveCall:
    number, digest, step, phase, what = fields
    return CollectiveCall(
        number=number, step=step, phase=PHASES[phase], what=_text(what), group=group, digest=digest
    )


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode()


def is_gone(seen: RankStatus | Status) -> bool:
    """Return whether the process has certainly ended; False for a process on another host."""
    if seen.host != socket.gethostname():
        return False
    try:
        state = Path(f"/proc/{seen.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return Path("/proc/self/stat").exists()
    return state in "ZX"


def wake(seen: RankStatus) -> None:
    """Continue a process of this host that was stopped.

    A stopped process cannot obey a launcher's SIGTERM, and torchrun waits 30 s before it kills.
    """
    if seen.host == socket.gethostname():
        with suppress(OSError):
            os.kill(seen.pid, signal.SIGCONT)


def _mapped(path: Path) -> mmap.mmap:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
    # A process of an earlier start may still map its file, so that file is never written.
    path.unlink(missing_ok=True)
    with open(path, "xb+") as file:
        try:
            _allocate(file.fileno())
        except OSError:
            path.unlink()
            raise
        return mmap.mmap(file.fileno(), _SIZE)


def _allocate(descriptor: int) -> None:
    """Give the file its blocks; a full disk would end the process at its first write to a page."""
    try:
        os.posix_fallocate(descriptor, 0, _SIZE)
    except OSError as error:
        if error.errno not in _NO_FALLOCATE:
            raise
        os.ftruncate(descriptor, _SIZE)
