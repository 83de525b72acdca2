"""Dynamic sparse reparameterization (DSR): prune by a global threshold, then regrow."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from megatron.data_parallel.bucket import ParamInfo
from megatron.data_parallel.gradient_path import LayoutChange, MaskUpdater
from megatron.data_parallel.layout import BucketLayout, Masks
from samo.mask import PackedMasks
from samo.model_parts import ModelParts
from samo.pruning import WHOLE
from samo.schedule import RewiringSchedule, why_none

RUNG_SHIFT, RUNGS = 16, 1 << 15
"""Positive fp32 numbers whose low 16 bits are zero: the bins of a histogram of magnitudes."""
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class TensorCounts:
    """Entry counts of a whole tensor: all, stored, and stored below the threshold."""

    entries: int
    stored: int
    below: int

    @property
    def keeps_one(self) -> bool:
        """Return whether every stored entry is below the threshold; the largest is then kept."""
        return self.below == self.stored

    @property
    def pruned(self) -> int:
        """Number of stored entries that a rewiring prunes."""
        return self.below - self.keeps_one

    @property
    def zeros(self) -> int:
        """Return the number of entries that are zero after pruning, where the tensor can grow."""
        return self.entries - self.stored + self.pruned


@dataclass(frozen=True)
class RegrowthPlan:
    """The counts by which a whole tensor is pruned, and the number of entries to grow."""

    counts: TensorCounts
    share: int

    @property
    def is_whole(self) -> bool:
        """Return whether every entry is stored after the growth."""
        return self.share == self.counts.zeros


@dataclass(frozen=True)
class RegrowthTensor:
    """This rank's part of a parameter before a rewiring: the fp32 weights of its stored entries."""

    info: ParamInfo
    weight: torch.Tensor
    layout: BucketLayout

    @classmethod
    def of(cls, info: ParamInfo, weight: torch.Tensor, layout: BucketLayout) -> RegrowthTensor:
        """Create the tensor without padding, which a parameter without a mask stores too."""
        return cls(info, weight[: info.local_entries], layout)

    def count_below(self, threshold: float) -> int:
        """Return the number of weights of magnitude below `threshold`; NaN does not count."""
        return int((self.weight.abs() < threshold).sum())

    def count_rungs(self, threshold: float) -> torch.Tensor:
        """Return a histogram of the magnitudes below `threshold`: int64 `[RUNGS]` on the CPU."""
        magnitude = self.weight.abs()
        bits = magnitude[magnitude < threshold].view(torch.int32) >> RUNG_SHIFT
        return torch.bincount(bits, minlength=RUNGS).cpu()

    def pruned(self, threshold: float, plan: RegrowthPlan, parts: ModelParts) -> RewiredTensor:
        """Prune weights below `threshold`, but for the largest where all are.

        Collective over the stage.
        """
        info, magnitude = self.info, self.weight.abs()
        mask = self.layout.mask(info.name)
        if mask is None:
            before = np.arange(info.param.numel()) < info.local_entries
        else:
            before = mask.cpu().numpy()
        keep = (~(magnitude < threshold)).cpu().numpy()
        if plan.counts.keeps_one:
            found = magnitude.cpu().numpy()
            # The first largest weight on this rank, if the rank has any.
            first = int(found.argmax()) if found.size else -1
            value, place = -1.0, 0
            if found.size:
                value, place = float(found[first]), int(np.flatnonzero(before)[first])
            if parts.first_of_largest(info.name, value, place) and found.size:
                keep[first] = True
        left = before.copy()
        left[before] = keep
        return RewiredTensor(info, left, np.flatnonzero(before & ~left))


@dataclass(frozen=True)
class RewiredTensor:
    """This rank's part of a parameter after pruning: the mask, and the pruned positions."""

    info: ParamInfo
    mask: Bools
    gone: npt.NDArray[np.int64]

    def grow(self, count: int, generator: np.random.Generator, parts: ModelParts) -> None:
        """Add `count` entries, drawn from the zeros of the whole tensor, to `mask` in place.

        Collective over the stage.
        """
        if count == 0:
            return
        name, mine = self.info.name, self.mask[: self.info.local_entries]
        whole = parts.whole(name, torch.from_numpy(mine))
        entries = whole.numpy()
        zero = ~entries
        entries[zero] = choose(int(np.count_nonzero(zero)), count, generator)
        mine[:] = parts.part(name, whole).numpy()

    def regrown(self) -> npt.NDArray[np.int64]:
        """Return the positions that were pruned and drawn again."""
        return self.gone[self.mask[self.gone]]


