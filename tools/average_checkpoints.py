"""Average the weights of the last checkpoints of a run, as one checkpoint.

    python tools/average_checkpoints.py RUN --last 10 --output AVERAGED
    python tools/average_checkpoints.py RUN --steps 4000,5000 --output AVERAGED

Works for runs of every task, of any grid. Weights and the buffers of norms are averaged in double
precision; moments and the gradient path's state are left out. The output is a run folder with the
configuration and one checkpoint, of the newest step: tools that read the model of a run take it,
and a run starts from it with --load OUTPUT --no-load-optim. It lies outside the run that is read
and is no other run's folder. Masks of pruned weights must be equal in all steps; the run that
starts from them has the gradient path of the run that was averaged. One mean at a time is in
memory.

Exit code 0 if it is written, 2 for wrong usage, 4 for a missing or damaged checkpoint.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.checkpoint.find import (  # noqa: E402
    CHECKPOINTS,
    CommittedStep,
    checkpoints_folder,
    list_steps,
    steps_folder,
)
from megatron.checkpoint.io import failing_as  # noqa: E402
from megatron.checkpoint.verify import open_to_all  # noqa: E402
from megatron.config.fields import show_plain, whole_number  # noqa: E402
from megatron.errors import CheckpointError, ConfigError, SparsetronError  # noqa: E402
from tools.run_model import CONFIG, PARAM  # noqa: E402

if TYPE_CHECKING:
    import torch

    from megatron.checkpoint.store import Checkpoint, LocalShard

MOST = 10_000
_NETWORK = ("model", "data", "training")
"""Sections of an identity that do not belong to the gradient path."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    try:
        check_output(options.run, options.output)
        found = find_steps(options.run, last=options.last, steps=_steps(options.steps))
        written = average_run(options.run, found, options.output)
        count = f"{len(found)} checkpoint{'s' if len(found) > 1 else ''}"
        print(f"wrote {written}: the mean of {count} of {options.run}, {_numbers(found)}")
        print(f"start a run from it with --load {options.output} --no-load-optim")
    except SparsetronError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def check_output(run: Path, output: Path) -> None:
    """Check that writing the run folder `output` changes neither `run` nor another run.

    Raises:
        ConfigError: `output` is the run that is read or lies in its folder, or holds a run.
        CheckpointError: A folder cannot be read.
    """
    inside = Path(os.path.realpath(output))
    for source in (_run_root(run), run):  # two folders if the run has --save
        if inside.is_relative_to(os.path.realpath(source)):
            where = "is" if inside == Path(os.path.realpath(source)) else "lies in"
            raise ConfigError(
                f"--output: {output} {where} {source}, the run that is read; give a folder outside"
            )
    with failing_as(output, "read"):
        if (output / CONFIG).exists():
            raise ConfigError(f"--output: {output} holds a {CONFIG}; give a new folder")
        there = checkpoints_folder(output)
        listing = list_steps(there) if there.is_dir() else None
    if listing is not None and (listing.committed or listing.damaged):
        held = _numbers(listing.committed[::-1]) or "damaged steps"
        raise ConfigError(f"--output: {output} holds checkpoints ({held}); give a new folder")


def _run_root(run: Path) -> Path:
    """Return the folder above the checkpoints that are read, or their own if nobody owns it."""
    directory = steps_folder(run)
    with failing_as(directory, "read"):
        # --save may name the folder of checkpoints, which then need not lie in a run folder.
        owned = directory.name == CHECKPOINTS or (directory.parent / CONFIG).is_file()
    return directory.parent if owned else directory


def find_steps(run: Path, *, last: int, steps: Sequence[int] = ()) -> list[CommittedStep]:
    """Return the checkpoints to average, in ascending order of their steps.

    Args:
        run: A run folder, or its folder of checkpoints.
        last: Number of the newest steps.
        steps: Step numbers, which replace `last`.

    Raises:
        CheckpointError: A step is not there, or there are fewer than asked for.
    """
    directory = steps_folder(run)
    if not directory.is_dir():
        raise CheckpointError(f"{run}: no checkpoint was committed there")
    if danger := open_to_all(directory):
        raise CheckpointError(f"{directory}: {danger}")
    # Of several folders of one step the first is the one to use.
    found: dict[int, CommittedStep] = {}
    for folder in list_steps(directory).committed:
        found.setdefault(folder.step, folder)
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


