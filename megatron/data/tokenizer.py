"""Text to token ids and back: one small protocol, six tokenizers, and how data names its own.

Text is only text to every tokenizer here: an end mark spelled out inside a document stays ordinary
characters. The end mark comes from `eod` alone. Llama2Tokenizer alone puts a begin mark in front,
because Megatron-LM's does.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatron.config.values import UNREAD_TOKENIZERS
from megatron.data.local_file import one_line, stat_of
from megatron.data.sidecar import MAX_IDS
from megatron.data.subword import (
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    Llama2Tokenizer,
    SentencePieceTokenizer,
    describe,
    unencodable,
)
from megatron.errors import ConfigError, DataError


class Tokenizer(Protocol):
    """What the rest of the stack knows of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Largest id plus one, the end mark included and padding not."""
        ...

    @property
    def eod(self) -> int:
        """Id that ends a document."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without an end mark; DataError if it cannot be represented."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; bytes that are no UTF-8 (a cut character) become U+FFFD."""
        ...

    def fingerprint(self) -> str:
        """sha256 (hex) over everything that determines the ids, and nothing else."""
        ...

    def describe(self) -> dict[str, object]:
        """Description for the sidecar of a data set; `tokenizer_from_sidecar` reverses it."""
        ...


class ByteTokenizer:
    """The 256 bytes of UTF-8 as ids 0 to 255, and 256 as the end mark. Needs no file."""

    vocab_size = 257
    eod = 256

    def encode(self, text: str) -> list[int]:
        try:
            return list(text.encode())
        except UnicodeEncodeError as error:
            raise unencodable(text) from error

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; end marks, which no byte stands for, are left out."""
        return bytes(id for id in ids if id != self.eod).decode(errors="replace")

    def fingerprint(self) -> str:
        return hashlib.sha256(b"bytes 0-255, eod 256").hexdigest()

    def describe(self) -> dict[str, object]:
        return describe(
            "ByteTokenizer",
            vocab_size=self.vocab_size,
            eod=self.eod,
            fingerprint=self.fingerprint(),
            files={},
        )


class NullTokenizer:
    """Text that already is ids: whole numbers set apart by spaces.

    As in Megatron-LM, `ids` is the number of ordinary ids, the end mark is `ids` itself and
    `vocab_size` is one more.
    """

    def __init__(self, ids: int) -> None:
        self.vocab_size = ids + 1
        self.eod = ids

    def encode(self, text: str) -> list[int]:
        numbers: list[int] = []
        for word in text.split():
            plain = len(word) < 20 and word.isascii() and word.isdigit()
            if not plain or int(word) >= self.vocab_size:
                raise DataError(
                    f"text: {word[:20]!r} is not a token id; NullTokenizer takes whole numbers "
                    f"from 0 to {self.vocab_size - 1} set apart by spaces"
                )
            numbers.append(int(word))
        return numbers

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(id) for id in ids)

    def fingerprint(self) -> str:
        return hashlib.sha256(f"null {self.vocab_size}".encode()).hexdigest()

    def describe(self) -> dict[str, object]:
        return describe(
            "NullTokenizer",
            vocab_size=self.vocab_size,
            eod=self.eod,
            fingerprint=self.fingerprint(),
            files={},
        )


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """How a type is built: `needs` maps arguments of `build_tokenizer` to their flags."""

    needs: Mapping[str, str]
    build: Callable[..., Tokenizer]


_VOCAB_SIZE = "--vocab-size"
_KINDS: dict[str, _Kind] = {
    "GPT2BPETokenizer": _Kind(
        needs={"vocab_file": "--vocab-file", "merge_file": "--merge-file"}, build=GPT2BPETokenizer
    ),
    "SentencePieceTokenizer": _Kind(
        needs={"model": "--tokenizer-model"}, build=SentencePieceTokenizer
    ),
    "Llama2Tokenizer": _Kind(needs={"model": "--tokenizer-model"}, build=Llama2Tokenizer),
    "HuggingFaceTokenizer": _Kind(needs={"model": "--tokenizer-model"}, build=HuggingFaceTokenizer),
    "ByteTokenizer": _Kind(needs={}, build=ByteTokenizer),
    "NullTokenizer": _Kind(needs={"ids": _VOCAB_SIZE}, build=NullTokenizer),
}

TOKENIZER_TYPES = tuple(_KINDS)
"""Names that `--tokenizer-type` takes."""


