"""Each Triton kernel of Radius beside plain torch, on a device; `tests/gpu` calls these too.

Run as a program they run one after the other on the CPU, by Triton's interpreter.
"""

from __future__ import annotations

import sys
from typing import Literal

import torch

from megatron.data_parallel.reducer import ReducedGrad
from megatron.optimizer.update_rules import AdamW, Hyper
from megatron.sparse.reference import BLOCK, GROUP, Bits
from megatron.sparse.selection import draw_seeded, select_largest
from radius import kernels, reference
from radius.bitmap_index import BitmapIndex
from tests.triton_process import compare_all

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


def compare_clearing(device: torch.device) -> None:
    for bits in both_bits(device):
        numel = int(bits.counts.sum())
        for dtype in (torch.float32, torch.bfloat16):
            flat = torch.randn(LENGTH, device=device).to(dtype)
            wanted, found = flat.clone(), flat.clone()
            reference.clear(bits, wanted)
            kernels.clear(bits, found)
            assert torch.equal(found, wanted)
            assert wanted.count_nonzero() == flat.count_nonzero() - numel


def compare_clearing_of_ranges(device: torch.device) -> None:
    for bits in both_bits(device):
        for start, stop in ((0, LENGTH), (3, 4), (77, 5 * BLOCK), (5000, 5001), (9000, LENGTH - 1)):
            flat = torch.ones(LENGTH, device=device)
            found, everywhere = flat.clone(), flat.clone()
            kernels.clear_range(bits, found, start, stop)
            reference.clear(bits, everywhere)
            flat[start:stop] = everywhere[start:stop]
            assert torch.equal(found, flat)


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
            reduced = ReducedGrad(
                values=values, index=bits_of, unselected=rest, steps_accumulated=counts
            )
            results = []
            for module in (reference, kernels):
                bits_of._kernels = module
                torch.manual_seed(3)
                weight, mean = torch.randn(2, LENGTH, device=device).unbind()
                square = torch.rand(LENGTH, device=device)
                start = [t.clone() for t in (weight, mean, square)]
                hyper = Hyper(t=7, lr=1e-2, weight_decay=0.1)
                bits_of.apply(rule, reduced, weight, (mean, square), hyper, factor=0.5)
                results.append((weight, mean, square))
            for number, (wanted, found, before) in enumerate(zip(*results, start, strict=True)):
                torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-7)
                if number == 0 and rest == "frozen":
                    assert (found != before).all(), "all weights decay"
                    continue
                changed = int((found != before).sum())
                assert changed <= numel if rest == "frozen" else changed > numel
                if rest == "frozen":
                    assert torch.equal(found == before, wanted == before)


COMPARISONS = (compare_moving, compare_clearing, compare_clearing_of_ranges, compare_adamw)


if __name__ == "__main__":
    sys.exit(compare_all(COMPARISONS))
