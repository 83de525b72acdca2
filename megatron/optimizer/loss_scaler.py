"""The fp16 loss scale, by Megatron's rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class LossScaler(Protocol):
    """Factor the loss is multiplied by before backward."""

    scale: float

    @property
    def is_lowest(self) -> bool:
        """Whether a lower scale cannot be tried against overflow."""
        ...

    def update(self, *, overflow: bool) -> None:
        """Learn whether the step just taken had non-finite gradients on any rank."""
        ...

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        ...

    def load(self, state: dict[str, float]) -> None:
        """Take back what `state` gave."""
        ...


@dataclass
class ConstantScaler:
    """A scale that never changes: 1 for fp32 and bf16, `--loss-scale` for fp16."""

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
    """Halve after `hysteresis` overflows, double after `window` clean steps in a row.

    An overflow resets the count of clean steps and uses up one of the hysteresis; when none is
    left, each further overflow halves the scale, down to `min_scale`. Growth restores the
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
        if self._clean_steps == self.window:
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
        if not state:  # the checkpoint comes from a run without a dynamic scale: begin one
            return
        self.scale = float(state["scale"])
        self._clean_steps = int(state["clean_steps"])
        self._hysteresis_left = int(state["hysteresis_left"])
