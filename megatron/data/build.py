"""Construction of the three data sets of a run from the configuration, and `--mock-data`."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.data.blended_dataset import (
    SPLITS,
    Blend,
    BlendedDataset,
    DataOptions,
    SampleSource,
    Source,
    blend_order,
    count_draws,
    documents_of,
    filled_split,
    normalized,
    number_draws,
    part_sizes,
    split_sources,
)
from megatron.data.gpt_dataset import GPTDataset, IndexCache, count_tokens
from megatron.data.indexed_dataset import IndexedDataset, bin_path
from megatron.data.sidecar import check_sizes, read_sidecar, sidecar_path
from megatron.errors import DataError

_LOOKED_AT = 32
"""Documents of a file whose ends are looked at."""
_MODULUS = 256
_STEPS = 4


class MockDataset:
    """Samples for `--mock-data`: sample k counts up from a random token in steps of 1 to 4.

    A sample depends on (seed, split, k) only. Two tokens reveal the step, so the loss of a working
    model falls towards zero within a few hundred iterations. Ids stay below min(vocab_size, 256).
    """

    def __init__(
        self, num_samples: int, *, sequence_length: int, vocab_size: int, seed: int, split: int = 0
    ) -> None:
        self._num_samples = num_samples
        self._sequence_length = sequence_length
        self._modulus = min(vocab_size, _MODULUS)
        self._seed = (seed, split)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        rng = np.random.default_rng([*self._seed, index])
        start, step = int(rng.integers(self._modulus)), int(rng.integers(1, _STEPS + 1))
        places = np.arange(self._sequence_length + 1, dtype=np.int64)
        return (start + step * places) % self._modulus


Log = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """The data sets of training, validation and test; None if not requested."""

    train: SampleSource | None
    valid: SampleSource | Mapping[str, SampleSource] | None
    """Several sets have names (`multiple_validation_sets`)."""
    test: SampleSource | None


def build_datasets(
    data_config: DataOptions,
    *,
    seq_length: int,
    seed: int,
    samples: tuple[int, int | None, int | None],
    vocab_size: int,
    log: Log,
    tokenizer_fingerprint: str | None = None,
    mark: int | None = None,
) -> Datasets:
    """Return the data sets of a run, with at least `samples` samples in train, valid and test.

    None samples stand for one pass over the whole split. A set is None for 0 samples, for a share
    of 0 in `--split`, without a path of its own if paths are given per split, and for a whole pass
    over generated data, which have no end. A share of validation or test that comes to no document
    gives no set either, and in a blend nothing of this file. Every process that calls this
    function with the same arguments gets the same samples; the first one writes the index caches.

    Args:
        data_config: The settings that select the files.
        seq_length: Tokens of a sample, without its last label.
        seed: Seed of the order of documents and samples.
        samples: Number of samples of train, valid and test.
        vocab_size: Entries of the tokenizer's vocabulary, without padding.
        log: Receives a line per corpus (documents, tokens, samples, epochs) and warnings.
        tokenizer_fingerprint: Fingerprint of the tokenizer, if known.
        mark: The id that ends a document, if the run treats documents apart; data without it get
            a warning.

    Raises:
        DataError: Data are missing, damaged, too small or of another tokenizer.
        ConfigError: The paths or `--split` contradict each other.
    """
    if data_config.mock_data:
        made = [
            MockDataset(
                count, sequence_length=seq_length, vocab_size=vocab_size, seed=seed, split=number
            )
            if count
            else None
            for number, count in enumerate(samples)
        ]
        return Datasets(train=made[0], valid=made[1], test=made[2])
    builder = _Builder(
        data_config=data_config,
        seq_length=seq_length,
        seed=seed,
        vocab_size=vocab_size,
        fingerprint=tokenizer_fingerprint,
        mark=mark,
        log=log,
        cache=IndexCache(data_config.data_cache_path, log=log),
    )
    sources = split_sources(data_config)
    _warn_of_overlap(sources, log)
    asked = [
        (split, source, count) if source is not None and count != 0 else None
        for split, source, count in zip(SPLITS, sources, samples, strict=True)
    ]
    train, valid, test = asked
    build_valid = builder.build_apart if data_config.multiple_validation_sets else builder.build
    return Datasets(
        train=train and builder.build(*train),
        valid=valid and build_valid(*valid),
        test=test and builder.build(*test),
    )


def _set_names(prefixes: Sequence[str]) -> list[str]:
    """Return the names of validation sets: those of their files, with a number if two are equal."""
    names = [
        Path(prefix).name.removesuffix("_document").removesuffix("_text") for prefix in prefixes
    ]
    if len(set(names)) == len(names):
        return names
    return [f"{name}-{number}" for number, name in enumerate(names)]


def _warn_of_overlap(sources: Sequence[Source | None], log: Log) -> None:
    users: dict[str, list[str]] = {}
    for split, source in zip(SPLITS, sources, strict=True):
        if source is None:
            continue
        files = [os.path.realpath(bin_path(prefix)) for prefix in source.blend.prefixes]
        for path, count in Counter(files).items():
            if count > 1 and (split == "train" or not source.shared):
                log(f"warning: {path}: named {count} times in one blend; its samples repeat")
            if not source.shared:
                users.setdefault(path, []).append(split)
    for path, splits in users.items():
        if len(splits) > 1:
            log(f"warning: {path}: read by {' and '.join(splits)}; their losses are not apart")


@dataclass(frozen=True, kw_only=True)
class _Builder:
    data_config: DataOptions
    seq_length: int
    seed: int
    vocab_size: int
    fingerprint: str | None
    mark: int | None
    log: Log
    cache: IndexCache
    opened: dict[str, IndexedDataset] = field(default_factory=dict)

    def build_apart(
        self, split: str, source: Source, count: int | None
    ) -> dict[str, SampleSource] | None:
        """Return each file of a split as a set, by name; None if the share of each is empty."""
        sets = dict[str, SampleSource]()
        prefixes = source.blend.prefixes
        for name, prefix in zip(_set_names(prefixes), prefixes, strict=True):
            blend = Blend(prefixes=(prefix,), weights=None)
            made = self.build(split, dataclasses.replace(source, blend=blend), count)
            if made is not None:
                sets[name] = made
        return sets or None

    def build(self, split: str, source: Source, count: int | None) -> SampleSource | None:
        """Return one split: a single file, or parts drawn by weight; all of it without `count`.

        None if its share of every file comes to no document.
        """
        documents = {
            prefix: self._documents(split, source, prefix) for prefix in set(source.blend.prefixes)
        }
        blend = _with_documents(source.blend, documents)
        if blend is None:
            self.log(f"data: there is no {split} set")
            return None

        def part(prefix: str, asked: int | None) -> GPTDataset:
            return GPTDataset(
                self.opened[prefix],
                documents=documents[prefix],
                num_samples=asked,
                sequence_length=self.seq_length,
                seed=self.seed,
                split=split,
                vocab_size=self.vocab_size,
                cache=self.cache,
            )

        if len(blend.prefixes) == 1 and (blend.weights is None or not source.shared):
            single = part(blend.prefixes[0], count)
            self._tell(split, single, len(single) if count is None else count)
            return single
        if count is None:
            return self._whole(split, [part(prefix, None) for prefix in blend.prefixes])
        weights, asked, draws = self._shares(blend, documents, count)
        order = self._blend(split, blend.prefixes[0], weights, draws)
        counts = count_draws(order["dataset_index"], len(weights)).tolist()
        parts: list[GPTDataset] = []
        for prefix, size, drawn in zip(blend.prefixes, asked, counts, strict=True):
            one = part(prefix, size)
            if len(one) < drawn:
                # The surplus is relative but the rounding error is not, so a part may be too short;
                # Megatron raises an error here.
                one = part(prefix, drawn)
            parts.append(one)
            self._tell(split, one, drawn)
        return BlendedDataset(
            parts, dataset_index=order["dataset_index"], sample_index=order["sample_index"]
        )

    def _whole(self, split: str, parts: Sequence[GPTDataset]) -> SampleSource:
        """Return all samples of the parts, one part after another, whatever their weights."""
        for part in parts:
            self._tell(split, part, len(part))
        numbers = [np.arange(len(part), dtype=np.int64) for part in parts]
        owners = [np.full(len(part), i, dtype=np.int16) for i, part in enumerate(parts)]
        return BlendedDataset(
            parts, dataset_index=np.concatenate(owners), sample_index=np.concatenate(numbers)
        )

    def _shares(
        self, blend: Blend, documents: dict[str, range], count: int
    ) -> tuple[list[float], list[int | None], int]:
        """Return weights, samples to prepare of each part (None: one epoch), and total draws."""
        weights = blend.weights
        if weights is None:
            sizes = [
                (count_tokens(self.opened[prefix], documents[prefix]) - 1) // self.seq_length
                for prefix in blend.prefixes
            ]
            # If no part has a whole sample, the part that is built first raises an error.
            weights = tuple(normalized([max(size, 1) for size in sizes]))
            if count <= sum(sizes):
                return list(weights), [None] * len(sizes), count
        # Without weights, Megatron stops after one epoch; here the data are repeated in proportion.
        asked, draws = part_sizes(weights, count)
        return list(weights), list(asked), draws

    def _blend(self, split: str, prefix: str, weights: list[float], draws: int):
        def build():
            order = blend_order(weights, draws)
            return {"dataset_index": order, "sample_index": number_draws(order, len(weights))}

        return self.cache.get(
            {"class": "BlendedDataset", "weights": weights, "size": draws},
            folder=self.cache.folder(prefix, "BlendedDataset"),
            kind="BlendedDataset",
            split=split,
            layout={
                "dataset_index": ((draws,), np.dtype("<i2")),
                "sample_index": ((draws,), np.dtype("<i8")),
            },
            build=build,
        )

    def _documents(self, split: str, source: Source, prefix: str) -> range:
        indexed = self.opened.get(prefix)
        if indexed is None:
            indexed = IndexedDataset(prefix, mmap=not self.data_config.no_mmap_bin_files)
            check_sizes(prefix)
            check_tokenizer(indexed, vocab_size=self.vocab_size, fingerprint=self.fingerprint)
            self.opened[prefix] = indexed
            if self.mark is not None and not ends_with(indexed, self.mark):
                self.log(
                    f"warning: {prefix}: no document ends with the mark {self.mark}: --eod-mask-"
                    "loss, --reset-position-ids and --reset-attention-mask have no effect on it; "
                    "tools/preprocess_data.py --append-eod writes marks"
                )
        found = documents_of(source.fractions, len(indexed))
        if not found:
            start, stop = source.fractions
            text = (
                f"{prefix}: {split}: split {self.data_config.split!r} takes documents "
                f"round({start:.6g} x {len(indexed)}) = {found.start} to round({stop:.6g} x "
                f"{len(indexed)}) = {found.stop}: none; give {split} a larger share or a path of "
                f"its own, for example --split "
                f"{filled_split(self.data_config.split, len(indexed))}"
            )
            if split == "train":
                raise DataError(text)
            self.log(f"data: {text}")
        return found

    def _tell(self, split: str, part: GPTDataset, used: int) -> None:
        self.log(
            f"data: {split}: {part.indexed.prefix}: {len(part.documents)} documents, "
            f"{part.plan.tokens_per_epoch} tokens, {used} samples, "
            f"{part.epochs_in(used):.2f} epochs"
        )


def ends_with(indexed: IndexedDataset, mark: int) -> bool:
    """Return whether a document ends with the mark, of up to `_LOOKED_AT` that lie evenly."""
    places = np.linspace(0, len(indexed) - 1, min(len(indexed), _LOOKED_AT)).astype(int).tolist()
    return any(indexed[place][-1:].tolist() == [mark] for place in places)


def _with_documents(blend: Blend, documents: dict[str, range]) -> Blend | None:
    """Return the parts of a blend that have documents, with weights that sum to 1."""
    kept = [number for number, prefix in enumerate(blend.prefixes) if documents[prefix]]
    if len(kept) == len(blend.prefixes):
        return blend
    if not kept:
        return None
    prefixes = tuple(blend.prefixes[number] for number in kept)
    if blend.weights is None:
        return Blend(prefixes=prefixes, weights=None)
    weights = normalized([blend.weights[number] for number in kept])
    return Blend(prefixes=prefixes, weights=tuple(weights))


def check_tokenizer(
    indexed: IndexedDataset, *, vocab_size: int, fingerprint: str | None = None
) -> None:
    """Raise DataError if a file is not of this tokenizer, by its sidecar or else its dtype.

    Files without a sidecar (Megatron's) pass if their dtype can hold the vocabulary; each sample's
    ids are checked when it is read.
    """
    made_by = read_sidecar(indexed.prefix)
    if made_by is None:
        largest = int(np.iinfo(indexed.dtype).max)
        if largest < vocab_size - 1:
            raise DataError(
                f"{indexed.prefix}: holds {indexed.dtype} ids up to {largest}, the tokenizer's "
                f"vocabulary has {vocab_size} entries: another tokenizer made this data"
            )
        return
    path = sidecar_path(indexed.prefix)
    size = made_by.get("vocab_size")
    if isinstance(size, int) and size > vocab_size:
        raise DataError(
            f"{path}: the data's tokenizer has {size} entries, this run's has {vocab_size}; "
            "use the tokenizer that made the data"
        )
    seen = made_by.get("fingerprint")
    if fingerprint is not None and seen is not None and seen != fingerprint:
        raise DataError(
            f"{path}: made by tokenizer {seen}, this run has {fingerprint}; "
            "use the tokenizer that made the data, or tokenize the text again"
        )
