"""Laws of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megatron.config import RecomputeConfig
from megatron.model.gpt import GPT
from tests.model.models import (
    VARIANTS,
    VOCAB,
    gradients,
    random_tokens,
    sharpen,
    small_config,
    small_model,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_runs_forward_and_backward(variant: str, dtype: torch.dtype) -> None:
    model = small_model(dtype=dtype, **VARIANTS[variant])
    tokens, labels = random_tokens(), random_tokens(seed=1)
    logits = model(tokens)
    assert logits.dtype == dtype and logits.shape == (2, 16, 128)
    loss = model.loss(tokens, labels)
    assert loss.dtype == torch.float32 and loss.shape == ()
    fresh = torch.log(torch.tensor(float(VOCAB))).item()
    assert abs(loss.item() / labels.numel() - fresh) < 0.2
    loss.backward()
    for name, grad in gradients(model).items():
        assert grad.isfinite().all() and grad.any(), name


def test_fp16_runs() -> None:
    model = small_model(
        dtype=torch.float16, num_layers=1, hidden_size=8, num_attention_heads=2, seq_length=4
    )
    tokens = random_tokens(1, 4)
    model.loss(tokens, tokens).backward()
    assert all(grad.dtype == torch.float16 for grad in gradients(model).values())


@pytest.mark.parametrize("variant", VARIANTS)
def test_16_bit_gradients_follow_fp32(variant: str) -> None:
    tokens, labels = random_tokens(), random_tokens(seed=1)
    exact = sharpen(small_model(**VARIANTS[variant]))
    rounded = small_model(dtype=torch.bfloat16, **VARIANTS[variant])
    rounded.load_values(exact.logical_values())
    for model in (exact, rounded):
        model.loss(tokens, labels).backward()
    expected, got = gradients(exact), gradients(rounded)
    for name, grad in expected.items():
        # Softmax does not see what is added to every key alike: that gradient is rounding.
        size = expected[name.replace("k_layernorm.bias", "k_layernorm.weight")].norm()
        error = (got[name].float() - grad).norm() / size
        assert error < 0.12, (name, error.item())


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_position_sees_a_later_one(variant: str) -> None:
    model = sharpen(small_model(**VARIANTS[variant]))
    tokens = random_tokens()
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % VOCAB
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :9], before[:, :9], atol=1e-6, rtol=1e-6)
    assert not torch.allclose(after[:, 9:], before[:, 9:], atol=1e-2)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_is_described_once(variant: str) -> None:
    model = small_model(**VARIANTS[variant])
    infos = model.parameter_infos()
    leaves = [leaf for info in infos for leaf in info.leaves]
    assert {id(leaf) for leaf in leaves} == {id(p) for p in model.parameters()}
    assert len(leaves) == len({id(leaf) for leaf in leaves})
    assert len({info.name for info in infos}) == len(infos)
    for info in infos:
        assert info.weight_decay == (info.param.ndim >= 2)
        assert len(info.leaves) == (2 if info.tied else 1)
        rows = VOCAB if "word_emb" in info.name or "output" in info.name else info.param.shape[0]
        assert info.logical_shape == (rows, *info.param.shape[1:])


def test_names_in_forward_order() -> None:
    layer = [
        f"{module}.{kind}"
        for module in (
            "input_norm",
            "attention.query_key_value",
            "attention.dense",
            "post_attention_norm",
            "mlp.dense_h_to_4h",
            "mlp.dense_4h_to_h",
        )
        for kind in ("weight", "bias")
    ]
    assert [info.name for info in small_model().parameter_infos()] == [
        "embedding.word_embeddings.weight",
        "embedding.position_embeddings.weight",
        *(f"layers.{n}.{name}" for n in range(3) for name in layer),
        "final_norm.weight",
        "final_norm.bias",
    ]
    untied = small_model(untie_embeddings_and_output_weights=True)
    assert untied.parameter_infos()[-1].name == "output_layer.weight"


def test_tied_leaves_share_storage_and_take_a_gradient_each() -> None:
    model = small_model()
    tied = model.parameter_infos()[0]
    embedding, output = tied.leaves
    assert embedding is not output and embedding.data_ptr() == output.data_ptr()
    tokens = random_tokens()
    model.loss(tokens, tokens).backward()
    assert embedding.grad is not None and output.grad is not None
    untouched = torch.ones(128, dtype=torch.bool)
    untouched[tokens.flatten()] = False
    assert not embedding.grad[untouched].any()
    assert output.grad[:VOCAB].any(dim=1).all()
    with torch.no_grad():
        embedding.add_(1.0)
    assert torch.equal(embedding, output)


def test_moving_a_model_is_refused() -> None:
    with pytest.raises(RuntimeError, match="tied"):
        small_model().to(torch.bfloat16)


@pytest.mark.parametrize("tied", [True, False])
def test_vocabulary_padding_changes_nothing(tied: bool) -> None:
    tokens, labels = random_tokens(), random_tokens(seed=1)
    results = []
    for multiple in (1, 128):
        model = small_model(
            make_vocab_size_divisible_by=multiple, untie_embeddings_and_output_weights=not tied
        )
        loss = model.loss(tokens, labels)
        loss.backward()
        results.append((loss.detach(), gradients(model)))
        for parameter in model.parameters():
            if parameter.shape[0] == 128:
                assert parameter.grad is not None
                assert not parameter[VOCAB:].any() and not parameter.grad[VOCAB:].any()
    (bare_loss, bare), (padded_loss, padded) = results
    torch.testing.assert_close(padded_loss, bare_loss, rtol=1e-6, atol=0)
    for name, grad in bare.items():
        torch.testing.assert_close(padded[name], grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", ["gpt2", "llama"])
def test_packed_documents_equal_separate_ones(variant: str) -> None:
    # In fp64, since how far fp32 products of other shapes round apart differs between CPUs.
    model = sharpen(small_model(dtype=torch.float64, **VARIANTS[variant]))
    tokens, labels = random_tokens(1), random_tokens(1, seed=1)
    lengths = (5, 8, 3)
    document_ids = np.repeat(np.arange(3), lengths)[None]
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(tokens, position_ids, document_ids)
    separate = [model(part) for part in tokens.split(lengths, dim=1)]
    torch.testing.assert_close(packed, torch.cat(separate, dim=1), atol=1e-12, rtol=1e-12)

    model.loss(tokens, labels, None, position_ids, document_ids).backward()
    expected = gradients(model)
    for parameter in model.parameters():
        parameter.grad = None
    for part, label in zip(tokens.split(lengths, 1), labels.split(lengths, 1), strict=True):
        model.loss(part, label).backward()
    for name, grad in gradients(model).items():  # the loss keeps its statistics in fp32
        torch.testing.assert_close(grad, expected[name], atol=1e-6, rtol=1e-5)


def test_loss_is_the_masked_sum() -> None:
    model = sharpen(small_model())
    tokens, labels = random_tokens(), random_tokens(seed=1)
    mask = torch.ones(2, 16)
    mask[0, :5] = 0
    logits = model(tokens)[..., :VOCAB]
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none"
    )
    torch.testing.assert_close(model.loss(tokens, labels), losses.sum())
    torch.testing.assert_close(model.loss(tokens, labels, mask), losses[5:].sum())


@pytest.mark.parametrize("variant", ["gpt2", "llama"])
def test_stages_compose_to_the_whole(variant: str) -> None:
    whole = small_model(**VARIANTS[variant])
    config = small_config(**VARIANTS[variant])
    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "seed": 5,
        "dtype": torch.float32,
        "device": "cpu",
    }
    first = GPT(config, layers=range(0, 2), has_head=False, **common)
    last = GPT(config, layers=range(2, 3), has_embedding=False, **common)
    tokens, labels = random_tokens(), random_tokens(seed=1)
    hidden = last.transform(first.transform(first.embed(tokens)))
    assert torch.equal(last.loss_from_hidden(hidden, labels), whole.loss(tokens, labels))

    names = [info.name for stage in (first, last) for info in stage.parameter_infos()]
    expected = [info.name for info in whole.parameter_infos()]
    assert set(names) == set(expected)
    assert len(names) == len(expected) + (1 if config.tied else 0)


@pytest.mark.push
# torch's own tracing looks at `.grad` of tensors that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_compiled_layers_give_the_same_numbers(dtype: torch.dtype) -> None:
    tokens, labels = random_tokens(), random_tokens(seed=1)
    plain, compiled = small_model(dtype=dtype), small_model(dtype=dtype)
    compiled.compile_layers(backend="aot_eager")
    for model in (plain, compiled):
        model.loss(tokens, labels).backward()
    expected = gradients(plain)
    bound = 1e-6 if dtype == torch.float32 else 0.05
    for name, grad in gradients(compiled).items():
        assert (grad - expected[name]).norm() <= bound * expected[name].norm(), name


RECOMPUTATIONS = {
    "none": RecomputeConfig(),
    "full": RecomputeConfig(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2
    ),
    "block": RecomputeConfig(
        recompute_granularity="full", recompute_method="block", recompute_num_layers=1
    ),
    "selective": RecomputeConfig(recompute_granularity="selective"),
}


@pytest.mark.push
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("recompute", RECOMPUTATIONS)
def test_compiled_layers_are_recomputed_with_their_dropout(recompute: str) -> None:
    tokens, labels = random_tokens(), random_tokens(seed=1)
    common: dict[str, Any] = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
    plain = small_model(**common)
    compiled = small_model(recompute=RECOMPUTATIONS[recompute], **common)
    compiled.compile_layers(backend="aot_eager")
    for model in (plain, compiled):
        model.streams.at(3, 1)
        model.loss(tokens, labels).backward()
    expected = gradients(plain)
    for name, grad in gradients(compiled).items():
        assert (grad - expected[name]).norm() <= 1e-6 * expected[name].norm(), name


@pytest.mark.parametrize("recompute", RECOMPUTATIONS)
def test_the_last_layer_of_each_pass_is_announced(recompute: str) -> None:
    model = small_model(recompute=RECOMPUTATIONS[recompute])
    seen: list[str] = []
    model.before_last_layer = lambda: seen.append("announced")
    for number, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(lambda *_, number=number: seen.append(str(number)))
        last = layer.get_parameter("mlp.dense_4h_to_h.weight")  # the first whose gradient is made
        last.register_hook(lambda gradient, number=number: seen.append(f"backward {number}"))
    loss = model(random_tokens()).sum()
    assert seen == ["0", "1", "announced", "2"]
    seen.clear()
    loss.backward()
    called = len(seen) - 1 - seen[::-1].index("announced")
    assert set(seen[:called]) >= {"backward 2", "backward 1"}, "layer 0 alone is left"
    assert "backward 0" in seen[called:]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_layers_share_what_is_compiled() -> None:
    """A graph for each layer would take the compiler's time for each, and torch stops at eight."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    model = small_model(num_layers=10)
    model.compile_layers(backend=backend)
    for _ in range(2):
        model.loss(random_tokens(), random_tokens(seed=1)).backward()
    assert len(graphs) == 1
    model.eval()
    with torch.no_grad():
        model.loss(random_tokens(), random_tokens(seed=1))
    assert len(graphs) == 2
