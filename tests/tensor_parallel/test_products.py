"""Products on the CPU equal those of `F.linear`: fp32 by oneDNN, 16 bit widened to fp32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.tensor_parallel import products as module
from megatron.tensor_parallel.collectives import UNCUT
from megatron.tensor_parallel.layers import ColumnParallelLinear
from megatron.tensor_parallel.products import batched_product, multiply


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the smallest product goes to oneDNN."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("oneDNN serves fp32 only on CPUs with AVX512")
    monkeypatch.setattr(module, "_WORTHWHILE", 0)
    monkeypatch.setattr(module, "is_intel", lambda: False)


@pytest.mark.parametrize("shape", [(5, 16), (2, 7, 16), (1, 1, 16)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_values_and_gradients(always: None, shape: tuple[int, ...], with_bias: bool) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(shape, requires_grad=True)
    weight = torch.randn(24, 16, requires_grad=True)
    bias = torch.randn(24, requires_grad=True) if with_bias else None
    leaves = [leaf for leaf in (inputs, weight, bias) if leaf is not None]
    ours, theirs = multiply(inputs, weight, bias), F.linear(inputs, weight, bias)
    assert type(ours.grad_fn) is not type(theirs.grad_fn), "oneDNN was to be asked"
    torch.testing.assert_close(ours, theirs)
    upstream = torch.randn_like(ours)
    for mine, wanted in zip(
        torch.autograd.grad(ours, leaves, upstream),
        torch.autograd.grad(theirs, leaves, upstream),
        strict=True,
    ):
        assert mine.is_contiguous()
        torch.testing.assert_close(mine, wanted)


def test_same_bits_without_gradients_and_again(always: None) -> None:
    torch.manual_seed(0)
    layer = ColumnParallelLinear(
        32, 48, bias=True, tp=UNCUT, dtype=torch.float32, device=torch.device("cpu")
    )
    for leaf in layer.parameters():
        torch.nn.init.normal_(leaf)
    inputs = torch.randn(9, 32)
    first = layer(inputs)
    with torch.no_grad():
        assert torch.equal(first, layer(inputs))
    (first_grad,) = torch.autograd.grad(first.sum(), [layer.weight])
    (second_grad,) = torch.autograd.grad(layer(inputs).sum(), [layer.weight])
    assert torch.equal(first_grad, second_grad)


def test_gradients_only_where_wanted(always: None) -> None:
    inputs, weight = torch.randn(4, 8), torch.randn(6, 8, requires_grad=True)
    multiply(inputs, weight).sum().backward()
    assert weight.grad is not None and inputs.grad is None


def test_small_products_and_other_dtypes_stay_with_torch() -> None:
    small = multiply(torch.randn(4, 8), torch.randn(6, 8, requires_grad=True))
    assert "OneDnn" not in type(small.grad_fn).__name__
    many = torch.randn(512, 128, dtype=torch.bfloat16)
    weight = torch.randn(128, 128, dtype=torch.bfloat16, requires_grad=True)
    assert "OneDnn" not in type(multiply(many, weight).grad_fn).__name__


@pytest.fixture
def widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has no 16-bit multiply-add units, and slices of a weight are small."""
    monkeypatch.setattr(
        module, "multiplies_natively", lambda dtype: dtype not in (torch.bfloat16, torch.float16)
    )
    monkeypatch.setattr(module, "_WIDENED_ELEMENTS", 100)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", [(16,), (5, 16), (2, 7, 16), (1, 1, 16)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_widened_products_are_rounded_once(
    widened: None, shape: tuple[int, ...], with_bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(shape), torch.randn(24, 16)]
    if with_bias:
        tensors.append(torch.randn(24))
    ours = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    exact = [tensor.detach().double().requires_grad_() for tensor in ours]
    got, expected = multiply(*ours), F.linear(*exact)
    assert "Widened" in type(got.grad_fn).__name__ and got.is_contiguous()
    # Half a unit in the last place of the result, and a little for sums in fp32.
    half = torch.finfo(dtype).eps / 2 * 1.01
    torch.testing.assert_close(got.double(), expected, rtol=half, atol=1e-5)
    upstream = torch.randn(got.shape).to(dtype)
    pairs = zip(
        torch.autograd.grad(got, ours, upstream),
        torch.autograd.grad(expected, exact, upstream.double()),
        strict=True,
    )
    for mine, wanted in pairs:
        assert mine.dtype == dtype and mine.is_contiguous()
        torch.testing.assert_close(mine.double(), wanted, rtol=half, atol=1e-5)


def test_widened_products_save_16_bit_tensors(widened: None) -> None:
    inputs = torch.randn(6, 16, dtype=torch.bfloat16)
    weight = torch.randn(24, 16, dtype=torch.bfloat16, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (saved.append(tensor), tensor)[1], lambda tensor: tensor
    ):
        multiply(inputs, weight)
    assert {tensor.dtype for tensor in saved} == {torch.bfloat16}
    assert {tensor.data_ptr() for tensor in saved} == {inputs.data_ptr(), weight.data_ptr()}


def test_a_cut_layer_widens_as_a_whole_one(widened: None) -> None:
    inputs, weight = (torch.randn(size, 16).bfloat16() for size in (6, 24))
    assert torch.equal(module.product(inputs, weight), multiply(inputs, weight))
    assert torch.equal(
        module.product(inputs, weight), (inputs.float() @ weight.float().t()).bfloat16()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_widened_batched_products_are_rounded_once(widened: None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes = [(2, 3, 5, 16), (2, 3, 16, 4)]
    ours = [torch.randn(size).to(dtype).requires_grad_() for size in sizes]
    exact = [tensor.detach().double().requires_grad_() for tensor in ours]
    got, expected = batched_product(*ours), exact[0] @ exact[1]
    half = torch.finfo(dtype).eps / 2 * 1.01
    torch.testing.assert_close(got.double(), expected, rtol=half, atol=1e-5)
    upstream = torch.randn(got.shape).to(dtype)
    grads = torch.autograd.grad(got, ours, upstream)
    for mine, wanted in zip(
        grads, torch.autograd.grad(expected, exact, upstream.double()), strict=True
    ):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), wanted, rtol=half, atol=1e-5)
