"""Write the frozen checkpoints and the table of what they hold.

    python -m tests.frozen.write

The script was run once, by the code that the checkpoints stand for. Running the script again
replaces the checkpoints, and with them the proof that checkpoints of that code can be read: do so
only for a deliberate change of the format that leaves old checkpoints behind, in a commit of its
own that gives the reason. Add a checkpoint under a new name instead where a format is added.

Each run trains 7 steps on two ranks without interruption, which gives the losses of the table; a
second run leaves after step 5, and its checkpoint and config.yaml are kept.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from megatron.config import parse, resolve, to_yaml
from pretrain_gpt import GRADIENT_PATHS
from tests.frozen.cases import (
    FLAGS,
    FOLDER,
    RUNS,
    SAVED_AT,
    STEPS,
    TABLE,
    WORLD,
    Expected,
    checkpoint_of,
    hashes,
    on_rank,
)
from tests.ranks import Ranks


def main() -> None:
    """Write every run."""
    ranks = Ranks()
    expected: Expected = {}
    try:
        with tempfile.TemporaryDirectory(prefix="frozen") as folder:
            for name, more in RUNS.items():
                expected[name] = write(ranks, name, f"{FLAGS} {more}", Path(folder) / name)
    finally:
        ranks.close()
    TABLE.write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


def write(ranks: Ranks, name: str, flags: str, folder: Path) -> dict[str, object]:
    """Keep a run's checkpoint and configuration; return the run's entry of the table."""
    losses = ranks.run(WORLD, on_rank, flags, folder / "through")[0]
    ranks.run(WORLD, on_rank, f"{flags} --exit-interval {SAVED_AT}", folder / "left")
    kept = FOLDER / name
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(folder / "left" / "checkpoints", kept / "checkpoints")
    config = resolve(parse(flags.split(), paths=GRADIENT_PATHS), WORLD)
    (kept / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    return {
        "losses": [losses[step] for step in range(SAVED_AT + 1, STEPS + 1)],
        "tensors": hashes(checkpoint_of(kept)),
    }


if __name__ == "__main__":
    main()
