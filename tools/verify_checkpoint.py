"""Check checkpoints: hashes, shapes, and that each entry is stored exactly once.

    python tools/verify_checkpoint.py RUN | RUN/checkpoints | RUN/checkpoints/step_00000100

Prints one line per checkpoint; `--verbose` also lists its files and tensors. A checkpoint that the
run removes meanwhile (--keep-last) is told and is no failure. Exit code 0 if all checkpoints
verify, 4 if one does not or if there is none, 2 for wrong usage. Imports neither torch nor numpy,
so it works on a login node.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.checkpoint.find import list_steps, steps_folder, verify_committed  # noqa: E402
from megatron.checkpoint.format import DATA_PARALLEL, MANIFEST_NAME, Manifest, TensorRecord  # noqa: E402  # noqa: E402
from megatron.checkpoint.verify import alien, verify_folder  # noqa: E402
from megatron.closed_pipe import end_with_reader  # noqa: E402
from megatron.errors import CheckpointError  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="verify_checkpoint.py", description="Check checkpoints: hashes, shapes, layout."
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="step, checkpoints or run folder")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument(
        "--verbose", action="store_true", help="also list the files and the tensors of each step"
    )
    amount.add_argument("--quiet", action="store_true", help="one line for each step (the default)")
    options = parser.parse_args(arguments)
    try:
        problems = check(options.folder, tables=options.verbose)
    except CheckpointError as error:
        problems = [str(error)]
    except OSError as error:
        problems = [f"{options.folder}: {error.strerror}"]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return CheckpointError.exit_code if problems else 0


def check(folder: Path, *, tables: bool) -> list[str]:
    """Print each step that verifies, and return the problems of the others.

    Raises `CheckpointError` for a folder without checkpoints, and for a damaged step folder.
    """
    if (folder / MANIFEST_NAME).exists() or not folder.is_dir():
        report(folder, verify_folder(folder), tables=tables)
        return []
    directory = steps_folder(folder)
    listing = list_steps(directory)
    if not listing.committed and not listing.damaged:
        raise CheckpointError(f"{directory}: {alien(directory) or 'no checkpoint was committed'}")
    problems, removed = [], 0
    for step in reversed(listing.committed):
        try:
            report(step.path, verify_committed(step), tables=tables)
        except CheckpointError as error:
            if step.path.exists():
                problems.append(str(error))
                continue
            removed += 1
            print(f"{step.path}: removed meanwhile, not checked")
    for path in listing.drafts:
        print(f"{path}: left by a save or a removal that did not finish, never loaded")
    for path in listing.damaged:
        print(f"{path}: set aside as damaged, not checked")
    if not listing.committed:
        problems.append(f"{directory}: every checkpoint was set aside as damaged")
    elif removed == len(listing.committed):
        problems.append(f"{directory}: every checkpoint was removed meanwhile; check again")
    return problems


def report(folder: Path, manifest: Manifest, *, tables: bool) -> None:
    """Print a step that verifies: one line, and the tables of its files and tensors."""
    size = sum(file.bytes for file in manifest.files.values())
    grid = ", ".join(f"{name} = {count}" for name, count in manifest.world.items())
    print(
        f"{folder}: step {manifest.step} verifies: {len(manifest.tensors)} tensors in "
        f"{len(manifest.files)} files, {size} bytes; ranks: {grid}"
    )
    if not tables:
        return
    print_table(
        [("file", "bytes", "sha256")]
        + [(name, str(file.bytes), file.sha256) for name, file in manifest.files.items()]
    )
    print_table(
        [("tensor", "dtype", "shape", "slices", "files", "stored")]
        + [layout_row(name, record) for name, record in manifest.tensors.items()]
    )


def layout_row(name: str, record: TensorRecord) -> tuple[str, ...]:
    """Return a row of the table of tensors: name, dtype, shape, slices, files and storage."""
    kinds = []
    if record.scope == DATA_PARALLEL:
        kinds.append("per data-parallel rank")
    if record.mask is not None:
        where = "" if record.mask.value else "not "
        kinds.append(f"where {where}{record.mask.name}")
    if record.dtype == "BOOL":
        kinds.append("bits")
    if any(part.flat is not None for part in record.slices):
        kinds.append("flat ranges")
    return (
        name,
        record.dtype,
        "x".join(map(str, record.shape)) or "scalar",
        str(len(record.slices)),
        str(len({part.file for part in record.slices})),
        ", ".join(kinds) or "whole boxes",
    )


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows in aligned columns, indented by two."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(f"  {'  '.join(cells)}".rstrip())


if __name__ == "__main__":
    end_with_reader()
    sys.exit(main())
