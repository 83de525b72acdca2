"""Dynamic sparse reparameterization: prune the smallest weights, grow as many elsewhere, train on.

Mostafa and Wang 2019 as "Low-Memory Neural Network Training" (Sohoni et al. 2019, 3.1 and A.3.1)
uses it: one threshold for all tensors, so that nonzeros move to the layers that make use of them,
and moments that are kept for nonzeros alone. What is drawn is drawn from (seed, update, logical
name), so that data-parallel ranks, which have the same weights, agree without sending a mask. Ranks
of a model that is cut tell each other counts of what is stored and pruned, and those that hold
parts of a tensor its mask, a byte an entry for one tensor at a time.

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from megatron.data_parallel.bucket import ParamInfo
from megatron.data_parallel.gradient_path import Rewirer, Rewiring
from megatron.data_parallel.layout import BucketLayout, Masks
from samo.mask import PackedMasks
from samo.parts import Parts
from samo.pruning import WHOLE
from samo.regrowth import RUNG_SHIFT, RUNGS, Counts, Plan, Tensor, share_out
from samo.schedule import Schedule, why_none

TOLERANCE = 0.1
GAIN = 2.0
LIMIT = 2
"""Times the target that a rewiring prunes at most."""
LEAST_NORMAL, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class RewiringSettings:
    """`target`: weights to prune at a time (`schedule.target_of`); `threshold`: H at first;
    `reset_moments`: whether all moments begin anew or those of new weights alone."""

    schedule: Schedule
    target: int
    threshold: float
    reset_moments: bool
    seed: int


class DsrRewirer(Rewirer):
    """A `Rewirer` of the parameters `names`, those of this rank, of which it holds `parts`: as many
    entries of them are stored in the end as in the beginning, to the last one. `make_layout` makes
    a layout of masks."""

    def __init__(
        self,
        names: Collection[str],
        settings: RewiringSettings,
        make_layout: Callable[[Masks], BucketLayout],
        *,
        parts: Parts = WHOLE,
    ) -> None:
        self._names, self._settings, self._make_layout = frozenset(names), settings, make_layout
        self._parts = parts
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
        others: list[tuple[str, torch.Tensor]] = []
        tensors: list[Tensor] = []
        for info, weight in weights:
            if info.name in self._names:
                tensors.append(Tensor.of(info, weight, layout))
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
            """One after another, so that the rest of the masks can be packed."""
            for tensor in tensors:
                plan, name = plans[tensor.info.name], tensor.info.name
                one = tensor.pruned(threshold, plan, self._parts)
                one.grow(plan.share, self._generator(t, name), self._parts)
                if (positions := torch.from_numpy(one.regrown())).numel():
                    anew[name] = positions
                if not plan.is_whole:
                    yield name, torch.from_numpy(one.mask)

        masks = PackedMasks.of(chain(others, rewired()))
        return Rewiring(
            layout=self._make_layout(masks),
            reset_moments=self._settings.reset_moments,
            anew=anew,
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

    def _plan(self, t: int, tensors: Sequence[Tensor]) -> tuple[float, dict[str, Plan]]:
        """By which threshold to prune, which is adapted for the next time, and what becomes of each
        tensor of the model; nothing where there is nothing to prune. Collective over a copy of the
        model."""
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
            name: Plan(one, share)
            for (name, one), share in zip(counts.items(), shares, strict=True)
        }

    def _count(self, tensors: Sequence[Tensor], threshold: float) -> dict[str, Counts]:
        """Of all tensors of the model, in the order of their names."""
        rows = {
            one.info.name: (one.info.local_entries, one.weight.numel(), one.count_below(threshold))
            for one in tensors
        }
        return {name: Counts(*numbers) for name, numbers in self._parts.table(rows).items()}

    def _adapt(self, threshold: float, pruned: int) -> None:
        """H for the next rewiring, by how far this one was from the target."""
        target = self._settings.target
        if pruned < (1 - TOLERANCE) * target:
            threshold *= GAIN
        elif pruned > (1 + TOLERANCE) * target:
            threshold /= GAIN
        # Zero or infinity would stay what they are.
        self._threshold = min(max(threshold, LEAST_NORMAL), LARGEST)

    def _lowered(self, t: int, tensors: Sequence[Tensor], below: int) -> float:
        """In place of H, where more than `LIMIT` times the target are below it, the greatest number
        of the ladder of which that is not so. Weights as good as zero go whatever their number."""
        counts = torch.zeros(RUNGS, dtype=torch.int64)
        for tensor in tensors:
            if self._parts.counted(tensor.info.name):
                counts += tensor.count_rungs(self._threshold)
        self._parts.sum_over_model(counts)
        # What lies on the rungs before one is below that one's number.
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
        """Numbers that are the same on every rank."""
        text = f"dsr/{self._settings.seed}/{t}/{name}"
        digest = hashlib.sha256(text.encode()).digest()
        return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