def share_out(count: int, sizes: Sequence[int], generator: np.random.Generator) -> list[int]:
    """Distribute `count` entries, drawn uniformly without replacement, over tensors of `sizes`."""
    total = sum(sizes)
    assert 0 <= count <= total
    # The result is multivariate hypergeometric; numpy draws that from at most 10^9 entries. So
    # binomial numbers first thin the tensors to slightly too many entries.
    wanted = count + 4 * math.sqrt(count) + 8
    taken = np.zeros(len(sizes), dtype=np.int64)
    while taken.sum() < count:
        taken = generator.binomial(sizes, min(1.0, wanted / total))
    return generator.multivariate_hypergeometric(taken, count).tolist()


def choose(n: int, count: int, generator: np.random.Generator) -> Bools:
    """Choose `count` of `n` entries uniformly without replacement, as a bool mask `[n]`."""
    assert 0 <= count <= n
    if 2 * count > n:
        return ~choose(n, n - count, generator)
    # numpy's `choice` takes eight times as much memory.
    chosen = np.zeros(n, dtype=np.bool_)
    missing = count
    while missing:
        chosen[generator.integers(n, size=missing)] = True
        missing = count - int(np.count_nonzero(chosen))
    return chosen


TOLERANCE = 0.1
GAIN = 2.0
LIMIT = 2
"""The most weights that a rewiring prunes, as a multiple of the target."""
LEAST_NORMAL, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class RewiringSettings:
    """Settings of the rewirings.

    `target`: weights to prune per rewiring (`schedule.target_of`); `threshold`: the first H;
    `reset_moments`: whether a rewiring resets all moments or only the moments of new weights.
    """

    schedule: RewiringSchedule
    target: int
    threshold: float
    reset_moments: bool
    seed: int


