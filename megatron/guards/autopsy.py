"""Says how a run ended whose ranks could not: for launchers, once every process is gone.

    python -m megatron.guards.autopsy RUN      prints the exit code that its status.json stands for

Some launchers kill every rank the moment one is lost. Then status.json still says "running", and
the rank that had come the least far when all fell silent is the best guess at the first cause.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.errors import PeerError
from megatron.guards.heartbeat import FOLDER, sightings
from megatron.guards.parting import find_parting_of
from megatron.status import STATUS, Status, read_status, write_status


def find_out(run_dir: Path) -> int | None:
    """The run's exit code; a run that was cut short is written down as failed. None where there is
    no status.json to go by."""
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
