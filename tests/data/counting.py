"""A reader of numbers, for tests of whoever reads: batches that show which samples they hold."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from megatron.transfer import to_device
from tests.limits import LIMIT

ENTRIES = 1000


@dataclass(frozen=True)
class CountingBatch:
    """Sample number `first` + `index`, `ENTRIES` times."""

    numbers: torch.Tensor
    index: int
    counted: int = ENTRIES
    uneven: bool = False


@dataclass
class Counting:
    """A `Reader` with one sample in a microbatch; `before` is called with each sample's number."""

    device: torch.device
    before: Callable[[int], object] = lambda number: None
    samples: int = 1000

    def read(self, first_sample: int, global_batch_size: int) -> Iterator[CountingBatch]:
        for index in range(global_batch_size):
            self.before(first_sample + index)
            numbers = torch.full((ENTRIES,), first_sample + index)
            yield CountingBatch(to_device(numbers, self.device), index)

    def fingerprint(self) -> str:
        return "counting"


def prefetch_threads() -> list[threading.Thread]:
    """Return the threads of this process that read ahead."""
    return [each for each in threading.enumerate() if each.name.startswith("prefetch")]


def threads_left() -> int:
    """Return the number of threads that read ahead and have not ended within `LIMIT`."""
    deadline = time.monotonic() + LIMIT
    while prefetch_threads() and time.monotonic() < deadline:
        time.sleep(0.001)
    return len(prefetch_threads())
