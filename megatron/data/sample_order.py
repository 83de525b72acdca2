"""Which tokens sample k holds: Megatron's document, sample and shuffle indices, built by NumPy.

Documents of all epochs are shuffled and laid end to end; the stream is cut every `sequence_length`
tokens, each sample taking one more than that, so that neighbours share a token; the samples are
shuffled again. The legacy `RandomState` and the order of its two uses are part of the format: they
make a seed mean the same batches as in Megatron (megatron/core/datasets/gpt_dataset.py).

    documents   |--d7--|-d2-|-----d9-----|d0|---d4---|        document_index = 7 2 9 0 4
    samples     ^0       ^1      ^2      ^3      ^4           sample_index[i] = (place, offset)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SEPARATE_BELOW = 0.80
"""The last epoch is shuffled apart if less than this share of its samples is wanted."""

_BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """How often a set of documents is read, and what that yields."""

    tokens_per_epoch: int
    sequence_length: int
    epochs: int
    samples: int
    """Samples in all epochs together; at least as many as were asked for."""
    samples_before_last: int | None
    """Samples that start before the last epoch if that one is shuffled apart, else None."""


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """The three indices: sample k lies between rows r and r + 1, r = shuffle_index[k]."""

    document_index: NDArray[np.int32]  # [epochs * documents] numbers of sequences in the file
    sample_index: NDArray[np.integer]  # [samples + 1, 2] (place in document_index, offset in it)
    shuffle_index: NDArray[np.integer]  # [samples]


def plan_epochs(
    tokens_per_epoch: int, *, sequence_length: int, num_samples: int | None
) -> EpochPlan:
    """Fewest epochs that yield `num_samples` (None: one epoch); needs at least one token."""
    assert tokens_per_epoch > 0 and sequence_length > 0
    epochs = 1
    if num_samples is not None:
        epochs = max(1, -(-(num_samples * sequence_length + 1) // tokens_per_epoch))
    before_last: int | None = None
    if num_samples is not None and epochs > 1:
        before_last = ((epochs - 1) * tokens_per_epoch - 1) // sequence_length
        per_epoch = (tokens_per_epoch - 1) // sequence_length
        if num_samples - before_last >= int(SEPARATE_BELOW * per_epoch):
            before_last = None
    return EpochPlan(
        tokens_per_epoch=tokens_per_epoch,
        sequence_length=sequence_length,
        epochs=epochs,
        samples=(epochs * tokens_per_epoch - 1) // sequence_length,
        samples_before_last=before_last,
    )


def expected_arrays(
    plan: EpochPlan, num_documents: int
) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and dtype of each array of a `SampleOrder`, by name: what a cached one must have."""
    places = num_documents * plan.epochs
    int32, int64 = np.iinfo(np.int32), np.dtype("<i8")
    return {
        "document_index": ((places,), np.dtype("<i4")),
        "sample_index": (
            (plan.samples + 1, 2),
            # Offsets fit int32, as lengths do; only the places can outgrow it.
            np.dtype("<i4") if places <= int32.max else int64,
        ),
        "shuffle_index": (
            (plan.samples,),
            np.dtype("<u4") if plan.samples < np.iinfo(np.uint32).max - 1 else int64,
        ),
    }


def build_order(
    sequence_lengths: NDArray[np.int32], documents: range, *, plan: EpochPlan, seed: int
) -> SampleOrder:
    """The order of `documents` (numbers of sequences in the file) under a plan and a seed.

    Peak memory is the result, the lengths and numbers of the documents once, and some 50 MB.
    Of the seed the low 32 bits count.
    """
    arrays = expected_arrays(plan, len(documents))
    rng = np.random.RandomState(seed % 2**32)
    numbers = np.arange(documents.start, documents.stop, dtype=np.int32)
    places = np.tile(numbers, plan.epochs)
    apart = plan.samples_before_last
    _shuffle(places, None if apart is None else len(places) - len(documents), rng)
    lengths = np.array(sequence_lengths[documents.start : documents.stop])
    rows = np.empty(*arrays["sample_index"])
    _cut_into_samples(rows, lengths, places, documents.start, plan.sequence_length)
    shuffle = np.arange(plan.samples, dtype=arrays["shuffle_index"][1])
    _shuffle(shuffle, apart, rng)
    return SampleOrder(document_index=places, sample_index=rows, shuffle_index=shuffle)


def _shuffle(values: NDArray, cut: int | None, rng: np.random.RandomState) -> None:
    """Shuffle in place, the parts before and from `cut` apart; one random stream for both."""
    if cut is None:
        rng.shuffle(values)
        return
    rng.shuffle(values[:cut])
    rng.shuffle(values[cut:])


def _cut_into_samples(
    rows: NDArray, lengths: NDArray, places: NDArray, first: int, sequence_length: int
) -> None:
    """Fill `rows`: sample i starts at token i * sequence_length, in the document that holds it."""
    # Row 0 names place 0 even if that document is empty; later rows never name an empty one.
    rows[0] = 0
    sample, before = 1, 0
    for start in range(0, len(places), _BLOCK):
        part = lengths[places[start : start + _BLOCK] - first]
        ends = np.cumsum(part, dtype=np.int64)
        total = int(ends[-1])
        stop = min(len(rows), (before + total - 1) // sequence_length + 1)
        while sample < stop:
            upto = min(stop, sample + _BLOCK)
            tokens = np.arange(sample, upto, dtype=np.int64) * sequence_length - before
            found = np.searchsorted(ends, tokens, side="right")
            rows[sample:upto, 0] = start + found
            rows[sample:upto, 1] = tokens - (ends[found] - part[found])
            sample = upto
        before += total
    assert sample == len(rows), (sample, len(rows))
