"""Dynamic sparse reparameterization: prune the smallest weights, grow as many elsewhere, train on.

Mostafa and Wang 2019 as "Low-Memory Neural Network Training" (Sohoni et al. 2019, 3.1 and A.3.1)
uses it: one threshold for all tensors, so that nonzeros move to the layers that make use of them,
and moments that are kept for nonzeros alone. Every rank has the same weights, and what is drawn is
drawn from (seed, update, logical name), so that ranks agree without sending a mask.

The threshold H is doubled after a rewiring that pruned fewer than (1 - delta) K weights and halved
after one that pruned more than (1 + delta) K; K is the target and delta = 0.1, the tolerance of
the program that Mostafa and Wang published. Three things they leave open or do otherwise:

- New weights come uniformly from all places that are zero after the pruning, in whatever tensor,
  where theirs go to the tensors in proportion to the weights that survive there.
- No rewiring prunes more than twice the target, but for weights as good as zero. Magnitudes of
  random weights are the more frequent the smaller they are, and then doubling H at most doubles
  what lies below it: the limit does nothing. But after magnitude pruning there are none up to some
  value and nearly all within twice that value, and the doubling that reaches it would take the
  whole network.
- No tensor loses its last entry.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from megatron.data_parallel.interface import BucketLayout, Masks, ParamInfo, Rewiring
from samo.schedule import Schedule, why_none

TOLERANCE = 0.1
GAIN = 2.0
LIMIT = 2
"""Times the target that a rewiring prunes at most."""
RUNG_SHIFT, RUNGS = 16, 1 << 15
"""The limit chooses from a ladder: the positive fp32 numbers whose last 16 bits are zero."""
LEAST_NORMAL, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class RewiringSettings:
    """`target`: weights to prune at a time (`schedule.target_of`); `threshold`: H at first;
    `reset_moments`: whether all moments begin anew or those of new weights alone."""

    schedule: Schedule
    target: int
    threshold: float
    reset_moments: bool
    seed: int


class DsrRewirer:
    """A `Rewirer` of the parameters `names`: as many entries of them are stored in the end as in
    the beginning, to the last one. `make_layout` makes a layout of masks."""

    def __init__(
        self,
        names: Collection[str],
        settings: RewiringSettings,
        make_layout: Callable[[Masks], BucketLayout],
    ) -> None:
        self._names, self._settings, self._make_layout = frozenset(names), settings, make_layout
        self._threshold = settings.threshold
        self._seen = self._rewirings = 0
        self._stats: dict[str, float] = {}
        self._notes: list[str] = []
        self._told_limit = False

    @property
    def settled(self) -> bool:
        """Whether no rewiring comes any more."""
        return self._seen >= self._settings.schedule.last

    def after_update(
        self, t: int, layout: BucketLayout, weights: Iterable[tuple[ParamInfo, torch.Tensor]]
    ) -> Rewiring | None:
        """Rewire where the schedule says so: the other coordinates, or None."""
        self._seen = t
        if not self._settings.schedule.due(t):
            return None
        others: dict[str, torch.Tensor] = {}
        tensors: list[_Tensor] = []
        for info, weight in weights:
            if info.name in self._names:
                tensors.append(_Tensor.of(info, weight, layout))
            elif (mask := layout.mask(info.name)) is not None:
                others[info.name] = mask
        tensors.sort(key=lambda tensor: tensor.info.name)
        rewired = self._rewire(t, tensors)
        if t == self._settings.schedule.last:
            self._notes.append(
                f"DSR: update {t} was the last after which to rewire; there were "
                f"{self._rewirings} rewirings"
            )
        if not rewired:
            return None
        masks = others | {one.name: torch.from_numpy(one.mask) for one in rewired}
        anew = {one.name: torch.from_numpy(one.regrown()) for one in rewired}
        return Rewiring(
            layout=self._make_layout(masks),
            reset_moments=self._settings.reset_moments,
            anew={name: positions for name, positions in anew.items() if positions.numel()},
        )

    def why_idle(self, first: int, last: int) -> str:
        """Why the network is not rewired after any of these updates, and never was."""
        return "" if self._rewirings else why_none(self._settings.schedule, first, last)

    def stats(self) -> Mapping[str, float]:
        """Weights pruned, and the threshold by which: of the last update, if it had a rewiring."""
        stats, self._stats = self._stats, {}
        return stats

    def notes(self) -> tuple[str, ...]:
        """Sentences for the log since the last call."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The threshold, the update it is of and the rewirings so far; masks are the layout's."""
        yield "dsr/threshold", torch.tensor([self._threshold], dtype=torch.float64)
        yield "dsr/counts", torch.tensor([self._seen, self._rewirings], dtype=torch.int64)

    def load_state_tensors(self, shared: Mapping[str, torch.Tensor]) -> None:
        """Take back what `state_tensors` gave."""
        self._threshold = float(shared["dsr/threshold"])
        self._seen, self._rewirings = shared["dsr/counts"].tolist()

    # ---- a rewiring ----------------------------------------------------------------------------

    def _rewire(self, t: int, tensors: Sequence[_Tensor]) -> list[_Rewired]:
        """Prune by the threshold, adapt it, grow; empty where there was nothing to prune."""
        stored = sum(tensor.weight.numel() for tensor in tensors)
        assert LIMIT * self._settings.target <= stored, "why_too_many refuses that"
        threshold = self._limited(t, tensors)
        rewired = [tensor.pruned(threshold) for tensor in tensors]
        pruned = sum(one.gone.size for one in rewired)
        self._stats = {"dsr_pruned": pruned, "dsr_threshold": threshold}
        self._adapt(threshold, pruned)
        if pruned == 0:
            return []
        shares = share_out(pruned, [one.zeros() for one in rewired], self._generator(t))
        for one, share in zip(rewired, shares, strict=True):
            one.grow(share, self._generator(t, one.name))
        self._rewirings += 1
        return rewired

    def _adapt(self, threshold: float, pruned: int) -> None:
        """H for the next rewiring, by how far this one was from the target."""
        target = self._settings.target
        if pruned < (1 - TOLERANCE) * target:
            threshold *= GAIN
        elif pruned > (1 + TOLERANCE) * target:
            threshold /= GAIN
        # Zero or infinity would stay what they are.
        self._threshold = min(max(threshold, LEAST_NORMAL), LARGEST)

    def _limited(self, t: int, tensors: Sequence[_Tensor]) -> float:
        """H, or where more than `LIMIT` times the target are below it the greatest number of the
        ladder of which that is not so. Weights as good as zero go whatever their number."""
        most = LIMIT * self._settings.target
        below = sum(tensor.count_below(self._threshold) for tensor in tensors)
        if below <= most:
            return self._threshold
        counts = torch.zeros(RUNGS, dtype=torch.int64)
        for tensor in tensors:
            counts += tensor.count_rungs(self._threshold)
        # What lies on the rungs before one is below that one's number.
        rung = int(torch.searchsorted(counts.cumsum(0), most, right=True))
        number = torch.tensor(rung << RUNG_SHIFT, dtype=torch.int32).view(torch.float32)
        lowered = max(float(number), LEAST_NORMAL)
        if not self._told_limit:
            self._told_limit = True
            self._notes.append(
                f"DSR: the threshold {self._threshold:.3g} would have pruned {below:,} weights "
                f"after update {t}; {lowered:.3g} instead, for at most {LIMIT} times the target "
                f"of {self._settings.target:,}"
            )
        return lowered

    def _generator(self, t: int, name: str = "") -> np.random.Generator:
        """Numbers that are the same on every rank."""
        text = f"dsr/{self._settings.seed}/{t}/{name}"
        digest = hashlib.sha256(text.encode()).digest()
        return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


