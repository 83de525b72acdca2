"""Where the time of a training step goes: stopwatches around the named verbs of a trainer.

Each moment counts for the innermost phase only, so the phases add up to the step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from time import perf_counter
from typing import Any

from megatron.training import Trainer

FORWARD, BACKWARD = "forward", "backward"
GATHER = "gather or accumulate"
CHECK = "finite check, launch"
WAIT = "agreement, all-reduce wait"
NORM = "norm"
OPTIMIZER, SCATTER = "optimizer", "scatter"
LOGGING, REST = "logging", "data and the rest"
PHASES = (FORWARD, BACKWARD, GATHER, CHECK, WAIT, NORM, OPTIMIZER, SCATTER, LOGGING, REST)


class Phases:
    """Wraps a trainer's verbs; `means` gives seconds of each phase, mean over the steps."""

    def __init__(self, trainer: Trainer) -> None:
        self._seconds: dict[str, float] = {phase: 0.0 for phase in PHASES}
        self._running = [REST]
        self._since = perf_counter()
        self._steps = 0
        self._wrapped: list[tuple[Any, str]] = []
        engine, optimizer = trainer.engine, trainer.optimizer
        for owner, verb, phase in (
            (trainer.stage, "forward", FORWARD),
            (trainer.stage, "backward", BACKWARD),
            (engine.layout, "gather", GATHER),
            (engine.layout, "gather_add", GATHER),
            (engine, "_launch_full", CHECK),
            (engine, "finish", WAIT),
            (engine, "_norm", NORM),
            (optimizer, "step", OPTIMIZER),
            (engine.layout, "scatter", SCATTER),
            (trainer.metrics, "step", LOGGING),
        ):
            setattr(owner, verb, self._timed(getattr(owner, verb), phase))
            self._wrapped.append((owner, verb))

    def start(self) -> None:
        """Count from here, as one more step."""
        self._steps += 1
        self._since = perf_counter()

    def stop(self) -> None:
        """The step is over; time until the next `start` does not count."""
        self._change()

    def means(self) -> dict[str, float]:
        """Seconds of a step by phase."""
        return {phase: took / self._steps for phase, took in self._seconds.items()}

    def remove(self) -> None:
        """Take the stopwatches off."""
        for owner, verb in self._wrapped:
            delattr(owner, verb)

    def _change(self) -> None:
        now = perf_counter()
        self._seconds[self._running[-1]] += now - self._since
        self._since = now

    def _timed(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._change()
            self._running.append(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self._change()
                self._running.pop()

        return timed
