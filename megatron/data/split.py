"""What `--split` and `--data-path` mean: shares of documents, prefixes and their weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron.config.shares import split_shares
from megatron.data.index_file import without_suffix
from megatron.errors import ConfigError, DataError

SPLITS = ("train", "valid", "test")


class DataOptions(Protocol):
    """The fields of the configuration's data section that say what is read."""

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


@dataclass(frozen=True, kw_only=True)
class Blend:
    """Prefixes of one split; weights sum to 1, or are None: then as the sizes are."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where one split comes from: a blend, and which fraction of each file's documents."""

    blend: Blend
    fractions: tuple[float, float]
    shared: bool
    """The files are divided between the splits by `--split`."""


def split_sources(options: DataOptions) -> list[Source | None]:
    """Sources of train, valid and test; None where the share is 0 or no path is given.

    Either one path for all three with `--split`, or paths per split, which are read whole;
    ConfigError for both or neither.
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
    """Start and end of train, valid and test as fractions; None where the share is 0. Raises as
    `split_shares` does."""
    ranges: list[tuple[float, float] | None] = []
    start = 0.0
    for share in normalized(split_shares(text)):
        stop = start + share
        ranges.append((start, stop) if stop > start else None)
        start = stop
    return tuple(ranges)


def documents_of(fractions: tuple[float, float], num_documents: int) -> range:
    """Documents of a split; both ends rounded as Megatron does, so that splits never overlap."""
    start, stop = (int(round(fraction * float(num_documents))) for fraction in fractions)
    return range(start, stop)


def filled_split(text: str, num_documents: int) -> str:
    """`text`, with shares of validation and test that hold no document joined to the one before."""
    shares = split_shares(text)
    for place in (2, 1):
        part = parse_split(",".join(map(str, shares)))[place]
        if part is not None and not documents_of(part, num_documents):
            shares[place - 1] += shares[place]
            shares[place] = 0.0
    return ",".join(f"{share:.6g}" for share in shares)


def parse_blend(items: Sequence[str], *, name: str) -> Blend:
    """Read "PREFIX", "PREFIX PREFIX ..." or "WEIGHT PREFIX WEIGHT PREFIX ..."; `name` is the flag.
    A `.bin` or `.idx` at a prefix's end is left out.

    DataError for weights without a prefix, negative, not finite, or all zero. A prefix of weight 0
    is dropped: Megatron would read a sample of it where the others are even.
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
    """Weights over their sum, in float64 as Megatron computes it."""
    values = np.array(weights, dtype=np.float64)
    return (values / np.sum(values)).tolist()


def _prefix(item: str) -> str:
    return without_suffix(item.strip())


def _number(item: str) -> float | None:
    try:
        return float(item)
    except ValueError:
        return None
