"""A process that saves one checkpoint after the other until it is killed; it imports no torch.

    python checkpoint_writer.py DIRECTORY FIRST LAST KEEP

Prints `ready`, then each step once it is committed and older ones have made room (KEEP, 0: all).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.checkpoint.find import Keeper  # noqa: E402
from megatron.checkpoint.format import (  # noqa: E402
    Manifest,
    SliceRecord,
    TensorRecord,
)
from megatron.checkpoint.io import TensorToWrite  # noqa: E402
from megatron.checkpoint.writer import RankWrites, Save, alone, file_name  # noqa: E402

ENTRIES = 30_000
MARK = "/the-saves-begin-here"
"""A path that is looked up just before the first save, to mark it in a trace of system calls."""


def content(step: int) -> bytes:
    """Return the content of the one tensor of a step."""
    return bytes([step % 251]) * ENTRIES


def save(directory: Path, step: int) -> None:
    """Commit a step."""
    end = (ENTRIES,)
    record = TensorRecord((ENTRIES,), "U8", (SliceRecord(file_name(0), "t", (0,), end, None),))
    item = TensorToWrite(key="t", dtype="U8", shape=end, data=lambda: memoryview(content(step)))
    manifest = Manifest(step=step, state={"step": step}, world={"size": 1})
    Save(directory=directory, manifest=manifest, rank=0, gather=alone, log=print).run(
        lambda: RankWrites([item], {"t": record})
    )


def main(directory: Path, first: int, last: int, keep: int) -> None:
    """Save the steps `first` to `last`."""
    assert not {"torch", "numpy"} & set(sys.modules)
    keeper = Keeper(directory=directory, count=keep, log=print) if keep else None
    print("ready", flush=True)
    Path(MARK).exists()
    for step in range(first, last + 1):
        save(directory, step)
        if keeper is not None:
            keeper.prune()
        print(step, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
