"""Early-Bird tickets (You et al. 2020): prune once the magnitude mask stops changing.

A run begins dense. A magnitude mask is drawn every few updates and compared with the previous ones;
once they are nearly equal, the newest is the ticket and states are compressed. Masks and distances
are of the whole model, so that all ranks switch at the same step. You et al. score channels by the
scale factors of batch normalization; SAMO's indices are of single entries, so entries are scored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial

import torch

from megatron.data_parallel.bucket import ParamInfo
from megatron.data_parallel.gradient_path import LayoutChange, MaskUpdater
from megatron.data_parallel.layout import BucketLayout, Masks
from megatron.data_parallel.reducer import PerEntryState
from samo.layout import CompressedLayout
from samo.mask import PackedMasks, flat_parts
from samo.model_parts import ModelParts
from samo.pruning import WHOLE, Scope, distance, magnitude
from samo.schedule import DRAWS

WhyIdle = Callable[[int, int], str]
_STATE = "early-bird/"
_COUNTS = f"{_STATE}counts"


class EarlyBird(MaskUpdater):
    """A `MaskUpdater` that prunes once `DRAWS` consecutive masks are similar.

    The newest mask is the ticket if its distance to each other one is below `limit`. Distances are
    |A xor B| / (|A| + |B|): over all entries, as in the paper, unrelated masks at p = 0.95 would be
    0.095 apart and meet the paper's limit of 0.1 at once.

    Args:
        infos: the parameters of this rank to prune.
        interval: updates between draws.
        last: the last update of the run.
        drawn: whether an earlier run drew the ticket.
        parts: the parts of the model's tensors that this rank holds.
        make_layout: a function that makes a layout of masks.
        why_no_more: a function of (first, last) updates that says why nothing that waits for the
            ticket happens in them; "" if something does.
    """

    def __init__(
        self,
        infos: Sequence[ParamInfo],
        sparsity: Fraction,
        *,
        scope: Scope,
        interval: int,
        limit: float,
        last: int,
        drawn: bool = False,
        parts: ModelParts = WHOLE,
        make_layout: Callable[[Masks], BucketLayout] = CompressedLayout,
        why_no_more: WhyIdle = lambda first, last: "",
    ) -> None:
        self.infos, self.sparsity, self.parts = list(infos), sparsity, parts
        self._make_layout, self._why_no_more = make_layout, why_no_more
        self.scope: Scope = scope
        self.interval, self.limit, self.last = interval, limit, last
        self._draws = 0
        self._ticket = int(drawn)  # the update of the draw; 0 = none yet
        self._masks: list[PackedMasks] = []  # the latest masks, oldest first
        self._stats: dict[str, float] = {}
        self._notes: list[str] = []

    @property
    def layout_is_final(self) -> bool:
        """True once the ticket is drawn."""
        return self._ticket > 0

    def after_update(
        self, t: int, layout: BucketLayout, weights: Iterable[tuple[ParamInfo, torch.Tensor]]
    ) -> LayoutChange | None:
        """Draw a mask if one is due, and return the compressed layout if the mask is the ticket."""
        if self.layout_is_final or t % self.interval:
            return None
        masks = self.parts.raise_on_all_ranks(partial(self._draw, self._logical(weights)))
        distances = [distance(masks, old, parts=self.parts) for old in self._masks]
        found = max(distances, default=None)
        drawn = len(self._masks) == DRAWS - 1 and found is not None and found < self.limit
        self._draws += 1
        self._tell(t, found, masks, drawn)
        if not drawn:
            self._masks = [*self._masks, PackedMasks.of(masks.items())][1 - DRAWS :]
            return None
        self._ticket, self._masks = t, []
        return LayoutChange(layout=self._make_layout(flat_parts(self.infos, masks, self.parts)))

    def inactive_reason(self, first: int, last: int) -> str:
        """Return why no ticket is drawn in these updates, or only one that is drawn too late.

        Returns "" if the ticket is drawn, or can be drawn in time for what waits for it.
        """
        drawn = (first - 1) // self.interval
        draws = last // self.interval - drawn
        missing = DRAWS - len(self._masks)
        if self.layout_is_final:
            return ""
        if draws >= missing:
            return self._why_no_more((drawn + missing) * self.interval + 1, last)
        return (
            f"samo_early_bird_interval {self.interval}: {draws} masks will be drawn, a ticket "
            f"takes {missing} more; lower it, or train for longer"
        )

    def stats(self) -> Mapping[str, float]:
        """Return `mask_distance`, the latest mask's largest distance to the masks kept before it.

        Returns nothing if no mask was compared since the last call.
        """
        stats, self._stats = self._stats, {}
        return stats

    def notes(self) -> tuple[str, ...]:
        """Return a sentence for each draw, and one if no draw is left."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def state_tensors(self) -> Iterator[tuple[str, torch.Tensor | PerEntryState]]:
        """Yield the number of draws with the ticket's update, and the kept masks.

        Masks are this rank's parts, bool, named by draw and parameter; each is unpacked when read.
        """
        yield _COUNTS, torch.tensor([self._draws, self._ticket])
        for number, masks in enumerate(self._masks, self._draws - len(self._masks) + 1):
            for name in masks:
                yield (
                    f"{_STATE}{number}/{name}",
                    PerEntryState(param=name, values=partial(_flat, masks, name)),
                )

    def load_state_tensors(self, shared: Mapping[str, torch.Tensor]) -> None:
        """Restore the state that `state_tensors` yielded.

        Masks without it, as averaged checkpoints have, are those of a new start.
        """
        if _COUNTS not in shared:
            return
        self._draws, self._ticket = shared[_COUNTS].tolist()
        # A rank without tensors to prune has no mask in `shared`, but compares as many as others.
        kept = 0 if self._ticket else min(self._draws, DRAWS - 1)
        self._masks = [
            PackedMasks.of(
                (info.name, shared[f"{_STATE}{number}/{info.name}"].view(info.local_shape))
                for info in self.infos
            )
            for number in range(self._draws - kept + 1, self._draws + 1)
        ]

    def _draw(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return magnitude(weights, self.sparsity, scope=self.scope, parts=self.parts)

    def _logical(
        self, weights: Iterable[tuple[ParamInfo, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """Return views of the weights without padding, in an order independent of buckets."""
        wanted = {info.name for info in self.infos}
        found = {info.name: flat for info, flat in weights if info.name in wanted}
        return {
            info.name: found[info.name][: info.local_entries].view(info.local_shape)
            for info in self.infos
        }

    def _tell(
        self, t: int, found: float | None, masks: Mapping[str, torch.Tensor], drawn: bool
    ) -> None:
        text = f"early bird: draw {self._draws} after update {t}: "
        if found is None:
            self._notes.append(f"{text}the first mask")
        else:
            others = len(self._masks)
            text += f"largest distance {found:.4f} to the last {others} mask{'s' * (others > 1)}"
            if drawn:
                rows = {n: [int(mask.count_nonzero()), mask.numel()] for n, mask in masks.items()}
                columns = zip(*self.parts.table(rows).values(), strict=True)
                kept, all_ = (sum(column) for column in columns)
                text += (
                    f", below {self.limit:g}: the ticket is drawn; {kept:,} of {all_:,} entries of "
                    "the pruned tensors exist from here on"
                )
            self._notes.append(text)
            self._stats["mask_distance"] = found
        if not drawn and t + self.interval > self.last:
            self._notes.append(
                f"early bird: no draw is left of this run of {self.last} updates: it ends dense, "
                "without a ticket; train longer, or draw more often or with a larger distance "
                "(--samo-early-bird-interval, --samo-early-bird-distance)"
            )


def _flat(masks: PackedMasks, name: str) -> torch.Tensor:
    return masks[name].view(-1)
