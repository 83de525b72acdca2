"""What a step consists of, and its one description on disk: `manifest.json`.

The file is JSON whose first line holds the SHA-256 of all bytes after that line, so that no bit of
it can change unseen; that first line stays as it is in every future version.

Nothing here imports torch or numpy.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.checkpoint.strict import (
    fields,
    integer,
    named,
    one_line,
    show,
    strict_json,
    text,
)
from megatron.checkpoint.tensors import (
    TensorRecord,
    check_tensors,
    tensor_from_json,
    tensor_to_json,
)
from megatron.errors import CheckpointError

FORMAT = "sparsetron-checkpoint"
VERSION = 2
MANIFEST_NAME = "manifest.json"
MANIFEST_LIMIT = 256 * 2**20
"""Bytes. A manifest of 1024 ranks and 600 tensors takes about 90 MB."""

_KEYS = ("sha256", "format", "version", "step", "state", "world", "packages", "files", "tensors")
_SIGNATURE = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n')
_SIGNATURE_BYTES = 79
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,100}\.safetensors")


class NewerFormat(CheckpointError):
    """The checkpoint is whole but written by a later version: no reason to set it aside."""


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and lower-case hex SHA-256 of a file of the step folder."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything about a step but the numbers in its tensors.

    `state` is the caller's JSON object. `world` are named counts, `size` (ranks) among them.
    """

    step: int
    state: dict[str, Any]
    world: dict[str, int]
    packages: dict[str, str] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    tensors: dict[str, TensorRecord] = field(default_factory=dict)


def dump(manifest: Manifest) -> bytes:
    """Bytes of `manifest.json`, whose state has passed `check_json`. Raises `CheckpointError` where
    a reader would refuse them."""
    blocks = {
        "format": _line(FORMAT),
        "version": _line(VERSION),
        "step": _line(manifest.step),
        "state": _line(manifest.state),
        "world": _line(manifest.world),
        "packages": _line(manifest.packages),
        "files": _block({name: vars(file) for name, file in manifest.files.items()}),
        "tensors": _block({n: tensor_to_json(t) for n, t in manifest.tensors.items()}),
    }
    body = ",\n".join(f"{_line(key)}: {value}" for key, value in blocks.items()) + "}\n"
    data = sign(body.encode())
    if len(data) > MANIFEST_LIMIT:
        raise CheckpointError(f"{MANIFEST_NAME}: {len(data)} bytes, the limit is {MANIFEST_LIMIT}")
    parse(data, MANIFEST_NAME)
    return data


def sign(body: bytes) -> bytes:
    """Put the signature line before the rest of a manifest."""
    return b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",\n' + body


def parse(data: bytes, source: str) -> Manifest:
    """Read the bytes of a manifest; `source` names it in errors.

    Raises `CheckpointError`, one line with the key at fault: wrong signature, type, range or name,
    unknown, missing or duplicate keys, a non-finite number, slices that overlap or leave a hole.
    Raises `NewerFormat` for a version this code does not know.
    """
    signature = _SIGNATURE.match(data)
    if signature is None:
        raise CheckpointError(f"{source}: does not begin with the signature line of a manifest")
    if hashlib.sha256(data[_SIGNATURE_BYTES:]).hexdigest().encode() != signature[1]:
        raise CheckpointError(f"{source}: damaged: its bytes do not have the SHA-256 it states")
    try:
        return _manifest(strict_json(data), source)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source}: {one_line(error)}") from error


def _manifest(document: Any, source: str) -> Manifest:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"format: must be {FORMAT!r}")
    version = integer(document.get("version"), "version", low=1)
    if version > VERSION:
        raise NewerFormat(
            f"{source}: written in format version {version}, this program reads up to version "
            f"{VERSION}; use a newer sparsetron"
        )
    fields(document, "manifest", _KEYS)
    if not isinstance(document["state"], dict):
        raise ValueError("state: must be an object")
    world = named(document["world"], "world", integer)
    if world.get("size", 0) < 1:
        raise ValueError("world.size: must be 1 or more")
    manifest = Manifest(
        step=integer(document["step"], "step"),
        state=document["state"],
        world=world,
        packages=named(document["packages"], "packages", text),
        files=named(document["files"], "files", _file_record),
        tensors=named(document["tensors"], "tensors", tensor_from_json),
    )
    for name in manifest.files:
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"files[{show(name)}]: must be a plain name ending in .safetensors")
    check_tensors(manifest.tensors)
    for name, tensor in manifest.tensors.items():
        for number, part in enumerate(tensor.slices):
            if part.file not in manifest.files:
                raise ValueError(
                    f"tensors[{show(name)}].slices[{number}].file: {show(part.file)} is not listed"
                )
    return manifest


def _line(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def _block(entries: Mapping[str, Any]) -> str:
    lines = ",\n".join(f" {_line(key)}: {_line(value)}" for key, value in entries.items())
    return "{\n" + lines + "\n}"


def _file_record(value: Any, where: str) -> FileRecord:
    fields(value, where, ["bytes", "sha256"])
    digest = text(value["sha256"], f"{where}.sha256")
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise ValueError(f"{where}.sha256: must be 64 hex digits, not {show(digest)}")
    return FileRecord(integer(value["bytes"], f"{where}.bytes"), digest)
