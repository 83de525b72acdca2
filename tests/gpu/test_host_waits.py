"""What is counted, copied and summed on a GPU without a wait of the host is right there, too."""

from __future__ import annotations

import pytest
import torch

from megatron.checkpoint.store import Snapshots, whole
from megatron.data_parallel.norm import sum_of_squares
from megatron.data_parallel.waits import Waits
from megatron.transfer import to_device


def test_a_wait_is_told_once_the_stream_is_past_it(device: torch.device) -> None:
    waits, values = Waits(), torch.ones(1000, 1000, device=device)
    with waits.on(device):
        torch.mm(values, values)
    torch.cuda.synchronize()
    assert 0 < waits.take() < 10 and waits.take() == 0


def test_copies_to_the_device_are_whole_before_they_are_used(device: torch.device) -> None:
    for number in range(100):
        # The memory of the one before is free by now, though its copy may not be made.
        assert int(to_device(torch.full((10_000,), number), device).sum()) == 10_000 * number


def test_snapshots_hold_what_the_device_held(device: torch.device) -> None:
    tensors = [
        torch.randn(300, 70, device=device).t(),
        torch.randn(1000, device=device).bfloat16(),
        torch.tensor([True, False], device=device),
        torch.randn(10),
    ]
    wanted, snapshots = [tensor.clone() for tensor in tensors], Snapshots()
    for _ in range(2):
        copies = snapshots.take([whole(str(n), tensor) for n, tensor in enumerate(tensors)])
        for tensor in tensors:
            tensor.zero_()
        for copy, tensor in zip(copies, wanted, strict=True):
            assert copy.tensor.device.type == "cpu" and torch.equal(copy.tensor, tensor.cpu())
        for tensor, before in zip(tensors, wanted, strict=True):
            tensor.copy_(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_squares_are_summed_to_fp32_rounding(device: torch.device, dtype: torch.dtype) -> None:
    values = torch.randn(3_000_001, device=device).to(dtype)
    exact = values.double().square().sum().item()
    assert sum_of_squares(values).item() == pytest.approx(exact, rel=2e-6)
