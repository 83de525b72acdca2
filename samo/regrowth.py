"""What a rewiring does to a tensor: prune it by a threshold, grow it at places drawn by chance.

Counts are of whole tensors, weights and masks are what this rank holds of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from megatron.data_parallel.bucket import ParamInfo
from megatron.data_parallel.layout import BucketLayout
from samo.parts import Parts

RUNG_SHIFT, RUNGS = 16, 1 << 15
"""A ladder of thresholds: the positive fp32 numbers whose last 16 bits are zero."""
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Counts:
    """Of a whole tensor: its entries, how many are stored, and of these how many are below the
    threshold."""

    entries: int
    stored: int
    below: int

    @property
    def keeps_one(self) -> bool:
        """Whether all of it is below, so that the largest stays all the same."""
        return self.below == self.stored

    @property
    def pruned(self) -> int:
        return self.below - self.keeps_one

    @property
    def zeros(self) -> int:
        """Places where it can grow, once it is pruned."""
        return self.entries - self.stored + self.pruned


@dataclass(frozen=True)
class Plan:
    """How a whole tensor is pruned, and how many entries it then grows."""

    counts: Counts
    share: int

    @property
    def is_whole(self) -> bool:
        """Whether all of it is stored in the end."""
        return self.share == self.counts.zeros


@dataclass(frozen=True)
class Tensor:
    """What is on this rank of a parameter before a rewiring: the fp32 weights of its stored
    entries."""

    info: ParamInfo
    weight: torch.Tensor
    layout: BucketLayout

    @classmethod
    def of(cls, info: ParamInfo, weight: torch.Tensor, layout: BucketLayout) -> Tensor:
        """Of a parameter without a mask padding is stored too, and takes no part."""
        return cls(info, weight[: info.local_entries], layout)

    def count_below(self, threshold: float) -> int:
        """How many weights are of smaller magnitude; NaN is not."""
        return int((self.weight.abs() < threshold).sum())

    def count_rungs(self, threshold: float) -> torch.Tensor:
        """How many of these lie on each rung of the ladder; int64 on the CPU."""
        magnitude = self.weight.abs()
        bits = magnitude[magnitude < threshold].view(torch.int32) >> RUNG_SHIFT
        return torch.bincount(bits, minlength=RUNGS).cpu()

    def pruned(self, threshold: float, plan: Plan, parts: Parts) -> Rewired:
        """Without what is below the threshold, but for the largest where all is."""
        info, magnitude = self.info, self.weight.abs()
        mask = self.layout.mask(info.name)
        if mask is None:
            before = np.arange(info.param.numel()) < info.local_entries
        else:
            before = mask.cpu().numpy()
        keep = (~(magnitude < threshold)).cpu().numpy()
        if plan.counts.keeps_one:
            found = magnitude.cpu().numpy()
            # The first of the largest, here; a rank may have none.
            first = int(found.argmax()) if found.size else -1
            value, place = -1.0, 0
            if found.size:
                value, place = float(found[first]), int(np.flatnonzero(before)[first])
            if parts.first_of_largest(info.name, value, place) and found.size:
                keep[first] = True
        left = before.copy()
        left[before] = keep
        return Rewired(info, left, np.flatnonzero(before & ~left))


@dataclass(frozen=True)
class Rewired:
    """What is on this rank of a parameter after the pruning: the mask, which grows in place, and
    the positions that are gone."""

    info: ParamInfo
    mask: Bools
    gone: npt.NDArray[np.int64]

    def grow(self, count: int, generator: np.random.Generator, parts: Parts) -> None:
        """Draw so many of all places of the whole tensor that are zero."""
        if count == 0:
            return
        name, mine = self.info.name, self.mask[: self.info.local_entries]
        whole = parts.whole(name, torch.from_numpy(mine))
        entries = whole.numpy()
        zero = ~entries
        entries[zero] = choose(int(np.count_nonzero(zero)), count, generator)
        mine[:] = parts.part(name, whole).numpy()

    def regrown(self) -> npt.NDArray[np.int64]:
        """Positions that are gone and were drawn again."""
        return self.gone[self.mask[self.gone]]


def share_out(count: int, sizes: Sequence[int], generator: np.random.Generator) -> list[int]:
    """How many of `count` entries, drawn uniformly without replacement from tensors of these sizes,
    are of each: multivariate hypergeometric.

    numpy's own draws from at most 10^9 entries. Here each entry is first taken with a probability
    by which slightly too many are, as a binomial number a tensor tells, and of these, of which any
    set of their number is as likely as another, `count` are drawn.
    """
    total = sum(sizes)
    assert 0 <= count <= total
    wanted = count + 4 * math.sqrt(count) + 8
    taken = np.zeros(len(sizes), dtype=np.int64)
    while taken.sum() < count:
        taken = generator.binomial(sizes, min(1.0, wanted / total))
    return generator.multivariate_hypergeometric(taken, count).tolist()


def choose(n: int, count: int, generator: np.random.Generator) -> Bools:
    """`count` of n entries, every set of so many as likely as another. Takes n bytes; numpy's
    `choice` takes eight times as many."""
    assert 0 <= count <= n
    if 2 * count > n:
        return ~choose(n, n - count, generator)
    chosen = np.zeros(n, dtype=np.bool_)
    missing = count
    while missing:
        chosen[generator.integers(n, size=missing)] = True
        missing = count - int(np.count_nonzero(chosen))
    return chosen
