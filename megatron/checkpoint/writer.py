"""The commit of a checkpoint: all ranks together bring a step to disk, or none of it.

    (1) every rank: what it will write ..... agreed: the slices fit, there is space
    (2) rank 0: step_00000100.tmp-NONCE/ ... agreed: the folder is there
    (3) every rank: its file, fsync ........ agreed: sizes and hashes
    (4) rank 0: manifest.json, fsync, fsync of the folder, rename to step_00000100, fsync of the
        folder above, `latest` ............. agreed: committed

Each phase ends with a gather of all ranks' outcomes, so that all ranks raise the same error and no
rank waits for a failed one. A crash leaves a `.tmp-` folder, which is never read and which the next
save removes. A step that exists is never deleted: the new one is dropped if it is the same;
otherwise the old one is renamed `.replaced-N`, or `.damaged-N` if it does not verify. Imports
neither torch nor numpy.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.checkpoint.format import (
    MANIFEST_LIMIT,
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    NewerFormat,
    TensorRecord,
    check_json,
    check_tensors,
    dump,
    one_line,
    show,
    tensor_from_json,
    tensor_to_json,
)
from megatron.checkpoint.io import (
    FILES,
    Files,
    TensorToWrite,
    chunks,
    failing_as,
    header,
    in_order,
    make_folder,
    opened,
    read_bytes,
    remove_folder,
    replace_text,
    sync_folder,
    write_file,
)
from megatron.checkpoint.verify import verify_folder
from megatron.errors import CheckpointError

LATEST = "latest"
_LEFTOVER = re.compile(r"(step_\d{8,}|latest)\.tmp-[0-9a-f]+")

Gather = Callable[[str], list[str]]
"""A collective that gives every rank the texts of all ranks, in rank order."""


def step_name(step: int) -> str:
    """Return the name of a step's folder."""
    return f"step_{step:08d}"


