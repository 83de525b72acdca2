"""Recomputation by operators: equal bits, statistics once, less memory, the counted FLOPs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron.config import RecomputeConfig
from megatron.low_memory.activation_checkpoint import (
    is_recomputing,
    product_result,
    recomputed,
    watching_kept,
)
from megatron.low_memory.ledger import ColumnName, MemoryLedger
from megatron.low_memory.memory_recorder import count_flops
from megatron.low_memory.operation_graph import wide_resnet_graph
from megatron.low_memory.strategies import Strategy, activation_course
from megatron.model.batch_norm import BatchNorm2d, batch_norm_buffers
from megatron.model.resnet import WideResNet101
from megatron.model.vgg import VGG19
from megatron.model.wide_resnet import WideResNet
from megatron.tensor_parallel import products
from megatron.tensor_parallel.rng import DropoutStreams
from tests.low_memory.test_ledger import GPT_CASES, PP, STILL, TP, check, gpt, translation, vision
from tests.model.models import VARIANTS, gradients, random_tokens, small_model
from tests.model.translations import random_pairs, small_translator
from tests.tiers import sampled

pytestmark = pytest.mark.push

WIDE_RESNET = partial(WideResNet, depth=10, width=1, classes=10, seed=1)
STREAMS = DropoutStreams(1, device=torch.device("cpu"))
STRATEGIES = {
    "ops": RecomputeConfig(recompute_granularity="ops"),
    "no-norm": RecomputeConfig(recompute_granularity="no-norm"),
    "every-1": RecomputeConfig(recompute_granularity="every"),
    "every-3": RecomputeConfig(recompute_granularity="every", recompute_num_layers=3),
    "every-7": RecomputeConfig(recompute_granularity="every", recompute_num_layers=7),
    "residual-1": RecomputeConfig(recompute_granularity="residual"),
    "residual-2": RecomputeConfig(recompute_granularity="residual", recompute_num_layers=2),
    "residual-star-1": RecomputeConfig(recompute_granularity="residual-star"),
    "residual-star-2": RecomputeConfig(
        recompute_granularity="residual-star", recompute_num_layers=2
    ),
}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
EACH = pytest.mark.parametrize("strategy", STRATEGIES)
Found = dict[str, torch.Tensor]


@pytest.fixture
def widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has no 16-bit multiply-add units."""
    sixteen = (torch.bfloat16, torch.float16)
    monkeypatch.setattr(products, "multiplies_natively", lambda dtype: dtype not in sixteen)


def of_gpt(recompute: RecomputeConfig | None, dtype: torch.dtype, **changes: Any) -> Found:
    """Return the loss and the gradients of a GPT, with another forward before the backward."""
    model = small_model(dtype=dtype, recompute=recompute, **changes)
    tokens, labels = random_tokens(), random_tokens(seed=1)
    model.streams.at(3, 1)
    loss = model.loss(tokens, labels)
    model.streams.at(3, 2)
    model.loss(labels, tokens)
    arrived: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.update([name]))
    loss.backward()
    assert set(arrived.values()) == {1}, "a hook fires once for each parameter"
    return {"loss": loss.detach(), **gradients(model)}


def of_translator(recompute: RecomputeConfig | None, dtype: torch.dtype, **changes: Any) -> Found:
    model = small_translator(dtype=dtype, recompute=recompute, **changes)
    pairs = random_pairs([(5, 7), (3, 4), (70, 66)])
    model.streams.at(3, 1)
    sums = model.loss(*pairs)
    model.streams.at(3, 2)
    model.loss(*pairs)
    sums[0].backward()
    return {"sums": sums.detach(), **_gradients(model)}


def of_network(
    make: Callable[..., nn.Module], recompute: RecomputeConfig | None, dtype: torch.dtype
) -> Found:
    """Return the loss, gradients and running statistics of a network of images."""
    network = make(recompute=recompute, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(3, 3, 32, 32, generator=generator).to(dtype)
    STREAMS.at(3, 1)
    loss = F.cross_entropy(network(images).float(), torch.tensor([1, 0, 3]), reduction="sum")
    STREAMS.at(3, 2)
    infos = batch_norm_buffers(network)
    before = {info.name: info.shadow.clone() for info in infos}
    loss.backward()
    after = {info.name: info.shadow for info in infos}
    assert all(torch.equal(before[name], shadow) for name, shadow in after.items())
    return {"loss": loss.detach(), **before, **_gradients(network)}


def _gradients(model: nn.Module) -> Found:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {f"gradient of {name}": grad for name, grad in found.items() if grad is not None}


def assert_same(found: Found, wanted: Found) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@DTYPES
@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_dropout": 0.3, "attention_dropout": 0.2},
        {"hidden_dropout": 0.3},
        VARIANTS["llama with head norms"],
        VARIANTS["llama"],
    ],
    ids=["dropout", "dropout of hidden states", "head norms", "gated"],
)
def test_gradients_of_a_gpt_are_bitwise_equal(changes: dict[str, Any], dtype: torch.dtype) -> None:
    wanted = of_gpt(None, dtype, **changes)
    for recompute in STRATEGIES.values():
        assert_same(of_gpt(recompute, dtype, **changes), wanted)


