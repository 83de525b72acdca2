"""Verification of step folders, and recognition of other programs' checkpoints.

Imports neither torch nor numpy.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron.checkpoint.format import (
    MANIFEST_LIMIT,
    MANIFEST_NAME,
    Manifest,
    SliceRecord,
    TensorRecord,
    one_line,
    parse,
    show,
)
from megatron.checkpoint.io import (
    CHUNK,
    FILES,
    Files,
    StoredTensor,
    failing_as,
    opened,
    parse_header,
    read_bytes,
)
from megatron.errors import CheckpointError

_THREADS = 4
"""Number of hashing threads; more would only wait for the disk."""


def read_manifest(folder: Path, *, files: Files = FILES) -> Manifest:
    """Read the manifest of a step folder. Raises `CheckpointError` naming file and key."""
    path = folder / MANIFEST_NAME
    with failing_as(folder, "read"):
        if not path.exists():
            missing = f"has no {MANIFEST_NAME}" if folder.exists() else "does not exist"
            raise CheckpointError(f"{folder}: {alien(folder) or missing}")
    with opened(files, path) as (descriptor, size):
        if size > MANIFEST_LIMIT:
            raise CheckpointError(f"{path}: {size} bytes, the limit is {MANIFEST_LIMIT}")
        return parse(read_bytes(files, descriptor, size), str(path))


def verify_folder(
    folder: Path,
    *,
    hashes: bool = True,
    share: tuple[int, int] = (0, 1),
    files: Files = FILES,
) -> Manifest:
    """Check the contents of a step folder against its manifest, and return the manifest.

    Checked are the names of all files, their sizes, their headers against the slices, and with
    `hashes` their SHA-256. With `share`, a rank and the number of ranks, only that rank's files are
    opened; all ranks together check every file once. Names that begin with a dot are ignored, since
    disks and desktops create them. Raises `CheckpointError` naming file and key.
    """
    manifest = read_manifest(folder, files=files)
    with failing_as(folder, "list"):
        present = {name for name in files.entries(folder) if not name.startswith(".")}
    for name in sorted(present - manifest.files.keys() - {MANIFEST_NAME}):
        raise CheckpointError(f"{folder / name}: is not listed in {MANIFEST_NAME}")
    slices = slices_by_file(manifest)
    rank, ranks = share
    # Descending, so that ranks get about the same number of bytes.
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].bytes, name))
    names = sorted(by_size[rank::ranks])

    def check(name: str) -> str | None:
        try:
            header = read_header(folder, name, manifest, files=files)
            check_header(folder / name, header, slices.get(name, {}))
            if hashes:
                _check_hash(folder / name, manifest.files[name].sha256, files)
        except CheckpointError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(_THREADS) as pool:
        problems = [problem for problem in pool.map(check, names) if problem]
    if problems:
        more = f" (and {len(problems) - 1} more files)" if len(problems) > 1 else ""
        raise CheckpointError(problems[0] + more)
    return manifest


def slices_by_file(manifest: Manifest) -> dict[str, dict[str, tuple[TensorRecord, SliceRecord]]]:
    """Return, for each file, the records of its keys by the manifest."""
    result: dict[str, dict[str, tuple[TensorRecord, SliceRecord]]] = {}
    for record in manifest.tensors.values():
        for part in record.slices:
            result.setdefault(part.file, {})[part.key] = (record, part)
    return result


def read_header(
    folder: Path, name: str, manifest: Manifest, *, files: Files = FILES
) -> dict[str, StoredTensor]:
    """Return the header of a file of the folder, after checking its size.

    Raises `CheckpointError`.
    """
    path = folder / name
    with opened(files, path) as (descriptor, size):
        if size != manifest.files[name].bytes:
            raise CheckpointError(
                f"{path}: has {size} bytes, {MANIFEST_NAME} says {manifest.files[name].bytes}"
            )
        try:
            length = read_bytes(files, descriptor, 8)
            return parse_header(length, lambda n: read_bytes(files, descriptor, n), size)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: {one_line(error)}") from error


def check_header(
    path: Path, header: dict[str, StoredTensor], slices: dict[str, tuple[TensorRecord, SliceRecord]]
) -> None:
    """Raise `CheckpointError` unless a file's header agrees with its slices by the manifest."""
    for key in sorted(header.keys() ^ slices.keys()):
        where = "missing, though" if key in slices else "not"
        raise CheckpointError(f"{path}: key {show(key)} is {where} listed in {MANIFEST_NAME}")
    for key, (record, part) in slices.items():
        stored, (first, last) = header[key], part.range
        count = math.prod(stored.shape)
        if record.dtype == "BOOL":
            fits = stored.dtype == "U8" and count == (last - first + 7) // 8
        elif record.mask is not None:
            fits = stored.dtype == record.dtype and count <= last - first
        else:
            fits = stored.dtype == record.dtype and count == last - first
        if not fits:
            raise CheckpointError(
                f"{path}: key {show(key)} is {stored.dtype} with {count} entries, which is not "
                f"{record.dtype} for {last - first} entries as listed in {MANIFEST_NAME}"
            )


def _check_hash(path: Path, expected: str, files: Files) -> None:
    digest = hashlib.sha256()
    with opened(files, path) as (descriptor, _):
        while piece := files.read(descriptor, CHUNK):
            digest.update(piece)
    if digest.hexdigest() != expected:
        raise CheckpointError(
            f"{path}: damaged: SHA-256 is {digest.hexdigest()}, {MANIFEST_NAME} says {expected}"
        )


def open_to_all(folder: Path) -> str | None:
    """Return why a folder cannot be trusted, with the way out; else None.

    The reason is that another user owns the folder, and anyone may write into it.
    """
    status = os.stat(folder)
    if status.st_uid in (0, os.geteuid()) or not status.st_mode & stat.S_IWOTH:
        return None
    return (
        f"belongs to user {status.st_uid} and anyone may write into it; use a folder of your own, "
        "or have it closed with: chmod o-w"
    )


def alien(path: Path) -> str | None:
    """Return why `path` is no checkpoint of this program, with the way out; None if it may be.

    Only names and the first bytes are read: loading such formats can run code.
    """
    kind = None
    if path.is_file():
        with opened(FILES, path) as (descriptor, _):
            start = read_bytes(FILES, descriptor, 4)
        if start.startswith(b"PK\x03\x04"):
            kind = "a zip or torch.save file"
        elif start[:1] == b"\x80" or path.suffix in {".pt", ".pth", ".bin", ".pkl", ".ckpt"}:
            kind = "a pickle"
        else:
            kind = "a file"
    elif path.is_dir():
        kinds = {
            ".metadata": "a torch.distributed.checkpoint folder",
            "latest_checkpointed_iteration.txt": "a Megatron-LM checkpoint",
            "pytorch_model.bin": "a Hugging Face model",
            "model.safetensors": "a Hugging Face model",
            "model.safetensors.index.json": "a Hugging Face model",
            "latest_universal": "a DeepSpeed checkpoint",
        }
        kind = next((text for name, text in kinds.items() if (path / name).exists()), None)
    if kind is None:
        return None
    return (
        f"is {kind}, not a checkpoint of this program, and is not opened; give a folder with "
        f"{MANIFEST_NAME} or the run folder above it"
    )