def file_name(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank_{rank:05d}.safetensors"


def alone(text: str) -> list[str]:
    """Return the gathered texts of a world of one rank; a `Gather`."""
    return [text]


@dataclass(frozen=True)
class RankWrites:
    """The part of a save that one rank writes: items, and slices of the tensors that they hold."""

    items: Sequence[TensorToWrite]
    tensors: Mapping[str, TensorRecord]


@dataclass(frozen=True, kw_only=True)
class Save:
    """One save on one rank.

    `directory` holds the step folders; it is on a disk that all ranks see and takes one save at a
    time. `manifest` lacks only files and tensors; rank 0's is used.
    """

    directory: Path
    manifest: Manifest
    rank: int
    gather: Gather
    log: Callable[[str], None]
    files: Files = FILES

    def run(self, part: Callable[[], RankWrites]) -> Path:
        """Write and commit the step; all ranks call this method, and all return or all raise.

        Raises `CheckpointError`.
        """
        step = self.manifest.step
        mine: list[RankWrites] = []

        def announce() -> dict[str, Any]:
            self._check_state()
            mine.append(part())
            items = in_order(mine[0].items)
            size = len(header(items)) + sum(item.bytes for item in items) if items else 0
            tensors = {name: tensor_to_json(record) for name, record in mine[0].tensors.items()}
            return {"step": step, "bytes": size, "tensors": tensors}

        plans = self._agree(announce)
        draft, tensors = self._agreed_start(plans)
        try:
            written = self._agree(lambda: self._write(draft, mine[0], plans[self.rank]["bytes"]))
            final = self._agree(lambda: self._commit(draft, tensors, written))[0]
        except CheckpointError:
            if self.rank == 0:
                with contextlib.suppress(OSError):
                    remove_folder(self.files, draft)
            raise
        return Path(final)

    def _check_state(self) -> None:
        try:
            check_json(self.manifest.state, "state")
        except ValueError as error:
            raise CheckpointError(one_line(error)) from error

    def _agree(self, act: Callable[[], Any]) -> list[Any]:
        """Do this rank's share of a phase, and return what all ranks returned.

        An exception on one rank, even a bug, is raised on all ranks, since the others would wait
        for a rank that left.
        """
        cause: Exception | None = None
        try:
            answer = json.dumps({"value": act()})
        except Exception as error:
            cause = error
            kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
            answer = json.dumps({"error": kind + one_line(error)})
        answers = [json.loads(text) for text in self.gather(answer)]
        failed = [(rank, a["error"]) for rank, a in enumerate(answers) if "error" in a]
        if failed:
            rank, problem = failed[0]
            by = f" on rank {rank}" if len(answers) > 1 else ""
            more = f" (and on {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
            raise CheckpointError(
                f"step {self.manifest.step} not saved{by}: {problem}{more}"
            ) from cause
        return [a["value"] for a in answers]

    def _agreed_start(self, plans: list[Any]) -> tuple[Path, dict[str, TensorRecord]]:
        tensors: dict[str, TensorRecord] = {}

        def start() -> str | None:
            if self.rank != 0:
                return None
            tensors.update(merge(plans))
            return str(self._begin(sum(plan["bytes"] for plan in plans)))

        return Path(self._agree(start)[0]), tensors

    def _begin(self, need: int) -> Path:
        make_folder(self.files, self.directory)
        with failing_as(self.directory, "remove the remains of an earlier save in"):
            for name in self.files.entries(self.directory):
                if not _LEFTOVER.fullmatch(name):
                    continue
                leftover = self.directory / name
                if leftover.is_dir() and not leftover.is_symlink():
                    remove_folder(self.files, leftover)
                else:
                    self.files.unlink(leftover)
        with failing_as(self.directory, "measure the free space of"):
            have = self.files.free(self.directory)
        if need > have:
            raise CheckpointError(
                f"{self.directory}: no space: need {need} bytes, have {have}; free some space"
            )
        draft = self.directory / f"{step_name(self.manifest.step)}.tmp-{secrets.token_hex(4)}"
        with failing_as(draft, "make the folder"):
            self.files.mkdir(draft)
        return draft

    def _write(self, draft: Path, part: RankWrites, size: int) -> dict[str, Any]:
        if not part.items:
            return {}
        if not draft.is_dir():
            raise CheckpointError(
                f"{draft}: rank 0 made it, rank {self.rank} does not see it; checkpoints must lie "
                f"on a disk that all ranks share"
            )
        name = file_name(self.rank)
        record = write_file(self.files, draft / name, chunks(in_order(part.items)), size)
        return {name: vars(record)}

    def _commit(
        self, draft: Path, tensors: dict[str, TensorRecord], written: list[dict[str, Any]]
    ) -> str | None:
        if self.rank != 0:
            return None
        records = {name: FileRecord(**r) for files in written for name, r in files.items()}
        data = memoryview(dump(replace(self.manifest, files=records, tensors=tensors)))
        write_file(self.files, draft / MANIFEST_NAME, [data], len(data))
        sync_folder(self.files, draft)
        final = self.directory / step_name(self.manifest.step)
        if not self._stands(draft, final):
            self._take_place(draft, final)
            sync_folder(self.files, self.directory)
        try:
            nonce = draft.name.rpartition("-")[2]
            replace_text(self.files, self.directory / LATEST, f"{final.name}\n", nonce)
        except CheckpointError as error:
            self.log(f"{final} is saved, but the hint at it is not: {error}")
        return str(final)

    def _stands(self, draft: Path, final: Path) -> bool:
        """Return whether the same bytes are committed already; the draft is then removed."""
        try:
            if self._manifest_bytes(final) != self._manifest_bytes(draft):
                return False
            verify_folder(final, files=self.files)
        except CheckpointError:
            return False
        with failing_as(draft, "remove"):
            remove_folder(self.files, draft)
        return True

    def _manifest_bytes(self, folder: Path) -> bytes:
        with opened(self.files, folder / MANIFEST_NAME) as (descriptor, size):
            return read_bytes(self.files, descriptor, min(size, MANIFEST_LIMIT))

    def _take_place(self, draft: Path, final: Path) -> None:
        aside = None
        if final.exists() or final.is_symlink():
            try:
                verify_folder(final, files=self.files)
                kind = "replaced"
            except NewerFormat:
                kind = "replaced"
            except CheckpointError as error:
                self.log(f"damaged: {error}")
                kind = "damaged"
            aside = set_aside(self.files, final, kind)
            self.log(f"{final.name} existed already and is now {aside.name}")
        with failing_as(draft, f"rename to {final.name}"):
            try:
                self.files.rename(draft, final)
            except OSError:
                if aside is not None:
                    with contextlib.suppress(OSError):
                        self.files.rename(aside, final)
                raise


def set_aside(files: Files, folder: Path, kind: str) -> Path:
    """Rename a step folder to the first free `NAME.kind-N`; nothing is deleted."""
    number = 1
    while (target := folder.with_name(f"{folder.name}.{kind}-{number}")).exists():
        number += 1
    with failing_as(folder, f"rename to {target.name}"):
        files.rename(folder, target)
    sync_folder(files, folder.parent)
    return target


def merge(plans: Sequence[Mapping[str, Any]]) -> dict[str, TensorRecord]:
    """Merge the tensors of a step from the plans of all ranks.

    Raises `CheckpointError` if ranks disagree, or if an entry of a tensor is written by two ranks
    or by none.
    """
    tensors: dict[str, TensorRecord] = {}
    first: dict[str, int] = {}
    for rank, plan in enumerate(plans):
        if plan["step"] != plans[0]["step"]:
            raise CheckpointError(
                f"rank {rank} saves step {plan['step']}, rank 0 step {plans[0]['step']}"
            )
        for name, document in plan["tensors"].items():
            record = tensor_from_json(document, f"tensors[{show(name)}]")
            known = tensors.setdefault(name, record)
            if first.setdefault(name, rank) == rank:
                continue
            if replace(known, slices=()) != replace(record, slices=()):
                raise CheckpointError(
                    f"tensors[{show(name)}]: {record.dtype} {list(record.shape)} on rank {rank} "
                    f"differs from {known.dtype} {list(known.shape)} on rank {first[name]}"
                )
            tensors[name] = replace(known, slices=known.slices + record.slices)
    try:
        check_tensors(tensors)
    except ValueError as error:
        raise CheckpointError(one_line(error)) from error
    return tensors
