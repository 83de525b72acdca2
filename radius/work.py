"""A bucket's reduction under way, or held back until the ranks agree on the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.data_parallel.reducer import Reduced, Work


@dataclass
class RadiusWork:
    """A reduction that was launched, or is to be once the ranks agree, and what to make of it.
    `held`: those of the step that are to be."""

    launch: Callable[[], Work]
    read: Callable[[torch.Tensor], Reduced]
    held: list[RadiusWork]
    under_way: Work | None = None

    def wait(self) -> Reduced:
        # All leave with the first that is waited for, so that none stays idle meanwhile.
        for work in self.held:
            work.under_way = work.launch()
        self.held.clear()
        assert self.under_way is not None, "it was launched, or held until now"
        return self.read(self.under_way.wait().values)

    def drop(self) -> None:
        self.held.clear()
        if self.under_way is not None:
            self.under_way.drop()
