"""The first cause of a failure, found by failing ranks.

    python -m megatron.fault_tolerance.root_cause RUN      prints the exit code of status.json

Launchers use the command for a run that could not report its failure.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import socket
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
from megatron.fault_tolerance.run_lock import HEARTBEAT_SECONDS, LOCK, RunFolderInUse, check_free
from megatron.launch import job_has_one_node
from megatron.regular_file import open_regular
from megatron.status import STATUS, Status, node_name, read_status, write_status

PATIENCE = 2.0
"""Seconds for which a rank waits for a peer's report."""
_POLL = 0.05
_LOOK_AGAIN = 1.0
_LOOK_BYTES = 4096
_REASON = 512
"""Maximum length of a reason in a finding; each character takes up to 6 bytes there."""
_READS = 5
SILENT = 3.0
"""Seconds without a sign of life after which a rank counts as stopped."""


@dataclass(frozen=True, kw_only=True)
class RingCheck:
    """The finding of the rank that read the headers of all ranks.

    `parted` is the desynchronised rank, which `step`, `phase` and `reason` describe; otherwise
    `last` is the rank with the least progress. None means that there is no such rank. `number`
    counts the findings of this start, since the clocks of two hosts would not order them.
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
    """The search for the first cause of this attempt's failure, in status.json and heartbeats.

    `signed` has the job and version for every status. `near` lists the ranks on this host; without
    it all ranks are searched. `nodes` has Slurm's name of the node of each rank in a Slurm job.
    """

    run_dir: Path
    attempt: str
    rank: int
    world_size: int
    signed: Status
    near: Sequence[int] = ()
    nodes: Sequence[str] = ()

    def known(self) -> Status | None:
        """Return the failure that a rank of this attempt reported, if any."""
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
        """Return a peer on this host that ended without a report."""
        near = [rank for rank in self._near() if rank != self.rank]
        return next((peer for peer in self._seen(near) if is_gone(peer)), None)

    def parted(self) -> Status | None:
        """Return the failure of the desynchronised rank, if there is one.

        That failure explains any other error. Waits for other ranks for up to `PATIENCE` seconds.
        """
        return self._parted_in(self.look(until=time.monotonic() + PATIENCE))

    def look(self, *, until: float) -> RingCheck:
        """Return the finding of this rank, or of the rank that looks for all.

        If another rank still looks at time `until` (of `time.monotonic`), this rank looks itself,
        since the other rank may be stopped.
        """
        try:
            with _opened(self.run_dir / FOLDER / LOOK) as file:
                asked = self._told(file)
                if not _locked(file, until):
                    return self._look()
                told = self._told(file) or RingCheck(attempt=self.attempt)
                # The next finding may have begun before this call; the one after it did not.
                since = asked is not None and told.number > asked.number + 1
                if told.parted is not None or since:
                    return told
                found = replace(self._look(), number=told.number + 1)
                # Findings have one length, so that a reader never sees the end of an older one.
                told = replace(found, reason=found.reason[:_REASON])
                text = json.dumps(asdict(told), ensure_ascii=False)
                os.pwrite(file, text.encode().ljust(_LOOK_BYTES), 0)
                return found
        except OSError:
            # The disk has no locks or no space: one rank of each host looks for itself.
            mine = self.rank == min(self._near()) or time.monotonic() >= until
            return self._look() if mine else RingCheck(attempt=self.attempt)

    def _told(self, file: int) -> RingCheck | None:
        """Return the last finding of this start from the file.

        A partly written finding is read again; None if it stays unreadable, since its number is
        unknown.
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
        # Of two ranks in the same phase, the one that waits for the other has begun one more
        # collective.
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
        """Return the failure behind a failed collective, as far as this rank can tell.

        `seen` is the message of the collective. None if a peer has reported its own failure. Takes
        up to `PATIENCE` seconds, and up to `SILENT` in all where a rank of another host is late.
        """
        here = f"seen by rank {self.rank} in {heartbeat.phase}{heartbeat.last_call}: {seen}"
        step, phase = heartbeat.step, heartbeat.phase
        heartbeat.at("leaving")
        deadline = time.monotonic() + PATIENCE
        first, since = None, 0.0
        while True:
            # The deadline is read before the last look, so that this look still counts.
            ends = time.monotonic() >= deadline
            gone, look = self.gone(), self.look(until=deadline)
            if look.last not in (None, self.rank) and (first is None or first.rank != look.last):
                first, since = self._sign_of(look.last), time.monotonic()
            parted = self._parted_in(look)
            if self.known() is not None:
                return None
            if parted is not None:
                return replace(parted, reason=f"{parted.reason}; {here}")
            if gone is not None:
                # The launcher may have killed it after another rank's failure, so wait for that
                # report.
                time.sleep(_POLL)
                if self.known() is not None:
                    return None
                return self.of(gone, gone_text(gone, here), lost=True)
            if ends:
                break
            time.sleep(_POLL)
        late = first if first is not None and first.rank == look.last else None
        if late is None:
            return self._failed(rank=self.rank, step=step, phase=phase, reason=seen)
        late, lost = self._watch(late, until=since + SILENT)
        if self.known() is not None:
            return None
        cause = self.of(late, late_text(late, here, lost=lost), lost=lost)
        wake(late)
        return cause

    def _sign_of(self, rank: int) -> RankStatus | None:
        return next(iter(self._seen([rank])), None)

    def _watch(self, late: RankStatus, *, until: float) -> tuple[RankStatus, bool]:
        """Return the latest record of a rank, and whether it gives no sign of life any more.

        Nothing else tells whether a process of another host is gone. Clocks of hosts differ, so
        that the rank is watched for a new sign, at most `until` that time of the monotonic clock.
        """
        while True:
            seen = self._sign_of(late.rank) or late
            if seen.host == socket.gethostname():
                return seen, _silence(seen) > SILENT
            if seen.alive != late.alive or time.monotonic() >= until:
                return seen, seen.alive == late.alive
            time.sleep(_POLL)

    def of(self, peer: RankStatus, reason: str, *, lost: bool) -> Status:
        """Return the failure of another rank, reported in its place; `lost` as in `Status`."""
        cause = self._failed(rank=peer.rank, step=peer.step, phase=peer.phase, reason=reason)
        return replace(cause, lost=lost)

    def _failed(self, *, rank: int, step: int, phase: str, reason: str) -> Status:
        return Status(
            state="failed",
            exit_code=PeerError.exit_code,
            reason=reason,
            rank=rank,
            iteration=step,
            phase=phase,
            node=self.node_of(rank),
        )

    def node_of(self, rank: int) -> str:
        """Return Slurm's name of the node of a rank, "" outside of Slurm."""
        return self.nodes[rank] if self.nodes else ""


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _locked(file: int, until: float) -> bool:
    """Lock the file before `until` and return whether that worked; closing the file unlocks it.

    Raises OSError if the disk has no locks.
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
    return f"{status.place}{where}: {status.reason}"


def gone_text(peer: RankStatus, here: str) -> str:
    """Return the description of a rank whose process is gone."""
    return (
        f"its process {peer.pid} on {peer.host} is gone without a report: killed (out of memory?) "
        f"or left early; {here}"
    )


def late_text(peer: RankStatus, here: str, *, lost: bool) -> str:
    """Return the description of a rank that does not follow; `lost` as in `Status`."""
    silent, since = max(SILENT, _silence(peer)), time.time() - peer.since
    state = f"stopped or unreachable for {silent:.0f} s" if lost else "running"
    return (
        f"it does not follow the others: {state}, in this phase for {since:.0f} s "
        f"(process {peer.pid} on {peer.host}); {here}"
    )


def waits(peer: RankStatus) -> bool:
    """Return whether a rank runs and was last seen waiting for a message of another rank."""
    return peer.phase == "receive" and _silence(peer) <= SILENT


def _silence(peer: RankStatus) -> float:
    return time.time() - peer.alive


def find_out(run_dir: Path) -> int | None:
    """Return the exit code of a run that has ended; None if there is no usable status.json.

    A run whose status is still "running" was cut short: its status becomes "failed", with the first
    cause as far as the heartbeats show it. The status of a run that still has a process stays, and
    the result is None: the launcher that asks may be that of a start that was refused, or of a node
    that the run has lost. Takes up to `PATIENCE` seconds, or `HEARTBEAT_SECONDS` more for a run of
    another host.
    """
    status = _cut_short(run_dir)
    if status is None:
        return _recorded(run_dir)
    found = latest_sightings(run_dir, status)
    failed = dataclasses.replace(
        Status(state="failed", exit_code=PeerError.exit_code, attempt=status.attempt),
        reason="every process ended without a report: killed, or left early",
        job_id=status.job_id,
        version=status.version,
    )
    # Of several nodes, nobody is left to tell which was lost.
    if job_has_one_node():
        failed = dataclasses.replace(failed, lost=True, node=node_name())
    parting = find_parting_of(run_dir / FOLDER, found)
    if parting is not None:
        failed = dataclasses.replace(
            failed,
            rank=parting.rank,
            iteration=parting.place.step,
            phase=parting.place.phase,
            lost=False,
            reason=f"{failed.reason}; rank {parting.rank}: {parting}",
        )
    elif found:
        last = min(found, key=lambda seen: (seen.phase == "receive", seen.beats))
        failed = dataclasses.replace(
            failed,
            rank=last.rank,
            iteration=last.step,
            phase=last.phase,
            reason=f"{failed.reason}; rank {last.rank} had made the least progress: {last}",
        )
    write_status(run_dir, failed)
    print(failed.reason, file=sys.stderr)
    return PeerError.exit_code


def _cut_short(run_dir: Path) -> Status | None:
    """Return the status "running" of a run that has no process; None for any other run."""
    began, first = time.monotonic(), None
    while (status := read_status(run_dir)) is not None and status.state == "running":
        first = first or last_sign(run_dir, latest_sightings(run_dir, status))
        seconds = time.monotonic() - began
        if is_held(run_dir, status):
            # A process that was killed may need a moment to be gone.
            if seconds >= PATIENCE:
                return None
        elif status.host == socket.gethostname() or first is None:
            return status
        # Without locks between hosts, a run that was just killed shows by its silence alone.
        elif last_sign(run_dir, latest_sightings(run_dir, status)) != first:
            return None
        elif seconds >= HEARTBEAT_SECONDS + PATIENCE:
            return status
        time.sleep(_LOOK_AGAIN)
    return None


def is_held(run_dir: Path, status: Status) -> bool:
    """Return whether the kernel shows a process of a run whose status is "running".

    False for a process on another host if the disk has no locks between hosts.
    """
    try:
        check_free(run_dir)
    except RunFolderInUse:
        return True
    return status.host == socket.gethostname() and not is_gone(status)


def latest_sightings(run_dir: Path, status: Status) -> list[RankStatus]:
    """Return the latest records of the ranks of a start, as far as the folder has them.

    A run of one rank keeps none.
    """
    names = [path.name.removeprefix("rank_") for path in (run_dir / FOLDER).glob("rank_*")]
    ranks = sorted(int(name) for name in names if name.isdigit())
    return sightings(run_dir / FOLDER, attempt=status.attempt, ranks=ranks)


def last_sign(run_dir: Path, seen: Sequence[RankStatus]) -> float | None:
    """Return the time of the last sign of life, in seconds since the epoch; None without any.

    A sign of life is a heartbeat of the ranks in `seen`, or a touch of the lock.
    """
    stamps = [one.alive for one in seen]
    with suppress(OSError):
        stamps.append((run_dir / LOCK).stat().st_mtime)
    return max(stamps, default=None)


def _recorded(run_dir: Path) -> int | None:
    """Return the exit code in status.json, also if another version wrote fields unknown here."""
    try:
        code = json.loads((run_dir / STATUS).read_text(encoding="utf-8"))["exit_code"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return code if type(code) is int else None


def main(argv: Sequence[str]) -> int:
    """Print the exit code of the run in folder `argv[0]`, or an empty line; return 0."""
    code = find_out(Path(argv[0]))
    print("" if code is None else code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
