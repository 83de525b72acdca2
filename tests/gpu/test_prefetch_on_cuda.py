"""Tests that batches which a thread copies to a GPU are whole when the step reads them.

This module does not import pytest.
"""

from __future__ import annotations

import torch

from megatron.data.prefetch import Prefetcher
from tests.data.counting import Counting, CountingBatch
from tests.gpu.sizes import fitting
from tests.gpu.test_host_waits import keep_busy


def test_batches_read_ahead_are_whole(device: torch.device) -> None:
    """Batches are freed while the kernels that read them wait behind others."""
    prefetcher, found = Prefetcher(Counting(device), device), list[torch.Tensor]()
    steps, size = fitting(20, 4), 4
    for step in range(steps):
        batches = prefetcher.read(step * size, size)
        prefetcher.prefetch((step + 1) * size, size)
        keep_busy(device)
        for batch in batches:
            assert isinstance(batch, CountingBatch)
            found += [batch.numbers.min(), batch.numbers.max()]
    prefetcher.close()
    assert [int(each) for each in found] == [n for n in range(steps * size) for _ in range(2)]
