"""Each Triton kernel of Radius beside plain torch, on a device; `tests/gpu` calls these too.

Run as a program they run one after the other on the CPU, by Triton's interpreter.
"""

from __future__ import annotations

import sys
from typing import Literal

import torch

from megatron.data_parallel.interface import Reduced
from megatron.optimizer.rules import AdamW, Hyper
from radius import kernels, reference, selection, selection_kernels
from radius.bitmap import BitmapIndex
from radius.reference import BLOCK, GROUP, TIE_BLOCK, Bits
from radius.selection import draw_seeded, select_largest
from radius.shard import Shard

LENGTH = 13 * BLOCK + 1000
"""Not a whole number of blocks; the last bucket of a model need not be one either."""


def some_index(device: torch.device, length: int = LENGTH) -> BitmapIndex:
    """Two slices with a gap between them: largest entries and drawn ones."""
    generator = torch.Generator().manual_seed(1)
    first = torch.randn(length // 2 - 100, generator=generator).to(device)
    index = BitmapIndex(length, device)
    index.choose(0, select_largest(first, int(0.4 * first.numel())))
    rest = length - length // 2
    index.choose(length // 2, draw_seeded(rest, rest // 10, seed=1, step=2, name="second"))
    return index


def both_bits(device: torch.device) -> list[Bits]:
    index = some_index(device)
    return [index.bits, index.flushed([(5, 77), (BLOCK - 3, BLOCK + 700), (9000, 9000)]).bits]


def compare_moving(device: torch.device) -> None:
    for bits in both_bits(device):
        numel = int(bits.counts.sum())
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            flat = (torch.randn(LENGTH, device=device) * 100).to(dtype)
            wanted, found = flat.new_empty(numel), flat.new_empty(numel)
            reference.compact(bits, flat, wanted)
            kernels.compact(bits, flat, found)
            assert torch.equal(found, wanted)
            placed, expected = torch.zeros_like(flat), torch.zeros_like(flat)
            for module, out in ((reference, expected), (kernels, placed)):
                module.expand(bits, wanted, out)
                module.place(bits, wanted + 1, out)
            assert torch.equal(placed, expected)
            part = flat[GROUP * BLOCK : (GROUP + 1) * BLOCK + 10].clone()
            again = part.clone()
            kernels.expand(bits, wanted, part, first=GROUP)
            reference.expand(bits, wanted, again, first=GROUP)
            assert torch.equal(part, again) and part.count_nonzero() < part.numel()


def compare_taking(device: torch.device) -> None:
    for bits in both_bits(device):
        numel = int(bits.counts.sum())
        for dtype in (torch.float32, torch.bfloat16):
            flat = torch.randn(LENGTH, device=device).to(dtype)
            left = [flat.clone(), flat.clone(), flat.clone()]
            taken = [flat.new_empty(numel), flat.new_empty(numel)]
            reference.compact(bits, left[0], taken[0], scale=0.37, clear=True)
            kernels.compact(bits, left[1], taken[1], scale=0.37, clear=True)
            kernels.clear(bits, left[2])
            # The interpreter cuts bits off where a GPU rounds.
            rounding = 0.0 if dtype == torch.float32 else 2**-7
            torch.testing.assert_close(taken[1], taken[0], rtol=rounding, atol=0.0)
            assert torch.equal(left[0], left[1]) and torch.equal(left[0], left[2])
            assert left[0].count_nonzero() == flat.count_nonzero() - numel


def compare_adamw(device: torch.device) -> None:
    index = some_index(device)
    rule = AdamW(beta1=0.9, beta2=0.99, eps=1e-8)
    for bits_of in (index, index.flushed([(5, 77), (BLOCK - 3, BLOCK + 700)])):
        cases: tuple[tuple[torch.dtype, Literal["zero", "frozen"], bool], ...] = (
            (torch.float32, "zero", False),
            (torch.bfloat16, "zero", False),
            (torch.float32, "frozen", False),
            (torch.float32, "frozen", True),
        )
        for dtype, rest, counted in cases:
            numel = bits_of.numel
            values = torch.randn(numel, device=device).to(dtype)
            counts = torch.randint(1, 9, (numel,), device=device).float() if counted else None
            reduced = Reduced(values=values, index=bits_of, rest=rest, gathered=counts)
            results = []
            for module, fused in ((reference, False), (kernels, True)):
                bits_of._kernels, bits_of._fused = module, fused
                torch.manual_seed(3)
                weight, mean = torch.randn(2, LENGTH, device=device).unbind()
                square = torch.rand(LENGTH, device=device)
                start = [t.clone() for t in (weight, mean, square)]
                hyper = Hyper(t=7, lr=1e-2, weight_decay=0.1)
                bits_of.apply(rule, reduced, weight, (mean, square), hyper, factor=0.5)
                results.append((weight, mean, square))
            for wanted, found, before in zip(*results, start, strict=True):
                torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-7)
                changed = int((found != before).sum())
                assert changed <= numel if rest == "frozen" else changed > numel
                if rest == "frozen":
                    assert torch.equal(found == before, wanted == before)


def compare_counting(device: torch.device) -> None:
    values = torch.randn(20000, device=device) * 1e-3
    values[:3000] = 0
    values[5000:5100] = 0.25
    one = torch.ones((), dtype=torch.bool, device=device)
    quarter = torch.tensor(0.25, device=device).view(torch.int32)
    for bracket in ((0, 0x7FFFFFFF, 15), (0x38000000, 0x3AFFFFFF, 10), (0x3E800000, 0x3E80FFFF, 0)):
        numbers = torch.tensor(bracket, device=device)
        found = selection_kernels.histogram(values, numbers)
        assert torch.equal(found.cpu(), reference.histogram(values.cpu(), numbers.cpu()))
        assert found.sum() > 0
    nothing = torch.tensor((1, 0, 0), device=device)
    assert not selection_kernels.histogram(values, nothing).any()
    for shard in (
        Shard(20000, 20000),
        Shard(20000, 200000, offset=100000),
        Shard(20000, 200000, row=20, stride=200, offset=40),
    ):
        found = selection_kernels.tie_counts(values, quarter, one, shard)
        wanted = reference.tie_counts(values.cpu(), quarter.cpu(), one.cpu(), shard)
        assert torch.equal(found.cpu(), wanted) and found.sum() == 100
        assert not selection_kernels.tie_counts(values, quarter, ~one, shard).any()


def compare_bit_writing(device: torch.device) -> None:
    whole = torch.randint(-9, 10, (12 * BLOCK,), device=device).float()
    threshold = torch.tensor(4.0, device=device).view(torch.int32)
    for start, numel in ((0, 12 * BLOCK), (64, 5000), (4000, 4500), (4097, 31), (4099, 1)):
        values = whole[:numel].clone()
        for shard in (
            Shard(numel, numel),
            Shard(numel, 10 * numel, offset=2 * numel),
            Shard(numel, 10 * numel, row=7, stride=70, offset=14),
        ):
            cutoff = shard.logical(torch.tensor(numel // 3, device=device))
            found, wanted = torch.randint(-(2**31), 2**31, (2, 3 * GROUP, 32), device=device).int()
            wanted.copy_(found)
            kernels.write_bits(found, start, values, threshold, cutoff, shard)
            reference.write_bits(wanted, start, values, threshold, cutoff, shard)
            assert torch.equal(found, wanted)
            counts = kernels.count_blocks(found)
            assert torch.equal(counts, reference.count_blocks(found)) and counts.any()


def compare_selection(device: torch.device) -> None:
    """The whole way, a sample first, beside a sort; also where the sample misleads."""
    size, chooser = selection.SAMPLE, selection._kernels
    selection.SAMPLE, selection._kernels = 64, lambda values: selection_kernels
    try:
        values = torch.randn(6000, device=device)
        misleading = values.clone()
        misleading[:: 6000 // 64 | 1] = 1e-9
        equal = torch.ones(6000, device=device)
        for case, k in (
            (values, 2000),
            (values, 1),
            (misleading, 3000),
            (equal, 77),
            (equal, 6000),
        ):
            shard = Shard(case.numel(), case.numel())
            counter = selection._Counter(case, None)
            wanted = torch.full((1,), k, device=device)
            threshold, ties, left = counter.threshold(counter.sampled(wanted, 6000), wanted)
            cutoff = counter.cutoff(threshold, ties, left, shard)
            found = selection.Largest(case, threshold, cutoff, shard, k).positions()
            order = torch.sort(case.cpu().abs(), descending=True, stable=True).indices
            assert torch.equal(found.cpu().long(), order[:k].sort().values), k
    finally:
        selection.SAMPLE, selection._kernels = size, chooser


COMPARISONS = (
    compare_moving,
    compare_taking,
    compare_adamw,
    compare_counting,
    compare_bit_writing,
    compare_selection,
)


def main() -> int:
    assert TIE_BLOCK > BLOCK
    torch.manual_seed(0)
    for comparison in COMPARISONS:
        comparison(torch.device("cpu"))
    print("all equal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