class DsrMaskUpdater(MaskUpdater):
    """A `MaskUpdater` that keeps the total number of stored entries exactly constant.

    Args:
        names: the prunable parameters of this rank.
        make_layout: a function that makes a layout of masks.
        parts: the parts of the model's tensors that this rank holds.
    """

    def __init__(
        self,
        names: Collection[str],
        settings: RewiringSettings,
        make_layout: Callable[[Masks], BucketLayout],
        *,
        parts: ModelParts = WHOLE,
    ) -> None:
        self._names, self._settings, self._make_layout = frozenset(names), settings, make_layout
        self._parts = parts
        self._threshold = settings.threshold
        self._seen = self._rewirings = 0
        self._stats: dict[str, float] = {}
        self._notes: list[str] = []
        self._told_limit = False

    @property
    def layout_is_final(self) -> bool:
        """Return whether no rewiring is left."""
        return self._seen >= self._settings.schedule.last

    def after_update(
        self, t: int, layout: BucketLayout, weights: Iterable[tuple[ParamInfo, torch.Tensor]]
    ) -> LayoutChange | None:
        """Rewire the network if the schedule says so, and return the new layout; None otherwise."""
        self._seen = t
        if not self._settings.schedule.due(t):
            return None
        others: list[tuple[str, torch.Tensor]] = []
        tensors: list[RegrowthTensor] = []
        for info, weight in weights:
            if info.name in self._names:
                tensors.append(RegrowthTensor.of(info, weight, layout))
            elif (mask := layout.mask(info.name)) is not None:
                others.append((info.name, mask))
        tensors.sort(key=lambda tensor: tensor.info.name)
        threshold, plans = self._plan(t, tensors)
        if t == self._settings.schedule.last:
            self._notes.append(
                f"DSR: update {t} was the last after which to rewire; there were "
                f"{self._rewirings} rewirings"
            )
        if not plans:
            return None
        anew: dict[str, torch.Tensor] = {}

        def rewired() -> Iterator[tuple[str, torch.Tensor]]:
            """Yield one mask at a time, while the other masks are packed."""
            for tensor in tensors:
                plan, name = plans[tensor.info.name], tensor.info.name
                one = tensor.pruned(threshold, plan, self._parts)
                one.grow(plan.share, self._generator(t, name), self._parts)
                if (positions := torch.from_numpy(one.regrown())).numel():
                    anew[name] = positions
                if not plan.is_whole:
                    yield name, torch.from_numpy(one.mask)

        masks = PackedMasks.of(chain(others, rewired()))
        return LayoutChange(
            layout=self._make_layout(masks),
            reset_moments=self._settings.reset_moments,
            anew=anew,
        )

    def inactive_reason(self, first: int, last: int) -> str:
        """Return why no rewiring follows updates `first` to `last`; "" if one does or any did."""
        return "" if self._rewirings else why_none(self._settings.schedule, first, last)

    def stats(self) -> Mapping[str, float]:
        """Return the pruned weights and the threshold of a rewiring since the last call."""
        stats, self._stats = self._stats, {}
        return stats

    def notes(self) -> tuple[str, ...]:
        """Return sentences for the log since the last call."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield threshold, last update and number of rewirings; the layout has the masks."""
        yield "dsr/threshold", torch.tensor([self._threshold], dtype=torch.float64)
        yield "dsr/counts", torch.tensor([self._seen, self._rewirings], dtype=torch.int64)

    def load_state_tensors(self, shared: Mapping[str, torch.Tensor]) -> None:
        """Restore the state that `state_tensors` yielded."""
        self._threshold = float(shared["dsr/threshold"])
        self._seen, self._rewirings = shared["dsr/counts"].tolist()

    # ---- a rewiring ----------------------------------------------------------------------------

    def _plan(
        self, t: int, tensors: Sequence[RegrowthTensor]
    ) -> tuple[float, dict[str, RegrowthPlan]]:
        """Return the threshold, adapted afterwards, and plans for the tensors of the model."""
        threshold = self._threshold
        counts = self._count(tensors, threshold)
        stored = sum(one.stored for one in counts.values())
        assert LIMIT * self._settings.target <= stored, "why_too_many refuses that"
        below = sum(one.below for one in counts.values())
        if below > LIMIT * self._settings.target:
            threshold = self._lowered(t, tensors, below)
            counts = self._count(tensors, threshold)
        pruned = sum(one.pruned for one in counts.values())
        self._stats = {"dsr_pruned": pruned, "dsr_threshold": threshold}
        self._adapt(threshold, pruned)
        if pruned == 0:
            return threshold, {}
        zeros = [one.zeros for one in counts.values()]
        shares = share_out(pruned, zeros, self._generator(t))
        self._rewirings += 1
        return threshold, {
            name: RegrowthPlan(one, share)
            for (name, one), share in zip(counts.items(), shares, strict=True)
        }

    def _count(
        self, tensors: Sequence[RegrowthTensor], threshold: float
    ) -> dict[str, TensorCounts]:
        """Return the counts of all tensors of the model, ordered by name."""
        rows = {
            one.info.name: (one.info.local_entries, one.weight.numel(), one.count_below(threshold))
            for one in tensors
        }
        return {name: TensorCounts(*numbers) for name, numbers in self._parts.table(rows).items()}

    def _adapt(self, threshold: float, pruned: int) -> None:
        """Set the threshold for the next rewiring by the distance of `pruned` from the target."""
        target = self._settings.target
        if pruned < (1 - TOLERANCE) * target:
            threshold *= GAIN
        elif pruned > (1 + TOLERANCE) * target:
            threshold /= GAIN
        # A threshold of zero or infinity could not adapt any more.
        self._threshold = min(max(threshold, LEAST_NORMAL), LARGEST)

    def _lowered(self, t: int, tensors: Sequence[RegrowthTensor], below: int) -> float:
        """Return the greatest rung that has at most `LIMIT` times the target below it."""
        counts = torch.zeros(RUNGS, dtype=torch.int64)
        for tensor in tensors:
            if self._parts.counted(tensor.info.name):
                counts += tensor.count_rungs(self._threshold)
        self._parts.sum_over_model(counts)
        # The weights on the rungs before a rung are below the rung's number. The least threshold is
        # the least normal number: weights that are practically zero are pruned whatever their
        # count.
        most = LIMIT * self._settings.target
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
        """Return a generator that draws the same numbers on every rank."""
        text = f"dsr/{self._settings.seed}/{t}/{name}"
        digest = hashlib.sha256(text.encode()).digest()
        return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
