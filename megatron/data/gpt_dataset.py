"""Samples of `seq_length + 1` tokens from documents, in a seeded order, with cached indices."""

from __future__ import annotations

import hashlib
import io
import json
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from megatron.data.indexed_dataset import (
    IndexedDataset,
    bin_path,
    hash_of_ends,
    idx_path,
    is_out_of_files,
    why_not_opened,
)
from megatron.errors import DataError

Log = Callable[[str], None]
Layout = Mapping[str, tuple[tuple[int, ...], np.dtype]]


class IndexCache:
    """A cache of index arrays on disk, in `folder` or in `cache/` next to the data.

    A new `cache/` is announced. If the folder cannot be written, that is announced once, and arrays
    stay in memory.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, *, log: Log) -> None:
        self._folder = None if folder is None else Path(folder)
        self._log = log
        self._announced = False

    def folder(self, prefix: str, kind: str) -> Path:
        """Return the folder of entries of this kind for the data under `prefix`."""
        if self._folder is not None:
            return self._folder
        return Path(prefix).parent / "cache" / f"{kind}_indices"

    def get(
        self,
        description: Mapping[str, object],
        *,
        folder: Path,
        kind: str,
        split: str,
        layout: Layout,
        build: Callable[[], Mapping[str, NDArray]],
    ) -> Mapping[str, NDArray]:
        """Return the arrays of an entry, mapped read-only from disk if possible.

        `layout` has the shape and dtype of each array. `build` makes the arrays if the entry is
        missing or differs in any way from the description, which must name everything that the
        values depend on. Raises `DataError` if this process has too many files open.
        """
        text = json.dumps(description, indent=4)
        digest = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
        entry = _Entry(folder / f"{digest}-{kind}-{split}", text, layout)
        found = entry.load()
        if found is not None:
            return found
        arrays = build()
        for name, (shape, dtype) in layout.items():
            assert arrays[name].shape == shape and arrays[name].dtype == dtype, name
        try:
            beside_data = self._folder is None and not folder.parent.exists()
            folder.mkdir(parents=True, exist_ok=True)
            if beside_data:
                self._log(f"index cache: made {folder.parent} (elsewhere: --data-cache-path)")
            entry.store(arrays)
        except OSError as error:
            if is_out_of_files(error):
                raise DataError(f"{folder}: cannot be written: {why_not_opened(error)}") from error
            if not self._announced:
                self._log(
                    f"index cache {folder}: cannot be written ({error.strerror}); continuing "
                    "without (each rank and each start builds its own; see --data-cache-path)"
                )
            self._announced = True
            return arrays
        return entry.load() or arrays


class _Entry:
    def __init__(self, stem: Path, text: str, layout: Layout) -> None:
        self._stem = stem
        self._text = text
        self._layout = layout

    def _path(self, suffix: str) -> Path:
        return self._stem.with_name(f"{self._stem.name}-{suffix}")

    def load(self) -> dict[str, NDArray] | None:
        """Return the arrays, or None unless description, headers and sizes are as expected."""
        try:
            if self._path("description.txt").read_bytes() != self._text.encode():
                return None
            return {name: self._map(name, *form) for name, form in self._layout.items()}
        except (OSError, ValueError) as error:
            if is_out_of_files(error):
                # Built in memory, every entry of every rank would take its place.
                raise DataError(f"{self._stem}: cannot be read: {why_not_opened(error)}") from error
            return None

    def store(self, arrays: Mapping[str, NDArray]) -> None:
        for name, form in self._layout.items():
            array = np.ascontiguousarray(arrays[name])
            _replace(self._path(f"{name}.npy"), _header(*form), array.data.cast("B"))
        _replace(self._path("description.txt"), self._text.encode())

    def _map(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> NDArray:
        # The header is compared, not parsed, so the file cannot decide how much is allocated.
        path, header = self._path(f"{name}.npy"), _header(shape, dtype)
        size = len(header) + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        with open(path, "rb") as file:
            if file.read(len(header)) != header or os.fstat(file.fileno()).st_size != size:
                raise ValueError(path)
        mapped = np.memmap(path, dtype=dtype, mode="r", offset=len(header), shape=shape)
        return mapped.view(np.ndarray)  # indexing a memmap is several times slower


def _header(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    buffer = io.BytesIO()
    description = npy.dtype_to_descr(dtype)
    npy.write_array_header_1_0(
        buffer, {"descr": description, "fortran_order": False, "shape": shape}
    )
    return buffer.getvalue()


def _replace(path: Path, *contents: bytes | memoryview) -> None:
    # A random name and not the process id: ranks on several hosts may share this folder.
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            for content in contents:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


SEPARATE_BELOW = 0.80
"""The last epoch is shuffled separately if less than this share of its samples is needed."""

_BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """The number of epochs over a set of documents, and the number of their samples."""

    tokens_per_epoch: int
    sequence_length: int
    epochs: int
    samples: int
    """Samples in all epochs; at least as many as requested."""
    samples_before_last: int | None
    """Samples before the last epoch if that one is shuffled separately, else None."""


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """Three indices: sample k lies between rows r and r + 1 of `sample_index`.

    The row is r = shuffle_index[k].
    """

    document_index: NDArray[np.int32]  # [epochs * documents] numbers of sequences in the file
    sample_index: NDArray[np.integer]  # [samples + 1, 2] (place in document_index, offset in it)
    shuffle_index: NDArray[np.integer]  # [samples]


def plan_epochs(
    tokens_per_epoch: int, *, sequence_length: int, num_samples: int | None
) -> EpochPlan:
    """Return the plan with the fewest epochs that yield `num_samples` (None: one epoch).

    There must be at least one token.
    """
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
    """Return shape and dtype of each array of a `SampleOrder`, by name, to check a cached one."""
    places = num_documents * plan.epochs
    int32, int64 = np.iinfo(np.int32), np.dtype("<i8")
    return {
        "document_index": ((places,), np.dtype("<i4")),
        "sample_index": (
            (plan.samples + 1, 2),
            # Offsets fit int32, as lengths do; only positions can exceed it.
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
    """Return the order of `documents` (numbers of sequences in the file) by plan and seed.

    Peak memory is the result, the lengths and numbers of the documents once, and about 50 MB. Only
    the low 32 bits of the seed count.
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
    """Shuffle the parts before and after `cut` in place, from one random stream."""
    if cut is None:
        rng.shuffle(values)
        return
    rng.shuffle(values[:cut])
    rng.shuffle(values[cut:])


