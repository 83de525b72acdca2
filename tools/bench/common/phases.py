"""The phases of a training step: stopwatches around the methods of a trainer.

Each moment counts for the innermost phase only, so the phases add up to the step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from time import perf_counter, thread_time
from typing import Any

from megatron.optimizer.update_rules import UpdateRule
from megatron.training import Trainer

FORWARD, BACKWARD = "forward", "backward"
GATHER = "gather or accumulate"
CHECK = "finite check, launch"
WAIT = "agreement, all-reduce wait"
NORM = "norm"
OPTIMIZER, SCATTER = "optimizer", "scatter"
LOGGING, REST = "logging", "data and the rest"
REDUCE, PLACE, KEEP = "gather what is sent", "place what was received", "keep the rest, choose"
PATH_PHASES = (REDUCE, PLACE, KEEP)
HANDLING = (GATHER, CHECK, NORM, OPTIMIZER, SCATTER, *PATH_PHASES)
CPU_TIME = "CPU time on gradients and weights"
"""CPU time of the phases in `HANDLING` and of the training thread.

If ranks share cores, wall time also includes the threads that send.
"""
PHASES = (FORWARD, BACKWARD, GATHER, CHECK, WAIT, NORM, OPTIMIZER, SCATTER, LOGGING, REST)


class Phases:
    """Stopwatches around a trainer's methods, which `remove` takes away."""

    def __init__(self, trainer: Trainer) -> None:
        self._seconds: dict[str, float] = {phase: 0.0 for phase in PHASES}
        self._running = [REST]
        self._since = perf_counter()
        self._steps = 0
        self._wrapped: list[tuple[Any, str]] = []
        for owner, verb, phase in self._verbs(trainer):
            setattr(owner, verb, self._timed(getattr(owner, verb), phase))
            self._wrapped.append((owner, verb))

    def _verbs(self, trainer: Trainer) -> list[tuple[Any, str, str]]:
        """Return the timed methods: owner, name, and phase."""
        engine, optimizer = trainer.engine, trainer.optimizer
        return [
            (trainer.stage, "forward", FORWARD),
            (trainer.stage, "backward", BACKWARD),
            (engine.layout, "gather", GATHER),
            (engine.layout, "gather_add", GATHER),
            (engine, "_launch_full", CHECK),
            (engine, "finish", WAIT),
            (engine, "_square", NORM),
            (engine, "_norm", NORM),
            (optimizer, "step", OPTIMIZER),
            (engine.layout, "scatter", SCATTER),
            (trainer.metrics, "step", LOGGING),
        ]

    def start(self) -> None:
        """Start to count one more step."""
        self._steps += 1
        self._since = perf_counter()

    def stop(self) -> None:
        """End the step; time until the next `start` does not count."""
        self._change()

    def totals(self) -> dict[str, float]:
        """Return the seconds of all steps so far by phase."""
        return dict(self._seconds)

    def means(self) -> dict[str, float]:
        """Return the mean seconds of a step by phase."""
        return {phase: took / self._steps for phase, took in self._seconds.items()}

    def remove(self) -> None:
        """Remove the stopwatches."""
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


class PathPhases(Phases):
    """Phases that include a sparse step's own work: `PATH_PHASES`, and the `CPU_TIME`."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._seconds |= {phase: 0.0 for phase in PATH_PHASES} | {CPU_TIME: 0.0}
        self._cpu_since = thread_time()
        rule = trainer.optimizer.rule
        trainer.optimizer.rule = _TimedRule(rule, self._timed(rule.apply, OPTIMIZER))

    def _verbs(self, trainer: Trainer) -> list[tuple[Any, str, str]]:
        engine = trainer.engine
        return [
            *super()._verbs(trainer),
            (engine.reducer, "reduce", REDUCE),
            (engine.reducer, "commit", KEEP),
            (trainer.optimizer, "_update", PLACE),
        ]

    def start(self) -> None:
        super().start()
        self._cpu_since = thread_time()

    def _change(self) -> None:
        now = thread_time()
        if self._running[-1] in HANDLING:
            self._seconds[CPU_TIME] += now - self._cpu_since
        self._cpu_since = now
        super()._change()


class _TimedRule:
    """An update rule, possibly frozen, with a stopwatch around its arithmetic."""

    def __init__(self, rule: UpdateRule, apply: Callable[..., None]) -> None:
        self.moments = rule.moments
        self.direction = rule.direction
        self.adamw = rule.adamw
        self.decays_all = rule.decays_all
        self.apply = apply
