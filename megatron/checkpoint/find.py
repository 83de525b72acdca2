"""Search for checkpoints: the committed steps of a run, which to keep, which to load.

The folders are the truth; the file `latest` is a hint.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.format import MANIFEST_NAME, Manifest, NewerFormat, show
from megatron.checkpoint.io import (
    FILES,
    Files,
    failing_as,
    opened,
    read_bytes,
    remove_folder,
    replace_text,
    sync_folder,
)
from megatron.checkpoint.verify import alien, open_to_all, verify_folder
from megatron.checkpoint.writer import LATEST, set_aside
from megatron.errors import CheckpointError

if TYPE_CHECKING:
    from megatron.config import Config

CHECKPOINTS = "checkpoints"
"""Name of the folder of step folders in a run folder."""
ENVIRONMENT = "environment.json"
"""Name of the file of a run folder with facts about the last start that trained."""
SAVE = "save"
"""Key of `ENVIRONMENT` with the absolute path of `--save`, absent if it is the default."""

Verify = Callable[[Path], Manifest]
"""Verifies a step folder and returns its manifest; raises `CheckpointError`."""

_STEP = re.compile(r"step_(\d{8,})(?:\.(replaced|damaged|tmp)-([0-9a-f]+))?")


@dataclass(frozen=True, order=True)
class CommittedStep:
    """A folder that was committed as `step`.

    In descending order, the folders of one step come by preference: the plain name first, then the
    one that was replaced last.
    """

    step: int
    plain: bool
    number: int
    path: Path


@dataclass(frozen=True)
class StepListing:
    """The step folders in a folder: committed ones, newest first; damaged ones; drafts."""

    committed: list[CommittedStep]
    damaged: list[Path]
    drafts: list[Path]


def checkpoints_folder(path: Path) -> Path:
    """Return the folder of step folders: `path/checkpoints` if that exists, else `path`.

    Raises `CheckpointError` if the folder cannot be read.
    """
    inner = path / CHECKPOINTS
    with failing_as(path, "read"):
        return inner if inner.is_dir() else path


def list_steps(directory: Path, *, files: Files = FILES) -> StepListing:
    """List the step folders of a directory by kind, which their names tell.

    A replaced step counts as committed, after the step that replaced it: a crash between the two
    renames leaves only the replaced one. Raises `CheckpointError`.
    """
    with failing_as(directory, "list"):
        names = files.entries(directory)
    listing = StepListing([], [], [])
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
            listing.committed.append(CommittedStep(int(match[1]), match[2] is None, number, path))
    listing.committed.sort(reverse=True)
    return listing


def find_checkpoint(
    directory: Path | str,
    *,
    log: Callable[[str], None],
    step: int | None = None,
    repair: bool = False,
    verify: Verify | None = None,
    literal: bool = False,
    files: Files = FILES,
) -> Path | None:
    """Return the step folder to load: the newest that verifies, or the folder of `step`.

    Damaged folders are logged. By default a returned folder has been hashed completely, so that
    other ranks need not hash it.

    Args:
        directory: A run folder, its `checkpoints`, or one step folder.
        log: Receives a line for each folder that is not used.
        step: The step to load; None: the newest good one.
        repair: Rename damaged folders to `.damaged-N` once a good one is found, and correct
            `latest`; on one rank only.
        verify: Verifies one step folder; None: `verify_folder`.
        literal: Search `directory` itself, even if it has a folder `checkpoints`.
        files: The system calls.

    Returns:
        None if nothing was ever committed there.

    Raises:
        CheckpointError: Committed folders exist and none verifies; `step` is missing or damaged;
            the checkpoint is of another program, or of a newer version of this one (`NewerFormat`).
    """
    path = Path(directory)
    verify = verify or partial(verify_folder, files=files)
    with failing_as(path, "read"):
        if (path / MANIFEST_NAME).exists() or path.is_file():
            return _check_one(path, step, verify)
        path = path if literal else checkpoints_folder(path)
        if not path.is_dir() and step is None:
            return None
        if path.is_dir() and (danger := open_to_all(path)):
            raise CheckpointError(f"{path}: {danger}")
        return _find(path, step, log, repair, verify, files)


def _find(
    path: Path,
    step: int | None,
    log: Callable[[str], None],
    repair: bool,
    verify: Verify,
    files: Files,
) -> Path | None:
    listing = list_steps(path, files=files) if path.is_dir() else StepListing([], [], [])
    for draft in listing.drafts:
        log(f"{draft}: left by a save or a removal that did not finish, not used")
    nothing = not listing.committed and not listing.damaged
    if nothing and (kind := alien(path)):
        raise CheckpointError(f"{path}: {kind}")
    if step is not None:
        return _explicit(path, step, listing.committed, verify)
    return None if nothing else _newest(path, listing, log, repair, verify, files)


def _check_one(path: Path, step: int | None, verify: Verify) -> Path:
    if danger := open_to_all(path):
        raise CheckpointError(f"{path}: {danger}")
    manifest = verify(path)
    if step is not None and manifest.step != step:
        raise CheckpointError(f"{path}: is step {manifest.step}, asked for was step {step}")
    return path


def _explicit(path: Path, step: int, found: list[CommittedStep], verify: Verify) -> Path:
    for folder in found:
        if folder.step == step:
            verify_committed(folder, verify)
            return folder.path
    steps = ", ".join(str(number) for number in sorted({folder.step for folder in found}))
    raise CheckpointError(f"{path}: has no step {step}; steps found: {steps or 'none'}")


def _newest(
    path: Path,
    listing: StepListing,
    log: Callable[[str], None],
    repair: bool,
    verify: Verify,
    files: Files,
) -> Path:
    bad: list[CommittedStep] = []
    for folder in listing.committed:
        try:
            verify_committed(folder, verify)
        except NewerFormat:
            raise
        except CheckpointError as error:
            log(f"checkpoint not used: {error}")
            bad.append(folder)
            continue
        if repair:
            for other in bad:
                target = set_aside(files, other.path, "damaged")
                log(f"{other.path.name} is now {target.name}")
        _compare_hint(path, folder.path, log, repair, files)
        return folder.path
    names = ", ".join([f.path.name for f in bad] + [folder.name for folder in listing.damaged])
    raise CheckpointError(
        f"{path}: no checkpoint in it verifies: {names}; restore a good copy of one, or start "
        f"in another run folder"
    )


def verify_committed(folder: CommittedStep, verify: Verify = verify_folder) -> Manifest:
    """Verify a folder and its name against the manifest, and return the manifest.

    Raises `CheckpointError`.
    """
    manifest = verify(folder.path)
    if manifest.step != folder.step:
        raise CheckpointError(
            f"{folder.path / MANIFEST_NAME}: step: is {manifest.step}, the folder's name says "
            f"{folder.step}"
        )
    return manifest


def _compare_hint(
    path: Path, chosen: Path, log: Callable[[str], None], repair: bool, files: Files
) -> None:
    hint = path / LATEST
    text = None
    with contextlib.suppress(CheckpointError), opened(files, hint) as (descriptor, _):
        text = read_bytes(files, descriptor, 200).decode(errors="replace")
    if text is not None and text.strip() == chosen.name:
        return
    told = "is missing" if text is None else f"says {show(text.strip())}"
    log(f"{hint}: {told}, the newest checkpoint that verifies is {chosen.name}: using that")
    if repair:
        replace_text(files, hint, f"{chosen.name}\n", secrets.token_hex(4))


def finite_step(step: int, state: Mapping[str, Any]) -> int:
    """Return the last step before a save whose loss and gradients were finite.

    A step computes them with the weights of the step before, so that a checkpoint of an earlier
    step has sound weights. Checkpoints without the record only count the skipped steps.

    Args:
        step: The step of the checkpoint.
        state: Its `state`.
    """
    progress = state.get("progress", {})
    return progress.get("finite_step", step - progress.get("skipped_in_row", 0))


Stamp = tuple[tuple[str, int, int], ...]


@dataclass(kw_only=True)
class Keeper:
    """Deletes old checkpoints.

    Keeps the newest `count` steps of a folder that verify, the newest of those that a finite step
    followed (`finite_step`), and every multiple of `interval` (None: no others). One process per
    folder. A process hashes each checkpoint once, its own ones right after their commit; the result
    holds while sizes and times of the files do not change.
    """

    directory: Path
    count: int
    interval: int | None = None
    log: Callable[[str], None]
    verify: Verify | None = None
    files: Files = FILES
    _verdicts: dict[Path, tuple[Stamp, int | None]] = field(default_factory=dict)

    def prune(self) -> list[Path]:
        """Delete good steps except those to keep.

        Damaged steps are neither counted nor deleted. A failure is only logged: it does not affect
        the run, and the next save tries again. Returns the deleted folders.
        """
        removed: list[Path] = []
        kept, finite, has_followed = 0, 0, False
        try:
            steps = list_steps(self.directory, files=self.files).committed
            for step, folders in groupby(steps, key=lambda folder: folder.step):
                if kept >= self.count and has_followed and self._is_retained(step):
                    continue
                known = {folder.path: self._finite_step(folder) for folder in folders}
                good = {path: last for path, last in known.items() if last is not None}
                if not good:
                    continue
                is_followed = step < finite
                if kept < self.count or (is_followed and not has_followed):
                    kept += 1
                    has_followed |= is_followed
                elif not self._is_retained(step):
                    for path in good:
                        self._remove(path)
                        removed.append(path)
                finite = max(finite, *good.values())
        except CheckpointError as error:
            self.log(f"older checkpoints stay: {error}")
        return removed

    def _is_retained(self, step: int) -> bool:
        return self.interval is not None and step % self.interval == 0

    def _finite_step(self, folder: CommittedStep) -> int | None:
        """Return `finite_step` of a folder that verifies, None for another one."""
        stamp = self._stamp(folder.path)
        known, found = self._verdicts.get(folder.path, (None, None))
        if known == stamp:
            return found
        try:
            verify = self.verify or partial(verify_folder, files=self.files)
            manifest = verify_committed(folder, verify)
            found = finite_step(manifest.step, manifest.state)
        except CheckpointError as error:
            found = None
            self.log(f"not counted as a checkpoint to keep: {error}")
        self._verdicts[folder.path] = stamp, found
        return found

    def _stamp(self, path: Path) -> Stamp:
        with failing_as(path, "read"):
            found = [(name, os.lstat(path / name)) for name in self.files.entries(path)]
        return tuple((name, status.st_size, status.st_mtime_ns) for name, status in found)

    def _remove(self, path: Path) -> None:
        draft = path.with_name(f"{path.name.partition('.')[0]}.tmp-{secrets.token_hex(4)}")
        with failing_as(path, "remove"):
            self.files.rename(path, draft)
            sync_folder(self.files, self.directory)
            remove_folder(self.files, draft)
        del self._verdicts[path]


def save_directory(config: Config, run_dir: Path) -> Path:
    """Return the folder for checkpoints of a run."""
    return Path(config.checkpoint.save) if config.checkpoint.save else run_dir / CHECKPOINTS


def recorded_directory(run_dir: Path) -> Path:
    """Return the folder to which the last start of a run saved, as the run folder records it."""
    try:
        recorded = json.loads((run_dir / ENVIRONMENT).read_text(encoding="utf-8"))[SAVE]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return run_dir / CHECKPOINTS
    return Path(recorded) if isinstance(recorded, str) and recorded else run_dir / CHECKPOINTS


def steps_folder(place: Path) -> Path:
    """Return the folder of step folders of a run, where its last start saved, or of another folder.

    Raises `CheckpointError` if the folder cannot be read.
    """
    recorded = recorded_directory(place)
    return checkpoints_folder(place) if recorded == place / CHECKPOINTS else recorded


def loads_elsewhere(config: Config, run_dir: Path) -> bool:
    """Return whether `--load` names another folder than that to which a run saves.

    Raises `CheckpointError` if a folder cannot be read.
    """
    load, own_place = config.checkpoint.load, save_directory(config, run_dir)
    # Path.resolve raises RuntimeError for a loop of links.
    return load is not None and (
        os.path.realpath(_folder_to_load(Path(load))) != os.path.realpath(own_place)
    )


def _folder_to_load(load: Path) -> Path:
    """Return the folder of steps that `--load` names: its own, or where that run has saved."""
    own = checkpoints_folder(load)
    # A record may be of another place: of a folder that was copied or moved, or of a start that has
    # saved nothing yet.
    with failing_as(own, "read"):
        is_folder = own.is_dir()
    return own if is_folder and list_steps(own).committed else steps_folder(load)


@dataclass(frozen=True)
class CheckpointSource:
    """The step folder from which a run starts.

    `own`: this run saved it and resumes; otherwise it belongs to another run, and `--finetune` and
    `--no-load-optim` may leave out parts.
    """

    path: Path
    own: bool


def locate_checkpoint(
    config: Config,
    run_dir: Path,
    *,
    log: Callable[[str], None],
    look: bool = False,
    verify: Verify = verify_folder,
) -> CheckpointSource | None:
    """Return where to start from: the newest good checkpoint of this run, else of `--load`.

    Returns None to start at step 0. One rank calls this function for all. With `look` nothing is
    renamed and no tensor is hashed, which takes milliseconds and suffices to find mistakes before a
    run starts. Without `look`, `verify` verifies each folder that is considered, once.

    Raises:
        CheckpointError: Committed folders exist and none verifies; `--load` names another folder in
            which nothing was ever committed; the run folder has checkpoints elsewhere, or `--save`
            names a run folder that has some, which the run would not continue; `--ckpt-step` names
            a step of this run's own folder that is not its newest, since two histories would then
            share the later steps.
    """
    # The folder of --ckpt-step is also the newest one, if it is of this run.
    verify = cache(partial(verify_folder, hashes=False) if look else verify)
    asked = config.checkpoint
    own_place = save_directory(config, run_dir)
    elsewhere = loads_elsewhere(config, run_dir)
    own_step = None if elsewhere else asked.ckpt_step
    own = None
    with failing_as(own_place, "read"):
        begun = own_place.exists()
    if begun or own_step is not None:
        own = find_checkpoint(
            own_place,
            log=log,
            step=own_step,
            repair=own_step is None and not look,
            verify=verify,
            # A run reads where it saves: steps of an earlier run in `--save`/checkpoints, found at
            # every start, would hide those that this run has saved.
            literal=True,
        )
    if own is not None:
        _refuse_to_branch(own, own_place, own_step, verify)
        return CheckpointSource(own, own=True)
    if asked.load is None:
        _refuse_to_ignore(own_place)
        _refuse_to_begin_again(run_dir, own_place)
        return None
    other, place = None, _folder_to_load(Path(asked.load))
    if elsewhere:
        other = find_checkpoint(place, log=log, step=asked.ckpt_step, verify=verify, literal=True)
    if other is None and (elsewhere or asked.exit_on_missing_checkpoint):
        recorded = place != checkpoints_folder(Path(asked.load))
        raise CheckpointError(
            f"{place}: no checkpoint was ever committed there"
            f"{f', where {asked.load} saves' if recorded else ''}; check --load, or leave it out "
            "to start at step 0"
        )
    if other is None:
        _refuse_to_begin_again(run_dir, own_place)
    return CheckpointSource(other, own=False) if other is not None else None


def _refuse_to_branch(found: Path, directory: Path, step: int | None, verify: Verify) -> None:
    if step is None:
        return
    newest = find_checkpoint(directory, log=lambda text: None, verify=verify, literal=True)
    if newest != found:
        raise CheckpointError(
            f"ckpt_step: {step} is not the newest of {directory}; to go another way from there, "
            f"give --load {directory} --ckpt-step {step} and a new --run-dir"
        )


def _refuse_to_ignore(directory: Path) -> None:
    """Raise `CheckpointError` for a folder to save to that is a run folder with checkpoints."""
    inner = checkpoints_folder(directory)
    if inner != directory and list_steps(inner).committed:
        raise CheckpointError(
            f"{inner}: has checkpoints, and --save {directory} would begin at step 0 beside them; "
            f"give --save {inner} to continue that run, or --load {directory} to begin with its "
            "newest"
        )


def _refuse_to_begin_again(run_dir: Path, own_place: Path) -> None:
    """Raise `CheckpointError` for a run folder whose checkpoints are not where this start saves."""
    for place in (recorded_directory(run_dir), run_dir / CHECKPOINTS):
        with failing_as(place, "read"):
            is_other = os.path.realpath(place) != os.path.realpath(own_place) and place.is_dir()
        if is_other and list_steps(place).committed:
            raise CheckpointError(
                f"{place}: has the checkpoints of {run_dir}, which would begin again at step 0 and "
                f"save to {own_place}; give --save {place} to resume, or another --run-dir"
            )