@dataclass(frozen=True)
class _Tensor:
    """A parameter before a rewiring: the fp32 weights of its stored entries, and how many entries
    there are before vocabulary padding."""

    info: ParamInfo
    weight: torch.Tensor
    logical: int
    layout: BucketLayout

    @classmethod
    def of(cls, info: ParamInfo, weight: torch.Tensor, layout: BucketLayout) -> _Tensor:
        """Of a parameter without a mask padding is stored too, and takes no part."""
        logical = math.prod(info.logical_shape)
        return cls(info, weight[:logical], logical, layout)

    def count_below(self, threshold: float) -> int:
        """How many weights are of smaller magnitude; NaN is not."""
        return int((self.weight.abs() < threshold).sum())

    def count_rungs(self, threshold: float) -> torch.Tensor:
        """How many of these lie on each rung of the ladder; int64 on the CPU."""
        magnitude = self.weight.abs()
        bits = magnitude[magnitude < threshold].view(torch.int32) >> RUNG_SHIFT
        return torch.bincount(bits, minlength=RUNGS).cpu()

    def pruned(self, threshold: float) -> _Rewired:
        """Without what is below the threshold, but for the largest where all is."""
        magnitude = self.weight.abs()
        keep = ~(magnitude < threshold)
        if not keep.any():
            keep[(magnitude == magnitude.max()).nonzero()[0]] = True
        mask = self.layout.mask(self.info.name)
        if mask is None:
            before = np.arange(self.info.param.numel()) < self.logical
        else:
            before = mask.cpu().numpy()
        left = before.copy()
        left[before] = keep.cpu().numpy()
        return _Rewired(self.info.name, self.logical, left, np.flatnonzero(before & ~left))


@dataclass(frozen=True)
class _Rewired:
    """A parameter after the pruning: its mask, which grows in place, and the positions that are
    gone."""

    name: str
    logical: int
    mask: Bools
    gone: npt.NDArray[np.int64]

    def zeros(self) -> int:
        """Places where it can grow."""
        return self.logical - int(np.count_nonzero(self.mask))

    def grow(self, count: int, generator: np.random.Generator) -> None:
        """Draw so many of them."""
        entries = self.mask[: self.logical]
        zero = ~entries
        entries[zero] = choose(int(np.count_nonzero(zero)), count, generator)

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
