"""Comparison of the tensors that the ranks of two grids hold, for the parity self-test."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tools.parity_cases import ROUNDING, ParityCase

KINDS = ("gradients", "weights")


@dataclass(frozen=True, kw_only=True)
class Differences:
    """The differences of a case.

    `worst` has the largest relative difference of each kind and its tensor. `unequal` names tensors
    with copies that differ, or with parts that no rank of a grid has.
    """

    case: ParityCase
    losses: float
    worst: Mapping[str, tuple[float, str]]
    unequal: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Whether all differences are within rounding. A NaN is not."""
        limits = {"gradients": ROUNDING, "weights": self.case.limit}
        near = all(self.worst[kind][0] <= limit for kind, limit in limits.items())
        return near and self.losses <= self.case.limit and not self.unequal

    def __str__(self) -> str:
        numbers = [self.losses, *(self.worst[kind][0] for kind in KINDS)]
        cells = " ".join(f"{number:9.1e}" for number in numbers)
        copies = f"{', '.join(self.unequal)} differ" if self.unequal else "equal"
        line = f"{self.case.name:<34} {self.case.steps:>5} {cells}  {copies}"
        if self.good:
            return line
        where = ", ".join(f"{kind} most in {self.worst[kind][1]}" for kind in KINDS)
        return f"{line}  DIFFERS: {where}"


def differences(reference: Path, grid: Path, case: ParityCase) -> Differences:
    """Return the differences between the results of a case in two folders."""
    one, other = gather(_files(reference, case)), gather(_files(grid, case))
    return compare(one, other, case)


def compare(one: Gathered, other: Gathered, case: ParityCase) -> Differences:
    """Return the differences between the whole tensors and the losses of two grids."""
    unequal = sorted({*one.unequal, *other.unequal, *(one.whole.keys() ^ other.whole.keys())})
    worst = {kind: (0.0, "none") for kind in KINDS}
    for key in one.whole.keys() & other.whole.keys():
        kind, name = key.split("/", 1)
        here = relative(one.whole[key], other.whole[key])
        if not here <= worst[kind][0]:
            worst[kind] = (here, name)
    losses = relative(np.array(one.losses), np.array(other.losses))
    return Differences(case=case, losses=losses, worst=worst, unequal=tuple(unequal))


def relative(one: np.ndarray, other: np.ndarray) -> float:
    """Return the largest difference relative to the largest magnitude of `one`.

    The result is absolute if `one` is zero, and NaN if the shapes differ.
    """
    if one.shape != other.shape:
        return float("nan")
    scale = float(np.abs(one).max(initial=0.0))
    most = float(np.abs(one - other).max(initial=0.0))
    return most / scale if scale else most


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """Whole tensors of a grid by kind and name, its losses, and its bad tensors.

    A tensor is bad if two ranks have different copies of it or no rank has some part.
    """

    losses: list[float]
    whole: dict[str, np.ndarray]
    unequal: set[str]


def gather(ranks: Iterator[Mapping[str, Any]]) -> Gathered:
    """Assemble the results of `parity_rank.run_case` on each rank."""
    losses: list[list[float]] = []
    whole: dict[str, np.ndarray] = {}
    unequal: set[str] = set()
    for found in ranks:
        losses.append(found["losses"])
        for kind in KINDS:
            for name, array in found[kind].items():
                piece = found["pieces"][name]
                key = f"{kind}/{name}"
                if key not in whole:
                    whole[key] = np.full(piece["shape"], np.nan, np.float32)
                for (start, stop), (low, high) in piece["boxes"]:
                    there = whole[key][tuple(map(slice, start, stop))]
                    mine = array[tuple(map(slice, low, high))]
                    known = ~np.isnan(there)
                    if not np.array_equal(there[known], mine[known]):
                        unequal.add(name)
                    there[...] = mine
    unequal |= {key.split("/", 1)[1] for key, array in whole.items() if np.isnan(array).any()}
    if any(each != losses[0] for each in losses):
        unequal.add("losses")
    return Gathered(losses=losses[0], whole=whole, unequal=unequal)


def _files(folder: Path, case: ParityCase) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob(f"{case.name} *.json")):
        facts = json.loads(path.read_text(encoding="utf-8"))
        with np.load(path.with_suffix(".npz"), allow_pickle=False) as arrays:
            for kind in KINDS:
                mine = [name for name in arrays.files if name.startswith(f"{kind}/")]
                facts[kind] = {name.split("/", 1)[1]: arrays[name] for name in mine}
        yield facts
