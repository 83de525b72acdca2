"""What an index does with a bitmap: gather, clear, and bring values to the optimizer's states."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from megatron.data_parallel.reducer import Reduced, Run
from megatron.sparse.reference import BLOCK, CHUNK, Bits, pack
from radius import reference
from radius.native_library import native_library

if TYPE_CHECKING:
    from megatron.optimizer.rules import Hyper, UpdateRule

CUDA_CHUNK = 64 * CHUNK
"""Entries placed among zeros together for an update rule that has no kernel here."""


class Marked(ABC):
    """A `SparseIndex` of the entries that `bits` marks."""

    runs: Sequence[Run] = ()

    def __init__(self, device: torch.device) -> None:
        self._kernels = _kernels_for(device)
        self._fused = device.type == "cuda" and self._kernels is not reference
        self._chunk = CHUNK if device.type == "cpu" else CUDA_CHUNK

    @property
    @abstractmethod
    def bits(self) -> Bits:
        """Which entries these are."""

    @property
    @abstractmethod
    def numel(self) -> int:
        """How many these are."""

    def gather(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        """Write the entries at the positions to `out`, of the same dtype."""
        self._kernels.compact(self.bits, flat, out)

    def take(self, flat: torch.Tensor, out: torch.Tensor, *, scale: float = 1.0) -> None:
        """Gather times `scale` and leave zeros where the entries were, in one pass."""
        self._kernels.compact(self.bits, flat, out, scale=scale, clear=True)

    def clear(self, flat: torch.Tensor) -> None:
        """Set the entries at the positions to 0."""
        self._kernels.clear(self.bits, flat)

    def place(self, values: torch.Tensor, flat: torch.Tensor) -> None:
        """Overwrite `flat`, of the same dtype, by the values at the positions and zeros
        elsewhere."""
        self._kernels.expand(self.bits, values, flat)

    def apply(
        self,
        rule: UpdateRule,
        reduced: Reduced,
        weight: torch.Tensor,
        moments: Sequence[torch.Tensor],
        hyper: Hyper,
        *,
        factor: float,
    ) -> None:
        """See `SparseIndex.apply`. AdamW on CUDA reads the values where they are."""
        constants = rule.adamw if self._fused else None
        if constants is not None:
            self._kernels.adamw(
                self.bits,
                reduced.values,
                reduced.gathered,
                weight,
                *moments,
                factor=factor,
                frozen=reduced.rest == "frozen",
                lr=hyper.lr,
                weight_decay=hyper.weight_decay,
                betas=(constants.beta1, constants.beta2),
                eps=constants.eps,
                t=hyper.t,
            )
        elif reduced.rest == "frozen":
            self._apply_to_chosen(rule, reduced, weight, moments, hyper, factor)
        else:
            self._apply_to_all(rule, reduced, weight, moments, hyper, factor)

    def _apply_to_all(
        self,
        rule: UpdateRule,
        reduced: Reduced,
        weight: torch.Tensor,
        moments: Sequence[torch.Tensor],
        hyper: Hyper,
        factor: float,
    ) -> None:
        """The rule on every chunk, its values placed among zeros just before."""
        assert reduced.gathered is None, "sums of several steps belong to frozen rests"
        bits, length = self.bits, weight.numel()
        scratch = torch.empty(min(self._chunk, length), dtype=torch.float32, device=weight.device)
        for start in range(0, length, self._chunk):
            cut = slice(start, min(start + self._chunk, length))
            grad = scratch[: cut.stop - start]
            first = start // BLOCK
            self._kernels.expand(bits, reduced.values, grad, first=first, scale=factor)
            rule.apply(weight[cut], grad, [moment[cut] for moment in moments], hyper)

    def _apply_to_chosen(
        self,
        rule: UpdateRule,
        reduced: Reduced,
        weight: torch.Tensor,
        moments: Sequence[torch.Tensor],
        hyper: Hyper,
        factor: float,
    ) -> None:
        """The rule on the chosen entries alone, taken together and put back. A CPU does so within
        cache; a GPU would have to be waited for to tell how many there are in each piece."""
        bits, at = self.bits, 0
        length = weight.numel()
        # Half a chunk: copies of all states of a piece that is sent whole stay in cache.
        together = CHUNK // 2 if weight.device.type == "cpu" else length
        for start in range(0, length, together):
            cut = slice(start, min(start + together, length))
            here = bits if together >= length else bits.part(start // BLOCK, -(-cut.stop // BLOCK))
            count = self.numel if here is bits else int(here.counts.sum())
            values = slice(at, at + count)
            at += count
            states = [state[cut] for state in (weight, *moments)]
            held = [state.new_empty(count) for state in states]
            for state, mine in zip(states, held, strict=True):
                self._kernels.compact(here, state, mine)
            counts = None if reduced.gathered is None else reduced.gathered[values]
            if here is not bits and counts is not None and bool((counts == 1).all()):
                counts = None  # which spares the rule a few passes
            rule.apply(held[0], reduced.values[values].float() * factor, held[1:], hyper, counts)
            for state, mine in zip(states, held, strict=True):
                self._kernels.place(here, mine, state)


class FlushedBitmap(Marked):
    """Chosen positions and whole ranges, for one step. Only blocks that a range meets are copied:
    the others stay those of the index it was made from."""

    def __init__(self, bits: Bits, runs: Sequence[Run], numel: int) -> None:
        super().__init__(bits.words.device)
        self.runs, self._numel = runs, numel
        self._spans: list[tuple[int, int]] = []
        for run in runs:
            first, last = run.start // BLOCK, -(-run.stop // BLOCK)
            if self._spans and self._spans[-1][1] >= first:
                first, _ = self._spans.pop()
            self._spans.append((first, last))
        self._bits = self._patched(bits) if runs else bits

    @property
    def bits(self) -> Bits:
        return self._bits

    @property
    def numel(self) -> int:
        return self._numel

    def keep(self, start: int, stop: int) -> None:
        """The words of `[start, stop)` are about to change: copy them all unless copied already."""
        first, last = start // BLOCK, -(-stop // BLOCK)
        if not any(a <= first and last <= b for a, b in self._spans):
            self._bits = dataclasses.replace(self._bits, words=self._bits.words.clone())
            self._spans = [(0, self._bits.blocks)]

    def _patched(self, bits: Bits) -> Bits:
        device = bits.words.device
        patches = torch.cat([bits.words[first:last] for first, last in self._spans])
        patch = torch.full((bits.blocks,), -1, dtype=torch.int32, device=device)
        counts = bits.counts.clone()
        row = 0
        runs = list(self.runs)
        for first, last in self._spans:
            rows = slice(row, row + last - first)
            patch[first:last] = torch.arange(rows.start, rows.stop, device=device)
            while runs and runs[0].start < last * BLOCK:
                run = runs.pop(0)
                moved = (row - first) * BLOCK
                _set_run(patches, run.start + moved, run.stop + moved)
            counts[first:last] = self._kernels.count_blocks(patches[rows])
            row = rows.stop
        return Bits.of(bits.length, bits.words, counts, patch, patches)


def _set_run(words: torch.Tensor, start: int, stop: int) -> None:
    """Set the bits of `[start, stop)`."""
    flat = words.view(-1)
    first, last = -(-start // 32), stop // 32
    flat[first:last] = -1
    edges = [(start // 32, start % 32, 32 if first <= last else stop % 32)] if start % 32 else []
    if stop % 32 and first <= last:
        edges.append((last, 0, stop % 32))
    for word, low, high in edges:
        mask = torch.zeros(32, dtype=torch.bool)
        mask[low:high] = True
        flat[word : word + 1].bitwise_or_(int(pack(mask)))


def _kernels_for(device: torch.device) -> ModuleType:
    if device.type == "cuda" and find_spec("triton") is not None:
        from radius import kernels

        return kernels
    if device.type == "cpu" and native_library() is not None:
        from radius import native

        return native
    return reference
