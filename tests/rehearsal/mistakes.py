"""Mistakes made on purpose in the program's CUDA code, to see that the rehearsal notices them. Runs
in a process that has the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from megatron.data.prefetch import Prefetcher
from megatron.optimizer import cpu_offload
from megatron.optimizer.update_rules import AdamW
from megatron.pipeline.mpi_staging import CudaStreams, PinnedStaging
from tests.data.counting import Counting, CountingBatch
from tests.gpu import test_offload_on_cuda
from tests.gpu.test_offload_on_cuda import OffloadNet
from tests.rehearsal import gpu_tests
from tests.rehearsal.device import install
from tests.rehearsal.findings import place
from tests.rehearsal.streams import PlayedStream

CUDA = torch.device("cuda", 0)


def offloaded_steps() -> None:
    """Update states that are in pinned memory, over streams for copies in and out."""
    net = OffloadNet(CUDA, share=1.0, offloaded=True)
    for number in (1, 2):
        net.step(number, 0.0)
    net.state()


def messages() -> None:
    """Send and receive tensors by way of pinned memory, whose copies have streams of their own."""
    staging = PinnedStaging(CudaStreams(CUDA))
    for _ in range(3):
        made = torch.ones(64, 64, device=CUDA) * 2
        sent = staging.outgoing(made)
        del made
        while not sent.ready():
            pass
        received = staging.incoming((64, 64), torch.float32)
        received.buffer.copy_(sent.buffer)
        received.landed()
        taken = received.take()
        doubled = taken * 2
        del taken, received  # freed before the host has waited for anything
        install().memory.settle()
        assert float(doubled.sum()) == 64 * 64 * 4


def first_copy() -> None:
    """Copy into a buffer that was just filled, by a stream that was just made."""
    buffer, pinned = torch.zeros(64, device=CUDA), torch.ones(64).pin_memory()
    lanes = cpu_offload.CudaLanes(CUDA)
    with lanes.coming(0):
        buffer.copy_(pinned, non_blocking=True)
    torch.cuda.synchronize()


def batches_ahead() -> None:
    """Compute on batches that a thread copies to the device, and free them at once."""
    prefetcher = Prefetcher(Counting(CUDA), CUDA)
    prefetcher.prefetch(0, 2)
    for step in range(3):
        batches = prefetcher.read(2 * step, 2)
        prefetcher.prefetch(2 * (step + 1), 2)
        for batch in batches:
            assert isinstance(batch, CountingBatch)
            batch.numbers.sum()
        del batch, batches  # freed before the host has waited for anything
        install().memory.settle()
    prefetcher.close()


SCENES = (offloaded_steps, first_copy, messages, batches_ahead)


def drop_each() -> dict[str, dict[str, int]]:
    """Play the scenes once for each line that orders streams, without what that line does.

    Returns the kinds of findings, and how many, by line; under "" those of the scenes as they are.
    """
    lines: set[str] = set()
    with _ordering_calls(lambda line: lines.add(line) or True):
        found = {"": _findings(*SCENES)}
    for dropped in sorted(lines):
        with _ordering_calls(dropped.__ne__):
            found[dropped] = _findings(*SCENES)
    return found


def gradient_on(device: str) -> dict[str, int]:
    """Updates that get their gradients on another device than the states."""
    apply = AdamW.apply

    def mistaken(self: AdamW, weight: Any, grad: torch.Tensor, *others: Any) -> None:
        apply(self, weight, grad.to(device), *others)

    with mock.patch.object(AdamW, "apply", mistaken):
        return _findings(offloaded_steps)


def states_in_pageable_memory() -> dict[str, int]:
    """Offloaded states whose memory is not pinned."""

    def pageable(numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype)

    with mock.patch.object(cpu_offload, "pinned_zeros", pageable):
        return _findings(offloaded_steps)


def freed_as_a_test_ends() -> list[str]:
    """A test of `tests/gpu` that frees, with its last line, what another stream still reads."""

    def mistaken(device: torch.device) -> None:
        made, other = torch.ones(64, device=device), torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            made.sum()

    name = "test_the_device_holds_buffers_and_no_states"
    with mock.patch.object(test_offload_on_cuda, name, mistaken):
        return gpu_tests.run("test_offload_on_cuda", name)


@contextmanager
def _ordering_calls(keeps: Callable[[str], bool]) -> Iterator[None]:
    """Make only those calls that order streams, or memory, whose line `keeps` accepts."""

    def kept(real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any) -> None:
            ((file, number, function), *_) = place(depth=1)
            if keeps(f"{file}:{number} {function}: {name}"):
                real(*args)

        return call

    with (
        mock.patch.object(PlayedStream, "wait_event", kept(PlayedStream.wait_event, "wait_event")),
        mock.patch.object(
            PlayedStream, "wait_stream", kept(PlayedStream.wait_stream, "wait_stream")
        ),
        mock.patch.object(
            torch.Tensor, "record_stream", kept(torch.Tensor.record_stream, "record_stream")
        ),
    ):
        yield


def _findings(*scenes: Callable[[], None]) -> dict[str, int]:
    """Play scenes; returns how many findings of each kind they leave, but for waits."""
    device = install()
    device.findings.take()
    for scene in scenes:
        try:
            scene()
        except RuntimeError as error:
            assert "on the same device" in str(error)
    device.memory.settle()
    return Counter(one.kind for one in device.findings.take() if one.kind != "wait")
