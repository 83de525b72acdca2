"""Models on a CPU without 16-bit multiply-add units compute every product in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from megatron.model.convolution import convolution
from megatron.model.resnet import WideResNet101
from megatron.model.vgg import VGG19
from megatron.model.wide_resnet import WideResNet
from megatron.tensor_parallel import products
from megatron.tensor_parallel.rng import DropoutStreams
from tests.model.translations import random_pairs, small_translator

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
STREAMS = DropoutStreams(1, device=torch.device("cpu"))


@pytest.fixture(autouse=True)
def without_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has no multiply-add units for 16-bit operands."""
    monkeypatch.setattr(products, "multiplies_natively", lambda dtype: dtype not in HALF.values())


class ProductDtypes(TorchDispatchMode):
    """Collects the dtypes of the operands of every matrix product, convolution and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func._overloadpacket in flop_registry or "dot_product" in str(func):
            dtypes = {
                a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()
            }
            self.found.setdefault(str(func), set()).update(dtypes)
        return func(*args, **(kwargs or {}))


def scores(network: torch.nn.Module, dtype: torch.dtype) -> torch.Tensor:
    return network(torch.randn(2, 3, 40, 40, dtype=dtype))


def translated(dtype: torch.dtype, **shape: Any) -> torch.Tensor:
    return small_translator(dtype=dtype, **shape).loss(*random_pairs([(5, 7), (70, 66)]))


def decoded(dtype: torch.dtype) -> torch.Tensor:
    model = small_translator(dtype=dtype)
    model.train(False)
    source, inputs, _ = random_pairs([(5, 6), (9, 6)])
    memory, visible = model.encode(source), (source != 0)[:, None, None]
    return model.decode_next(inputs[:, 0], 0, visible, model.start_decoding(memory))


MODELS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "wrn": lambda dtype: scores(
        WideResNet(depth=10, width=0.5, classes=5, seed=1, dtype=dtype), dtype
    ),
    "vgg19": lambda dtype: scores(
        VGG19(classes=5, dropout=0.1, streams=STREAMS, seed=1, width=1 / 16, dtype=dtype), dtype
    ),
    "wide-resnet101": lambda dtype: scores(
        WideResNet101(classes=5, seed=1, width=1 / 16, dtype=dtype), dtype
    ),
    "dc-transformer": translated,
    "dc-transformer with dropout": lambda dtype: translated(
        dtype, attention_dropout=0.1, weight_dropout=0.1
    ),
    "decoding": decoded,
}


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("name", MODELS)
def test_every_product_of_a_model_is_of_fp32_operands(name: str, dtype: torch.dtype) -> None:
    with ProductDtypes() as mode:
        MODELS[name](dtype).float().sum().backward()
    assert len(mode.found) >= 2
    assert all(dtypes == {torch.float32} for dtypes in mode.found.values()), mode.found


def test_products_of_fp32_models_are_left_alone() -> None:
    with ProductDtypes() as mode:
        MODELS["wrn"](torch.float32).sum().backward()
    assert all(dtypes == {torch.float32} for dtypes in mode.found.values())


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_is_rounded_once_and_saves_16_bits(
    stride: int, bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    layer = convolution(5, 6, 3, stride=stride, bias=bias, dtype=dtype, device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    exact = torch.nn.Conv2d(5, 6, 3, stride=stride, padding=1, bias=bias, dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    images = torch.randn(2, 5, 9, 8).to(dtype).requires_grad_()
    wide = images.detach().double().requires_grad_()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (saved.append(tensor), tensor)[1], lambda tensor: tensor
    ):
        found = layer(images)
    assert {tensor.data_ptr() for tensor in saved} == {images.data_ptr(), layer.weight.data_ptr()}
    expected = exact(wide)
    # Half a unit in the last place of the result. Sums of at most n products of N(0, 1) in fp32
    # are off by n eps of their largest partial sum.
    half, sums = torch.finfo(dtype).eps / 2 * 1.01, 144 * torch.finfo(torch.float32).eps
    bounds: dict[str, Any] = {"rtol": half, "atol": sums}
    torch.testing.assert_close(found.double(), expected, **bounds)
    upstream = torch.randn(found.shape).to(dtype)
    found.backward(upstream)
    expected.backward(upstream.double())
    assert images.grad is not None and wide.grad is not None and images.grad.dtype == dtype
    torch.testing.assert_close(images.grad.double(), wide.grad, **bounds)
    for mine, wanted in zip(layer.parameters(), exact.parameters(), strict=True):
        assert mine.grad is not None and wanted.grad is not None and mine.grad.dtype == dtype
        torch.testing.assert_close(mine.grad.double(), wanted.grad, **bounds)


def test_frozen_weights_get_no_gradient() -> None:
    layer = convolution(3, 4, 3, dtype=torch.bfloat16, device="cpu")
    torch.nn.init.normal_(layer.weight)
    layer.weight.requires_grad_(False)
    images = torch.randn(1, 3, 5, 5, dtype=torch.bfloat16, requires_grad=True)
    layer(images).sum().backward()
    assert layer.weight.grad is None and images.grad is not None