def _cut_into_samples(
    rows: NDArray, lengths: NDArray, places: NDArray, first: int, sequence_length: int
) -> None:
    """Fill `rows`: sample i starts at token i * sequence_length; a row is (position, offset)."""
    # Row 0 names position 0 even if that document is empty; later rows never name an empty one.
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


_LOOK_EVERY = 1024


class GPTDataset:
    """A data set of at least `num_samples` samples of documents; item k is int64 [s + 1].

    `documents` are numbers of sequences in the file (Megatron splits by sequence). `num_samples`
    None is one epoch. With a `cache` the order is kept on disk, under a name that covers everything
    it depends on, including size and time of the data files.

    Raises:
        DataError: The documents have too few tokens for a sample. Reading a sample raises it, with
            id, document and offset, for an id outside `vocab_size` (None: unchecked), and for a
            file that changed its size.
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
        """Return how often each token is read, on average, in the first `num_samples` samples."""
        return num_samples * self.sequence_length / self.plan.tokens_per_epoch

    def _pieces(self, row: int) -> list[tuple[int, int, int]]:
        """Return (sequence, offset, length) of each piece of a sample in the file."""
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
    """Return the number of tokens in a range of sequences."""
    lengths = indexed.sequence_lengths[documents.start : documents.stop]
    return int(np.sum(lengths, dtype=np.int64))


_HASHED_BYTES = 1 << 16
"""Bytes at each end of an index that are hashed for each use of a cache."""


def _file_stamps(prefix: str) -> dict[str, list[int] | str]:
    """Return what tells the files of a prefix from others of equal size that took their place.

    Archives and some file systems give different files one time, so that the ends of the index are
    hashed too: the places of sequences, which add up their lengths, are at its end.
    """
    stamps: dict[str, list[int] | str] = {}
    for path in (bin_path(prefix), idx_path(prefix)):
        found = os.stat(path)
        stamps[path.suffix] = [found.st_size, found.st_mtime_ns]
    stamps["index"] = hash_of_ends(idx_path(prefix), _HASHED_BYTES)
    return stamps
