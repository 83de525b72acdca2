"""Each Triton kernel that chooses entries beside plain torch, on a device; `tests/gpu` calls these
too.

As a program this module runs the comparisons that its arguments name on the CPU, by Triton's
interpreter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any
from unittest import mock

import torch

from megatron.sparse import counting, kernels, reference, selection
from megatron.sparse.counting import DTYPES, Candidates, MagnitudeCounter, TorchCounter
from megatron.sparse.counting_kernels import KernelCounter
from megatron.sparse.reference import BLOCK, GROUP
from megatron.sparse.selection import select_largest_each
from megatron.sparse.shard import FlatShard
from megatron.sparse.sizes import BATCH
from tests.triton_process import compare_all

NUMEL = 20000
SHARDS = (
    FlatShard(NUMEL, NUMEL),
    FlatShard(NUMEL, 10 * NUMEL, offset=5 * NUMEL),
    FlatShard(NUMEL, 10 * NUMEL, row=20, stride=200, offset=40),
    FlatShard(NUMEL, 201000, row=20, stride=200, offset=-9, first=13),
    # Runs of 100 entries; the entries between them are another rank's.
    FlatShard(NUMEL, 2 * NUMEL, runs=(torch.arange(200) * 100, torch.arange(200) * 200)),
)


MISLED = 2 * len(SHARDS)
"""The tensor of `assorted` whose sample misleads."""


def assorted(device: torch.device, dtype: torch.dtype) -> list[Candidates]:
    """Return a batch of tensors with ties, zeros and denormal numbers, some of them short."""
    values = (torch.randn(NUMEL, device=device) * 1e-3).to(dtype)
    values[:3000] = 0
    values[5000:5100] = 0.25
    values[6000:7000] *= 1e-4 if dtype == torch.float16 else 1e-36  # denormal in part
    misleading = values.clone()
    misleading[:: NUMEL // 64 | 1] = 1e-7
    found = [Candidates(values, k, shard) for shard in SHARDS for k in (50, 8000)]
    found += [Candidates(misleading, k, SHARDS[0]) for k in (12000, 0, NUMEL)]
    short = [FlatShard(numel, 9000) for numel in (0, 1, 4500)]
    found += [Candidates(values[3 : 3 + shard.numel], 1, shard) for shard in short]
    assert len(found) == BATCH
    return found


def halves(device: torch.device) -> list[list[Candidates]]:
    """Return the batches of two ranks, each of which has every other row of a tensor."""
    whole = torch.randint(-9, 10, (NUMEL // 100, 2, 100), device=device).float()
    shards = [FlatShard(NUMEL, 2 * NUMEL, row=100, stride=200, offset=100 * r) for r in range(2)]
    return [
        [Candidates(whole[:, rank].flatten(), k, shard) for k in (1, 9000, 2 * NUMEL - 1)]
        for rank, shard in enumerate(shards)
    ]


def with_empty_ranks(device: torch.device) -> list[list[Candidates]]:
    """Return the batches of three ranks: some of their shards, and all of the last, are empty."""
    batches: list[list[Candidates]] = [[], [], []]
    for cut in (0, 12000, NUMEL):  # the first rank's entries
        values = torch.randn(NUMEL, device=device)
        for rank, (start, stop) in enumerate(((0, cut), (cut, NUMEL), (NUMEL, NUMEL))):
            shard = FlatShard(stop - start, NUMEL, offset=start)
            batches[rank].append(Candidates(values[start:stop], 8000, shard))
    return batches


def compare_counting(device: torch.device) -> None:
    """Each step beside plain torch's: full batches, one tensor, and shards of several ranks."""
    with mock.patch.object(counting, "SAMPLE", 64):
        for dtype, sampled in product(DTYPES, (False, True)):
            again, ties = _compare_steps([assorted(device, dtype)], sampled=sampled)
            assert ties[0] == 100
            if again is not None:  # one sample tells the truth, the other misleads
                assert not again[0].any() and again[MISLED].any()
        _compare_steps([assorted(device, torch.float32)[MISLED:][:1]], sampled=True)
        for batches, kind in product(
            (halves(device), with_empty_ranks(device)), (torch.int32, torch.int64)
        ):
            _compare_steps(batches, sampled=True, kind=kind)


