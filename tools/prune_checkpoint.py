"""Draw the masks of a pruned network from the weights of a checkpoint.

    python tools/prune_checkpoint.py RUN [--step N] --sparsity 0.9 [--scope tensor|global]
        [--keep-embeddings] [--dense PATTERN ...] --output masks.npz

RUN may also be a folder of checkpoints or one step, of any grid. The tool verifies the step,
selects the largest master weights, writes the masks to a file and prints how to train with them:
from the initial weights, or from the weights of an earlier step (rewinding). If the run's
configuration has settings that conflict (of its gradient path, or its origin), a copy without them
is written next to the masks.

Exit code 0 if the file is written, 2 for wrong usage, 4 for a missing or damaged checkpoint, 5 for
weights that are not finite.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.checkpoint.find import CHECKPOINTS, list_steps  # noqa: E402
from megatron.checkpoint.verify import read_manifest  # noqa: E402
from megatron.config.fields import show_plain, whole_number  # noqa: E402
from megatron.errors import CheckpointError, ConfigError, SparsetronError  # noqa: E402
from pretrain_gpt import GRADIENT_PATHS  # noqa: E402
from tools.run_model import CONFIG, PARAM, find_step, script_of  # noqa: E402
from tools.verify_checkpoint import print_table  # noqa: E402

_NUMBER = re.compile(r"[0-9./]{1,100}([eE][-+]?[0-9]{1,3})?")
OF_PATHS = {section for path in GRADIENT_PATHS.values() for section in path.sections}
OF_A_START = {
    "load",
    "ckpt_step",
    "finetune",
    "no_load_optim",
    "exit_on_missing_checkpoint",
    "reset_grad_state",
    "accept_new_data",
}
"""Settings that say from what a run started."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    try:
        sparsity = _check(options)
        step = find_step(options.checkpoint, step=options.step, log=_log)
        if step is None:
            raise CheckpointError(f"{options.checkpoint}: no checkpoint was committed there")
        prune(step, sparsity, options)
        print(f"wrote {options.output}")
        print_ways(options.checkpoint, step, options.output, overwrite=options.overwrite)
    except SparsetronError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def prune(step: Path, sparsity: Fraction, options: argparse.Namespace) -> None:
    """Draw the masks of a verified step, write them, and print a summary.

    Raises:
        CheckpointError: The step has no weight matrix to prune.
        ConfigError: The masks would keep entries that the checkpoint has pruned.
        NumericsError: Weights are not finite.
    """
    from megatron.checkpoint.store import Checkpoint
    from samo.mask import save_masks
    from samo.pruning import NamedWeights, magnitude, refuse_zeros
    from samo.schedule import is_prunable

    with Checkpoint.open(step, verify=False) as saved:
        shapes = {n.removeprefix(PARAM): saved.shape(n) for n in saved.names(PARAM)}
        names = [
            name
            for name, shape in shapes.items()
            if is_prunable(
                name, shape, keep_embeddings=options.keep_embeddings, dense=options.dense
            )
        ]
        if not names:
            raise CheckpointError(f"{step}: has no weight matrix to prune")
        masks = magnitude(
            NamedWeights(names, lambda name: saved.read(f"{PARAM}{name}")),
            sparsity,
            scope=options.scope,
        )
        records = {name: saved.mask(f"{PARAM}{name}") for name in masks}
        stored = {name: saved.read(mask) for name, mask in records.items() if mask is not None}
        refuse_zeros(masks, stored, what="--sparsity")
    save_masks(options.output, masks)
    over = "each tensor" if options.scope == "tensor" else "all pruned tensors together"
    print(f"{step}: verifies; the smallest {options.sparsity} of {over} is left out")
    print_counts(
        {name: math.prod(shape) for name, shape in shapes.items()},
        {name: int(mask.count_nonzero()) for name, mask in masks.items()},
    )


def print_counts(entries: Mapping[str, int], stored: Mapping[str, int]) -> None:
    """Print the stored share of each pruned tensor, of all of them (p) and of the model (f)."""
    rows = [(name, entries[name], kept) for name, kept in stored.items()]
    print_table(
        [("tensor", "entries", "stored", "share")]
        + [(name, str(all_), str(kept), f"{kept / all_:.4f}") for name, all_, kept in rows]
    )
    pruned, kept = sum(entries[name] for name in stored), sum(stored.values())
    whole = sum(entries.values())
    left = whole - pruned + kept
    print(f"pruned tensors: {kept} of {pruned} entries stored, p = {1 - kept / pruned:.6f}")
    print(f"whole model: {left} of {whole} entries stored, f = {left / whole:.6f}")


