"""The model is GPT-2 to rounding, and weights convert both ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.errors import CheckpointError
from megatron.model.huggingface import from_gpt2, to_gpt2
from tests.model.models import VOCAB, gradients, random_tokens, sharpen, small_model

transformers = pytest.importorskip("transformers", reason="optional package")


def reference_model(attention: str = "eager") -> Any:
    config = transformers.GPT2Config(
        n_layer=3,
        n_embd=48,
        n_head=4,
        n_positions=16,
        vocab_size=VOCAB,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=attention,
    )
    return transformers.GPT2LMHeadModel(config).train()


def test_logits_and_every_gradient_equal_gpt2() -> None:
    ours = sharpen(small_model())
    theirs = reference_model()
    theirs.load_state_dict(to_gpt2(ours.logical_values(), num_heads=4))
    tokens = random_tokens(3)
    labels = random_tokens(3, seed=1)

    logits = theirs(input_ids=tokens).logits
    torch.testing.assert_close(ours(tokens)[..., :VOCAB], logits, atol=1e-5, rtol=1e-5)

    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    expected.backward()
    (ours.loss(tokens, labels) / labels.numel()).backward()
    got = to_gpt2(gradients(ours), num_heads=4)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(
            got[name], parameter.grad, atol=1e-5, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_weights_survive_the_round_trip() -> None:
    theirs = reference_model()
    values = from_gpt2(theirs.state_dict(), num_heads=4, hidden_size=48)
    assert "output_layer.weight" not in values
    back = to_gpt2(values, num_heads=4)
    assert back.keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(back[name], tensor), name


def test_foreign_weights_load_into_our_model() -> None:
    theirs = reference_model("sdpa")
    ours = small_model(seed=99)
    ours.load_values(from_gpt2(theirs.state_dict(), num_heads=4, hidden_size=48))
    tokens = random_tokens()
    torch.testing.assert_close(
        ours(tokens)[..., :VOCAB], theirs(input_ids=tokens).logits, atol=1e-5, rtol=1e-5
    )


def test_an_untied_head_is_kept() -> None:
    state = dict(reference_model().state_dict())
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    values = from_gpt2(state, num_heads=4, hidden_size=48)
    assert torch.equal(values["output_layer.weight"], state["lm_head.weight"])
    assert torch.equal(to_gpt2(values, num_heads=4)["lm_head.weight"], state["lm_head.weight"])


def test_what_gpt2_cannot_hold_is_refused() -> None:
    with pytest.raises(CheckpointError, match="model.layers.0.q_proj.weight"):
        from_gpt2({"model.layers.0.q_proj.weight": torch.zeros(2, 2)}, num_heads=1, hidden_size=2)
    with pytest.raises(CheckpointError, match="layers.0.attention.unknown.weight"):
        to_gpt2({"layers.0.attention.unknown.weight": torch.zeros(2, 2)}, num_heads=1)
    grouped = small_model(group_query_attention=True, num_query_groups=1)
    with pytest.raises(CheckpointError, match="query groups"):
        to_gpt2(grouped.logical_values(), num_heads=4)