def build_tokenizer(
    type: str,
    *,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    model: str | None = None,
    vocab_size: int | None = None,
    hub: bool = False,
) -> Tokenizer:
    """The tokenizer of a type name and the files it needs.

    A `model` that is the name of a hub model is downloaded with `hub` alone, which a caller gives
    where the user's own flag names the model; a name that a file brought may not start a download.
    ConfigError: unknown type, a flag missing, a flag that the type does not take, an absent
    package, or a `vocab_size` that is not the tokenizer's. DataError: a file missing or damaged.
    """
    kind = _KINDS.get(type)
    if kind is None:
        raise ConfigError(f"--tokenizer-type: unknown {type!r}{_nearest(type)}")
    given = {"vocab_file": vocab_file, "merge_file": merge_file, "model": model, "ids": vocab_size}
    flags = {
        "vocab_file": "--vocab-file",
        "merge_file": "--merge-file",
        "model": "--tokenizer-model",
    }
    missing = [flag for name, flag in kind.needs.items() if given[name] is None]
    if missing:
        raise ConfigError(f"--tokenizer-type {type}: needs {' and '.join(missing)}")
    for name, flag in flags.items():
        if given[name] is not None and name not in kind.needs:
            raise ConfigError(
                f"{flag}: given, but {type} reads {_takes(kind)}; remove it or change "
                "--tokenizer-type"
            )
    if vocab_size is not None and vocab_size < 1:
        raise ConfigError(f"{_VOCAB_SIZE}: {vocab_size}; wanted at least 1")
    if vocab_size is not None and vocab_size >= MAX_IDS:
        raise ConfigError(f"{_VOCAB_SIZE}: {vocab_size}; wanted less than {MAX_IDS}")
    arguments: dict[str, object] = {name: given[name] for name in kind.needs}
    if type == "HuggingFaceTokenizer":
        arguments["hub"] = hub
    tokenizer = kind.build(**arguments)
    if "ids" not in kind.needs and vocab_size not in (None, tokenizer.vocab_size):
        raise ConfigError(
            f"{_VOCAB_SIZE}: {vocab_size}, but {type} has {tokenizer.vocab_size} entries; leave "
            "the flag out"
        )
    return tokenizer


def tokenizer_from_sidecar(
    info: Mapping[str, object], *, folder: str | Path | None = None
) -> Tokenizer:
    """Rebuild the tokenizer that `Tokenizer.describe()` described, and prove it the same.

    A file that is no longer at its recorded place is looked for by name in `folder` (where the
    data lies). DataError if the description is no such thing, a file has gone, or the fingerprint
    differs.
    """
    kind = info.get("type")
    files = info.get("files", {})
    fingerprint = info.get("fingerprint")
    known = isinstance(kind, str) and kind in _KINDS
    if not known or not isinstance(files, Mapping) or not isinstance(fingerprint, str):
        raise DataError(
            f"tokenizer description: wanted a known type ({', '.join(TOKENIZER_TYPES)}), files and "
            f"a fingerprint, found type {kind!r}; give --tokenizer-type and its files"
        )
    assert isinstance(kind, str)
    arguments: dict[str, object] = {
        str(name): _locate(str(path), folder, kind) for name, path in files.items()
    }
    if kind == "NullTokenizer":
        size = info.get("vocab_size")
        if type(size) is not int or not 2 <= size <= MAX_IDS:
            raise DataError(
                f"tokenizer description: vocab_size is {one_line(repr(size))}; wanted 2 to "
                f"{MAX_IDS}"
            )
        arguments["ids"] = size - 1
    if set(arguments) != set(_KINDS[kind].needs):
        raise DataError(
            f"tokenizer description: {kind} wants files {list(_KINDS[kind].needs)}, found "
            f"{sorted(files)}; give --tokenizer-type and its files"
        )
    tokenizer = _KINDS[kind].build(**arguments)
    if tokenizer.fingerprint() != fingerprint:
        places = ", ".join(str(arguments[name]) for name in files) or kind
        raise DataError(
            f"{places}: not the tokenizer that made the data (fingerprint "
            f"{tokenizer.fingerprint()[:12]}, the data's is {fingerprint[:12]}); find the file it "
            "was made with or make the data again"
        )
    return tokenizer


def _locate(recorded: str, folder: str | Path | None, kind: str) -> str:
    path = Path(recorded)
    # A relative name is a hub name, which the tokenizer looks for on this machine alone.
    if not path.is_absolute() or stat_of(path) is not None:
        return recorded
    if folder is not None and stat_of(Path(folder) / path.name) is not None:
        return str(Path(folder) / path.name)
    raise DataError(
        f"{recorded}: the tokenizer file that made the data is gone or has moved; put it back, or "
        f"beside the data, or give --tokenizer-type {kind} with its new place"
    )


def _nearest(type: str) -> str:
    if type in UNREAD_TOKENIZERS:
        return f"; {UNREAD_TOKENIZERS[type]}"
    known = {name.lower(): name for name in TOKENIZER_TYPES}
    close = difflib.get_close_matches(type.lower(), known, n=1, cutoff=0.4)
    meant = f"; did you mean {known[close[0]]}?" if close else ";"
    return f"{meant} known: {', '.join(TOKENIZER_TYPES)}"


def _takes(kind: _Kind) -> str:
    return " and ".join(kind.needs.values()) or "no file"