@pytest.mark.parametrize("kind", ["uses_one_dnn", "must_widen"])
def test_products_with_their_own_backward_recompute_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The products of large shapes in fp32, and those of CPUs without 16-bit units."""
    if kind == "uses_one_dnn" and not torch.backends.mkldnn.is_available():
        pytest.skip("torch has no oneDNN here")
    dtype = torch.float32 if kind == "uses_one_dnn" else torch.bfloat16
    for each in ("uses_one_dnn", "must_widen"):
        monkeypatch.setattr(products, each, lambda *_, served=each == kind: served)
    wanted = of_gpt(None, dtype, hidden_dropout=0.3)
    for recompute in STRATEGIES.values():
        assert_same(of_gpt(recompute, dtype, hidden_dropout=0.3), wanted)


@EACH
def test_widened_convolutions_recompute_the_same_bits(widened: None, strategy: str) -> None:
    wanted = of_network(WIDE_RESNET, None, torch.float16)
    assert_same(of_network(WIDE_RESNET, STRATEGIES[strategy], torch.float16), wanted)


@pytest.mark.parametrize("strategy", ["ops", "no-norm", "residual-1"])
def test_widened_batched_products_recompute_the_same_bits(widened: None, strategy: str) -> None:
    wanted = of_translator(None, torch.float16)
    assert_same(of_translator(STRATEGIES[strategy], torch.float16), wanted)


@DTYPES
def test_gradients_of_a_dc_transformer_are_bitwise_equal(dtype: torch.dtype) -> None:
    dropout = {"dropout": 0.3, "attention_dropout": 0.1, "weight_dropout": 0.1}
    wanted = of_translator(None, dtype, **dropout)
    for recompute in STRATEGIES.values():
        assert_same(of_translator(recompute, dtype, **dropout), wanted)


@pytest.mark.turns
@DTYPES
@EACH
def test_gradients_and_statistics_of_wrn_28_2_are_bitwise_equal(
    strategy: str, dtype: torch.dtype
) -> None:
    make = partial(WideResNet, depth=28, width=2, classes=10, seed=1)
    wanted = of_network(make, None, dtype)
    assert_same(of_network(make, STRATEGIES[strategy], dtype), wanted)


@pytest.mark.parametrize("strategy", ["ops", "no-norm", "every-7", "residual-2", "residual-star-2"])
def test_bottlenecks_recompute_the_same_bits(strategy: str) -> None:
    make = partial(WideResNet101, width=1 / 16, classes=10, seed=1)
    wanted = of_network(make, None, torch.float32)
    assert_same(of_network(make, STRATEGIES[strategy], torch.float32), wanted)


def test_a_network_without_blocks_recomputes_runs_with_dropout() -> None:
    make = partial(VGG19, width=1 / 16, classes=10, seed=1, dropout=0.5, streams=STREAMS)
    wanted = of_network(make, None, torch.float32)
    for name in ("every-1", "every-7"):
        assert_same(of_network(make, STRATEGIES[name], torch.float32), wanted)


def test_the_shadow_of_statistics_is_written_by_the_first_pass_alone() -> None:
    norm = BatchNorm2d(2, device="cpu")
    nn.init.ones_(norm.weight)
    nn.init.zeros_(norm.bias)
    seen: list[bool] = []

    def run(images: torch.Tensor) -> torch.Tensor:
        seen.append(is_recomputing())
        return norm(images).square()

    # An outer recomputation runs the first pass of the inner one again.
    images = torch.randn(4, 2, 3, 3, requires_grad=True)
    made = recomputed(lambda images: recomputed(run, images).exp(), images)
    first = norm._shadow_mean.clone()
    norm(images + 1)  # another microbatch
    second = norm._shadow_mean.clone()
    made.sum().backward()
    assert seen[0] is False and all(seen[1:]) and len(seen) > 1
    assert not torch.equal(first, second) and torch.equal(norm._shadow_mean, second)
    assert not is_recomputing()


# ---- memory and FLOPs ----------------------------------------------------------------------------

OPS, STAR = "--recompute-granularity ops", "--recompute-granularity residual-star"
NO_NORM, EVERY = "--recompute-granularity no-norm", "--recompute-granularity every"
GRID = f"{STILL} {TP} {PP} --sequence-parallel --bf16"
PLANNED = {
    "ops": (1, 0, f"{STILL} {OPS}"),
    "ops bf16": (1, 0, f"{STILL} --bf16 {OPS}"),
    "ops dropout": (1, 0, OPS),
    "ops gated": (1, 0, f"{GPT_CASES['gated'][2]} {OPS}"),
    "no-norm": (1, 0, f"{STILL} {NO_NORM}"),
    "no-norm gated bf16": (1, 0, f"{GPT_CASES['gated'][2]} --bf16 {NO_NORM}"),
    "every": (1, 0, f"{STILL} {EVERY}"),
    "every 5": (1, 0, f"{STILL} --bf16 {EVERY} --recompute-num-layers 5"),
    "residual 2": (1, 0, f"{STILL} --recompute-granularity residual --recompute-num-layers 2"),
    "residual-star 2": (1, 0, f"{STILL} {STAR} --recompute-num-layers 2"),
    "grid": (8, 5, f"{GRID} {OPS}"),
    "grid without norms": (8, 5, f"{GRID} {NO_NORM}"),
}
ON_PUSH = ("ops gated", "every 5", "residual-star 2")


@pytest.mark.parametrize("case", sampled(PLANNED, ON_PUSH))
def test_what_a_gpt_stores_is_planned(case: str) -> None:
    world, rank, flags = PLANNED[case]
    check(gpt(flags, world=world, rank=rank))


@pytest.mark.parametrize(
    "flags",
    sampled([OPS, NO_NORM, f"{STAR} --bf16", f"{STAR} --recompute-num-layers 2"], [OPS]),
)
def test_what_a_wide_resnet_stores_is_planned(flags: str) -> None:
    check(vision(flags))


@pytest.mark.parametrize("flags", sampled([OPS, NO_NORM], [NO_NORM]))
def test_what_widened_convolutions_store_is_planned(widened: None, flags: str) -> None:
    kept, ledger = vision("--fp16"), vision(f"--fp16 {flags}")
    check(ledger)
    stored, flops = _shares(ledger, kept)
    assert stored < 0.8 and flops == 1


def test_the_statistics_of_each_simulated_microbatch_are_planned() -> None:
    names: tuple[ColumnName, ...] = ("planned", "tracked")
    whole = vision("", columns=names)
    ledger = vision("--simulated-micro-batch-size 1", columns=names)
    planned, tracked = (ledger.columns[name].stored - whole.columns[name].stored for name in names)
    assert planned == tracked > 0


def _shares(ledger: MemoryLedger, kept: MemoryLedger) -> tuple[float, float]:
    """Return stored bytes of the layers and all FLOPs, divided by those without recomputation."""
    stored = [
        sum(size for name, size in each.columns["measured"].layers.items() if name != "head")
        for each in (ledger, kept)
    ]
    assert ledger.flops is not None and kept.flops is not None
    assert ledger.flops.forward == kept.flops.forward
    assert ledger.flops.backward == kept.flops.backward
    flops = kept.flops.forward + kept.flops.backward
    return stored[0] / stored[1], 1 + ledger.flops.recomputed / flops


@pytest.mark.parametrize(
    "flags",
    sampled([STILL, f"{STILL} --bf16", f"{STILL} {TP} --sequence-parallel"], [STILL]),
)
def test_stored_products_of_a_gpt_cost_no_product(flags: str) -> None:
    world = 2 if TP in flags else 1
    kept, ops, norms = (
        gpt(f"{flags} {more}", world=world, flops=True) for more in ("", OPS, NO_NORM)
    )
    stored, flops = _shares(ops, kept)
    assert stored <= 0.72 and flops <= 1.01
    stored, flops = _shares(norms, kept)
    # Two of 16 hidden states a layer.
    assert stored == pytest.approx(14 / 16, abs=0.02) and flops <= 1.01


@pytest.mark.full
def test_strategies_trade_memory_for_flops_in_the_expected_order() -> None:
    wide = "--num-layers 28 --width-factor 2"
    found = {
        name: vision(f"{wide} {flags}", columns=("planned", "tracked"))
        for name, flags in {
            "none": "",
            "ops": OPS,
            "no-norm": NO_NORM,
            "residual-star-1": STAR,
            "residual-star-2": f"{STAR} --recompute-num-layers 2",
        }.items()
    }
    stored = [ledger.columns["tracked"].stored for ledger in found.values()]
    assert stored == sorted(stored, reverse=True) and len(set(stored)) == len(stored)
    graph = wide_resnet_graph()
    for name, m in (("residual-star-1", 1), ("residual-star-2", 2)):
        flops = found[name].flops
        assert flops is not None
        counted = activation_course(graph, Strategy("residual-star", m), batch=3, entry_bytes=4)
        share = flops.recomputed / (flops.forward + flops.backward)
        # The first convolution, 0.07 % of the FLOPs, is recomputed once more than counted.
        assert share == pytest.approx(counted.flops_ratio - 1, abs=0.0015)
    for name in ("none", "ops", "no-norm"):
        flops = found[name].flops
        assert flops is not None and flops.recomputed == 0


@pytest.mark.full
def test_a_dc_transformer_stores_less_for_no_product() -> None:
    kept = translation("", flops=True)
    for flags, most in ((OPS, 0.6), (NO_NORM, 0.95)):
        ledger = translation(flags, flops=True)
        assert "planned" in ledger.missing and "has no planned activations" in str(ledger.missing)
        assert ledger.columns["measured"].stored == ledger.columns["tracked"].stored
        stored, flops = _shares(ledger, kept)
        assert stored < most and flops == 1


@pytest.mark.parametrize("strategy", ["ops", "no-norm"])
def test_backward_repeats_no_kept_convolution(
    widened: None, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    network = WIDE_RESNET(recompute=STRATEGIES[strategy], dtype=torch.float16)
    kept: list[torch.Tensor] = []
    with watching_kept(kept.append):
        loss = network(torch.randn(2, 3, 32, 32).half()).float().square().mean()
    assert {tensor.dtype for tensor in kept} <= {torch.float16}
    called: list[object] = []
    convolve = F.conv2d
    monkeypatch.setattr(F, "conv2d", lambda *args: called.append(None) or convolve(*args))
    loss.backward()
    assert not called


def test_kept_results_are_shown_once() -> None:
    model = small_model(recompute=STRATEGIES["ops"])
    kept: list[torch.Tensor] = []
    with watching_kept(kept.append):
        loss = model.loss(random_tokens(), random_tokens(seed=1))
    # Two products and attention with its statistics, then two products, in each of three layers.
    assert len(kept) == 3 * 6
    with count_flops() as counter, watching_kept(kept.append):
        loss.backward()
    assert len(kept) == 3 * 6 and counter.get_total_flops() > 0
    assert product_result(torch.mul, torch.ones(2), torch.ones(2)).tolist() == [1.0, 1.0]


# ---- simulated microbatches ----------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [None, STRATEGIES["ops"], STRATEGIES["residual-star-2"]])
def test_simulated_microbatches_equal_true_ones(recompute: RecomputeConfig | None) -> None:
    """Outputs, gradients and running statistics in fp64, of microbatches of 2 images in 6."""
    images = torch.randn(6, 3, 32, 32, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 3, 4, 0])

    def run(size: int, group: int | None) -> Found:
        network = WideResNet(
            depth=10, width=0.5, classes=5, seed=1, norm_group=group, recompute=recompute
        ).double()
        scores = []
        for part in torch.arange(6).split(size):
            scores.append(network(images[part]))
            F.cross_entropy(scores[-1], labels[part], reduction="sum").backward()
        infos = batch_norm_buffers(network)
        assert infos and all(info.shadow.dtype == torch.float64 for info in infos)
        shadows = {info.name: info.shadow for info in infos}
        return {"scores": torch.cat(scores).detach(), **shadows, **_gradients(network)}

    wanted, found, whole = run(2, None), run(6, 2), run(6, None)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(whole["scores"], wanted["scores"], rtol=1e-3)


def test_a_simulated_microbatch_is_not_seen_by_an_evaluation() -> None:
    norm, plain = (BatchNorm2d(3, device="cpu", group_size=size) for size in (2, None))
    for each in (norm, plain):
        nn.init.ones_(each.weight)
        nn.init.zeros_(each.bias)
        each.eval()
    images = torch.randn(5, 3, 4, 4)
    assert torch.equal(norm(images), plain(images))
