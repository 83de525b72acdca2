"""Average the weights of the last checkpoints of a run, as one checkpoint.

    python tools/average_checkpoints.py RUN --last 10 --output RUN/averaged
    python tools/average_checkpoints.py RUN --steps 4000,5000 --output AVERAGED

Works for runs of every task, of any grid. Weights and the buffers of norms are averaged in double
precision; moments and the gradient path's state are left out. The output is a run folder with the
configuration and one checkpoint, of the newest step: tools that read the model of a run take it,
and a run starts from it with --load OUTPUT --no-load-optim. Masks of pruned weights must be equal
in all steps.

Exit code 0 if it is written, 2 for wrong usage, 4 for a missing or damaged checkpoint.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.checkpoint.find import (  # noqa: E402
    CHECKPOINTS,
    checkpoints_folder,
    list_steps,
)
from megatron.checkpoint.verify import open_to_all  # noqa: E402
from megatron.config.fields import show_plain  # noqa: E402
from megatron.errors import CheckpointError, ConfigError, SparsetronError  # noqa: E402
from pretrain_gpt import GRADIENT_PATHS  # noqa: E402

if TYPE_CHECKING:
    from megatron.checkpoint.store import Checkpoint, LocalShard

CONFIG = "config.yaml"
MOST = 10_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    try:
        folders = find_steps(options.run, last=options.last, steps=_steps(options.steps))
        written = average(folders, options.output)
        config = checkpoints_folder(options.run).parent / CONFIG
        if config.is_file():
            _copy(config, options.output / CONFIG)
        names = ", ".join(str(int(folder.name[5:13])) for folder in folders)
        print(f"wrote {written}: the mean of {len(folders)} checkpoints, steps {names}")
        print(f"start a run from it with --load {options.output} --no-load-optim")
    except SparsetronError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def find_steps(run: Path, *, last: int, steps: Sequence[int] = ()) -> list[Path]:
    """Return the folders of checkpoints to average, in ascending order of their steps.

    Args:
        run: A run folder, or its folder of checkpoints.
        last: Number of the newest steps.
        steps: Step numbers, which replace `last`.

    Raises:
        CheckpointError: A step is not there, or there are fewer than asked for.
    """
    directory = checkpoints_folder(run)
    if not directory.is_dir():
        raise CheckpointError(f"{run}: no checkpoint was committed there")
    if danger := open_to_all(directory):
        raise CheckpointError(f"{directory}: {danger}")
    # Of several folders of one step the first is the one to use.
    found: dict[int, Path] = {}
    for folder in list_steps(directory).committed:
        found.setdefault(folder.step, folder.path)
    there = ", ".join(map(str, sorted(found))) or "none"
    for step in steps:
        if step not in found:
            raise CheckpointError(f"{directory}: has no step {step}; steps found: {there}")
    if not steps and len(found) < last:
        raise CheckpointError(
            f"{directory}: holds {len(found)} checkpoints, fewer than --last {last}; steps found: "
            f"{there}"
        )
    return [found[step] for step in sorted(set(steps) or sorted(found)[-last:])]


def average(folders: Sequence[Path], output: Path) -> Path:
    """Write the mean of checkpoints to `output/checkpoints`, under the step of the last one.

    Args:
        folders: Step folders; opening them verifies every byte.
        output: A folder, which is created if it is missing.

    Returns:
        The step folder written.

    Raises:
        CheckpointError: A checkpoint is damaged or of another model, masks differ, or the disk
            refuses the new one.
    """
    from megatron.checkpoint.store import Checkpoint, save_checkpoint

    with ExitStack() as stack:
        saved = [stack.enter_context(Checkpoint.open(folder)) for folder in folders]
        newest = saved[-1]
        masked = any(newest.mask(name) for name in newest.names("param/"))
        state = dict(newest.state)
        state["identity"] = _without_path(dict(state.get("identity", {})), masked=masked)
        state["averaged_steps"] = [one.step for one in saved]
        return save_checkpoint(
            output / CHECKPOINTS, step=newest.step, tensors=_means(saved), state=state, log=print
        )


def _means(saved: Sequence[Checkpoint]) -> Iterator[LocalShard]:
    """Yield the mean of each weight and buffer, one at a time, and the masks."""
    from megatron.checkpoint.state_dict import BUFFER
    from megatron.checkpoint.store import LocalShard, whole

    newest = saved[-1]
    names = (*newest.names("param/"), *newest.names(BUFFER))
    if not newest.names("param/"):
        raise CheckpointError(f"{newest.path}: holds no weights")
    for name in names:
        for other in saved[:-1]:
            if name not in other.names(name) or other.shape(name) != newest.shape(name):
                raise CheckpointError(
                    f"{other.path}: {name} is not as in {newest.path}; average steps of one run"
                )
        total = newest.read(name).double()
        for other in saved[:-1]:
            total += other.read(name)
        mean = (total / len(saved)).to(newest.dtype(name))
        mask = newest.mask(name)
        if mask is None:
            _require_unmasked(saved, name)
            yield whole(name, mean)
            continue
        kept = _common_mask(saved, name)
        shape = tuple(mean.shape)
        yield whole(mask, kept)
        yield LocalShard(name, mean[kept], shape, (0,) * len(shape), shape, mask=mask)


def _require_unmasked(saved: Sequence[Checkpoint], name: str) -> None:
    for other in saved:
        if other.mask(name) is not None:
            raise CheckpointError(
                f"{other.path}: {name} is pruned there and not in {saved[-1].path}; average steps "
                "of one mask"
            )


def _common_mask(saved: Sequence[Checkpoint], name: str) -> Any:
    """Return the mask of a weight, bool of its shape, which all checkpoints share."""
    mask = saved[-1].mask(name)
    assert mask is not None
    kept = saved[-1].read(mask)
    for other in saved[:-1]:
        own = other.mask(name)
        if own is None or not bool((other.read(own) == kept).all()):
            raise CheckpointError(
                f"{other.path}: the mask of {name} is not that of {saved[-1].path}; average steps "
                "after the last change of masks"
            )
    return kept


def _without_path(identity: dict[str, Any], *, masked: bool) -> dict[str, Any]:
    """Return the identity as that of the dense path, or with masks of SAMO, without path state."""
    path = "samo" if masked else "dense"
    kept = {"model", "data", "training", *GRADIENT_PATHS[path].sections}
    found = {key: value for key, value in identity.items() if key.partition(".")[0] in kept}
    return {**found, "gradient.grad_path": path}


def _copy(config: Path, target: Path) -> None:
    try:
        shutil.copyfile(config, target)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error.strerror}") from error


def _steps(text: str | None) -> list[int]:
    if text is None:
        return []
    words = text.split(",")
    if not all(word.isascii() and word.isdigit() and len(word) < 18 for word in words):
        raise ConfigError(f"--steps: {show_plain(text)}; must be step numbers such as 100,200")
    return [int(word) for word in words]


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="average_checkpoints.py",
        description="Average the weights of the last checkpoints of a run, as one checkpoint.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="run folder, or its folder of checkpoints")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--last", type=int, default=10, metavar="N", help="the N newest checkpoints (10)"
    )
    which.add_argument("--steps", metavar="A,B", help="checkpoints of these steps")
    add("--output", required=True, type=Path, metavar="DIR", help="the run folder to write")
    options = parser.parse_args(arguments)
    if not 1 <= options.last <= MOST:
        parser.error(f"--last: {options.last}; must be from 1 to {MOST}")
    return options


if __name__ == "__main__":
    sys.exit(main())
