"""Microbatches that a thread reads one step ahead, while the current step computes.

    main thread    read 1 | compute 1     | compute 2     | compute 3
    prefetch              | read 2, copy  | read 3, copy  |

For a pipeline on GPUs the thread reads, and the main thread copies at the start of a step.

A batch follows from its place in the data set alone, so that reading ahead changes no bit of it.
The trainer names the place in each call, and a batch that it never asks for is dropped: the number
of consumed samples, and with it a checkpoint, counts only what was trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from megatron.data.batches import Batch, Reader
from megatron.documents import Documents
from megatron.transfer import to_device

_CLOSE_TIMEOUT_SECONDS = 1.0
"""Longest wait for the thread in `close`: a failing run must report even if reading hangs."""


def choose_reading_device(device: torch.device, *, stages: int) -> torch.device:
    """Return the device for which readers make the batches of a rank that computes on `device`.

    It is the CPU for a pipeline on GPUs: a send occupies a GPU until its receive is posted, and a
    thread that allocates memory in between, and waits for the GPU, could deadlock the stages
    (`megatron/pipeline/transport.py`). The trainer then copies batches at the start of a step.
    """
    return torch.device("cpu") if device.type == "cuda" and stages > 1 else device


def copy_to(batch: Batch, device: torch.device) -> Batch:
    """Return a copy of a batch for `device`, on the current stream; from the host, asynchronously.

    Tensors are fields of the batch, or of dataclasses in it.
    """
    return _copied(batch, device)


def _copied(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return to_device(value, device)
    if isinstance(value, Documents):
        return value.to(device)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    parts = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
    return replace(value, **{name: _copied(part, device) for name, part in parts.items()})


class Prefetcher:
    """Global batches of a `Reader`, of which at most one is read ahead by a thread.

    If the batches are made for a GPU, the thread pins and copies them on a stream of its own.
    Call the methods from one thread.

    Args:
        reader: The reader. Nothing else may use it while a batch is read ahead.
        device: The device for which the reader makes batches (`choose_reading_device`).
    """

    def __init__(self, reader: Reader, device: torch.device) -> None:
        self._reader = reader
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._ahead: tuple[tuple[int, int], Future[list[Batch]]] | None = None
        self._closed = False

    def prefetch(self, first_sample: int, global_batch_size: int) -> None:
        """Begin to read a global batch, which the next call of `read` is expected to ask for."""
        assert self._ahead is None, "one global batch is read ahead"
        place = (first_sample, global_batch_size)
        if not self._closed:
            self._ahead = place, self._executor.submit(self._read_ahead, *place)

    def read(self, first_sample: int, global_batch_size: int) -> Sequence[Batch]:
        """Return the microbatches that `Reader.read` yields; wait for the thread if it reads them.

        Raises:
            DataError: A sample cannot be read, here or in the thread.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            place, future = ahead
            wait([future])  # also for another place: readers do not serve two threads
            if place == (first_sample, global_batch_size):
                batches = future.result()
                self._hand_over(batches)
                return batches
        return list(self._reader.read(first_sample, global_batch_size))

    def close(self) -> None:
        """End the thread after the microbatch that it reads; later calls read nothing ahead.

        A read that hangs is not waited for here, but by Python's exit, which `pretrain.leave`
        leaves out.
        """
        self._closed = True
        self._executor.shutdown(wait=False)
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            wait([ahead[1]], timeout=_CLOSE_TIMEOUT_SECONDS)

    def _read_ahead(self, first_sample: int, global_batch_size: int) -> list[Batch]:
        batches: list[Batch] = []
        with self._copying():
            for batch in self._reader.read(first_sample, global_batch_size):
                batches.append(batch)
                if self._closed:
                    break
        return batches

    def _copying(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _hand_over(self, batches: Sequence[Batch]) -> None:
        """Order the copies before later work of the current stream."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_stream(self._stream)
        for batch in batches:
            for value in _parts(batch):
                if isinstance(value, torch.Tensor):
                    # The allocator would otherwise give freed memory to the next copies while
                    # kernels of the current stream still read it.
                    value.record_stream(current)


def _parts(batch: Batch) -> Iterator[object]:
    """Yield the fields of a batch, and those of fields that are dataclasses."""
    for value in vars(batch).values():
        yield value
        if is_dataclass(value):
            yield from vars(value).values()