def print_ways(place: Path, step: Path, output: Path, *, overwrite: bool) -> None:
    """Print the commands that train with the masks, for `step` of the run or folder `place`."""
    directory = step.parent
    run = directory.parent if directory.name == CHECKPOINTS else directory
    config = (place if (place / CONFIG).is_file() else run) / CONFIG
    command = ["python", script_of(config), "--config"]
    command.append(_usable(config, output, overwrite) if config.is_file() else "CONFIG_OF_THE_RUN")
    command += ["--run-dir", "NEW", "--grad-path", "samo", "--samo-pruning", "file"]
    command += ["--samo-mask-file", str(output)]
    steps = sorted({folder.step for folder in list_steps(directory).committed})
    load = ["--load", str(run if (run / CONFIG).is_file() else directory), "--ckpt-step", "K"]
    path = read_manifest(step).state.get("identity", {}).get("gradient.grad_path", "dense")
    if path != "dense":
        load.append("--reset-grad-state")
    if path != "dense" and not config.is_file():
        print(f"the run was of --grad-path {path}: take its options out of a copy of the config")
    print(f"train from the initial weights (same seed):\n  {shlex.join(command)}")
    print(
        f"train from the weights of step K, one of {', '.join(map(str, steps))}:\n"
        f"  {shlex.join([*command, *load])}"
    )


def _usable(config: Path, output: Path, overwrite: bool) -> str:
    """Return the path of a configuration for training with the masks.

    It is the run's, or a copy that this function writes without the conflicting settings.
    """
    lines = config.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = list(_without_the_path(lines))
    if kept == lines:
        return str(config)
    copy = output.with_name(f"{output.stem}.config.yaml")
    if copy.exists() and not overwrite:
        raise ConfigError(f"--output: {copy} exists; choose another or add --overwrite")
    try:
        copy.write_text("".join(kept), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{copy}: cannot be written: {error.strerror}") from error
    left_out = sorted({line.partition(":")[0].strip() for line in lines if line not in kept})
    print(f"wrote {copy}, the run's configuration without {', '.join(left_out)}")
    return str(copy)


def _without_the_path(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a configuration without the gradient path and the run's origin.

    A file written by a run has a line for each section and for each setting.
    """
    section = ""
    for line in lines:
        key, _, value = line.partition(":")
        section = section if line.startswith((" ", "#")) else key
        began = section == "checkpoint" and key.strip() in OF_A_START
        if section not in OF_PATHS and not (began and value.strip() not in ("null", "false")):
            yield line


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="prune_checkpoint.py",
        description="Draw the masks of a pruned network from the weights of a checkpoint.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="RUN", help="run, checkpoints or step folder")
    add("--step", type=whole_number, metavar="N", help="step to read (default: the newest)")
    add("--sparsity", required=True, metavar="P", help="share of entries to leave out, below 1")
    add(
        "--scope",
        choices=("tensor", "global"),
        default="tensor",
        help="whether each tensor loses this share, or all of them together (default: tensor)",
    )
    add("--keep-embeddings", action="store_true", help="leave embeddings whole, as biases are")
    add(
        "--dense",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="leave tensors whole whose names match a shell pattern",
    )
    add("--output", required=True, type=Path, metavar="FILE", help="the mask file to write")
    add("--overwrite", action="store_true", help="replace the file if it is there")
    return parser.parse_args(arguments)


def _check(options: argparse.Namespace) -> Fraction:
    """Return the sparsity as an exact fraction. Raises `ConfigError` for an invalid flag."""
    try:
        # An exponent of many digits would make an enormous fraction.
        known = _NUMBER.fullmatch(options.sparsity)
        sparsity = Fraction(options.sparsity) if known else Fraction(-1)
    except (ValueError, ZeroDivisionError):
        sparsity = Fraction(-1)
    if not 0 <= sparsity < 1:
        raise ConfigError(
            f"--sparsity: {show_plain(options.sparsity)}; must be a number from 0 up to below 1"
        )
    try:
        there, parent = options.output.exists(), options.output.parent.is_dir()
    except OSError as error:
        raise ConfigError(f"--output: {options.output}: {error.strerror}") from error
    if there and not options.overwrite:
        raise ConfigError(f"--output: {options.output} exists; choose another or add --overwrite")
    if not parent:
        raise ConfigError(f"--output: {options.output.parent} is no folder; make it first")
    return sparsity


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
