"""Files of raw token ids, as nanoGPT (`train.bin`) and llm.c write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed_dataset import IndexedDatasetWriter, optimal_dtype
from megatron.data.preprocess import PreprocessCounts, PreprocessResult
from megatron.data.tokenizer import Tokenizer
from megatron.errors import DataError

TOKEN_DTYPES = ("uint16", "uint32", "int32")
_MAGIC, _HEADER_BYTES = 20240520, 1024
"""First word of a file of llm.c, and the length of the header before its tokens."""
_CHUNK = 1 << 22


def convert_tokens(
    files: Iterable[Path],
    *,
    dtype: str,
    tokenizer: Tokenizer,
    prefix: str,
    watch: Callable[[PreprocessCounts], None],
) -> PreprocessResult:
    """Write a pair with the tokens of flat files, whose documents end with the tokenizer's mark.

    The tokens after the last mark of a file are a document, too. `watch` is called after each
    document.

    Args:
        files: Flat arrays of little-endian ids, with the header of llm.c or without.
        dtype: One of `TOKEN_DTYPES`.
        tokenizer: The tokenizer that made the ids.
        prefix: Prefix of the pair.
        watch: Receives the progress.

    Raises:
        DataError: A file cannot be read, is not a whole number of ids, or has an id that the
            tokenizer lacks.
    """
    counts, before = PreprocessCounts(), 0
    with IndexedDatasetWriter(prefix, optimal_dtype(tokenizer.vocab_size)) as writer:
        for path in files:
            tokens = _tokens(path, np.dtype(dtype).newbyteorder("<"))
            for start, end in _documents(path, tokens, tokenizer):
                writer.add_document(tokens[start:end])
                counts.documents += 1
                counts.tokens += end - start
                counts.position = before + end * tokens.itemsize
                watch(counts)
            before += path.stat().st_size
        if not counts.documents:
            raise DataError("--input: holds no token; nothing was written")
        writer.finish()
        writer.close(tokenizer=tokenizer.describe())
    return PreprocessResult(prefixes=(prefix,), dtype=writer.dtype, counts=counts)


def _tokens(path: Path, dtype: np.dtype) -> NDArray:
    """Map the ids of a file."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            word = np.frombuffer(file.read(4), dtype="<u4")
        begin = _HEADER_BYTES if size >= _HEADER_BYTES and word.tolist() == [_MAGIC] else 0
        if (size - begin) % dtype.itemsize:
            raise DataError(f"{path}: {size} bytes are not a whole number of {dtype} ids")
        if size == begin:
            return np.empty(0, dtype)
        return np.memmap(path, dtype=dtype, mode="r", offset=begin).view(np.ndarray)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read: {reason}") from error


def _documents(path: Path, tokens: NDArray, tokenizer: Tokenizer) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each document, its mark included."""
    start = 0
    for first in range(0, len(tokens), _CHUNK):
        chunk = tokens[first : first + _CHUNK]
        low, high = int(chunk.min()), int(chunk.max())
        if low < 0 or high >= tokenizer.vocab_size:
            raise DataError(
                f"{path}: id {low if low < 0 else high} among tokens {first} to "
                f"{first + len(chunk)}; the tokenizer has ids up to {tokenizer.vocab_size - 1}; "
                "are the ids of another type (--token-dtype)?"
            )
        for end in (np.flatnonzero(chunk == tokenizer.eod) + first + 1).tolist():
            yield start, end
            start = end
    if start < len(tokens):
        yield start, len(tokens)
