"""The first cause of a failure: found by the ranks while they fail, and by launchers afterwards.

python -m megatron.fault_tolerance.root_cause RUN      prints the exit code of status.json
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron.errors import PeerError
from megatron.fault_tolerance.desync import find_parting_of
from megatron.fault_tolerance.heartbeat import (
    FOLDER,
    LOOK,
    Heartbeat,
    RankStatus,
    is_gone,
    sightings,
    wake,
)
from megatron.status import STATUS, Status, read_status, write_status

PATIENCE = 2.0
"""Seconds that a rank waits for a peer to tell what happened to it."""
_POLL = 0.05
_LOOK_BYTES = 4096
_REASON = 512
"""Characters of a reason that fit into a look, each of which takes up to 6 bytes there."""
_READS = 5
SILENT = 3.0
"""Seconds without a sign of life after which a rank counts as stopped."""


@dataclass(frozen=True, kw_only=True)
class RingCheck:
    """The finding of one rank in the headers of all.

    The rank that parted from the others (`step`, `phase` and `reason` say how), and the rank that
    has come the least far. None: no such rank. `number` counts the looks of this start: clocks of
    two hosts would not tell which was first.
    """

    attempt: str
    number: int = 0
    parted: int | None = None
    step: int | None = None
    phase: str = ""
    reason: str = ""
    last: int | None = None


@dataclass(frozen=True, kw_only=True)
class RootCause:
    """The knowledge of this attempt's ranks about its failure.

    `signed`: job and version of every status. `near`: the ranks on this host; all ranks where that
    is not known.
    """

    run_dir: Path
    attempt: str
    rank: int
    world_size: int
    signed: Status
    near: Sequence[int] = ()

    def known(self) -> Status | None:
        """The failure that a rank of this attempt told, if one did."""
        status = read_status(self.run_dir)
        if status is None or (status.state, status.attempt) != ("failed", self.attempt):
            return None
        return status

    def tell(self, status: Status) -> None:
        """Write a failure to status.json and, if it is the first, to stderr."""
        status = replace(
            status, attempt=self.attempt, job_id=self.signed.job_id, version=self.signed.version
        )
        first = True
        with suppress(OSError):
            first = write_status(self.run_dir, status)
        if first:
            print(line(status, self.world_size), file=sys.stderr, flush=True)

    def gone(self) -> RankStatus | None:
        """A peer that ended without a word, seen on this host."""
        near = [rank for rank in self._near() if rank != self.rank]
        return next((peer for peer in self._seen(near) if is_gone(peer)), None)

    def parted(self) -> Status | None:
        """The failure of the rank that issued another collective than its peers, if one did.

        What else went wrong came of that.
        """
        return self._parted_in(self.look(until=time.monotonic() + PATIENCE))

    def look(self, *, until: float) -> RingCheck:
        """Return the finding of this rank, or of another one that looks for all.

        A rank that nobody has told anything `until` then looks by itself: the one that looks for
        all may be the one that is stopped.
        """
        try:
            with _opened(self.run_dir / FOLDER / LOOK) as file:
                asked = self._told(file)
                if not _locked(file, until):
                    return self._look()
                told = self._told(file) or RingCheck(attempt=self.attempt)
                # The look after this may have begun before this rank asked, the next one did not.
                since = asked is not None and told.number > asked.number + 1
                if told.parted is not None or since:
                    return told
                found = replace(self._look(), number=told.number + 1)
                # One length for all, so that nobody reads the end of the look before.
                told = replace(found, reason=found.reason[:_REASON])
                text = json.dumps(asdict(told), ensure_ascii=False)
                os.pwrite(file, text.encode().ljust(_LOOK_BYTES), 0)
                return found
        except OSError:
            # No locks on this disk, or no space: one rank of each host looks, for itself.
            mine = self.rank == min(self._near()) or time.monotonic() >= until
            return self._look() if mine else RingCheck(attempt=self.attempt)

    def _told(self, file: int) -> RingCheck | None:
        """The last look of this start, as the file has it.

        A half-written one is read again; None where it stays so, since the number of that look is
        not known.
        """
        for _ in range(_READS):
            text = os.pread(file, _LOOK_BYTES, 0)
            with suppress(ValueError, TypeError):
                told = RingCheck(**json.loads(text))
                return told if told.attempt == self.attempt else RingCheck(attempt=self.attempt)
            if not text:
                return RingCheck(attempt=self.attempt)
            time.sleep(_POLL / 5)
        return None

    def _look(self) -> RingCheck:
        look = RingCheck(attempt=self.attempt)
        seen = self._seen(range(self.world_size))
        parting = find_parting_of(self.run_dir / FOLDER, seen)
        if parting is not None:
            place = parting.place
            return replace(
                look, parted=parting.rank, step=place.step, phase=place.phase, reason=str(parting)
            )
        late = [one for one in seen if one.phase not in ("leaving", "done")]
        # Of two in one phase, the one that waits for the other has begun another collective.
        last = min(late, key=lambda one: (waits(one), one.beats, one.issued), default=None)
        return replace(look, last=last.rank if last is not None else None)

    def _near(self) -> Sequence[int]:
        return self.near or range(self.world_size)

    def _seen(self, ranks: Sequence[int]) -> list[RankStatus]:
        return sightings(self.run_dir / FOLDER, attempt=self.attempt, ranks=ranks)

    def _parted_in(self, look: RingCheck) -> Status | None:
        if look.parted is None:
            return None
        step, phase = look.step or 0, look.phase
        return self._failed(rank=look.parted, step=step, phase=phase, reason=look.reason)

    def blame(self, heartbeat: Heartbeat, seen: str) -> Status | None:
        """Whose fault a failed collective is, as this rank can tell it.

        None where a peer told its own. `seen`: what the collective said. Takes up to `PATIENCE`
        seconds.
        """
        here = f"seen by rank {self.rank} in {heartbeat.phase}: {seen}"
        step, phase = heartbeat.step, heartbeat.phase
        heartbeat.at("leaving")
        deadline = time.monotonic() + PATIENCE
        while True:
            # What the last look finds counts like what those before it found.
            ends = time.monotonic() >= deadline
            gone, look = self.gone(), self.look(until=deadline)
            parted = self._parted_in(look)
            if self.known() is not None:
                return None
            if parted is not None:
                return replace(parted, reason=f"{parted.reason}; {here}")
            if gone is not None:
                # It may have been killed by its launcher since another one failed; wait for that.
                time.sleep(_POLL)
                return None if self.known() is not None else self.of(gone, gone_text(gone, here))
            if ends:
                break
            time.sleep(_POLL)
        late = self._seen([look.last] if look.last not in (None, self.rank) else [])
        if not late:
            return self._failed(rank=self.rank, step=step, phase=phase, reason=seen)
        cause = self.of(late[0], late_text(late[0], here))
        wake(late[0])
        return cause

    def of(self, peer: RankStatus, reason: str) -> Status:
        """A failure of another rank, told for it."""
        return self._failed(rank=peer.rank, step=peer.step, phase=peer.phase, reason=reason)

    def _failed(self, *, rank: int, step: int, phase: str, reason: str) -> Status:
        return Status(
            state="failed",
            exit_code=PeerError.exit_code,
            reason=reason,
            rank=rank,
            iteration=step,
            phase=phase,
        )


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _locked(file: int, until: float) -> bool:
    """Lock the file before `until`; return whether that worked.

    Closing the file unlocks it.

    Raises OSError where the disk has no locks.
    """
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL / 5)


def line(status: Status, world_size: int) -> str:
    """Return the line of a failure for stderr."""
    if world_size == 1:
        return status.reason
    where = f", step {status.iteration}, {status.phase}" if status.phase else ""
    return f"rank {status.rank}{where}: {status.reason}"


def gone_text(peer: RankStatus, here: str) -> str:
    """Return the description of a rank whose process is gone."""
    return (
        f"its process {peer.pid} on {peer.host} is gone without a word: killed (out of memory?) or "
        f"left early; {here}"
    )


def late_text(peer: RankStatus, here: str) -> str:
    """Return the description of a rank that does not follow."""
    now = time.time()
    silent = _silence(peer)
    state = f"stopped or unreachable for {silent:.0f} s" if silent > SILENT else "running"
    return (
        f"it does not follow the others: {state}, in this phase for {now - peer.since:.0f} s "
        f"(process {peer.pid} on {peer.host}); {here}"
    )


def waits(peer: RankStatus) -> bool:
    """Return whether a rank runs and was last seen waiting for a message of another rank."""
    return peer.phase == "receive" and _silence(peer) <= SILENT


def _silence(peer: RankStatus) -> float:
    return time.time() - peer.alive


def find_out(run_dir: Path) -> int | None:
    """The run's exit code; a run that was cut short is written down as failed.

    None where there is no status.json to go by.
    """
    status = read_status(run_dir)
    if status is None or status.state != "running":
        return _recorded(run_dir)
    names = [path.name.removeprefix("rank_") for path in (run_dir / FOLDER).glob("rank_*")]
    ranks = sorted(int(name) for name in names if name.isdigit())
    found = sightings(run_dir / FOLDER, attempt=status.attempt, ranks=ranks)
    failed = dataclasses.replace(
        Status(state="failed", exit_code=PeerError.exit_code, attempt=status.attempt),
        reason="every process ended without a word: killed, or left early",
        job_id=status.job_id,
        version=status.version,
    )
    parting = find_parting_of(run_dir / FOLDER, found)
    if parting is not None:
        failed = dataclasses.replace(
            failed,
            rank=parting.rank,
            iteration=parting.place.step,
            phase=parting.place.phase,
            reason=f"{failed.reason}; rank {parting.rank}: {parting}",
        )
    elif found:
        last = min(found, key=lambda seen: (seen.phase == "receive", seen.beats))
        failed = dataclasses.replace(
            failed,
            rank=last.rank,
            iteration=last.step,
            phase=last.phase,
            reason=f"{failed.reason}; rank {last.rank} had come the least far: {last}",
        )
    write_status(run_dir, failed)
    print(failed.reason, file=sys.stderr)
    return PeerError.exit_code


def _recorded(run_dir: Path) -> int | None:
    """The code in the file, also in one of another version that we do not know all of."""
    try:
        code = json.loads((run_dir / STATUS).read_text(encoding="utf-8"))["exit_code"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return code if type(code) is int else None


def main(argv: Sequence[str]) -> int:
    """Print the code, if there is one."""
    code = find_out(Path(argv[0]))
    print("" if code is None else code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
