"""Samples of `sequence_length + 1` tokens from one token file, in Megatron's order."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from megatron.data.index_cache import IndexCache
from megatron.data.index_file import bin_path, idx_path
from megatron.data.indexed import IndexedDataset
from megatron.data.sample_order import build_order, expected_arrays, plan_epochs
from megatron.errors import DataError

_LOOK_EVERY = 1024


class GPTDataset:
    """At least `num_samples` samples of some documents of a token file; item k is int64 [s + 1].

    `documents` are numbers of sequences in the file (Megatron splits by sequence). `num_samples`
    None is one epoch. Each read checks ids against `vocab_size` (None: unchecked): DataError naming
    id, document and offset. With a `cache` the order is kept on disk under a name that covers
    everything it depends on, size and time of the data files included.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        *,
        documents: range,
        num_samples: int | None,
        sequence_length: int,
        seed: int,
        split: str = "train",
        vocab_size: int | None = None,
        cache: IndexCache | None = None,
    ) -> None:
        self.indexed = indexed
        self.documents = documents
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self._reads = 0
        tokens = count_tokens(indexed, documents)
        if tokens < sequence_length + 1:
            raise DataError(
                f"{indexed.prefix}: {split}: a sample of seq_length {sequence_length} needs "
                f"{sequence_length + 1} tokens, had {tokens} in {len(documents)} documents"
            )
        self.plan = plan_epochs(tokens, sequence_length=sequence_length, num_samples=num_samples)

        def build() -> dict[str, NDArray]:
            order = build_order(indexed.sequence_lengths, documents, plan=self.plan, seed=seed)
            return vars(order)

        if cache is None:
            arrays = build()
        else:
            arrays = cache.get(
                {
                    "class": "GPTDataset",
                    "dataset_path": indexed.prefix,
                    "num_samples": num_samples,
                    "index_split": split,
                    "random_seed": seed,
                    "sequence_length": sequence_length,
                    "documents": [documents.start, documents.stop],
                    "files": _file_stamps(indexed.prefix),
                },
                folder=cache.folder(indexed.prefix, "GPTDataset"),
                kind="GPTDataset",
                split=split,
                layout=expected_arrays(self.plan, len(documents)),
                build=build,
            )
        self._document_index = arrays["document_index"]
        self._sample_index = arrays["sample_index"]
        self._shuffle_index = arrays["shuffle_index"]

    def __len__(self) -> int:
        return self.plan.samples

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        if self._reads % _LOOK_EVERY == 0:
            self.indexed.check_unchanged()
        self._reads += 1
        pieces = self._pieces(int(self._shuffle_index[index]))
        parts = [self.indexed.get(*piece) for piece in pieces]
        text = np.concatenate(parts, dtype=np.int64)  # [s + 1]
        if self.vocab_size is not None and (text.max() >= self.vocab_size or text.min() < 0):
            self._refuse(pieces, parts, self.vocab_size)
        return text

    def epochs_in(self, num_samples: int) -> float:
        """Times each token is read, on average, in the first `num_samples` samples."""
        return num_samples * self.sequence_length / self.plan.tokens_per_epoch

    def _pieces(self, row: int) -> list[tuple[int, int, int]]:
        """(sequence, offset, length) of each stretch of a sample in the file."""
        (first, start), (last, end) = self._sample_index[row : row + 2].tolist()
        sequences = self._document_index[first : last + 1].tolist()
        if first == last:
            return [(sequences[0], start, end + 1 - start)]
        lengths = self.indexed.sequence_lengths
        pieces = [(sequence, 0, int(lengths[sequence])) for sequence in sequences]
        pieces[0] = (sequences[0], start, pieces[0][2] - start)
        pieces[-1] = (sequences[-1], 0, end + 1)
        return pieces

    def _refuse(
        self, pieces: list[tuple[int, int, int]], parts: list[NDArray], vocab_size: int
    ) -> None:
        for (sequence, offset, _), part in zip(pieces, parts, strict=True):
            values = part.astype(np.int64)
            wrong = (values < 0) | (values >= vocab_size)
            if wrong.any():
                place = int(wrong.argmax())
                marks = self.indexed.document_indices
                document = int(np.searchsorted(marks, sequence, side="right")) - 1
                raise DataError(
                    f"{self.indexed.prefix}: token id {values[place]} in document {document} "
                    f"(sequence {sequence}) at offset {offset + place}; the vocabulary has "
                    f"{vocab_size} entries, 0 to {vocab_size - 1}: another tokenizer made this data"
                )


def count_tokens(indexed: IndexedDataset, documents: range) -> int:
    """Tokens in a range of sequences."""
    lengths = indexed.sequence_lengths[documents.start : documents.stop]
    return int(np.sum(lengths, dtype=np.int64))


def _file_stamps(prefix: str) -> dict[str, list[int]]:
    stamps: dict[str, list[int]] = {}
    for path in (bin_path(prefix), idx_path(prefix)):
        found = os.stat(path)
        stamps[path.suffix] = [found.st_size, found.st_mtime_ns]
    return stamps
