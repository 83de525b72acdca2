"""Small pairs and options for the tests of this folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.data.indexed_dataset import IndexedDatasetWriter


@dataclass(frozen=True, kw_only=True)
class Options:
    """Stands in for the data section of a configuration."""

    data_path: tuple[str, ...] | None = None
    train_data_path: tuple[str, ...] | None = None
    valid_data_path: tuple[str, ...] | None = None
    test_data_path: tuple[str, ...] | None = None
    split: str = "969, 30, 1"
    data_cache_path: str | None = None
    mock_data: bool = False
    no_mmap_bin_files: bool = False
    multiple_validation_sets: bool = False


def write_pair(prefix: Path, lengths: list[int], *, dtype: str = "u2", vocab_size: int = 50) -> str:
    """One sequence per document, of the given lengths; token t of the file is t % vocab_size."""
    start = 0
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for length in lengths:
            writer.add_document(np.arange(start, start + length) % vocab_size, [length])
            start += length
    return str(prefix)


def random_lengths(seed: int, count: int, *, largest: int = 60) -> list[int]:
    """Lengths of which about a third are 0."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, largest, count)
    values[rng.random(count) < 0.3] = 0
    values[0] = largest
    return values.tolist()
