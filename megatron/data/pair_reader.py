"""Packs of sentence pairs as microbatches on the rank's device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from megatron.data.dictionary import PAD
from megatron.data.pair_dataset import Packs, PairTokens, cut_by_tokens
from megatron.data.sampler import MicrobatchSampler
from megatron.transfer import to_device


@dataclass(frozen=True, kw_only=True)
class PairBatch:
    """A microbatch of padded sentence pairs; `PairTokens` on a device.

    `counted` is the number of target tokens, whose losses the sums add up.
    """

    source: torch.Tensor
    inputs: torch.Tensor
    targets: torch.Tensor
    index: int
    counted: int
    uneven: bool = True
    """Packs differ in their number of target tokens, and so do ranks."""

    @classmethod
    def of(cls, tokens: PairTokens, *, index: int, counts: bool, device: torch.device) -> PairBatch:
        """Return a microbatch on the device; unless `counts`, its targets are all padding."""
        targets = tokens.targets if counts else np.full_like(tokens.targets, PAD)
        source, inputs, labels = (
            to_device(torch.from_numpy(array), device)
            for array in (tokens.source, tokens.inputs, targets)
        )
        return cls(
            source=source,
            inputs=inputs,
            targets=labels,
            index=index,
            counted=tokens.counted if counts else 0,
        )


@dataclass(frozen=True, kw_only=True)
class PackReader:
    """A `Reader` of packs of sentence pairs; a sample is a pack.

    Args:
        packs: The packs.
        sampler: This rank's part of each global batch; its microbatches are single packs.
        samples: Number of samples: the packs of an epoch, or of a whole run, whose epochs follow
            one another. Later samples are padding.
        microbatch_tokens: Padded tokens of a microbatch, into which packs are cut; None for whole
            packs.
        device: Device of the batches.
    """

    packs: Packs
    sampler: MicrobatchSampler
    samples: int
    microbatch_tokens: int | None
    device: torch.device

    def read(self, first_sample: int, global_batch_size: int) -> Iterator[PairBatch]:
        """Yield this rank's part of samples [first_sample, first_sample + global_batch_size).

        Raises:
            DataError: A sentence cannot be read or holds a token that is not in its dictionary.
        """
        assert self.sampler.micro_batch_size == 1, "a sample is a microbatch"
        # Numbers must not depend on how packs are cut elsewhere in the global batch: they seed
        # dropout on every grid.
        stride = 1 if self.microbatch_tokens is None else self.packs.max_tokens
        for number in self.sampler.numbers(global_batch_size):
            sample = first_sample + number
            exists = sample < self.samples
            pairs = self.packs.pairs(sample if exists else self.samples - 1)
            for piece, part in enumerate(self._cut(pairs)):
                yield PairBatch.of(
                    self.packs.dataset.tokens(part),
                    index=number * stride + piece,
                    counts=exists,
                    device=self.device,
                )

    def _cut(self, pairs: np.ndarray) -> Iterator[np.ndarray]:
        if self.microbatch_tokens is None:
            yield pairs
            return
        lengths = self.packs.dataset.lengths[pairs]
        starts = cut_by_tokens(lengths, self.microbatch_tokens)
        for start, stop in zip(starts[:-1], starts[1:], strict=True):
            yield pairs[start:stop]

    def fingerprint(self) -> str:
        """Return a text that differs between ranks which read other data."""
        return f"{self.samples} packs, {self.packs.digest()}"
