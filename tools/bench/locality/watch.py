"""A record of which entries of each matrix are among the largest, step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.find import locate_checkpoint
from megatron.config import GPTConfig, parse, resolve
from megatron.data_parallel.reducer import Step
from megatron.errors import ConfigError
from megatron.launch import detect_launch, start, stop
from megatron.metrics import NullMetrics
from megatron.optimizer.update_rules import Hyper
from megatron.pretrain import build_groups, build_trainer
from megatron.training import Trainer
from pretrain_gpt import GPT_TASK, GRADIENT_PATHS
from tools.bench.locality.report import LocalityCurve

GRADIENT, UPDATE = "gradient", "update"


@dataclass
class Counter:
    """Count of how often each entry of one tensor was among its `ceil(top n)` largest.

    `shared` has the shares of one step's entries that the next step also marked; `from_first` the
    share of the first step's marks that the last step also has.
    """

    top: float
    steps: int = 0
    counts: torch.Tensor | None = None
    shared: list[float] = field(default_factory=list)
    from_first: float = 1.0
    _last: torch.Tensor | None = None
    _first: torch.Tensor | None = None

    def add(self, values: torch.Tensor) -> None:
        """Mark the largest magnitudes of a flat tensor with the same entries at every call."""
        count = math.ceil(self.top * values.numel())
        marks = torch.zeros(values.numel(), dtype=torch.bool, device=values.device)
        marks[values.abs().topk(count, sorted=False).indices] = True
        if self.counts is None or self._last is None or self._first is None:
            self.counts = torch.zeros(values.numel(), dtype=torch.int32, device=values.device)
            self._first = marks
        else:
            self.shared.append(int((marks & self._last).sum()) / count)
            self.from_first = int((marks & self._first).sum()) / count
        self.counts += marks
        self._last = marks
        self.steps += 1


class Watch:
    """A wrapper of an optimizer's `step` that counts before and after it."""

    def __init__(
        self, trainer: Trainer, *, tops: Sequence[float], kinds: Mapping[str, str]
    ) -> None:
        self._trainer, self._inner = trainer, trainer.optimizer.step
        self.counters: dict[tuple[str, str, float], dict[str, Counter]] = {}
        self._watched: list[tuple[str, str]] = []
        """Kind and name of each matrix."""
        for info, _, _ in trainer.engine.slices():
            kind = next((kind for part, kind in kinds.items() if part in info.name), None)
            if kind is not None and info.param.ndim == 2:
                self._watched.append((kind, info.name))
                for what in (GRADIENT, UPDATE):
                    for top in tops:
                        group = self.counters.setdefault((kind, what, top), {})
                        group[info.name] = Counter(top)
        trainer.optimizer.step = self.step  # type: ignore[method-assign]

    def step(self, step: Step, *, lr: float, weight_decay: float) -> None:
        """Count the gradient, run the optimizer's step, and count its update."""
        engine, optimizer = self._trainer.engine, self._trainer.optimizer
        old: dict[str, torch.Tensor] = {}
        places = {info.name: (info, bucket, where) for info, bucket, where in engine.slices()}
        for kind, name in self._watched:
            info, bucket, where = places[name]
            reduced = step.reduced[bucket.index]
            if reduced.index is not None:
                raise ConfigError("this run sends part of its gradients; watch a dense one")
            entries = math.prod(info.logical_shape)
            self._add(kind, GRADIENT, name, where.of(reduced.values)[:entries].float())
            old[name] = where.of(optimizer.states[bucket.index].master).clone()
        self._inner(step, lr=lr, weight_decay=weight_decay)
        for kind, name in self._watched:
            info, bucket, where = places[name]
            decay = weight_decay if bucket.weight_decay else 0.0
            moments = [where.of(moment) for moment in optimizer.states[bucket.index].moments]
            hyper = Hyper(t=optimizer.applied, lr=lr, weight_decay=decay)
            update = optimizer.rule.direction(old[name], moments, hyper)
            self._add(kind, UPDATE, name, update[: math.prod(info.logical_shape)])

    def curves(self) -> list[LocalityCurve]:
        """Return a curve for each kind of layer, quantity and share, over all its matrices."""
        found = []
        for (kind, what, top), group in self.counters.items():
            counts = torch.cat([c.counts for c in group.values() if c.counts is not None])
            counters = list(group.values())
            found.append(
                LocalityCurve.of_counts(
                    counts.tolist(),
                    kind=kind,
                    what=what,
                    top=top,
                    steps=counters[0].steps,
                    shared=_mean([share for c in counters for share in c.shared]),
                    from_first=_mean([c.from_first for c in counters]),
                )
            )
        return found

    def _add(self, kind: str, what: str, name: str, values: torch.Tensor) -> None:
        for (group_kind, group_what, _), group in self.counters.items():
            if (group_kind, group_what) == (kind, what):
                group[name].add(values)


def watch(
    flags: Sequence[str], *, steps: int, tops: Sequence[float], kinds: Mapping[str, str]
) -> tuple[list[LocalityCurve], dict[str, Any]]:
    """Train `steps` steps with these flags on one rank, and return the curves and facts of the run.

    Raises `ConfigError` if the run ends earlier, is not dense or has several ranks.
    """
    launch = detect_launch()
    config = resolve(parse(flags, paths=GRADIENT_PATHS), launch.world_size)
    if launch.world_size != 1:
        raise ConfigError(f"{launch.world_size} ranks: this tool runs alone; start it without them")
    run_dir = Path(config.run.run_dir or "")
    runtime = start(launch, config)
    try:
        groups = build_groups(config, launch)
        origin = locate_checkpoint(config, run_dir, log=lambda text: None)
        trainer = build_trainer(
            GPT_TASK, GRADIENT_PATHS, config, runtime, groups, run_dir, NullMetrics(), origin
        )
        first = _first_step(trainer, config, steps)
        watching = Watch(trainer, tops=tops, kinds=kinds)
        for _ in range(steps):
            trainer.train_step()
        facts = {
            "first step": first,
            "steps": steps,
            "of": trainer.total_iterations,
            "layers": config.model.num_layers,
            "hidden": config.model.hidden_size,
            "tokens in a step": config.model.seq_length * (config.training.global_batch_size or 0),
        }
        return watching.curves(), facts
    finally:
        stop()


def _first_step(trainer: Trainer, config: GPTConfig, steps: int) -> int:
    left = trainer.total_iterations - trainer.progress.iteration
    if left < steps:
        raise ConfigError(
            f"--steps {steps}: the run ends {left} steps after step {trainer.progress.iteration}; "
            "give --at an earlier checkpoint, or fewer steps"
        )
    return trainer.progress.iteration + 1


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
