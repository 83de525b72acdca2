"""Where a run starts from: the newest checkpoint of its own, else that of `--load`, else step 0.

Nothing here imports torch, so that a dry run can look for the checkpoint in milliseconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.files import failing_as
from megatron.checkpoint.locate import CHECKPOINTS, checkpoints_folder, find_checkpoint
from megatron.config import Config
from megatron.errors import CheckpointError


def save_directory(config: Config, run_dir: Path) -> Path:
    """Where checkpoints of a run go."""
    return Path(config.checkpoint.save) if config.checkpoint.save else run_dir / CHECKPOINTS


@dataclass(frozen=True)
class Origin:
    """The step folder a run starts from. `own`: this very run saved it, and goes on; else it is
    another's, of which `--finetune` and `--no-load-optim` may leave out parts."""

    path: Path
    own: bool


def locate_checkpoint(
    config: Config, run_dir: Path, *, say: Callable[[str], None], look: bool = False
) -> Origin | None:
    """Where to start from: the newest good checkpoint of this run, else of `--load`; None for
    step 0. One rank calls it for all. With `look` nothing is renamed and no tensor is hashed,
    which is enough to find a mistake before a run starts.

    Raises `CheckpointError` where committed folders are there and none verifies, where `--load`
    names another place and nothing was ever committed there, and for `--ckpt-step` of this run's
    own folder when that is not its newest: two histories would share the steps after it.
    """
    asked = config.checkpoint
    own_place = save_directory(config, run_dir)
    elsewhere = asked.load is not None and (
        # Path.resolve raises a RuntimeError in a loop of links.
        os.path.realpath(checkpoints_folder(Path(asked.load))) != os.path.realpath(own_place)
    )
    own_step = None if elsewhere else asked.ckpt_step
    own = None
    with failing_as(own_place, "read"):
        begun = own_place.exists()
    if begun or own_step is not None:
        own = find_checkpoint(
            own_place,
            say=say,
            step=own_step,
            repair=own_step is None and not look,
            hashes=not look,
        )
    if own is not None:
        _refuse_to_branch(own, own_place, own_step, hashes=not look)
        return Origin(own, own=True)
    if asked.load is None:
        return None
    other = None
    if elsewhere:
        other = find_checkpoint(asked.load, say=say, step=asked.ckpt_step, hashes=not look)
    if other is None and (elsewhere or asked.exit_on_missing_checkpoint):
        raise CheckpointError(
            f"{asked.load}: no checkpoint was ever committed there; check --load, or leave it "
            "out to start at step 0"
        )
    return Origin(other, own=False) if other is not None else None


def _refuse_to_branch(found: Path, directory: Path, step: int | None, *, hashes: bool) -> None:
    if step is None:
        return
    if find_checkpoint(directory, say=lambda text: None, hashes=hashes) != found:
        raise CheckpointError(
            f"ckpt_step: {step} is not the newest of {directory}; to go another way from there, "
            f"give --load {directory} --ckpt-step {step} and a new --run-dir"
        )
