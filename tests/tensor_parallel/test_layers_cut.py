"""Tests that a model sharded over tensor-parallel ranks is the same model."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from megatron.config import RecomputeConfig
from megatron.documents import Documents
from megatron.parallel.groups import ProcessGroups
from megatron.tensor_parallel import products, sharded_products
from megatron.tensor_parallel.rng import LayerStream
from tests.ranks import Ranks
from tests.tensor_parallel.grids import (
    DROPOUT,
    LENGTH,
    LLAMA,
    GridCase,
    batch,
    build,
    found,
    loss_and_gradients,
    noted,
    whole_gradients,
)

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": LLAMA,
    "gpt2 with head norms": {"qk_layernorm": True, "position_embedding_type": "rope"},
    "llama with head norms": LLAMA | {"qk_layernorm": True},
}
BOTH = pytest.mark.parametrize("cut", [False, True], ids=["whole-sequence", "sequence-parallel"])


def alone(case: GridCase) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = build(case)
    loss = model.loss(**batch(case))
    loss.backward()
    return loss.detach(), whole_gradients([found(model, loss)])


def assert_close(got: torch.Tensor, wanted: torch.Tensor, bound: float, what: str) -> None:
    assert got.shape == wanted.shape, what
    error = (got.double() - wanted.double()).norm() / wanted.double().norm()
    assert error < bound, (what, error.item())


@pytest.mark.turns
@BOTH
@pytest.mark.parametrize("ranks_per_layer", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_one_rank(
    ranks: Ranks, name: str, ranks_per_layer: int, cut: bool
) -> None:
    case = GridCase(changes=MODELS[name], sequence_parallel=cut)
    loss, wanted = alone(case)
    parts = ranks.run(ranks_per_layer, loss_and_gradients, case)
    for part in parts:
        assert torch.equal(part.loss, parts[0].loss)
    assert_close(parts[0].loss, loss, 1e-6, "loss")
    grads = whole_gradients(parts)
    assert grads.keys() == wanted.keys()
    for what, grad in grads.items():
        assert_close(grad, wanted[what], 1e-5, what)


def with_one_dnn(groups: ProcessGroups, case: GridCase) -> Any:
    """Call `loss_and_gradients` with the matrix products that larger layers use on a CPU."""
    with mock.patch.multiple(products, _WORTHWHILE=0, is_intel=lambda: False):
        return loss_and_gradients(groups, case)


@BOTH
def test_products_of_large_layers_give_the_same(ranks: Ranks, cut: bool) -> None:
    case = GridCase(sequence_parallel=cut)
    loss, wanted = alone(case)
    parts = ranks.run(2, with_one_dnn, case)
    assert_close(parts[0].loss, loss, 1e-6, "loss")
    for what, grad in whole_gradients(parts).items():
        assert_close(grad, wanted[what], 1e-5, what)


@BOTH
def test_bf16_follows(ranks: Ranks, cut: bool) -> None:
    case = GridCase(sequence_parallel=cut, dtype=torch.bfloat16, batch=1)
    loss, wanted = alone(GridCase(batch=1))
    parts = ranks.run(2, loss_and_gradients, case)
    assert_close(parts[0].loss, loss, 0.02, "loss")
    for what, grad in whole_gradients(parts).items():
        assert_close(grad, wanted[what], 0.12, what)


def on_stages(groups: ProcessGroups, case: GridCase) -> tuple[Any, Any, tuple[int, ...]]:
    """Run both stages of a pipeline on the same ranks, one after the other."""
    first = build(case, groups.world, layers=range(0, 2), has_head=False)
    last = build(case, groups.world, layers=range(2, 3), has_embedding=False)
    data = batch(case)
    documents = Documents.of(data["document_ids"], torch.device("cpu"))
    where = data["position_ids"], documents
    sent = first.transform(first.embed(data["tokens"], where[0]), *where)
    received = sent.detach().requires_grad_()
    hidden = last.transform(received, *where)
    loss = last.loss_from_hidden(hidden, data["labels"], data["loss_mask"])
    loss.backward()
    assert received.grad is not None
    sent.backward(received.grad)
    for model in (first, last):
        for info in model.parameter_infos():
            assert info.tied == (info.name == "embedding.word_embeddings.weight")
    return found(first, loss), found(last, loss), tuple(sent.shape)


@BOTH
def test_stages_hold_a_copy_each_of_their_share_of_a_tied_table(ranks: Ranks, cut: bool) -> None:
    case = GridCase(sequence_parallel=cut)
    loss, wanted = alone(case)
    results = ranks.run(2, on_stages, case)
    assert results[0][2] == (2, LENGTH // 2 if cut else LENGTH, 48)
    assert_close(results[0][1].loss, loss, 1e-6, "loss")
    table = "embedding.word_embeddings.weight"
    first, last = (whole_gradients([result[i] for result in results]) for i in (0, 1))
    assert_close(first.pop(table) + last.pop(table), wanted.pop(table), 1e-5, table)
    for what, grad in {**first, **last}.items():
        assert_close(grad, wanted[what], 1e-5, what)


RECOMPUTE = [
    RecomputeConfig(recompute_granularity="full", recompute_num_layers=2),
    RecomputeConfig(recompute_granularity="selective"),
    RecomputeConfig(recompute_granularity="ops"),
    RecomputeConfig(recompute_granularity="no-norm"),
    RecomputeConfig(recompute_granularity="every", recompute_num_layers=3),
    RecomputeConfig(recompute_granularity="residual", recompute_num_layers=2),
    RecomputeConfig(recompute_granularity="residual-star", recompute_num_layers=2),
]


@pytest.mark.turns
@BOTH
@pytest.mark.parametrize("name", MODELS)
def test_recomputation_draws_and_finds_the_same(ranks: Ranks, name: str, cut: bool) -> None:
    kept = GridCase(changes=MODELS[name] | DROPOUT, sequence_parallel=cut)
    # This also asserts that ranks agree on replicated tensors, with and without dropout.
    wanted = whole_gradients(ranks.run(2, loss_and_gradients, kept))
    for recompute in RECOMPUTE:
        case = GridCase(changes=kept.changes, sequence_parallel=cut, recompute=recompute)
        for what, grad in whole_gradients(ranks.run(2, loss_and_gradients, case)).items():
            assert torch.equal(grad, wanted[what]), (recompute, what)


def draws(groups: ProcessGroups, cut: bool) -> list[torch.Tensor]:
    streams = build(GridCase(sequence_parallel=cut), groups.world).streams
    stream, drawn = LayerStream(streams, 1, streams.position), []
    stream.heads()
    drawn.append(torch.rand(8))
    stream.hidden()
    drawn.append(torch.rand(8))
    return drawn


@BOTH
def test_ranks_draw_apart_what_they_hold_apart(ranks: Ranks, cut: bool) -> None:
    (heads, hidden), (other_heads, other_hidden) = ranks.run(2, draws, cut)
    assert not torch.equal(heads, other_heads)
    assert torch.equal(hidden, other_hidden) != cut
    assert not torch.equal(heads, hidden) and not torch.equal(other_heads, other_hidden)


def refusals(groups: ProcessGroups, field: str, value: int) -> str:
    case = GridCase(sequence_parallel=groups.world.size > 2)
    model, data = build(case, groups.world), batch(case)
    data[field][1, 3] = value
    with pytest.raises(IndexError) as caught:
        model.loss(**data)
    return str(caught.value)


@pytest.mark.parametrize("value", [-1, 97, 100])
@pytest.mark.parametrize("field", ["tokens", "labels"])
def test_every_rank_refuses_an_id_outside_the_vocabulary(
    ranks: Ranks, field: str, value: int
) -> None:
    texts = ranks.run(2, refusals, field, value)
    assert texts == [f"token id {value} is outside the vocabulary of 97 entries"] * 2


def widths(groups: ProcessGroups, case: GridCase) -> tuple[int, int]:
    """Return the columns of the logits here, and the size of the largest tensor saved."""
    model, most = build(case, groups.world), 0
    weights = {parameter.data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal most
        if tensor.data_ptr() not in weights:
            most = max(most, tensor.untyped_storage().nbytes() // tensor.element_size())
        return tensor

    data = batch(case)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.loss(**data)
    return model(data["tokens"]).shape[-1], most


@BOTH
def test_no_rank_sees_the_whole_vocabulary(ranks: Ranks, cut: bool) -> None:
    case = GridCase(vocab_size=1001, sequence_parallel=cut)
    for columns, most in ranks.run(2, widths, case):
        assert columns == 504
        assert most <= 2 * LENGTH * 504


def traffic(groups: ProcessGroups, case: GridCase) -> tuple[list[str], list[str]]:
    """Return the collectives of forward and of backward."""
    model, data = build(case, groups.world), batch(case)
    with noted(groups.world) as forward:
        loss = model.loss(**data)
    with noted(groups.world) as backward:
        loss.backward()
    return forward, backward


def test_collectives_of_a_layer(ranks: Ranks) -> None:
    hidden = 2 * LENGTH * 48
    total, statistics = f"sum of {hidden} float32", 2 * LENGTH
    losses = [f"max of {statistics} float32", f"sum of {2 * statistics} float32"]
    for forward, backward in ranks.run(2, traffic, GridCase()):
        # Forward: the embedding's sum, two for each of three layers. Backward: the output layer's
        # first.
        assert forward == [total] * (1 + 2 * 3) + losses
        assert backward == [total] * (1 + 2 * 3)

    gather, scatter = f"gather of {hidden // 2} float32", f"reduce-scatter of {hidden} float32"
    for forward, backward in ranks.run(2, traffic, GridCase(sequence_parallel=True)):
        assert forward == [scatter, *[gather, scatter] * (2 * 3), gather, *losses]
        # Each column-parallel layer gathers its input again and sums its gradient; each row-
        # parallel layer and the embedding gathers the gradient.
        assert backward == [gather, scatter, *[gather, gather, scatter] * (2 * 3), gather]


def order_of_backward(groups: ProcessGroups, case: GridCase) -> list[str]:
    """Return the operations of the output layer's backward, in order."""
    model = build(case, groups.world, layers=range(0), has_embedding=False)
    length = LENGTH // 2 if case.sequence_parallel else LENGTH
    hidden = torch.ones(2, length, 48, requires_grad=True)
    logits = model.project(hidden)
    with pytest.MonkeyPatch.context() as patch, noted(groups.world) as events:
        product = sharded_products.product

        def noting(*operands: torch.Tensor) -> torch.Tensor:
            events.append("product")
            return product(*operands)

        patch.setattr(sharded_products, "product", noting)
        logits.sum().backward()
    return [event.split(" of ")[0] for event in events]


def test_the_weight_gradient_hides_the_sum(ranks: Ranks) -> None:
    for events in ranks.run(2, order_of_backward, GridCase()):
        assert events == ["product", "sum", "product"]
    for events in ranks.run(2, order_of_backward, GridCase(sequence_parallel=True)):
        assert events == ["gather", "product", "reduce-scatter", "product"]
