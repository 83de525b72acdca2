"""Each Triton kernel that chooses entries beside plain torch, on a device; `tests/gpu` calls these
too.

Run as a program they run one after the other on the CPU, by Triton's interpreter.
"""

from __future__ import annotations

import sys

import torch

from megatron.sparse import kernels, reference, selection
from megatron.sparse.reference import BINS, BLOCK, GROUP, TIE_BLOCK
from megatron.sparse.selection import DTYPES, Candidates
from megatron.sparse.shard import FlatShard
from tests.triton_process import compare_all


def compare_counting(device: torch.device) -> None:
    for dtype in DTYPES:
        _compare_counting(device, dtype)


def _compare_counting(device: torch.device, dtype: torch.dtype) -> None:
    values = (torch.randn(20000, device=device) * 1e-3).to(dtype)
    values[:3000] = 0
    values[5000:5100] = 0.25
    values[6000:7000] *= 1e-4 if dtype == torch.float16 else 1e-36  # denormal in part
    one = torch.ones((), dtype=torch.bool, device=device)
    quarter = torch.tensor(0.25, device=device).view(torch.int32)
    for bracket in ((0, 0x7FFFFFFF, 15), (0x38000000, 0x3AFFFFFF, 10), (0x3E800000, 0x3E80FFFF, 0)):
        numbers = torch.tensor(bracket, device=device)
        for kind in (torch.int32, torch.int64):
            found = torch.ones(BINS + 1, dtype=kind, device=device)
            wanted = found.cpu()
            kernels.add_histogram(values, numbers, found)
            reference.add_histogram(values.cpu().float(), numbers.cpu(), wanted)
            assert torch.equal(found.cpu(), wanted) and found.sum() > BINS + 1
    found = torch.zeros(BINS + 1, dtype=torch.int32, device=device)
    kernels.add_histogram(values, torch.tensor((1, 0, 0), device=device), found)
    assert not found.any()
    for shard in (
        FlatShard(20000, 20000),
        FlatShard(20000, 200000, offset=100000),
        FlatShard(20000, 200000, row=20, stride=200, offset=40),
        FlatShard(20000, 201000, row=20, stride=200, offset=-9, first=13),
    ):
        blocks = -(-shard.total // TIE_BLOCK)
        found = torch.zeros(blocks, dtype=torch.int64, device=device)
        kernels.add_tie_counts(values, quarter, ~one, shard, found)
        assert not found.any()
        kernels.add_tie_counts(values, quarter, one, shard, found)
        wanted = torch.zeros(blocks, dtype=torch.int64)
        reference.add_tie_counts(values.cpu().float(), quarter.cpu(), one.cpu(), shard, wanted)
        assert torch.equal(found.cpu(), wanted) and found.sum() == 100
        for block in range(blocks):
            number = torch.tensor(block, device=device)
            marks = torch.zeros(TIE_BLOCK, dtype=torch.int64, device=device)
            kernels.mark_ties(values, quarter, number, shard, marks)
            expected = torch.zeros(TIE_BLOCK, dtype=torch.int64)
            reference.mark_ties(values.cpu().float(), quarter.cpu(), number.cpu(), shard, expected)
            assert torch.equal(marks.cpu(), expected) and marks.sum() == wanted[block]


def compare_bit_writing(device: torch.device) -> None:
    whole = torch.randint(-9, 10, (12 * BLOCK,), device=device).float()
    threshold = torch.tensor(4.0, device=device).view(torch.int32)
    for start, numel in ((0, 12 * BLOCK), (64, 5000), (4000, 4500), (4097, 31), (4099, 1)):
        values = whole[:numel].clone()
        for shard in (
            FlatShard(numel, numel),
            FlatShard(numel, 10 * numel, offset=2 * numel),
            FlatShard(numel, 10 * numel, row=7, stride=70, offset=14),
            FlatShard(numel, 10 * numel, row=7, stride=70, offset=-3, first=4),
        ):
            cutoff = shard.logical(torch.tensor(numel // 3, device=device))
            found, wanted = torch.randint(-(2**31), 2**31, (2, 3 * GROUP, 32), device=device).int()
            wanted.copy_(found)
            reference.write_bits(wanted, start, values, threshold, cutoff, shard)
            for dtype in DTYPES:
                written = found.clone()
                kernels.write_bits(written, start, values.to(dtype), threshold, cutoff, shard)
                assert torch.equal(written, wanted)
            counts = kernels.count_blocks(wanted)
            assert torch.equal(counts, reference.count_blocks(wanted)) and counts.any()


def compare_selection(device: torch.device) -> None:
    """The whole way, a sample first, beside a sort; also where the sample misleads."""
    size, chooser = selection.SAMPLE, selection._kernels
    selection.SAMPLE, selection._kernels = 64, lambda values: kernels
    try:
        values = torch.randn(6000, device=device)
        misleading = values.clone()
        misleading[:: 6000 // 64 | 1] = 1e-9
        equal = torch.ones(6000, device=device)
        for case, k in (
            (values, 2000),
            (values, 1),
            (misleading, 3000),
            (values.bfloat16(), 2000),
            (misleading.half(), 3000),
            (equal, 77),
            (equal, 6000),
        ):
            one = Candidates(case, k, FlatShard(case.numel(), case.numel()))
            other = Candidates(values[:5000], 17, FlatShard(5000, 5000))
            _, largest, _ = selection._by_counting([other, one, other], None, sampled=True)
            found = largest.positions()
            order = torch.sort(case.cpu().abs(), descending=True, stable=True).indices
            assert torch.equal(found.cpu().long(), order[:k].sort().values), k
    finally:
        selection.SAMPLE, selection._kernels = size, chooser


COMPARISONS = (compare_counting, compare_bit_writing, compare_selection)


if __name__ == "__main__":
    assert TIE_BLOCK > BLOCK
    sys.exit(compare_all(COMPARISONS))