def average_run(run: Path, steps: Sequence[CommittedStep], output: Path) -> Path:
    """Write the mean of checkpoints of a run, with its configuration, as the run folder `output`.

    The mean is the checkpoint of the last step.

    Args:
        run: The run folder, or its folder of checkpoints.
        steps: Steps of the run in ascending order, which are verified.
        output: A folder, made where it is missing.

    Returns:
        The step folder written.

    Raises:
        CheckpointError: A checkpoint is damaged or of another model, masks differ, or the disk
            refuses the new one.
    """
    written = _average(steps, output)
    for config in (run / CONFIG, steps_folder(run).parent / CONFIG):
        if config.is_file():
            _copy(config, output / CONFIG)
            break
    return written


def _average(steps: Sequence[CommittedStep], output: Path) -> Path:
    from megatron.checkpoint.store import Checkpoint, save_checkpoint

    with ExitStack() as stack:
        saved = [stack.enter_context(Checkpoint.open(folder.path)) for folder in steps]
        newest = saved[-1]
        masked = any(newest.mask(name) for name in newest.names(PARAM))
        state = dict(newest.state)
        state["identity"] = _identity(dict(state.get("identity", {})), masked=masked)
        state["averaged_steps"] = [one.step for one in saved]
        return save_checkpoint(
            output / CHECKPOINTS, step=newest.step, tensors=_means(saved), state=state, log=print
        )


def _means(saved: Sequence[Checkpoint]) -> Iterator[LocalShard]:
    """Yield the mean of each weight and buffer, and the masks; each is computed when written."""
    from megatron.checkpoint.state_dict import BUFFER
    from megatron.checkpoint.store import Chosen, lazy

    newest = saved[-1]
    names = (*newest.names(PARAM), *newest.names(BUFFER))
    if not newest.names(PARAM):
        raise CheckpointError(f"{newest.path}: holds no weights")
    for name in names:
        for other in saved[:-1]:
            if name not in other.names(name) or other.shape(name) != newest.shape(name):
                raise CheckpointError(
                    f"{other.path}: {name} is not as in {newest.path}; average steps of one run"
                )
        mean = lazy(name, newest.shape(name), newest.dtype(name), partial(_mean, saved, name))
        mask = newest.mask(name)
        if mask is None:
            _require_unmasked(saved, name)
            yield mean
            continue
        read = partial(newest.read, mask)
        count = int(_common_mask(saved, name).count_nonzero())
        yield lazy(mask, newest.shape(mask), newest.dtype(mask), read)
        yield replace(mean, mask=mask, chosen=Chosen(count, read))


def _mean(saved: Sequence[Checkpoint], name: str) -> torch.Tensor:
    newest = saved[-1]
    total = newest.read(name).double()
    for other in saved[:-1]:
        total += other.read(name)
    return total.div_(len(saved)).to(newest.dtype(name))


def _require_unmasked(saved: Sequence[Checkpoint], name: str) -> None:
    for other in saved:
        if other.mask(name) is not None:
            raise CheckpointError(
                f"{other.path}: {name} is pruned there and not in {saved[-1].path}; average steps "
                "of one mask"
            )


def _common_mask(saved: Sequence[Checkpoint], name: str) -> torch.Tensor:
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


def _identity(was: dict[str, Any], *, masked: bool) -> dict[str, Any]:
    """Return the identity of the mean: the run's own with masks, else that of the dense path.

    A run takes the masks of a checkpoint only if all settings of its path are equal. Without masks
    nothing of the path is left, and a run with any path may start from dense weights.
    """
    if masked:
        return was
    kept = {key: value for key, value in was.items() if key.partition(".")[0] in _NETWORK}
    return {**kept, "gradient.grad_path": "dense"}


def _copy(config: Path, target: Path) -> None:
    try:
        shutil.copyfile(config, target)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error.strerror}") from error


def _numbers(steps: Sequence[CommittedStep]) -> str:
    """Return the numbers of steps in words; "" for none."""
    numbers = ", ".join(dict.fromkeys(str(one.step) for one in steps))
    return numbers and f"step{'s' if ',' in numbers else ''} {numbers}"


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
        "--last", type=whole_number, default=10, metavar="N", help="the N newest checkpoints (10)"
    )
    which.add_argument("--steps", metavar="A,B", help="checkpoints of these steps")
    add("--output", required=True, type=Path, metavar="DIR", help="the run folder to write")
    options = parser.parse_args(arguments)
    if not 1 <= options.last <= MOST:
        parser.error(f"--last: {options.last}; must be from 1 to {MOST}")
    return options


if __name__ == "__main__":
    sys.exit(main())
