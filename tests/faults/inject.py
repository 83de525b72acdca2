"""Inject faults into a training run: SPARSETRON_FAULT=kind:rank:step:phase, several by commas.

`step` is a number, or `3+` for step 3 and all steps after it. stderr tells when a fault strikes.
Kinds: kill, raise, exit0 (os._exit), sys-exit0, oom, hang, stop (SIGSTOP), extra-collective,
skip-collective (the next all-reduce), nan, inf (in one gradient), spike (100 times the loss, on a
rank that has a loss), drift (one bit of one weight), slow (1 s), held (until a signal asks this
rank to save or to leave), slow-tracker (rank 0 has a tracker that takes TRACKER_SECONDS to close).
`tests/faults/program.py` is pretrain_gpt.py with these faults; nothing in the product knows of
them.
"""

from __future__ import annotations

import functools
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron import pretrain
from megatron.errors import ConfigError
from megatron.fault_tolerance.heartbeat import PHASES
from megatron.parallel.dims import Coordinates
from tests.limits import LIMIT, SLOWNESS

if TYPE_CHECKING:
    import torch

    from megatron.training import Trainer

KINDS = (
    "kill", "raise", "exit0", "sys-exit0", "oom", "stop", "hang", "slow", "held",
    "extra-collective", "skip-collective", "nan", "inf", "spike", "drift", "slow-tracker",
)  # fmt: skip
TRACKER_SECONDS = 12.0 * SLOWNESS
"""More than a phase "leaving" may take, and than the timeout of collectives of these tests."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault: its kind, rank, step and phase; a `lasting` fault strikes in later steps too."""

    kind: str
    rank: int
    step: int
    phase: str
    lasting: bool = False

    def due(self, step: int) -> bool:
        """Return whether the fault strikes in `step`."""
        return step >= self.step if self.lasting else step == self.step


def parse_faults(text: str) -> list[Fault]:
    """Parse the value of SPARSETRON_FAULT. Raises `ConfigError` for a misspelt fault."""
    found = []
    for item in text.split(","):
        parts = item.split(":")
        known = len(parts) == 4 and parts[0] in KINDS and parts[3] in PHASES
        if not known or not parts[1].isdigit() or not parts[2].removesuffix("+").isdigit():
            raise ConfigError(
                f"SPARSETRON_FAULT: {item!r}; must be kind:rank:step:phase with a kind of "
                f"{', '.join(KINDS)} and a phase of {', '.join(PHASES)}"
            )
        kind, rank, step, phase = parts
        number, lasting = int(step.removesuffix("+")), step.endswith("+")
        found.append(Fault(kind=kind, rank=int(rank), step=number, phase=phase, lasting=lasting))
    return found


def arm(trainer: Trainer, faults: list[Fault]) -> None:
    """Wrap the heartbeat of `trainer` so that this rank's faults strike."""
    dims = trainer.groups.dims
    for fault in faults:
        if fault.kind == "spike" and dims.coordinates(fault.rank).pp != dims.pp - 1:
            first = dims.rank(Coordinates(tp=0, dp=0, pp=dims.pp - 1))
            raise ConfigError(
                f"SPARSETRON_FAULT: rank {fault.rank} has no loss to be a spike; name one from "
                f"{first} to {dims.world_size - 1}, of the last pipeline stage"
            )
    mine = [fault for fault in faults if fault.rank == trainer.groups.world.rank]
    heartbeat, go_there = trainer.heartbeat, trainer.heartbeat.at
    struck: set[Fault] = set()

    def at(phase: str, step: int | None = None) -> None:
        go_there(phase, step)
        for fault in mine:
            fresh = fault.lasting or fault not in struck
            if fresh and fault.phase == phase and fault.due(heartbeat.step):
                struck.add(fault)
                now = f"{time.time():.3f}"
                print(f"{fault.kind} strikes at {now}", file=sys.stderr, flush=True)
                _STRIKE[fault.kind](trainer)

    if mine:
        heartbeat.at = at  # type: ignore[method-assign]


def arm_every_trainer(faults: list[Fault]) -> None:
    """Arm each trainer that `megatron.pretrain` builds in this process from now on."""
    build = pretrain.build_trainer

    @functools.wraps(build)
    def build_armed(*args: Any, **kwargs: Any) -> Trainer:
        trainer = build(*args, **kwargs)
        arm(trainer, faults)
        return trainer

    pretrain.build_trainer = build_armed


def _raise(trainer: Trainer) -> None:
    raise RuntimeError("injected fault")


def _out_of_memory(trainer: Trainer) -> None:
    raise MemoryError("injected fault")


def _held(trainer: Trainer) -> None:
    """Wait for a request to save or to leave; after `LIMIT` seconds the run goes on without it."""
    deadline = time.monotonic() + LIMIT
    while not trainer._pending() and time.monotonic() < deadline:
        time.sleep(0.05)


def _extra_collective(trainer: Trainer) -> None:
    import torch
    import torch.distributed as dist

    trainer.groups.world.all_reduce(torch.zeros(4, dtype=torch.float64), dist.ReduceOp.MAX)


def _skip_collective(trainer: Trainer) -> None:
    from megatron.parallel.groups import Group

    all_reduce = Group.all_reduce

    def skip(group: Group, *args: object, **kwargs: object) -> None:
        if group.handle is not None:
            Group.all_reduce = all_reduce

    Group.all_reduce = skip  # type: ignore[method-assign,assignment]


def _poison(value: float) -> Callable[[Trainer], None]:
    """Set one entry of the first parameter's next gradient to `value`."""

    def strike(trainer: Trainer) -> None:
        leaf = next(iter(trainer.engine.infos.values())).param

        def poison(grad: torch.Tensor) -> torch.Tensor:
            handle.remove()
            grad = grad.clone()
            grad.view(-1)[0] = value
            return grad

        handle = leaf.register_hook(poison)

    return strike


def _spike(trainer: Trainer) -> None:
    forward = trainer.stage.forward

    def spiked(*args, **kwargs):  # noqa: ANN002, ANN003, ANN202
        made = forward(*args, **kwargs)
        if made.dim() > 1:  # an activation: of a chunk before the last
            return made
        trainer.stage.forward = forward  # type: ignore[method-assign]
        return made * 100

    trainer.stage.forward = spiked  # type: ignore[method-assign]


def _drift(trainer: Trainer) -> None:
    import torch

    # Not the last bit, which the next update may round away.
    trainer.optimizer.states[-1].master[:1].view(torch.int32).bitwise_xor_(1 << 12)


def _slow_tracker(trainer: Trainer) -> None:
    class Slow:
        name = "slow"

        def steps(self, records: object) -> None:
            pass

        def evaluation(self, evaluation: object, **_: object) -> None:
            pass

        def close(self) -> None:
            time.sleep(TRACKER_SECONDS)

    trainer.metrics._trackers.append(Slow())  # type: ignore[attr-defined]


_STRIKE: dict[str, Callable[[Trainer], None]] = {
    "kill": lambda trainer: os.kill(os.getpid(), signal.SIGKILL),
    "raise": _raise,
    "exit0": lambda trainer: os._exit(0),
    "sys-exit0": lambda trainer: sys.exit(0),
    "oom": _out_of_memory,
    "stop": lambda trainer: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda trainer: time.sleep(3600),
    "slow": lambda trainer: time.sleep(1),
    "held": _held,
    "extra-collective": _extra_collective,
    "skip-collective": _skip_collective,
    "nan": _poison(math.nan),
    "inf": _poison(math.inf),
    "spike": _spike,
    "drift": _drift,
    "slow-tracker": _slow_tracker,
}
