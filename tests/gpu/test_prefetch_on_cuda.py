"""Tests that batches which a thread copies to a GPU are whole when the step reads them.

This module does not import pytest.
"""

from __future__ import annotations

from dataclasses import fields

import torch

from megatron.data.build import MockDataset
from megatron.data.data_loader import BatchReader
from megatron.data.prefetch import Prefetcher, copy_to
from megatron.data.sampler import CollateOptions, MicrobatchSampler
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


def test_batches_copied_later_are_those_made_for_the_device(device: torch.device) -> None:
    """A pipeline's thread makes batches for the CPU, with masks, positions and documents."""

    def reader(on: torch.device) -> BatchReader:
        return BatchReader(
            dataset=MockDataset(8, sequence_length=16, vocab_size=8, seed=1),
            sampler=MicrobatchSampler(2, 0, 1),
            options=CollateOptions(
                eod=3, eod_mask_loss=True, reset_attention_mask=True, reset_position_ids=True
            ),
            device=on,
        )

    made, wanted = (list(reader(on).read(0, 4)) for on in (torch.device("cpu"), device))
    for host, there in zip(made, wanted, strict=True):
        batch = copy_to(host, device)
        for name in (field.name for field in fields(there)):
            mine, its = getattr(batch, name), getattr(there, name)
            if name == "documents":
                assert mine.lengths == its.lengths and mine.longest == its.longest
                mine, its = mine.offsets, its.offsets
                if its is None:  # torch has no kernel that takes documents
                    assert mine is None
                    continue
            if isinstance(its, torch.Tensor):
                assert mine.device == its.device and torch.equal(mine, its), name
            else:
                assert mine == its, name