def _compare_steps(
    batches: Sequence[Sequence[Candidates]],
    *,
    sampled: bool,
    kind: torch.dtype = torch.int32,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Select on every rank by kernels and by torch; counts must be equal after each step.

    The kernels count in `kind`. Returns the counts that correct a sample's, and the number of
    entries at the threshold of each tensor.
    """
    by_kernels = [KernelCounter(batch) for batch in batches]
    by_torch = [TorchCounter(batch) for batch in batches]
    counters: list[MagnitudeCounter] = [*by_kernels, *by_torch]
    cut = torch.ones((), dtype=torch.int64, device=batches[0][0].values.device)
    for counter in by_kernels:
        counter._kind = kind

    def sums(count: Callable[[MagnitudeCounter], torch.Tensor]) -> torch.Tensor:
        """Return the counts summed over the ranks."""
        found = [count(counter) for counter in by_kernels]
        for mine, counter in zip(found, by_torch, strict=True):
            assert torch.equal(mine * cut, count(counter) * cut)
        return found[0] if len(found) == 1 else torch.stack(found).sum(0)

    def take(step: Callable[[MagnitudeCounter], Callable[..., object]], *counts: Any) -> None:
        for counter in counters:
            step(counter)(*counts)

    if sampled:
        take(lambda counter: counter.narrow, sums(lambda counter: counter.count_sample()))
    counts, again = sums(lambda counter: counter.count()), None
    if sampled:
        take(lambda counter: counter.widen, counts)
        again = sums(lambda counter: counter.count_again())
    take(lambda counter: counter.zoom, counts, again)
    take(lambda counter: counter.find_thresholds, sums(lambda counter: counter.count()))
    cut = by_torch[0]._cut.long()  # other ties are not counted
    ties = sums(lambda counter: counter.count_ties())
    take(lambda counter: counter.find_blocks, ties)
    take(lambda counter: counter.find_cutoffs, sums(lambda counter: counter.mark_ties()))
    for mine, wanted in zip(by_kernels, by_torch, strict=True):
        assert torch.equal(mine.thresholds, wanted.thresholds)
        assert torch.equal(mine.cutoffs, wanted.cutoffs)
    return again, ties.sum(1)


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
    """Selections from more tensors than a batch has, of all dtypes, beside a sort."""
    whole = FlatShard(NUMEL, NUMEL)
    drawn = [torch.randn(NUMEL, device=device) for _ in range(BATCH + 2)]
    drawn += [torch.ones(NUMEL, device=device), torch.randn(NUMEL, device=device).bfloat16()]
    drawn.insert(2, torch.randn(NUMEL, device=device).half())
    tensors = [Candidates(each, 77 * number, whole) for number, each in enumerate(drawn)]
    with (
        mock.patch.object(counting, "SAMPLE", 64),
        mock.patch.object(selection, "SAMPLE", 64),  # every tensor is long enough for a sample
        mock.patch.object(selection, "_on_gpu", lambda values: True),
        mock.patch.object(selection, "_counter", mock.Mock(side_effect=KernelCounter)) as counter,
    ):
        found = select_largest_each(tensors)
    assert [len(call.args[0]) for call in counter.call_args_list] == [BATCH, 3, 1, 1]
    for one, largest in zip(tensors, found, strict=True):
        order = torch.sort(one.values.cpu().abs(), descending=True, stable=True).indices
        assert torch.equal(largest.positions().cpu().long(), order[: one.k].sort().values)


COMPARISONS = (compare_counting, compare_bit_writing, compare_selection)


if __name__ == "__main__":
    named = {each.__name__: each for each in COMPARISONS}
    sys.exit(compare_all([named[name] for name in sys.argv[1:]]))
