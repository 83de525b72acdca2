"""Dynamic sparse reparameterization (DSR): prune by a global threshold, then grow elsewhere.

One rewiring (Mostafa & Wang 2019, Algorithm 1; Sohoni et al. 2019, section 3.1), over all sparse
tensors i of the model:

    prune   every weight with |w| < H: K_i entries, which leaves R_i survivors; K, R: the sums
    grow    G_i = K R_i / R entries of weight 0, at places that were zero before the rewiring
    adapt   H doubles where K is below 0.9 times the target, and halves above 1.1 times
    reset   all moments to 0, as Sohoni et al. do; Adam's step count goes on

The total number of stored entries is constant, and each tensor keeps at least one entry. A rewiring
that would prune nothing changes nothing and resets nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

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

Bools = npt.NDArray[np.bool_]
Growth = Literal["survivors", "zeros"]


@dataclass(frozen=True)
class TensorCounts:
    """Entry counts of a whole tensor: all, stored, and stored below the threshold."""

    entries: int
    stored: int
    below: int

    @property
    def keeps_one(self) -> bool:
        """True if every stored entry is below the threshold; the largest is then kept."""
        return self.below == self.stored

    @property
    def pruned(self) -> int:
        """Number of stored entries that a rewiring prunes, K_i."""
        return self.below - self.keeps_one

    @property
    def survivors(self) -> int:
        """Number of stored entries that a rewiring leaves, R_i."""
        return self.stored - self.pruned

    @property
    def free(self) -> int:
        """Number of places to grow at: entries that are not stored before the rewiring."""
        return self.entries - self.stored


@dataclass(frozen=True)
class SparseTensor:
    """This rank's part of a parameter before a rewiring: the fp32 weights of its stored entries."""

    info: ParamInfo
    weight: torch.Tensor
    layout: BucketLayout

    @classmethod
    def of(cls, info: ParamInfo, weight: torch.Tensor, layout: BucketLayout) -> SparseTensor:
        """Create the tensor without padding, which a parameter without a mask stores too."""
        return cls(info, weight[: info.local_entries], layout)

    def count_below(self, threshold: float) -> int:
        """Return the number of weights of magnitude below `threshold`; NaN does not count."""
        return int((self.weight.abs() < threshold).sum())

    def rewired(
        self,
        threshold: float,
        counts: TensorCounts,
        growth: int,
        generator: np.random.Generator,
        parts: ModelParts,
    ) -> Bools:
        """Return the mask after pruning below `threshold` and growing: bool `[param.numel()]`.

        Collective over the stage.

        Args:
            counts: the counts of the whole tensor.
            growth: the number of entries that the whole tensor grows, at most `counts.free`.
            generator: draws the places, with equal numbers on all ranks of the stage.
        """
        before = self._stored()
        mask = before.copy()
        mask[before] = self._kept(threshold, counts, before, parts)
        if growth:
            mine = slice(self.info.local_entries)
            free = ~parts.whole(self.info.name, torch.from_numpy(before[mine])).numpy()
            grown = np.zeros_like(free)
            grown[free] = choose(counts.free, growth, generator)
            mask[mine] |= parts.part(self.info.name, torch.from_numpy(grown)).numpy()
        return mask

    def _stored(self) -> Bools:
        mask = self.layout.mask(self.info.name)
        if mask is None:
            return np.arange(self.info.param.numel()) < self.info.local_entries
        return mask.cpu().numpy()

    def _kept(
        self, threshold: float, counts: TensorCounts, before: Bools, parts: ModelParts
    ) -> Bools:
        """Return which stored entries survive."""
        magnitude = self.weight.abs()
        keep = (~(magnitude < threshold)).cpu().numpy()
        if counts.keeps_one:
            # The first largest weight on this rank, if the rank has any.
            found = magnitude.cpu().numpy()
            first, value, place = -1, -1.0, 0
            if found.size:
                first = int(found.argmax())
                value, place = float(found[first]), int(np.flatnonzero(before)[first])
            if parts.first_of_largest(self.info.name, value, place) and found.size:
                keep[first] = True
        return keep


