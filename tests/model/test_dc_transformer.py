"""The DC-Transformer: shapes and counts, a model of loops, padding, dropout, decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron.config import RecomputeConfig
from megatron.data.dictionary import PAD
from megatron.model.dc_transformer import DCTransformer, sinusoids, visible_positions
from megatron.model.dc_transformer_shapes import (
    forward_flops,
    logical_shapes,
    parameter_count,
    training_flops,
)
from megatron.model.dynamic_convolution import BLOCK
from megatron.tasks.translation_config import DCTransformerConfig
from megatron.tensor_parallel.rng import DropoutStreams, StreamPosition
from tests.model.translations import (
    SOURCE,
    TARGET,
    random_pairs,
    slow_logits,
    slow_sums,
    small_shape,
    small_translator,
)

REPO = Path(__file__).resolve().parents[2]
LENGTHS = [(5, 7), (9, 3), (2, 4), (9, 8)]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def full_recompute(interval: int | None) -> RecomputeConfig | None:
    """Return the settings that recompute runs of `interval` layers; None for none."""
    if interval is None:
        return None
    return RecomputeConfig(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=interval
    )


def test_the_published_model_has_its_parameters() -> None:
    config = DCTransformerConfig()
    assert config.encoder_kernels == (3, 7, 15, 31, 31, 31, 31)
    assert config.decoder_kernels == (3, 7, 15, 31, 31, 31)
    assert config.ffn_size == 1024
    assert parameter_count(config, source_size=8848, target_size=6632) == 38_685_184
    with torch.device("meta"):
        shapes = logical_shapes(config, source_size=8848, target_size=6632)
    dense = sum(
        torch.Size(shape).numel()
        for name, shape in shapes.items()
        if len(shape) == 2 and "weight_linear" not in name
    )
    assert dense == 38_060_032  # the tensors that Sohoni et al. 2019 make sparse


def test_the_reports_tables_are_those_of_the_configuration() -> None:
    folder = REPO / "configs"
    table = yaml.safe_load((folder / "tables" / "dc_transformer_de_en.yaml").read_text())
    config = yaml.safe_load((folder / "dc_transformer_de_en.yaml").read_text())
    shape = {k: v for k, v in config["model"].items() if not k.endswith("kernel_size_list")}
    assert DCTransformerConfig(**shape).encoder_kernels == tuple(
        config["model"]["encoder_kernel_size_list"]
    )
    for network in table["networks"]:
        sizes = {name: network[name] for name in ("decoder_layers", "embed_dim")}
        found = DCTransformerConfig(**{**shape, **sizes})
        counted = parameter_count(found, source_size=8848, target_size=6632)
        assert counted == network["parameters"]
    assert list(table["sparse"]) == [100, 50, 40, 30, 20, 10, 5]
    optimizer = config["optimizer"]
    assert table["learning_rate"] == optimizer["lr"]
    assert table["warmup_updates"] == optimizer["lr_warmup_iters"]
    assert table["updates"] == config["training"]["train_iters"]


def test_shapes_are_those_of_the_model() -> None:
    other = small_translator(embed_dim=24, ffn_embed_dim=10, encoder_layers=4)
    for model in (small_translator(), other):
        found = {info.name: info.logical_shape for info in model.parameter_infos()}
        assert found == logical_shapes(model.config, source_size=SOURCE, target_size=TARGET)
        assert list(found) == list(dict(model.named_parameters()))
        assert [i.weight_decay for i in model.parameter_infos()] == [
            len(shape) == 2 for shape in found.values()
        ]


def test_loss_and_gradients_equal_a_model_of_loops() -> None:
    model = small_translator(label_smoothing=0.1, encoder_layers=3)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    values = {
        name: parameter.detach().double().requires_grad_()
        for name, parameter in model.named_parameters()
    }
    source, inputs, targets = random_pairs(LENGTHS)
    sums = model.loss(source, inputs, targets)
    sums[0].backward()
    wanted = torch.zeros(2, dtype=torch.double)
    for row, (s, t) in enumerate(LENGTHS):
        logits = slow_logits(
            values, model.config, source[row, :s].tolist(), inputs[row, :t].tolist()
        )
        wanted = wanted + slow_sums(logits, targets[row, :t].tolist(), 0.1)
    wanted[0].backward()
    torch.testing.assert_close(sums.double(), wanted, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        expected, found = values[name].grad, parameter.grad
        assert expected is not None and found is not None, name
        torch.testing.assert_close(
            found.double(), expected, rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_padding_changes_nothing() -> None:
    model = small_translator()
    source, inputs, targets = random_pairs([(5, 4)])
    alone = model.loss(source, inputs, targets)
    padded = [torch.nn.functional.pad(x, (0, 6), value=PAD) for x in (source, inputs, targets)]
    torch.testing.assert_close(model.loss(*padded), alone)
    model.train(False)
    torch.testing.assert_close(
        model(padded[0], padded[1])[:, :4], model(source, inputs), atol=1e-5, rtol=1e-5
    )


@DTYPES
def test_decoding_by_positions_equals_whole_sentences(dtype: torch.dtype) -> None:
    model = small_translator(decoder_layers=3, dtype=dtype)
    model.train(False)
    source, inputs, _ = random_pairs([(5, 6), (9, 6)])
    visible = visible_positions(source)
    caches = model.start_decoding(model.encode(source))
    steps = [model.decode_next(inputs[:, t], t, visible, caches) for t in range(inputs.shape[1])]
    # A step sums in another order than a whole sentence. Some 30 operations follow one another, of
    # which each rounds numbers of about 1 to 2^-24 in fp32 and 2^-8 in bf16, in random directions.
    close = 1e-5 if dtype == torch.float32 else 30**0.5 * 2**-8
    torch.testing.assert_close(torch.stack(steps, 1), model(source, inputs), atol=close, rtol=close)


def test_dropout_depends_on_its_position_in_the_run_alone() -> None:
    model = small_translator(dropout=0.3, attention_dropout=0.1, weight_dropout=0.1)
    pairs = random_pairs(LENGTHS)

    def loss(iteration: int, microbatch: int) -> float:
        model.streams.at(iteration, microbatch)
        return model.loss(*pairs)[0].item()

    first = loss(1, 0)
    torch.manual_seed(99)
    others = {loss(1, 1), loss(2, 0), first}
    assert len(others) == 3
    assert loss(1, 0) == first
    model.train(False)
    assert loss(1, 0) == loss(5, 3)


DROPS: dict[str, Any] = {"dropout": 0.3, "attention_dropout": 0.1, "weight_dropout": 0.1}


@pytest.mark.parametrize("interval", [None, 1, 2])
def test_every_layer_draws_from_a_stream_of_its_own(
    monkeypatch: pytest.MonkeyPatch, interval: int | None
) -> None:
    """The embeddings and the layers of both sides: also of another microbatch and iteration."""
    entered: list[int] = []
    enter = DropoutStreams.enter

    def note(
        self: DropoutStreams, layer: int, *, position: StreamPosition | None = None, **more: int
    ) -> None:
        entered.append(self.key(layer, position=position, **more))
        enter(self, layer, position=position, **more)

    monkeypatch.setattr(DropoutStreams, "enter", note)
    model = small_translator(
        encoder_layers=3, decoder_layers=2, recompute=full_recompute(interval), **DROPS
    )
    seen: set[int] = set()
    for place in ((1, 0), (1, 1), (2, 0)):
        entered.clear()
        model.streams.at(*place)
        loss = model.loss(*random_pairs(LENGTHS))[0]
        forward = list(entered)
        assert len(forward) == 3 + 2 + 2
        model.streams.at(9, 9)  # backward must not follow
        loss.backward()
        # Recomputation draws again what the layers drew, and nothing else.
        assert set(entered) == set(forward) and len(set(forward)) == len(forward)
        seen |= set(forward)
    assert len(seen) == 3 * 7


@pytest.mark.parametrize(("interval", "calls"), [(None, 1), (1, 2), (2, 2), (3, 2)])
def test_each_layer_is_recomputed_once(interval: int | None, calls: int) -> None:
    model = small_translator(encoder_layers=3, decoder_layers=3, recompute=full_recompute(interval))
    layers = [*model.encoder.layers, *model.decoder.layers]
    counts = [0] * len(layers)

    def count(number: int) -> None:
        counts[number] += 1

    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, number=number: count(number))
    loss = model.loss(*random_pairs(LENGTHS))[0]
    assert counts == [1] * 6
    loss.backward()
    assert counts == [calls] * 6
    with torch.no_grad():
        model.loss(*random_pairs(LENGTHS))
    assert counts == [calls + 1] * 6


def test_each_dropout_changes_the_loss() -> None:
    pairs = random_pairs(LENGTHS)
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"dropout": 0.5},
        {"attention_dropout": 0.5},
        {"weight_dropout": 0.5},
    )
    losses = {small_translator(**change).loss(*pairs)[0].item() for change in changes}
    assert len(losses) == len(changes)


@DTYPES
def test_recomputed_layers_give_the_same_bits(dtype: torch.dtype) -> None:
    pairs = random_pairs(LENGTHS)
    found = []
    for interval in (None, 1, 2):
        model = small_translator(recompute=full_recompute(interval), dtype=dtype, **DROPS)
        model.streams.at(4, 2)
        sums = model.loss(*pairs)
        model.streams.at(9, 9)  # backward must not follow
        sums[0].backward()
        found.append([sums.detach(), *(p.grad for p in model.parameters())])
    for one, *others in zip(*found, strict=True):
        assert all(torch.equal(one, other) for other in others)


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    one, deeper = small_translator(), small_translator(encoder_layers=4)
    values = dict(deeper.named_parameters())
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, values[name])
    other = small_translator(seed=4)
    assert not torch.equal(one.encoder.embed_tokens.weight, other.encoder.embed_tokens.weight)


def test_initial_values_have_fairseqs_scale() -> None:
    model = DCTransformer(
        DCTransformerConfig(encoder_layers=1, decoder_layers=1, embed_dim=256),
        source_size=400,
        target_size=400,
        seed=1,
        dtype=torch.float32,
        device="cpu",
    )
    wanted = {
        "encoder.embed_tokens.weight": 256**-0.5,
        "decoder.output_projection.weight": 256**-0.5,
        "encoder.layers.0.linear1.weight": (2 / 512) ** 0.5,
        "encoder.layers.0.fc1.weight": (2 / 768) ** 0.5,
        "encoder.layers.0.conv.weight_linear.weight": (2 / 268) ** 0.5,
        "decoder.layers.0.encoder_attn.q_proj.weight": (2 / 1024) ** 0.5,
        "decoder.layers.0.encoder_attn.out_proj.weight": (2 / 512) ** 0.5,
    }
    values = dict(model.named_parameters())
    for name, std in wanted.items():
        assert abs(values[name].std().item() / std - 1) < 0.03, name
    assert values["encoder.layers.0.fc1.bias"].eq(0).all()
    assert values["encoder.layers.0.final_layer_norm.weight"].eq(1).all()


def test_positions_are_sines_then_cosines() -> None:
    waves = sinusoids(0, 50, 8, device=torch.device("cpu"))
    assert waves[0].tolist() == [0.0] * 4 + [1.0] * 4
    torch.testing.assert_close(waves[3, 0], torch.tensor(3.0).sin())
    torch.testing.assert_close(waves[7, 7], torch.tensor(7e-4).cos())
    assert torch.equal(sinusoids(7, 3, 8, device=torch.device("cpu")), waves[7:10])
    assert sinusoids(0, 4, 7, device=torch.device("cpu"))[:, 6].eq(0).all()


def test_operations_are_those_that_torch_counts() -> None:
    config = small_shape(embed_dim=32, encoder_layers=3)
    for pairs, s, t in ((3, 7, 9), (2, BLOCK + 5, 12)):
        model = DCTransformer(
            config, source_size=SOURCE, target_size=TARGET, seed=1, dtype=torch.float32,
            device="cpu",
        )  # fmt: skip
        source, inputs, targets = random_pairs([(s, t)] * pairs)
        # The counter does not know the fused attention of a CPU.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            loss = model.loss(source, inputs, targets)[0]
        counted = counter.get_total_flops()
        # What band matrices multiply in place of taps.
        for length, kernels in ((s, config.encoder_kernels), (t, config.decoder_kernels)):
            for kernel in kernels:
                wide = length if length <= BLOCK else BLOCK + kernel - 1
                rows = length if length <= BLOCK else -(-length // BLOCK) * BLOCK
                counted -= 2 * pairs * config.embed_dim * (rows * wide - length * kernel)
        shape = {"pairs": pairs, "source": s, "target": t, "target_size": TARGET}
        assert counted == forward_flops(config, **shape)
        assert training_flops(config, **shape) == 3 * forward_flops(config, **shape)
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        assert counter.get_total_flops() > 1.7 * forward_flops(config, **shape)


def test_16_bit_parameters_give_about_the_same_loss() -> None:
    pairs = random_pairs(LENGTHS)
    exact = small_translator().loss(*pairs)
    rounded = small_translator(dtype=torch.bfloat16).loss(*pairs)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=0.02, atol=0.0)
