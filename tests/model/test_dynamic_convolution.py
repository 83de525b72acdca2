"""Dynamic convolution against its definition."""

from __future__ import annotations

import pytest
import torch

from megatron.model import dynamic_convolution
from megatron.model.dynamic_convolution import DynamicConvolution, band_matrix, convolve
from megatron.tensor_parallel.products import multiply
from tests.model.translations import slow_convolution

BLOCK = 8


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make loops short."""
    monkeypatch.setattr(dynamic_convolution, "BLOCK", BLOCK)


def layer(
    size: int, heads: int, taps: int, *, causal: bool, drop: float = 0.0
) -> DynamicConvolution:
    made = DynamicConvolution(
        size,
        heads=heads,
        kernel_size=taps,
        padding=taps - 1 if causal else taps // 2,
        weight_dropout=drop,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    torch.nn.init.normal_(made.weight_linear.weight, std=0.5)
    return made


def test_a_band_matrix_shifts_its_rows() -> None:
    rows = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert band_matrix(rows).tolist() == [[1.0, 2.0, 3.0, 0.0], [0.0, 4.0, 5.0, 6.0]]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("taps", [1, 3, 4, 15])
@pytest.mark.parametrize("length", [1, 5, BLOCK, BLOCK + 1, 2 * BLOCK + 3])
def test_outputs_and_gradients_equal_a_loop(length: int, taps: int, causal: bool) -> None:
    torch.manual_seed(length + taps)
    made = layer(4, 2, taps, causal=causal)
    x = torch.randn(2, length, 4, requires_grad=True)
    slow = x.detach().double().requires_grad_()
    weight = made.weight_linear.weight.detach().double().requires_grad_()
    wanted = torch.stack(
        [slow_convolution(row, weight, heads=2, padding=made.padding) for row in slow]
    )
    found = made(x)
    torch.testing.assert_close(found, wanted.float(), atol=1e-5, rtol=1e-5)
    upstream = torch.randn_like(found)
    (found * upstream).sum().backward()
    (wanted * upstream.double()).sum().backward()
    assert slow.grad is not None and weight.grad is not None
    torch.testing.assert_close(x.grad, slow.grad.float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        made.weight_linear.weight.grad, weight.grad.float(), atol=1e-4, rtol=1e-5
    )


@pytest.mark.parametrize("length", [9, BLOCK + 9])
def test_a_causal_output_does_not_see_later_positions(length: int) -> None:
    made = layer(4, 2, 5, causal=True)
    x = torch.randn(1, length, 4)
    changed = x.clone()
    changed[:, 6:] = 7.0
    assert torch.equal(made(x)[:, :6], made(changed)[:, :6])
    assert not torch.equal(made(x)[:, 6:], made(changed)[:, 6:])


def test_steps_equal_the_whole_sentence() -> None:
    made = layer(6, 3, 4, causal=True)
    x = torch.randn(2, 9, 6)
    window, steps = torch.zeros(2, 4, 6), []
    for t in range(9):
        window = torch.cat((window[:, 1:], x[:, t : t + 1]), 1)
        steps.append(made.step(x[:, t : t + 1], window))
    torch.testing.assert_close(torch.cat(steps, 1), made(x), atol=1e-6, rtol=1e-5)


def test_dropped_taps_are_zero_and_the_others_larger() -> None:
    made = layer(8, 2, 7, causal=False, drop=0.25)
    x = torch.randn(4, 50, 8)
    torch.manual_seed(5)
    dropped = made.kernels(x)
    made.train(False)
    whole = made.kernels(x)
    torch.testing.assert_close(whole.sum(-1), torch.ones(4, 50, 2))
    gone = dropped == 0
    assert 0.2 < gone.float().mean() < 0.3
    torch.testing.assert_close(dropped[~gone], whole[~gone] / 0.75)


def test_softmax_of_16_bit_kernels_is_taken_in_fp32() -> None:
    made = layer(8, 1, 31, causal=False)
    x = 4 * torch.randn(1, 40, 8)
    exact = made.kernels(x)
    made.bfloat16()
    logits = multiply(x.bfloat16(), made.weight_linear.weight)
    assert torch.equal(made.kernels(x.bfloat16())[:, :, 0], logits.float().softmax(-1).bfloat16())
    assert made.kernels(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(made.kernels(x.bfloat16()).float(), exact, atol=0.1, rtol=0.1)


def test_blocks_do_not_change_what_is_computed() -> None:
    hidden, kernels = torch.randn(1, 3 * BLOCK, 4), torch.randn(1, 3 * BLOCK, 2, 9)
    whole = convolve(hidden, kernels, padding=4)
    part = convolve(hidden[:, : BLOCK + 4], kernels[:, : BLOCK + 4], padding=4)
    torch.testing.assert_close(part[:, :BLOCK], whole[:, :BLOCK])
