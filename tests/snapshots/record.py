"""Record the snapshots of formats again, after a deliberate change of a format.

    python -m tests.snapshots.record              every snapshot
    python -m tests.snapshots.record flags errors

Review `git diff tests/snapshots/recorded` and commit it with the change and the reason.
"""

from __future__ import annotations

import difflib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

RECORDED = Path(__file__).resolve().parent / "recorded"


def snapshot(name: str) -> str:
    """Return the text that the present code gives for a snapshot."""
    from tests.snapshots.formats import SNAPSHOTS

    with tempfile.TemporaryDirectory(prefix="snapshot") as folder:
        return SNAPSHOTS[name](Path(folder))


def compare(name: str) -> str:
    """Return what differs from the recorded text as a diff; empty where nothing differs."""
    recorded = (RECORDED / f"{name}.txt").read_text(encoding="utf-8")
    lines = difflib.unified_diff(
        recorded.splitlines(), snapshot(name).splitlines(), "recorded", "now", n=1, lineterm=""
    )
    return "\n".join(lines)


def main(names: Sequence[str]) -> int:
    """Write the snapshots of these names, all where there is none; return the exit code."""
    from tests.snapshots.formats import SNAPSHOTS

    if unknown := set(names) - SNAPSHOTS.keys():
        print(f"no such snapshot: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    RECORDED.mkdir(exist_ok=True)
    for name in names or SNAPSHOTS:
        (RECORDED / f"{name}.txt").write_text(snapshot(name), encoding="utf-8")
        print(f"recorded {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
