"""Which step to start from: the newest one that verifies, whatever `latest` says.

Nothing here imports torch or numpy.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.commit import LATEST, set_aside
from megatron.checkpoint.files import FILES, Files, failing_as, opened, read_bytes, replace_text
from megatron.checkpoint.manifest import MANIFEST_NAME, Manifest, NewerFormat
from megatron.checkpoint.strict import show
from megatron.checkpoint.verify import alien, open_to_all, verify_folder
from megatron.errors import CheckpointError

CHECKPOINTS = "checkpoints"
"""Name of the folder of step folders in a run folder."""

_STEP = re.compile(r"step_(\d{8,})(?:\.(replaced|damaged|tmp)-([0-9a-f]+))?")


@dataclass(frozen=True, order=True)
class Committed:
    """A folder that was committed as `step`. Of several for one step the one under the plain name
    comes first, then the last one that was replaced."""

    step: int
    plain: bool
    number: int
    path: Path


@dataclass(frozen=True)
class Listing:
    """What a folder of step folders holds: committed ones, newest first; those set aside as
    damaged; drafts of saves that never ended."""

    committed: list[Committed]
    damaged: list[Path]
    drafts: list[Path]


def checkpoints_folder(path: Path) -> Path:
    """The folder of step folders: `path`, or `path/checkpoints` where that is a run folder.
    Raises `CheckpointError` where the folder may not be read."""
    inner = path / CHECKPOINTS
    with failing_as(path, "read"):
        return inner if inner.is_dir() else path


def list_steps(directory: Path, *, files: Files = FILES) -> Listing:
    """Sort the step folders of a directory by their names.

    A step that was replaced counts as committed, after the one that replaced it: a crash between
    the two renames leaves it alone. Raises `CheckpointError`.
    """
    with failing_as(directory, "list"):
        names = files.entries(directory)
    listing = Listing([], [], [])
    for name in names:
        match = _STEP.fullmatch(name)
        path = directory / name
        if match is None or not path.is_dir():
            continue
        if match[2] == "damaged":
            listing.damaged.append(path)
        elif match[2] == "tmp":
            listing.drafts.append(path)
        elif match[2] is None or match[3].isdecimal():
            number = int(match[3] or 0)
            listing.committed.append(Committed(int(match[1]), match[2] is None, number, path))
    listing.committed.sort(reverse=True)
    return listing


def find_checkpoint(
    directory: Path | str,
    *,
    say: Callable[[str], None],
    step: int | None = None,
    repair: bool = False,
    hashes: bool = True,
    files: Files = FILES,
) -> Path | None:
    """The step folder to load: the newest that verifies, or that of `step`.

    `directory`: a run folder, its `checkpoints`, or one step folder. None if nothing was ever
    committed there. Damaged folders are told through `say`; with `repair` (one rank only) they
    are renamed `.damaged-N` once a good one is found, and a stale `latest` is set right. It hashes
    every byte of what it returns, so other ranks need not; without `hashes` it reads headers alone,
    in milliseconds, for a look before a run. Raises `CheckpointError` if committed
    folders are there and none verifies, if `step` is not there or damaged, for a checkpoint of
    another program, and for one of a newer version of this program (`NewerFormat`).
    """
    path = Path(directory)
    with failing_as(path, "read"):
        if (path / MANIFEST_NAME).exists() or path.is_file():
            return _check_one(path, step, hashes, files)
        path = checkpoints_folder(path)
        if not path.is_dir() and step is None:
            return None
        if path.is_dir() and (danger := open_to_all(path)):
            raise CheckpointError(f"{path}: {danger}")
        return _find(path, step, say, repair, hashes, files)


def _find(
    path: Path,
    step: int | None,
    say: Callable[[str], None],
    repair: bool,
    hashes: bool,
    files: Files,
) -> Path | None:
    listing = list_steps(path, files=files) if path.is_dir() else Listing([], [], [])
    for draft in listing.drafts:
        say(f"{draft}: what a save or a removal that did not end left, not used")
    nothing = not listing.committed and not listing.damaged
    if nothing and (kind := alien(path)):
        raise CheckpointError(f"{path}: {kind}")
    if step is not None:
        return _explicit(path, step, listing.committed, hashes, files)
    return None if nothing else _newest(path, listing, say, repair, hashes, files)


def _check_one(path: Path, step: int | None, hashes: bool, files: Files) -> Path:
    if danger := open_to_all(path):
        raise CheckpointError(f"{path}: {danger}")
    manifest = verify_folder(path, hashes=hashes, files=files)
    if step is not None and manifest.step != step:
        raise CheckpointError(f"{path}: is step {manifest.step}, asked for was step {step}")
    return path


def _explicit(path: Path, step: int, found: list[Committed], hashes: bool, files: Files) -> Path:
    for folder in found:
        if folder.step == step:
            verify_committed(folder, hashes=hashes, files=files)
            return folder.path
    steps = ", ".join(str(number) for number in sorted({folder.step for folder in found}))
    raise CheckpointError(f"{path}: has no step {step}; steps found: {steps or 'none'}")


def _newest(
    path: Path,
    listing: Listing,
    say: Callable[[str], None],
    repair: bool,
    hashes: bool,
    files: Files,
) -> Path:
    bad: list[Committed] = []
    for folder in listing.committed:
        try:
            verify_committed(folder, hashes=hashes, files=files)
        except NewerFormat:
            raise
        except CheckpointError as error:
            say(f"checkpoint not used: {error}")
            bad.append(folder)
            continue
        if repair:
            for other in bad:
                target = set_aside(files, other.path, "damaged")
                say(f"{other.path.name} is now {target.name}")
        _compare_hint(path, folder.path, say, repair, files)
        return folder.path
    names = ", ".join([f.path.name for f in bad] + [folder.name for folder in listing.damaged])
    raise CheckpointError(
        f"{path}: no checkpoint in it verifies: {names}; bring back a good copy of one, or start "
        f"anew in another run folder"
    )


def verify_committed(folder: Committed, *, hashes: bool = True, files: Files = FILES) -> Manifest:
    """`verify_folder`, and that the folder's name tells its step."""
    manifest = verify_folder(folder.path, hashes=hashes, files=files)
    if manifest.step != folder.step:
        raise CheckpointError(
            f"{folder.path / MANIFEST_NAME}: step: is {manifest.step}, the folder's name says "
            f"{folder.step}"
        )
    return manifest


def _compare_hint(
    path: Path, chosen: Path, say: Callable[[str], None], repair: bool, files: Files
) -> None:
    hint = path / LATEST
    text = None
    with contextlib.suppress(CheckpointError), opened(files, hint) as (descriptor, _):
        text = read_bytes(files, descriptor, 200).decode(errors="replace")
    if text is not None and text.strip() == chosen.name:
        return
    told = "is missing" if text is None else f"says {show(text.strip())}"
    say(f"{hint}: {told}, the newest checkpoint that verifies is {chosen.name}: using that")
    if repair:
        replace_text(files, hint, f"{chosen.name}\n", secrets.token_hex(4))