def share_out(count: int, weights: Sequence[int], room: Sequence[int]) -> list[int]:
    """Divide `count` in proportion to `weights`, rounded by largest remainders.

    The part of a share that exceeds its room is divided again, in proportion to the weights of the
    shares that have room left. Of equal remainders the first is rounded up.

    Args:
        weights: one positive number for each share that has room.
        room: the most that each share may get; their sum is at least `count`.

    Returns:
        The shares, which sum to `count` exactly.
    """
    assert 0 <= count <= sum(room)
    shares = [0] * len(weights)
    while count:
        able = [i for i, most in enumerate(room) if shares[i] < most]
        total = sum(weights[i] for i in able)
        quotas = {i: divmod(count * weights[i], total) for i in able}
        left = count - sum(quota for quota, _ in quotas.values())
        up = set(sorted(able, key=lambda i: -quotas[i][1])[:left])
        for i in able:
            more = min(quotas[i][0] + (i in up), room[i] - shares[i])
            shares[i] += more
            count -= more
    return shares


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
LEAST_NORMAL, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class RewiringSettings:
    """Settings of the rewirings.

    `target`: weights to prune per rewiring (`schedule.target_of`); `threshold`: the first H;
    `growth`: whether a tensor grows in proportion to its survivors or to its zeros, which Mostafa
    and Wang's program calls `paper` and `anti_paper`; `reset_moments`: whether a rewiring resets
    all moments or only the moments of new weights.
    """

    schedule: RewiringSchedule
    target: int
    threshold: float
    growth: Growth = "survivors"
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

    @property
    def layout_is_final(self) -> bool:
        """True after the last update of the schedule that a rewiring may follow."""
        return self._seen >= self._settings.schedule.last

    def after_update(
        self, t: int, layout: BucketLayout, weights: Iterable[tuple[ParamInfo, torch.Tensor]]
    ) -> LayoutChange | None:
        """Rewire the network if the schedule says so, and return the new layout; None otherwise."""
        self._seen = t
        if not self._settings.schedule.due(t):
            return None
        others: list[tuple[str, torch.Tensor]] = []
        tensors: list[SparseTensor] = []
        for info, weight in weights:
            if info.name in self._names:
                tensors.append(SparseTensor.of(info, weight, layout))
            elif (mask := layout.mask(info.name)) is not None:
                others.append((info.name, mask))
        tensors.sort(key=lambda tensor: tensor.info.name)
        threshold, counts = self._prunable(tensors)
        pruned = sum(one.pruned for one in counts.values())
        self._stats = {"dsr_pruned": pruned, "dsr_threshold": threshold}
        self._adapt(threshold, pruned)
        self._rewirings += pruned > 0
        if t == self._settings.schedule.last:
            self._notes.append(
                f"DSR: update {t} was the last after which to rewire; there were "
                f"{self._rewirings} rewirings"
            )
        if not pruned:
            return None
        growth = self._growth(counts)

        def rewired() -> Iterator[tuple[str, torch.Tensor]]:
            """Yield one mask at a time, while the other masks are packed."""
            for tensor in tensors:
                name = tensor.info.name
                one, grown = counts[name], growth[name]
                generator = self._generator(t, name)
                mask = tensor.rewired(threshold, one, grown, generator, self._parts)
                # A tensor that is stored whole has no mask.
                if one.survivors + grown < one.entries:
                    yield name, torch.from_numpy(mask)

        masks = PackedMasks.of(chain(others, rewired()))
        return LayoutChange(
            layout=self._make_layout(masks), reset_moments=self._settings.reset_moments
        )

    def inactive_reason(self, first: int, last: int) -> str:
        """Return why no rewiring follows the updates `first` to `last`.

        Returns "" if one is due there, or if an earlier one pruned weights.
        """
        return "" if self._rewirings else why_none(self._settings.schedule, first, last)

    def stats(self) -> Mapping[str, float]:
        """Return the number of pruned weights and the threshold of the latest rewiring.

        Returns nothing if no rewiring was due since the last call.
        """
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
        """Restore the state that `state_tensors` yielded.

        Masks without it, as averaged checkpoints have, are those of a new start.
        """
        if "dsr/threshold" not in shared:
            return
        self._threshold = float(shared["dsr/threshold"])
        self._seen, self._rewirings = shared["dsr/counts"].tolist()

    # ---- a rewiring ----------------------------------------------------------------------------

    def _prunable(self, tensors: Sequence[SparseTensor]) -> tuple[float, dict[str, TensorCounts]]:
        """Return the threshold of this rewiring, and all tensors' counts by it.

        The threshold is halved until the pruned entries have places to grow at.
        """
        threshold = self._threshold
        counts = self._count(tensors, threshold)
        # The papers leave open what happens if more weights are below the threshold than can grow
        # elsewhere, which is possible only if less than half of the network is zero.
        while sum(one.pruned - one.free for one in counts.values()) > 0:
            threshold = threshold / GAIN if threshold > LEAST_NORMAL else 0.0
            counts = self._count(tensors, threshold)
        return threshold, counts

    def _growth(self, counts: Mapping[str, TensorCounts]) -> dict[str, int]:
        """Return the number of entries that each tensor of the model grows."""
        by_survivors = self._settings.growth == "survivors"
        tensors = counts.values()
        shares = share_out(
            sum(one.pruned for one in tensors),
            [one.survivors if by_survivors else one.entries - one.survivors for one in tensors],
            [one.free for one in tensors],
        )
        return dict(zip(counts, shares, strict=True))

    def _count(self, tensors: Sequence[SparseTensor], threshold: float) -> dict[str, TensorCounts]:
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

    def _generator(self, t: int, name: str) -> np.random.Generator:
        """Return the generator for a tensor after update `t`, equal on every rank."""
        text = f"dsr/{self._settings.seed}/{t}/{name}"
        digest = hashlib.sha256(text.encode()).digest()
        return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
