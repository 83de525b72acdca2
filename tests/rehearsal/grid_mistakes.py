"""Deliberate mistakes in NCCL calls, to check that the rehearsal notices them.

Runs in processes that have the device and NCCL.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron.parallel.groups import ProcessGroups
from tests.ranks import grid
from tests.rehearsal import device, nccl
from tests.rehearsal.findings import place, told
from tests.rehearsal.grids import current_device, trainer_on


def drop_each(groups: ProcessGroups, flags: str, tp: int, pp: int) -> dict[str, dict[str, int]]:
    """Train one step without the wait for NCCL, for each line of any rank that waits.

    Returns the kinds of findings on this rank and their numbers, by line; the key "" has the
    findings of an unchanged step.
    """
    groups = grid(groups, tp=tp, pp=pp)
    sizes = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}"
    with trainer_on(groups, f"{sizes} {flags}", current_device(groups)) as trainer:
        _findings(lambda: None)
        lines: set[str] = set()
        with _waits(lambda line: lines.add(line) or True):
            found = {"": _findings(trainer.train_step)}
        told_by_all = map(json.loads, groups.world.all_gather_str(json.dumps(sorted(lines))))
        for dropped in sorted(set().union(*told_by_all)):
            with _waits(dropped.__ne__):
                found[dropped] = _findings(trainer.train_step)
    return found


def receives_ahead(groups: ProcessGroups) -> dict[str, int]:
    """Train one step of a pipeline that posts receives before they are needed."""
    groups = grid(groups, pp=2)
    flags = "--pipeline-model-parallel-size 2"
    with trainer_on(groups, flags, current_device(groups)) as trainer:
        trainer.pipeline.transport._ahead = 2  # pyright: ignore[reportAttributeAccessIssue]
        _findings(lambda: None)
        return _findings(trainer.train_step)


def in_another_order(groups: ProcessGroups) -> list[Any]:
    """Issue two reductions, which the last rank exchanges; return the log of the calls."""
    return _logged(groups, lambda issue: [issue(op) for op in _in_order(groups)])


def one_on_the_cpu(groups: ProcessGroups) -> list[Any]:
    """Issue two reductions; the first rank has one tensor on the CPU. Return the log."""
    first = groups.world.rank == 0

    def issue_both(issue: Callable[..., None]) -> None:
        issue(dist.ReduceOp.SUM)
        issue(dist.ReduceOp.SUM, torch.device("cpu") if first else None)

    return _logged(groups, issue_both)


def refused(groups: ProcessGroups) -> list[str]:
    """Try operations that NCCL does not support; return the error messages."""
    where = current_device(groups)
    on_device, apart = torch.zeros(4, device=where), groups.world.new_gloo_group()
    attempts: list[Callable[[], Any]] = [
        lambda: apart.all_reduce(on_device, dist.ReduceOp.SUM),
        lambda: groups.world.all_gather(on_device, torch.zeros(2)),
        lambda: groups.world.all_reduce(on_device[::2], dist.ReduceOp.SUM),
        lambda: groups.world.all_reduce(on_device.to(torch.int16), dist.ReduceOp.SUM),
    ]
    return [_refusal(attempt) for attempt in attempts]


def _refusal(attempt: Callable[[], Any]) -> str:
    found: list[str] = []

    def tried() -> None:
        try:
            attempt()
        except ValueError as error:
            found.append(str(error))

    assert "device" in _findings(tried)
    return found[0]


def _in_order(groups: ProcessGroups) -> list[dist.ReduceOp.RedOpType]:
    ops = [dist.ReduceOp.SUM, dist.ReduceOp.MAX]
    return ops[::-1] if groups.world.rank == groups.world.size - 1 else ops


def _logged(groups: ProcessGroups, scene: Callable[[Callable[..., None]], Any]) -> list[Any]:
    """Play a scene with a function that reduces four numbers; return the log of the calls."""
    played, here = nccl.install(), current_device(groups)

    def issue(op: dist.ReduceOp.RedOpType, where: torch.device | None = None) -> None:
        groups.world.all_reduce(torch.ones(4, device=where or here), op)

    played.take()
    scene(issue)
    return played.take()


def _waits(keeps: Callable[[str], bool]) -> Any:
    """Keep only those waits for NCCL whose line `keeps` accepts."""
    real = nccl.PlayedWork.wait

    def wait(self: nccl.PlayedWork, timeout: Any = None) -> bool:
        if keeps(told(place(depth=2))):
            return real(self, timeout)
        self.arrive()
        return True

    return mock.patch.object(nccl.PlayedWork, "wait", wait)


def _findings(scene: Callable[[], Any]) -> dict[str, int]:
    """Play a scene; return the number of its findings of each kind, without waits."""
    here = device.install()
    scene()
    here.memory.settle()
    found = Counter(one.kind for one in here.findings.take() if one.kind != "wait")
    # Operations that this scene left unordered must not count in the next scene.
    torch.cuda.synchronize()
    here.findings.take()
    return found
