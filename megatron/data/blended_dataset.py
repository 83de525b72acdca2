"""Blends of data sets by weight, and the three shares of `--split`."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.config.fields import split_shares
from megatron.data.indexed_dataset import without_suffix
from megatron.errors import ConfigError, DataError

SURPLUS = 0.005
"""Megatron's --mid-level-dataset-surplus: each part gets this share of samples in addition."""

_FEW = 16
_COUNTED_AT_ONCE = 1 << 18


class SampleSource(Protocol):
    """A sequence of samples, each int64 [sequence_length + 1]."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> NDArray[np.int64]: ...


class BlendedDataset:
    """A data set whose draw k is sample `sample_index[k]` of part `dataset_index[k]`.

    The arrays come from `blend_order` and `number_draws`. A part that is too short for its draws is
    an error of the program and is found here, not in the middle of a run.
    """

    def __init__(
        self,
        parts: Sequence[SampleSource],
        *,
        dataset_index: NDArray[np.int16],
        sample_index: NDArray[np.int64],
    ) -> None:
        assert len(dataset_index) == len(sample_index)
        counts = count_draws(dataset_index, len(parts))
        for part, count in zip(parts, counts, strict=True):
            assert count <= len(part), f"{count} samples wanted of a part with {len(part)}"
        self.parts = tuple(parts)
        self.dataset_index = dataset_index
        self.sample_index = sample_index

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.parts[self.dataset_index[index]][int(self.sample_index[index])]


def part_sizes(weights: Sequence[float], num_samples: int) -> tuple[list[int], int]:
    """Return the samples to prepare of each part, and the number of draws, rounded as in Megatron.

    The weights sum to 1.
    """
    due = [math.ceil(num_samples * weight) for weight in weights]
    return [math.ceil(count * (1 + SURPLUS)) for count in due], sum(due)


def blend_order(weights: Sequence[float], draws: int) -> NDArray[np.int16]:
    """Return the part of each draw: the one with the largest deficit, `w_i * max(s, 1) - count_i`.

    Ties go to the lowest number. Computed in float64 in the order of operations of Megatron's
    build_blending_indices, so that the draws are equal. 1e7 draws take seconds.
    """
    assert 0 < len(weights) <= np.iinfo(np.int16).max
    if len(weights) == 1:
        return np.zeros(draws, dtype=np.int16)
    return _blend_few(weights, draws) if len(weights) <= _FEW else _blend_many(weights, draws)


def number_draws(dataset_index: NDArray[np.int16], num_parts: int) -> NDArray[np.int64]:
    """Return the sample of its part for each draw: the number of earlier draws of that part."""
    numbers = np.empty(len(dataset_index), dtype=np.int64)
    for part in range(num_parts):
        places = np.flatnonzero(dataset_index == part)
        numbers[places] = np.arange(len(places))
    return numbers


def count_draws(dataset_index: NDArray[np.int16], num_parts: int) -> NDArray[np.int64]:
    """Return the number of draws of each part.

    The draws are counted in blocks, since `np.bincount` copies its whole input to int64.
    """
    counts = np.zeros(num_parts, dtype=np.int64)
    for start in range(0, len(dataset_index), _COUNTED_AT_ONCE):
        block = dataset_index[start : start + _COUNTED_AT_ONCE]
        counts += np.bincount(block, minlength=num_parts)
    return counts


def _blend_few(weights: Sequence[float], draws: int) -> NDArray[np.int16]:
    """Draw with plain floats: for a few parts NumPy's call overhead exceeds the arithmetic."""
    order = array("h", bytes(2 * draws))
    first, *others = (float(weight) for weight in weights)
    rest = list(enumerate(others, start=1))
    counts = [0.0] * len(weights)
    for draw in range(draws):
        scale = draw or 1
        best, behind = 0, first * scale - counts[0]
        for part, weight in rest:
            error = weight * scale - counts[part]
            if error > behind:
                best, behind = part, error
        order[draw] = best
        counts[best] += 1.0
    return np.frombuffer(order, dtype=np.int16)


def _blend_many(weights: Sequence[float], draws: int) -> NDArray[np.int16]:
    order = array("h", bytes(2 * draws))
    share = np.asarray(weights, dtype=np.float64)
    counts = np.zeros(len(share))
    errors = np.empty(len(share))
    for draw in range(draws):
        np.multiply(share, draw or 1, out=errors)
        np.subtract(errors, counts, out=errors)
        best = int(errors.argmax())  # the first of equal ones
        order[draw] = best
        counts[best] += 1.0
    return np.frombuffer(order, dtype=np.int16)


SPLITS = ("train", "valid", "test")


