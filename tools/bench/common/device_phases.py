"""Time of a step by phase on the device: CUDA events around methods, clocks on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from megatron.training import Trainer


class DevicePhases:
    """Marks in the device's queue at the beginning and the end of a trainer's methods.

    Nothing waits before `seconds` is called, so the queue stays as full as without marks.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._on_cuda = trainer.device.type == "cuda"
        self._verbs = (
            (trainer.stage, "forward", "forward"),
            (trainer.stage, "backward", "backward"),
            (trainer.engine, "finish", "agreement and norm"),
            (trainer.optimizer, "step", "optimizer"),
        )
        self._marks: list[tuple[str, Any, Any]] = []

    def __enter__(self) -> DevicePhases:
        for owner, verb, phase in self._verbs:
            setattr(owner, verb, self._marked(getattr(owner, verb), phase))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, verb, _phase in self._verbs:
            delattr(owner, verb)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase; waits for the device."""
        if self._on_cuda:
            torch.cuda.synchronize()
        found: dict[str, float] = {}
        for phase, began, ended in self._marks:
            took = began.elapsed_time(ended) / 1e3 if self._on_cuda else ended - began
            found[phase] = found.get(phase, 0.0) + took
        return found

    def _now(self) -> Any:
        if not self._on_cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _marked(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def marked(*args: Any, **kwargs: Any) -> Any:
            began = self._now()
            result = function(*args, **kwargs)
            self._marks.append((phase, began, self._now()))
            return result

        return marked
