"""Compiled layers of tensor-parallel ranks are whole graphs, and train as eager layers do."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from megatron.parallel.groups import ProcessGroups
from tests.ranks import Ranks
from tests.tensor_parallel.grids import LLAMA, GridCase, batch, build

STEPS = 3
CASES = {
    "GPT-2": GridCase(),
    "llama, sequence parallel": GridCase(changes=LLAMA, sequence_parallel=True),
}


def trained(groups: ProcessGroups, backend: str | None, case: GridCase) -> tuple[list[float], int]:
    """Return the losses of a few steps, and the bytes that a rank sends in them."""
    model = build(case, groups.world)
    if backend is not None:
        model.compile_layers(backend=backend)
    data: dict[str, Any] = {**batch(case), "document_ids": None}
    losses = []
    groups.world.traffic.take()
    for _ in range(STEPS):
        loss = model.loss(**data) / data["tokens"].numel()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.05 * parameter.grad
                parameter.grad = None
    return losses, groups.world.traffic.take()


def both(groups: ProcessGroups, case: GridCase, backend: str) -> dict[str, Any]:
    """Train eager layers, and layers compiled by a backend of torch.compile."""
    from torch._dynamo.utils import counters

    eager = trained(groups, None, case)
    counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own modules use deprecated functions
        compiled = trained(groups, backend, case)
    return {
        "eager": eager,
        "compiled": compiled,
        "breaks": dict(counters["graph_break"]),
        "graphs": counters["stats"]["unique_graphs"],
    }


@pytest.mark.push
@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_one_graph_with_the_losses_of_an_eager_layer(
    ranks: Ranks, name: str, pytestconfig: pytest.Config
) -> None:
    # Inductor generates C++, whose compilation takes one to two minutes for these graphs.
    backend = "inductor" if pytestconfig.getoption("--all") else "aot_eager"
    for found in ranks.run(2, both, CASES[name], backend):
        assert found["breaks"] == {} and found["graphs"] == 1
        losses, sent = found["compiled"]
        wanted, sent_eagerly = found["eager"]
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert len(set(losses)) == STEPS and sent == sent_eagerly > 0