class DataOptions(Protocol):
    """The fields of the configuration's data section that select the files."""

    @property
    def data_path(self) -> Sequence[str] | None: ...
    @property
    def train_data_path(self) -> Sequence[str] | None: ...
    @property
    def valid_data_path(self) -> Sequence[str] | None: ...
    @property
    def test_data_path(self) -> Sequence[str] | None: ...
    @property
    def split(self) -> str: ...
    @property
    def data_cache_path(self) -> str | None: ...
    @property
    def mock_data(self) -> bool: ...
    @property
    def no_mmap_bin_files(self) -> bool: ...
    @property
    def multiple_validation_sets(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Blend:
    """Prefixes of one split; weights sum to 1, or are None for weights by size."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


@dataclass(frozen=True, kw_only=True)
class Source:
    """The source of one split: a blend, and the fraction of each file's documents."""

    blend: Blend
    fractions: tuple[float, float]
    shared: bool
    """True if `--split` divides the files between the splits."""


def split_sources(options: DataOptions) -> list[Source | None]:
    """Return the sources of train, valid and test; None for a share of 0 or a missing path.

    The data are either one blend with `--split`, or a blend per split, which is read whole. Raises
    `ConfigError` if both or neither are given, and as `parse_blend` and `split_shares` do.
    """
    own = (options.train_data_path, options.valid_data_path, options.test_data_path)
    if options.data_path:
        given = [f"{split}_data_path" for split, path in zip(SPLITS, own, strict=True) if path]
        if given:
            raise ConfigError(
                f"data_path: given together with {', '.join(given)}; use --data-path with --split, "
                "or one path per split"
            )
        blend = parse_blend(options.data_path, name="data_path")
        return [
            None if part is None else Source(blend=blend, fractions=part, shared=True)
            for part in parse_split(options.split)
        ]
    if not any(own):
        raise ConfigError("data_path: not given; name a .bin/.idx prefix, or use --mock-data")
    sources: list[Source | None] = []
    for split, path in zip(SPLITS, own, strict=True):
        if path:
            blend = parse_blend(path, name=f"{split}_data_path")
            sources.append(Source(blend=blend, fractions=(0.0, 1.0), shared=False))
        else:
            sources.append(None)
    return sources


def parse_split(text: str) -> tuple[tuple[float, float] | None, ...]:
    """Return start and end of train, valid and test as fractions; None for a share of 0.

    Raises `ConfigError` for text that is not three shares.
    """
    ranges: list[tuple[float, float] | None] = []
    start = 0.0
    for share in normalized(split_shares(text)):
        stop = start + share
        ranges.append((start, stop) if stop > start else None)
        start = stop
    return tuple(ranges)


def documents_of(fractions: tuple[float, float], num_documents: int) -> range:
    """Return the documents of a split; both ends are rounded as in Megatron, without overlap."""
    start, stop = (int(round(fraction * float(num_documents))) for fraction in fractions)
    return range(start, stop)


def filled_split(text: str, num_documents: int) -> str:
    """Return the split `text` with each empty share added to the share before it.

    A validation or test share is empty if it gets none of `num_documents` documents.
    """
    shares = split_shares(text)
    for place in (2, 1):
        part = parse_split(",".join(map(str, shares)))[place]
        if part is not None and not documents_of(part, num_documents):
            shares[place - 1] += shares[place]
            shares[place] = 0.0
    return ",".join(f"{share:.6g}" for share in shares)


def parse_blend(items: Sequence[str], *, name: str) -> Blend:
    """Parse "PREFIX", "PREFIX PREFIX ..." or "WEIGHT PREFIX WEIGHT PREFIX ...".

    A `.bin` or `.idx` at a prefix's end is removed. A prefix of weight 0 is dropped; Megatron would
    read a sample of it at ties. Raises `DataError`, with the flag `name`, for an empty list and for
    weights that are without a prefix, negative, not finite or all zero.
    """
    numbers = [_number(item) for item in items]
    for number, prefix in zip(numbers, items[1:], strict=False):
        if number is not None and number < 0:
            raise DataError(f"{name}: weight {number} of {prefix}: wanted a number >= 0")
    given = sum(number is not None for number in numbers)
    if not items:
        raise DataError(f"{name}: names no data")
    if given == 0:
        return Blend(prefixes=tuple(_prefix(item) for item in items), weights=None)
    paired = len(items) % 2 == 0 and all(
        (number is not None) == (place % 2 == 0) for place, number in enumerate(numbers)
    )
    if not paired:
        raise DataError(
            f"{name}: {given} weights for {len(items) - given} prefixes; give WEIGHT PREFIX pairs, "
            "or prefixes alone (a prefix that reads as a number is written ./NUMBER)"
        )
    weights = [number for number in numbers[::2] if number is not None]
    prefixes = [_prefix(item) for item in items[1::2]]
    for weight, prefix in zip(weights, prefixes, strict=True):
        if not (math.isfinite(weight) and weight >= 0):
            raise DataError(f"{name}: weight {weight} of {prefix}: wanted a number >= 0")
    if not 0 < sum(weights) < math.inf:
        raise DataError(f"{name}: the weights sum to {sum(weights)}; one must be positive")
    used = [pair for pair in zip(prefixes, weights, strict=True) if pair[1] > 0]
    return Blend(
        prefixes=tuple(prefix for prefix, _ in used),
        weights=tuple(normalized([weight for _, weight in used])),
    )


def normalized(weights: Sequence[float]) -> list[float]:
    """Return weights divided by their sum, in float64 as Megatron computes it."""
    values = np.array(weights, dtype=np.float64)
    return (values / np.sum(values)).tolist()


def _prefix(item: str) -> str:
    return without_suffix(item.strip())


def _number(item: str) -> float | None:
    try:
        return float(item)
    except ValueError:
        return None
