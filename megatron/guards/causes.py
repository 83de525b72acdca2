"""The first cause of a failure: found among what the ranks left behind, told once for all.

A rank whose collective fails sees a socket, not a rank. So it looks, for a short while, for what a
peer says of itself in status.json, then for one that issued other collectives than the rest, then
for a peer that is gone, then for one that does not follow.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.errors import PeerError
from megatron.guards.heartbeat import FOLDER, Heartbeat, Sighting, calls, is_gone, sightings, wake
from megatron.guards.parting import find_parting
from megatron.status import Status, read_status, write_status

PATIENCE = 2.0
"""Seconds that a rank waits for a peer to tell what happened to it."""
_POLL = 0.05
SILENT = 3.0
"""Seconds without a sign of life after which a rank counts as stopped."""


@dataclass(frozen=True, kw_only=True)
class Causes:
    """What this attempt's ranks know of its failure. `signed`: job and version of every status."""

    run_dir: Path
    attempt: str
    rank: int
    world_size: int
    signed: Status

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

    def peers(self) -> list[Sighting]:
        """The other ranks' whereabouts."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        return sightings(self.run_dir / FOLDER, attempt=self.attempt, ranks=others)

    def gone(self) -> Sighting | None:
        """A peer that ended without a word, seen on this host."""
        return next((peer for peer in self.peers() if is_gone(peer)), None)

    def parted(self) -> Status | None:
        """The failure of the rank that issued another collective than its peers, if one did: what
        else went wrong came of that."""
        ranks = range(self.world_size)
        parting = find_parting(calls(self.run_dir / FOLDER, attempt=self.attempt, ranks=ranks))
        if parting is None:
            return None
        step, phase = parting.place.step, parting.place.phase
        return self._failed(rank=parting.rank, step=step, phase=phase, reason=str(parting))

    def blame(self, heartbeat: Heartbeat, seen: str) -> Status | None:
        """Whose fault a failed collective is, as this rank can tell it; None where a peer told
        its own. `seen`: what the collective said. Takes up to `PATIENCE` seconds."""
        here = f"seen by rank {self.rank} in {heartbeat.phase}: {seen}"
        step, phase = heartbeat.step, heartbeat.phase
        heartbeat.at("leaving")
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            gone, parted = self.gone(), self.parted()
            if self.known() is not None:
                return None
            if parted is not None:
                return replace(parted, reason=f"{parted.reason}; {here}")
            if gone is not None:
                # It may have been killed by its launcher since another one failed; wait for that.
                time.sleep(_POLL)
                return None if self.known() is not None else self.of(gone, gone_text(gone, here))
            time.sleep(_POLL)
        late = [peer for peer in self.peers() if peer.phase not in ("leaving", "done")]
        if not late:
            return self._failed(rank=self.rank, step=step, phase=phase, reason=seen)
        issued = self._issued()
        last = min(late, key=lambda peer: (waits(peer), peer.beats, issued.get(peer.rank, 0)))
        cause = self.of(last, late_text(last, here))
        wake(last)
        return cause

    def _issued(self) -> dict[int, int]:
        """How many collectives each rank has begun: of two in one phase, the one that waits for the
        other is the one that has begun another."""
        found = calls(self.run_dir / FOLDER, attempt=self.attempt, ranks=range(self.world_size))
        return {
            rank: sum({call.group: call.number for call in issued}.values())
            for rank, issued in found.items()
        }

    def of(self, peer: Sighting, reason: str) -> Status:
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


def line(status: Status, world_size: int) -> str:
    """What stderr shows of a failure."""
    if world_size == 1:
        return status.reason
    where = f", step {status.iteration}, {status.phase}" if status.phase else ""
    return f"rank {status.rank}{where}: {status.reason}"


def gone_text(peer: Sighting, here: str) -> str:
    """What is known of a rank that is not there any more."""
    return (
        f"its process {peer.pid} on {peer.host} is gone without a word: killed (out of memory?) or "
        f"left early; {here}"
    )


def late_text(peer: Sighting, here: str) -> str:
    """What is known of a rank that does not follow."""
    now = time.time()
    silent = _silence(peer)
    state = f"stopped or unreachable for {silent:.0f} s" if silent > SILENT else "running"
    return (
        f"it does not follow the others: {state}, in this phase for {now - peer.since:.0f} s "
        f"(process {peer.pid} on {peer.host}); {here}"
    )


def waits(peer: Sighting) -> bool:
    """Whether a rank runs and was last seen waiting for a message: somebody else holds it up."""
    return peer.phase == "receive" and _silence(peer) <= SILENT


def _silence(peer: Sighting) -> float:
    return time.time() - peer.alive
