"""The fp16 loss scale, with Megatron's rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class LossScaler(Protocol):
    """The factor by which the loss is multiplied before backward."""

    scale: float

    @property
    def is_lowest(self) -> bool:
        """True if the scale cannot decrease any more after an overflow."""
        ...

    def update(self, *, overflow: bool) -> None:
        """Adjust the scale; `overflow`: the last step had non-finite gradients on some rank."""
        ...

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        ...

    def load(self, state: dict[str, float]) -> None:
        """Load the state that `state` returned."""
        ...


@dataclass
class ConstantScaler:
    """A constant scale: 1 for fp32 and bf16, `--loss-scale` for fp16."""

    scale: float = 1.0

    @property
    def is_lowest(self) -> bool:
        return True

    def update(self, *, overflow: bool) -> None:
        pass

    def state(self) -> dict[str, float]:
        return {}

    def load(self, state: dict[str, float]) -> None:
        pass


@dataclass
class DynamicScaler:
    """A scale that halves after `hysteresis` overflows and doubles after `window` clean steps.

    An overflow resets the count of clean steps and decrements the hysteresis; once the hysteresis
    is used up, each further overflow halves the scale, down to `min_scale`. Growth restores the
    hysteresis.
    """

    scale: float
    min_scale: float
    window: int
    hysteresis: int

    def __post_init__(self) -> None:
        self._clean_steps = 0
        self._hysteresis_left = self.hysteresis

    @property
    def is_lowest(self) -> bool:
        return self.scale <= self.min_scale

    def update(self, *, overflow: bool) -> None:
        if overflow:
            self._clean_steps = 0
            self._hysteresis_left -= 1
            if self._hysteresis_left <= 0:
                self.scale = max(self.scale / 2.0, self.min_scale)
            return
        self._clean_steps += 1
        # More, if the checkpoint of a run with a longer window was resumed.
        if self._clean_steps >= self.window:
            self._clean_steps = 0
            self._hysteresis_left = self.hysteresis
            self.scale *= 2.0

    def state(self) -> dict[str, float]:
        return {
            "scale": self.scale,
            "clean_steps": self._clean_steps,
            "hysteresis_left": self._hysteresis_left,
        }

    def load(self, state: dict[str, float]) -> None:
        if not state:  # the checkpoint was saved without a dynamic scale: start one
            return
        self.scale = float(state["scale"])
        self._clean_steps = int(state["clean_steps"])
        self._hysteresis_left = int(state["hysteresis_left"])
