"""The bandwidth of Radius's GPU kernels, compared with plain torch code.

    python -m tools.bench.gpu.radius_kernels [--out FOLDER] [--shapes 355m 2b] [--smoke]

Each pass goes over all matrices of a model, bucket by bucket; `kernel_passes.py` explains the
measurement. Plain torch uses boolean masks, int64 positions and `torch.topk`. Results go to
FOLDER/radius.json and FOLDER/radius.md. `--smoke`: tiny; without a GPU on the CPU, with CPU
kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from megatron.data_parallel.reducer import ReducedGrad
from megatron.optimizer.update_rules import AdamW, Hyper
from megatron.sparse.counting import Candidates
from megatron.sparse.selection import select_largest, select_largest_each
from megatron.sparse.shard import FlatShard
from radius.bitmap_index import BitmapIndex
from tools.bench.gpu.kernel_passes import BITS, KernelBench, KernelPass, met

RULE, HYPER = AdamW(beta1=0.9, beta2=0.95, eps=1e-8), Hyper(t=10, lr=1e-4, weight_decay=0.1)


class _RadiusStates:
    """The tensors that an optimizer and an engine keep for a bucket."""

    def __init__(self, length: int, device: torch.device) -> None:
        self.grad, self.update = (torch.randn(length, device=device) for _ in range(2))
        self.weight, self.mean = (torch.randn(length, device=device) for _ in range(2))
        self.square = torch.rand(length, device=device)
        self.scratch = torch.empty(length, device=device)


class _RadiusBucket:
    """A bucket with its sent entries in our form and, for `peers`, in torch's."""

    def __init__(self, states: _RadiusStates, density: float, *, peers: bool) -> None:
        self.states = states
        length, device = states.grad.numel(), states.grad.device
        self.k = int(density * length)
        self.index = BitmapIndex(length, device)
        self.index.choose(0, select_largest(states.update, self.k))
        self.values = torch.randn(self.k, device=device)
        self.counts = torch.full((self.k,), 20.0, device=device)
        if peers:
            self.mask = torch.zeros(length, dtype=torch.bool, device=device)
            self.positions = torch.empty(self.k, dtype=torch.int64, device=device)
            self.index.gather(torch.arange(length, device=device), self.positions)
            self.mask.index_fill_(0, self.positions, True)
            self.index.gather(states.update, self.values)
            assert torch.equal(self.values, states.update[self.mask]), "ours gathers something else"

    def gather(self) -> None:
        self.index.gather(self.states.grad, self.values)

    def gather_by_mask(self) -> None:
        self.values = self.states.grad[self.mask]

    def gather_and_clear(self) -> None:
        self.index.gather(self.states.grad, self.values)
        self.index.clear(self.states.grad)

    def gather_and_clear_by_mask(self) -> None:
        self.values = self.states.grad[self.mask]
        self.states.grad.masked_fill_(self.mask, 0.0)

    def expand(self) -> None:
        self.index._kernels.expand(self.index.bits, self.values, self.states.scratch)

    def expand_by_positions(self) -> None:
        self.states.scratch.zero_().index_copy_(0, self.positions, self.values)

    def adamw(self) -> None:
        self._apply(ReducedGrad(values=self.values, index=self.index))

    def adamw_by_positions(self) -> None:
        self.expand_by_positions()
        states = self.states
        RULE.apply(states.weight, states.scratch, (states.mean, states.square), HYPER)

    def adamw_frozen(self) -> None:
        rest = ReducedGrad(
            values=self.values, index=self.index, unselected="frozen", steps_accumulated=self.counts
        )
        self._apply(rest)

    def adamw_frozen_by_positions(self) -> None:
        flats = (self.states.weight, self.states.mean, self.states.square)
        held = [flat.index_select(0, self.positions) for flat in flats]
        RULE.apply(held[0], self.values.clone(), held[1:], HYPER, self.counts)
        for flat, mine in zip(flats, held, strict=True):
            flat.index_copy_(0, self.positions, mine)

    def select_by_topk(self) -> None:
        found = torch.topk(self.states.update.abs(), self.k, sorted=False).indices
        self.mask.zero_().index_fill_(0, found, True)

    def _apply(self, reduced: ReducedGrad) -> None:
        states, moments = self.states, (self.states.mean, self.states.square)
        self.index.apply(RULE, reduced, states.weight, moments, HYPER, factor=0.5)


def _select(buckets: Sequence[_RadiusBucket]) -> None:
    whole = [FlatShard(bucket.index.length, bucket.index.length) for bucket in buckets]
    found = select_largest_each(
        [Candidates(b.states.update, b.k, shard) for b, shard in zip(buckets, whole, strict=True)]
    )
    for bucket, selection in zip(buckets, found, strict=True):
        bucket.index.choose(0, selection)


PASSES = [
    KernelPass(
        "gather",
        lambda d: 4 * met(d, 4) + 4 * d + BITS,
        _RadiusBucket.gather,
        "g[mask]",
        _RadiusBucket.gather_by_mask,
    ),
    KernelPass(
        "gather, then clear",
        lambda d: 8 * met(d, 4) + 4 * d + 2 * BITS,
        _RadiusBucket.gather_and_clear,
        "g[mask], masked_fill_",
        _RadiusBucket.gather_and_clear_by_mask,
    ),
    KernelPass(
        "expand",
        lambda d: 4 + 4 * d + BITS,
        _RadiusBucket.expand,
        "zero_, index_copy_",
        _RadiusBucket.expand_by_positions,
    ),
    KernelPass(
        "AdamW from compact values",
        lambda d: 24 + 4 * d + BITS,
        _RadiusBucket.adamw,
        "zero_, index_copy_, fused AdamW",
        _RadiusBucket.adamw_by_positions,
    ),
    KernelPass(
        "AdamW, rest frozen, counted",
        lambda d: 24 * met(d, 4) + 8 * d + BITS,
        _RadiusBucket.adamw_frozen,
        "index_select, fused AdamW, index_copy_",
        _RadiusBucket.adamw_frozen_by_positions,
    ),
    KernelPass(
        "selection (3 readings)",
        lambda d: 12 + BITS,
        _select,
        "abs, topk, index_fill_",
        _RadiusBucket.select_by_topk,
        together=True,
    ),
]


def _copy(states: _RadiusStates) -> None:
    states.scratch.copy_(states.weight)


BENCH = KernelBench(
    name="radius",
    what="Radius' kernels",
    passes=PASSES,
    densities=[0.4, 0.1],
    states=_RadiusStates,
    bucket=_RadiusBucket,
    copy=_copy,
    copied_bytes=8,
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
