"""The bits that a model needs for each byte of a text, a loss that no tokenizer changes.

Documents are scored as lm-evaluation-harness does (`loglikelihood_rolling`). Every token is
predicted once. The first window begins with the start of a document and predicts as many tokens as
the run's sequences have; each later window predicts the next tokens after the last token of the
window before; the last window is filled on the left with tokens that were predicted already.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.errors import DataError

if TYPE_CHECKING:
    from megatron.model.likelihood import Continuation
    from tools.evaluation.scoring import Scorer

FIGURE_NAMES = ("bits_per_byte", "nats_per_token")
WINDOWS_AT_ONCE = 1024
"""Windows whose tokens are in memory at a time, sorted by length for the batches of the model."""


def bits_per_byte(scorer: Scorer, documents: Sequence[str]) -> dict[str, Any]:
    """Return the bits per byte of all documents, the loss in nats a token, and what was counted.

    Bytes are those of the UTF-8 text. The mark that ends a document is not predicted.

    Raises:
        DataError: There is nothing to predict, or the tokenizer is not that of the model.
    """
    marked = bool(scorer.tokenizer.encode(""))  # the tokenizer begins each text with a mark
    start = [] if marked else scorer.document_start
    asked = (
        window
        for document in documents
        for window in windows([*start, *scorer.tokenizer.encode(document)], scorer.length)
    )
    nats, tokens = 0.0, 0
    while block := list(islice(asked, WINDOWS_AT_ONCE)):
        nats -= math.fsum(found.log for found in scorer.likelihoods(block))
        tokens += sum(len(one.tokens) for one in block)
    if not tokens:
        raise DataError("no document has a token to predict")
    text_bytes = sum(map(_bytes, documents))
    return {
        "documents": len(documents),
        "tokens": tokens,
        "bytes": text_bytes,
        "bits_per_byte": nats / math.log(2) / text_bytes,
        "nats_per_token": nats / tokens,
    }


def windows(sequence: Sequence[int], length: int) -> Iterator[Continuation]:
    """Yield windows of at most `length` inputs that predict each token but the first once."""
    from megatron.model.likelihood import Continuation

    for begin in range(0, len(sequence) - 1, length):
        end = min(begin + length, len(sequence) - 1)
        context = sequence[max(0, end - length) : begin + 1]
        predicted = sequence[begin + 1 : end + 1]
        yield Continuation(context=tuple(context), tokens=tuple(predicted))


def read_documents(path: Path, *, key: str, text_unit: str, limit: int | None = None) -> list[str]:
    """Return the texts of a file that `tools/preprocess_data.py` reads, at most `limit`.

    Raises:
        DataError: The file is empty, cannot be read or has a bad line.
    """
    documents = list(islice(_documents(path, key=key, text_unit=text_unit), limit))
    if not any(documents):
        raise DataError(f"{path}: holds no text")
    return documents


def _documents(path: Path, *, key: str, text_unit: str) -> Iterator[str]:
    from megatron.data.preprocess import extract_texts
    from megatron.data.raw_text import find_inputs, read_batches

    files = find_inputs([str(path)], log=lambda text: None)
    for batch in read_batches(files, keys=(key,), text_unit=text_unit):
        for number, payload in batch.records:
            try:
                (text,) = extract_texts(payload, batch.kind, (key,))
            except DataError as error:
                raise DataError(f"{batch.source}:{number}: {error}") from error
            yield text


def _bytes(text: str) -> int:
    return len(text.encode())
