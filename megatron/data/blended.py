"""Several data sets read as one, each as often as its weight says."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

SURPLUS = 0.005
"""Megatron's --mid-level-dataset-surplus: each part holds this share more than its due."""

_FEW = 16


class SampleSource(Protocol):
    """A sequence of samples, each int64 [sequence_length + 1]."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> NDArray[np.int64]: ...


class BlendedDataset:
    """Draw k is sample `sample_index[k]` of part `dataset_index[k]`, which must have it.

    The arrays come from `blend_order` and `number_draws`; a part too short for its draws is a
    programming error here, so that it cannot surface in the middle of a run.
    """

    def __init__(
        self,
        parts: Sequence[SampleSource],
        *,
        dataset_index: NDArray[np.int16],
        sample_index: NDArray[np.int64],
    ) -> None:
        assert len(dataset_index) == len(sample_index)
        counts = np.bincount(dataset_index, minlength=len(parts))
        assert len(counts) == len(parts)
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
    """Samples to prepare of each part, and draws in all; Megatron's rounding, weights sum to 1."""
    due = [math.ceil(num_samples * weight) for weight in weights]
    return [math.ceil(count * (1 + SURPLUS)) for count in due], sum(due)


def blend_order(weights: Sequence[float], draws: int) -> NDArray[np.int16]:
    """Part of each draw: the one furthest behind its due, `w_i * max(s, 1) - count_i`.

    Ties go to the lowest number. float64 in exactly this order of operations, as Megatron's
    build_blending_indices, so that the same draws come out. 1e7 draws take seconds.
    """
    assert 0 < len(weights) <= np.iinfo(np.int16).max
    if len(weights) == 1:
        return np.zeros(draws, dtype=np.int16)
    return _blend_few(weights, draws) if len(weights) <= _FEW else _blend_many(weights, draws)


def number_draws(dataset_index: NDArray[np.int16], num_parts: int) -> NDArray[np.int64]:
    """Sample of its part that each draw takes: how often that part was drawn before."""
    numbers = np.empty(len(dataset_index), dtype=np.int64)
    for part in range(num_parts):
        places = np.flatnonzero(dataset_index == part)
        numbers[places] = np.arange(len(places))
    return numbers


def _blend_few(weights: Sequence[float], draws: int) -> NDArray[np.int16]:
    """Plain floats: for a handful of parts NumPy's call overhead costs more than the sums."""
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
        best = int(errors.argmax())  # the first of equals
        order[draw] = best
        counts[best] += 1.0
    return np.frombuffer(order, dtype=np.int16)
