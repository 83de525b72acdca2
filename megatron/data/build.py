"""Made-up samples that a model can learn: for `--mock-data`, where there is no corpus.

From configuration to the three data sets of a run.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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

_MODULUS = 256
_STEPS = 4


class MockDataset:
    """Sample k counts up from a random token in steps of 1 to 4, a function of (seed, split, k).

    Two tokens give the step away, so the loss of a working model falls towards zero within a few
    hundred iterations. Ids stay below min(vocab_size, 256).
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
    """The data sets of training, evaluation and the final test; None for one not asked for."""

    train: SampleSource | None
    valid: SampleSource | None
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
) -> Datasets:
    """Open, check and order the data; each set holds at least its number of `samples`.

    None stands for one pass over a whole split, which generated data do not have.
    Sets are None for 0 samples, for a share of 0 in `--split`, or without a path of their own where
    paths are given per split. Every process that calls this with the same arguments gets the same
    samples; index caches are written by whoever comes first. `vocab_size` is the tokenizer's own,
    without padding. `log` gets a line per corpus (documents, tokens, samples, epochs) and warnings.
    DataError for data that is missing, damaged, too small or of another tokenizer.
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
        log=log,
        cache=IndexCache(data_config.data_cache_path, log=log),
    )
    sources = split_sources(data_config)
    _warn_of_overlap(sources, log)
    train, valid, test = (
        builder.build(split, source, count) if source is not None and count != 0 else None
        for split, source, count in zip(SPLITS, sources, samples, strict=True)
    )
    return Datasets(train=train, valid=valid, test=test)


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
    log: Log
    cache: IndexCache
    opened: dict[str, IndexedDataset] = field(default_factory=dict)

    def build(self, split: str, source: Source, count: int | None) -> SampleSource:
        """One split: a single file, or parts drawn by weight; whole where `count` is None."""
        blend = source.blend
        documents = {
            prefix: self._documents(split, source, prefix) for prefix in set(blend.prefixes)
        }

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
        counts = np.bincount(order["dataset_index"], minlength=len(weights)).tolist()
        parts: list[GPTDataset] = []
        for prefix, size, drawn in zip(blend.prefixes, asked, counts, strict=True):
            one = part(prefix, size)
            if len(one) < drawn:
                # The surplus is relative, the error of the rounding is not: Megatron raises here.
                one = part(prefix, drawn)
            parts.append(one)
            self._tell(split, one, drawn)
        return BlendedDataset(
            parts, dataset_index=order["dataset_index"], sample_index=order["sample_index"]
        )

    def _whole(self, split: str, parts: Sequence[GPTDataset]) -> SampleSource:
        """All samples of the parts, one part after another; weights have no say."""
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
        """Weights, samples to ask of each part (None: one epoch), draws in all."""
        weights = blend.weights
        if weights is None:
            sizes = [
                (count_tokens(self.opened[prefix], documents[prefix]) - 1) // self.seq_length
                for prefix in blend.prefixes
            ]
            # No whole sample anywhere: the part built first says so, with the numbers.
            weights = tuple(normalized([max(size, 1) for size in sizes]))
            if count <= sum(sizes):
                return list(weights), [None] * len(sizes), count
        # Megatron stops at one epoch of data without weights; here it is repeated in proportion.
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
        found = documents_of(source.fractions, len(indexed))
        if not found:
            start, stop = source.fractions
            raise DataError(
                f"{prefix}: {split}: split {self.data_config.split!r} takes documents "
                f"round({start:.6g} x {len(indexed)}) = {found.start} to round({stop:.6g} x "
                f"{len(indexed)}) = {found.stop}: none; give {split} a larger share or a path of "
                f"its own, or 0 to go without, for example --split "
                f"{filled_split(self.data_config.split, len(indexed))}"
            )
        return found

    def _tell(self, split: str, part: GPTDataset, used: int) -> None:
        self.log(
            f"data: {split}: {part.indexed.prefix}: {len(part.documents)} documents, "
            f"{part.plan.tokens_per_epoch} tokens, {used} samples, "
            f"{part.epochs_in(used):.2f} epochs"
        )


def check_tokenizer(
    indexed: IndexedDataset, *, vocab_size: int, fingerprint: str | None = None
) -> None:
    """DataError if a file cannot be, or by its sidecar is not, of this tokenizer.

    Files without a sidecar (Megatron's) pass if their dtype holds the vocabulary; each sample's ids
    are checked when it is read.
    """
    largest = int(np.iinfo(indexed.dtype).max)
    if largest < vocab_size - 1:
        raise DataError(
            f"{indexed.prefix}: holds {indexed.dtype} ids up to {largest}, the tokenizer's "
            f"vocabulary has {vocab_size} entries: another tokenizer made this data"
        )
    made_by = read_sidecar(indexed.prefix)
    if made_by is None:
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
