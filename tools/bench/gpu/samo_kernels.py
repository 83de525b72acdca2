"""The bandwidth of SAMO's GPU kernels, compared with positions in plain torch.

    python -m tools.bench.gpu.samo_kernels [--out FOLDER] [--shapes 355m 2b] [--smoke]

Each pass goes over all matrices of a model in bf16, bucket by bucket; `kernel_passes.py` explains
the measurement. Plain torch uses the paper's index of positions (int32 where torch accepts it),
with 4 bytes per stored entry instead of one bit per entry. Results go to FOLDER/samo.json and
FOLDER/samo.md. `--smoke`: tiny; without a GPU on the CPU, with the reference functions.
"""

from __future__ import annotations

import sys

import torch

from samo.layout import BitmapStore
from tools.bench.gpu.kernel_passes import BITS, KernelBench, KernelPass, met


class _SamoStates:
    """The tensors that a model keeps for a bucket at any sparsity."""

    def __init__(self, length: int, device: torch.device) -> None:
        self.grad = torch.randn(length, device=device, dtype=torch.bfloat16)
        self.weight = torch.zeros_like(self.grad)


class _SamoBucket:
    """A bucket with some stored entries, in our form and, for `peers`, in the paper's."""

    def __init__(self, states: _SamoStates, density: float, *, peers: bool) -> None:
        self.states = states
        length, device = states.grad.numel(), states.grad.device
        mask = torch.rand(length, device=device) < density
        self.index = BitmapStore(mask.cpu(), device)
        stored = self.index.stored
        self.sums = torch.zeros(stored, device=device)
        self.short = torch.empty(stored, dtype=torch.bfloat16, device=device)
        self.master = torch.randn(stored, device=device)
        if peers:
            self.positions = mask.nonzero().view(-1).int()
            self.index.compress(states.grad, self.short, add=False)
            picked = states.grad.index_select(0, self.positions)
            assert torch.equal(self.short, picked), "ours gathers something else"

    def compress(self) -> None:
        self.index.compress(self.states.grad, self.sums, add=False)

    def select(self) -> None:
        self.sums.copy_(self.states.grad.index_select(0, self.positions))

    def accumulate(self) -> None:
        self.index.compress(self.states.grad, self.sums, add=True)

    def select_and_add(self) -> None:
        self.sums.add_(self.states.grad.index_select(0, self.positions))

    def compress_16_bit(self) -> None:
        self.index.compress(self.states.grad, self.short, add=False)

    def select_16_bit(self) -> None:
        torch.index_select(self.states.grad, 0, self.positions, out=self.short)

    def expand(self) -> None:
        self.index.expand(self.master, self.states.weight)

    def copy_by_positions(self) -> None:
        self.states.weight.index_copy_(0, self.positions.long(), self.master.bfloat16())


PASSES = [
    KernelPass(
        "compress to fp32",
        lambda f: 2 * met(f, 2) + 4 * f + BITS,
        _SamoBucket.compress,
        "index_select, copy_",
        _SamoBucket.select,
    ),
    KernelPass(
        "compress, add to fp32",
        lambda f: 2 * met(f, 2) + 8 * f + BITS,
        _SamoBucket.accumulate,
        "index_select, add_",
        _SamoBucket.select_and_add,
    ),
    KernelPass(
        "compress to bf16",
        lambda f: 2 * met(f, 2) + 2 * f + BITS,
        _SamoBucket.compress_16_bit,
        "index_select",
        _SamoBucket.select_16_bit,
    ),
    KernelPass(
        "expand from fp32",
        lambda f: 2 * met(f, 2) + 4 * f + BITS,
        _SamoBucket.expand,
        "long, bfloat16, index_copy_",
        _SamoBucket.copy_by_positions,
    ),
]


def _copy(states: _SamoStates) -> None:
    states.weight.copy_(states.grad)


BENCH = KernelBench(
    name="samo",
    what="SAMO's kernels",
    passes=PASSES,
    densities=[0.2, 0.1],
    states=_SamoStates,
    bucket=_SamoBucket,
    copy=_copy,
    copied_bytes=4,
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
