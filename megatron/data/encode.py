"""One batch of raw records to tokens: what a worker does, and every reason a record is bad."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed import optimal_dtype
from megatron.data.raw_text import MAX_DOCUMENT_BYTES
from megatron.data.records import Batch, Oversized, Payload
from megatron.data.tokenizer import Tokenizer, build_tokenizer
from megatron.errors import DataError


@dataclass(frozen=True, kw_only=True)
class TokenizerChoice:
    """Arguments of `build_tokenizer`, small enough to send to a worker; the user's own flags."""

    type: str
    vocab_file: str | None = None
    merge_file: str | None = None
    model: str | None = None
    vocab_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """What turns a record into tokens: the keys to take, the tokenizer, an end mark or none."""

    keys: tuple[str, ...]
    tokenizer: TokenizerChoice
    append_eod: bool


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """The good documents of a batch, one array and one list of lengths per key, and the bad."""

    tokens: list[NDArray]
    lengths: list[list[int]]  # 0 = an empty document
    bad: list[tuple[int, str]]  # line or row number, reason
    text_bytes: int


def encode(batch: Batch, options: EncodeOptions) -> Encoded:
    """Tokens of a batch; a record with one bad key is left out under every key."""
    tokenizer = load_tokenizer(options.tokenizer)
    dtype = optimal_dtype(tokenizer.vocab_size)
    ids: list[list[NDArray]] = [[] for _ in options.keys]
    bad: list[tuple[int, str]] = []
    text_bytes = 0
    for number, payload in batch.records:
        try:
            texts = extract_texts(payload, batch.kind, options.keys)
            found = [tokenizer.encode(text) for text in texts]
        except DataError as error:
            bad.append((number, str(error)))
            continue
        text_bytes += len(payload) if isinstance(payload, bytes) else sum(map(len, texts))
        for key, document in enumerate(found):
            if document and options.append_eod:
                document.append(tokenizer.eod)
            ids[key].append(np.array(document, dtype=dtype))
    return Encoded(
        tokens=[np.concatenate([np.empty(0, dtype), *part]) for part in ids],
        lengths=[[len(document) for document in part] for part in ids],
        bad=bad,
        text_bytes=text_bytes,
    )


@functools.cache
def load_tokenizer(choice: TokenizerChoice) -> Tokenizer:
    """The tokenizer of a choice, read once per process (a worker gets a choice per batch)."""
    return build_tokenizer(
        choice.type,
        vocab_file=choice.vocab_file,
        merge_file=choice.merge_file,
        model=choice.model,
        vocab_size=choice.vocab_size,
        hub=True,
    )


def extract_texts(payload: Payload, kind: str, keys: Sequence[str]) -> list[str]:
    """The text under each key of a record; DataError with the reason if one is not there."""
    if isinstance(payload, Oversized):
        raise DataError(
            f"{payload.size} bytes or more; a document may have {MAX_DOCUMENT_BYTES} (of a plain "
            "text file, --text-unit paragraph or line makes smaller ones)"
        )
    if isinstance(payload, tuple):
        values = dict(zip(keys, payload, strict=True))
    else:
        if b"\0" in payload:
            raise DataError("NUL byte; not text")
        try:
            text = payload.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"not UTF-8 at byte {error.start + 1}") from error
        values = {keys[0]: text} if kind == "text" else _parse(text)
    texts: list[str] = []
    for key in keys:
        if key not in values:
            raise DataError(_missing(key, values))
        value = values[key]
        if not isinstance(value, str):
            shown = "null" if value is None else type(value).__name__
            raise DataError(f"{key!r} is {shown}; wanted a string")
        if "\0" in value:
            raise DataError(f"{key!r} has a NUL character; not text")
        texts.append(value)
    return texts


def _missing(key: str, values: Mapping[str, object]) -> str:
    texts = [other for other, value in values.items() if isinstance(value, str)]
    hint = f"; give --json-keys {texts[0]}" if len(texts) == 1 else ""
    return f"no key {key!r}; it has {', '.join(map(repr, values)) or 'none'}{hint}"


def _parse(line: str) -> dict[str, object]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        raise DataError(f"not JSON: {what} at column {error.colno}") from error
    except (RecursionError, ValueError) as error:
        raise DataError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise DataError(f"a JSON {kind}; wanted one object a line, {{...}}")
    return value
