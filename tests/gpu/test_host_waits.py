"""Tests that counts, copies and sums on a GPU are right without waits of the host.

This module does not import pytest.
"""

from __future__ import annotations

import math
from unittest import SkipTest

import torch

from megatron.checkpoint.store import Snapshots, whole
from megatron.data_parallel.exchange import Waits
from megatron.data_parallel.norm import sum_of_squares
from megatron.pipeline.pass_marker import PassMarker
from megatron.transfer import to_device
from tests.gpu import sizes
from tests.gpu.sizes import fitting


def keep_busy(device: torch.device) -> None:
    """Keep the stream busy for some hundredths of a second, so that later work is delayed."""
    if device.type == "cuda" and not sizes.small:
        torch.cuda._sleep(10**8)


def test_a_wait_is_told_once_the_stream_is_past_it(device: torch.device) -> None:
    waits, values = Waits(), torch.ones(fitting(1000, 100), 1000, device=device)
    with waits.on(device):
        torch.mm(values, values.t())
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert 0 < waits.take() < 10 and waits.take() == 0


def test_copies_to_the_device_are_whole_before_they_are_used(device: torch.device) -> None:
    """Freed page-locked memory of a copy must not be rewritten before the device has read it."""
    keep_busy(device)
    sums = [to_device(torch.full((10_000,), number), device).sum() for number in range(100)]
    for number, found in enumerate(sums):
        assert int(found) == 10_000 * number


def test_snapshots_hold_what_the_device_held(device: torch.device) -> None:
    values = [
        torch.randn(300, 70).t(),
        torch.randn(1000).bfloat16(),
        torch.tensor([True, False]),
    ]
    tensors, snapshots = [value.to(device, copy=True) for value in values], Snapshots()
    for _ in range(2):
        keep_busy(device)
        copies = snapshots.take([whole(str(n), tensor) for n, tensor in enumerate(tensors)])
        for copy, value in zip(copies, values, strict=True):
            assert copy.tensor.device.type == "cpu" and torch.equal(copy.tensor, value)
        for tensor in tensors:
            tensor.zero_()
        for copy, value in zip(copies, values, strict=True):
            assert torch.equal(copy.tensor, value)
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


def test_squares_are_summed_to_fp32_rounding(device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        values = torch.randn(fitting(3_000_001, 30_001), device=device).to(dtype)
        exact = values.double().square().sum().item()
        assert math.isclose(sum_of_squares(values).item(), exact, rel_tol=2e-6), dtype


def test_a_marked_pass_is_not_waited_for_to_its_end(device: torch.device) -> None:
    if device.type != "cuda":
        raise SkipTest("on a CPU nothing runs after its launch has returned")
    marker = PassMarker(device)
    for marks in (True, False):
        values = torch.ones(100, device=device)
        if marks:
            marker.mark()
        keep_busy(device)
        values += 1
        end = torch.cuda.Event()
        end.record()
        marker.wait()
        assert end.query() is not marks, "without a mark, the host waits for all launched work"
