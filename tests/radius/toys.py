"""Short runs of Radius on the parameters of the contract tests, and queries on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from tests.contract.harness import PATHS, SHAPES, PathCase, Toy, case_id, gradients

STEPS = 14
"""With an interval of 4 from step 2 on: dense up to step 4, then more than two intervals."""
MATRICES = [name for name, shape in SHAPES.items() if len(shape) > 1]
CASES = [case for case in PATHS if case.name == "radius"]
every_case = pytest.mark.parametrize("case", CASES, ids=case_id)
DENSE = PathCase("dense")


def radius(**options: Any) -> PathCase:
    """Return the case of a short run with these options, named without their prefix."""
    short = {"interval": 4, "start_iter": 2} | options
    return PathCase("radius", {f"radius_{name}": value for name, value in short.items()})


OWN_CASES = [
    radius(select="gradient"),
    radius(select="gradient", schedule="rolling"),
    radius(residual="none"),
]
"""Settings that the contract tests leave out.

The first two differ only in what they select by; the last keeps no residual.
"""


def reducer_of(toy: Toy) -> Any:
    """Return the reducer as `Any`, so that tests may use its private attributes."""
    return toy.engine.reducer


def masks_of(toy: Toy) -> dict[str, torch.Tensor]:
    """Return the selected entries by name, in the shape of the parameter."""
    shared = toy.shared()
    names = [name for name in MATRICES if f"index/{name}" in shared]
    return {name: shared[f"index/{name}"].view(SHAPES[name]) for name in names}


def params_of(toy: Toy) -> dict[str, torch.Tensor]:
    """Return copies of the parameters."""
    return {info.name: info.param.detach().clone() for info in toy.infos}


def settled(toy: Toy) -> dict[str, torch.Tensor]:
    """Return all state but the residual."""
    return {k: v for k, v in toy.state().items() if not k.startswith("reducer/")}


def moved(source: Toy, target: Toy, own: dict[str, torch.Tensor]) -> None:
    """Copy all state of one toy to another, with `own` as the residual."""
    saved = {(kind, name): tensor for kind, name, tensor in source.optimizer.tensors()}
    for kind, name, tensor in target.optimizer.tensors():
        tensor.copy_(saved[kind, name])
    target.optimizer.applied = source.optimizer.applied
    target.optimizer.finish_load()
    reducer_of(target).load_state_tensors(own, source.shared())


@contextmanager
def index_of(bits: bool) -> Iterator[None]:
    """Use bitmap indices, with the available kernels, or offsets."""
    with ExitStack() as changed:
        for module in ("reducer", "functional", "ddp_hook"):
            changed.enter_context(patch(f"radius.{module}.keeps_bits", lambda *_: bits))
        yield


def alone() -> ProcessGroups:
    """Return the groups of this process alone."""
    return ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=1), rank=0)


def densities(case: PathCase, steps: int, before: Callable[[Toy], None] = lambda toy: None) -> list:
    """Return the density of each of `steps`, after `before` has prepared the toy."""
    toy = Toy(alone(), case)
    before(toy)
    found = []
    for t in range(1, steps + 1):
        toy.step([gradients(t)])
        found.append(toy.engine.stats().density)
    return found
