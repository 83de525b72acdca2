"""The step, phase and latest collectives of each rank, in a memory-mapped file of its own.

A phase change costs about a microsecond and no system call, and what a rank wrote last survives
its being killed or stopped, so that its peers can name it and what it was doing. A file, not the
rendezvous store: that lives in one rank and dies with it.

    header, 704 bytes    who, where, since when; of each group: calls issued and their digest
    rings, 110 KB        the latest calls of each group

A digest stands for all calls up to it, in order. Ranks whose digests agree issued the same calls,
so a reader of a thousand headers needs the rings of the few ranks whose digests differ.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import struct
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = "heartbeat"
LOOK = "look"
"""File of the folder that holds what one rank found in all headers, for all ranks."""
PHASES = (
    "start", "data", "receive", "forward", "backward", "reduce", "optimizer", "evaluate", "save",
    "leaving", "done",
)  # fmt: skip
_NUMBER = {phase: number for number, phase in enumerate(PHASES)}
_OWNER = struct.Struct("<16sq64s")  # attempt, pid, host
_BEAT = struct.Struct("<qqqd")  # beats, step, phase, time of the last beat
_ALIVE = struct.Struct("<d")  # time at which the rank was seen running
_CALL = struct.Struct("<qqqq40s")  # number, digest, step, phase, what
_COUNT = struct.Struct("<q")
_TAIL = struct.Struct("<32sqq")  # name of a ring's connections, number and digest of the last call
_LAST = struct.Struct("<qq")
_NAME_BYTES = _TAIL.size - _LAST.size
_CALLS = 128
"""Collectives that a ring holds: the latest."""
_RINGS = 12
"""Connections of a rank: of every axis of the grid, and to its neighbours in the pipeline."""
_RING = _CALLS * _CALL.size
_BEAT_AT = _OWNER.size
_ALIVE_AT = _BEAT_AT + _BEAT.size
_TAILS_AT = _ALIVE_AT + _ALIVE.size
_CALLS_AT = _TAILS_AT + _RINGS * _TAIL.size
_SIZE = _CALLS_AT + _RINGS * _RING
WORLD = "world"


@dataclass(frozen=True, kw_only=True)
class LastCall:
    """The last call of a rank over the connections `group`, which ring `ring` is about.

    Its number, and the digest of all calls up to it.
    """

    group: str
    ring: int
    number: int
    digest: int


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """The latest record of a rank.

    Times are in seconds since the epoch, by that rank's clock; `beats` counts its phase changes;
    `alive` is when its watchdog last ran; `tails` has one entry for each of its groups.
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
        """Return how many collectives the rank has begun."""
        return sum(tail.number for tail in self.tails)

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}"


@dataclass(frozen=True, kw_only=True)
class CollectiveCall:
    """One collective that a rank issued.

    Its number among those over the same connections, whose name is `group`, where the rank was, and
    what it is. `digest` stands for it and all before.
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
    """This rank's whereabouts; `folder` None keeps them in this process.

    `attempt` tells this start of the run from others, at most 16 ASCII characters. `across_hosts`:
    peers read the file over a network, so `alive` pushes it there.
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
        self._file: mmap.mmap | None = None
        self._memory: mmap.mmap | bytearray = bytearray(_SIZE)
        if folder is not None:
            self._path = folder / f"rank_{rank}"
            self._file = self._memory = _mapped(self._path)
        self._across_hosts = across_hosts
        host = socket.gethostname().encode()[:64]
        _OWNER.pack_into(self._memory, 0, attempt.encode(), os.getpid(), host)
        self.alive()
        self.at("start")

    def at(self, phase: str, step: int | None = None) -> None:
        """The rank goes into `phase`, of `step` if that is new."""
        if step is not None:
            self.step = step
        self.phase, self.changed = phase, time.monotonic()
        self._beats += 1
        beat = (self._beats, self.step, _NUMBER[phase], time.time())
        _BEAT.pack_into(self._memory, _BEAT_AT, *beat)

    def alive(self) -> None:
        """The process runs, whatever its main thread does."""
        _ALIVE.pack_into(self._memory, _ALIVE_AT, time.time())
        if self._file is not None and self._across_hosts:
            with suppress(OSError):
                self._file.flush()

    def called(self, number: int, what: str, group: str = WORLD) -> None:
        """The rank is about to issue collective `number` of those over some connections."""
        if group not in self._rings:
            ring = len(self._rings)
            assert ring < _RINGS, f"room for {_RINGS} groups, {group} is one more"
            self._rings[group] = ring, 0
            _TAIL.pack_into(self._memory, _TAILS_AT + ring * _TAIL.size, group.encode(), 0, 0)
        ring, digest = self._rings[group]
        name = what.encode()[:40]
        # Not of the phase: ranks may wait for the same collective in different ones.
        digest = zlib.crc32(name, digest + self.step & 0xFFFFFFFF)
        self._rings[group] = ring, digest
        place = _CALLS_AT + ring * _RING + number % _CALLS * _CALL.size
        _CALL.pack_into(self._memory, place, 0, digest, self.step, _NUMBER[self.phase], name)
        # The numbers come last: a reader that finds the number there finds the rest.
        _COUNT.pack_into(self._memory, place, number)
        _LAST.pack_into(self._memory, _TAILS_AT + ring * _TAIL.size + _NAME_BYTES, number, digest)

    def seconds(self) -> float:
        """Time since the last phase change."""
        return time.monotonic() - self.changed

    def close(self) -> None:
        """An orderly end: the file goes, and the folder with the last of them."""
        self.at("done")
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
    """The latest collectives of these ranks in this attempt, in order, group after group.

    Ranks without a readable record are left out. Reads everything that the ranks wrote.
    """
    return {
        seen.rank: [call for tail in seen.tails for call in calls_of(folder, seen.rank, tail)]
        for seen in sightings(folder, attempt=attempt, ranks=ranks)
    }


def calls_of(folder: Path, rank: int, tail: LastCall) -> list[CollectiveCall]:
    """The latest collectives of a rank over the connections of `tail`, in order."""
    with suppress(OSError, struct.error, UnicodeError, IndexError):
        data = _read(folder, rank, _CALLS_AT + tail.ring * _RING, _RING)
        found = (_call(fields, tail.group) for fields in _CALL.iter_unpack(data) if fields[0])
        return sorted(found, key=lambda call: call.number)
    return []


def call_of(folder: Path, rank: int, tail: LastCall, number: int) -> CollectiveCall | None:
    """Collective `number` of a rank over the connections of `tail`.

    None where it is not among the latest.
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


def is_gone(seen: RankStatus) -> bool:
    """Return whether the process certainly does not run any more; False for one on another host."""
    if seen.host != socket.gethostname():
        return False
    try:
        state = Path(f"/proc/{seen.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return Path("/proc/self/stat").exists()
    return state in "ZX"


def wake(seen: RankStatus) -> None:
    """Let a process of this host go on if it was stopped.

    Stopped, it could not obey a launcher's SIGTERM, and torchrun waits for 30 s before it kills.
    """
    if seen.host == socket.gethostname():
        with suppress(OSError):
            os.kill(seen.pid, signal.SIGCONT)


def _mapped(path: Path) -> mmap.mmap:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
    # A file of an earlier start may still be mapped by a process of it: never write into that.
    path.unlink(missing_ok=True)
    with open(path, "xb+") as file:
        file.truncate(_SIZE)
        return mmap.mmap(file.fileno(), _SIZE)
