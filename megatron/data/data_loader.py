"""Microbatches as tensors on the rank's device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from megatron.data.blended_dataset import SampleSource
from megatron.data.sampler import CollateOptions, Microbatch, MicrobatchSampler, collate
from megatron.transfer import to_device


@dataclass(frozen=True, kw_only=True)
class DeviceMicrobatch:
    """A `Microbatch` on a device, with the same fields, [b, s] each."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    document_ids: torch.Tensor | None
    index: int
    counted_tokens: int
    """Number of tokens whose loss counts."""

    @classmethod
    def of(cls, batch: Microbatch, device: torch.device) -> DeviceMicrobatch:
        """Copy to the device, asynchronously if it is a GPU."""

        def place(array: np.ndarray | None) -> torch.Tensor | None:
            return None if array is None else to_device(torch.from_numpy(array), device)

        mask = batch.loss_mask
        tokens, labels = place(batch.tokens), place(batch.labels)
        assert tokens is not None and labels is not None
        return cls(
            tokens=tokens,
            labels=labels,
            loss_mask=place(mask),
            position_ids=place(batch.position_ids),
            document_ids=place(batch.document_ids),
            index=batch.index,
            counted_tokens=int(batch.labels.size if mask is None else mask.sum()),
        )


@dataclass(frozen=True, kw_only=True)
class BatchReader:
    """Reads one rank's microbatches of a data set; any global batch, in any order.

    Raises `DataError` if a sample has a token outside the vocabulary.
    """

    dataset: SampleSource
    sampler: MicrobatchSampler
    options: CollateOptions
    device: torch.device

    def read(self, first_sample: int, global_batch_size: int) -> Iterator[DeviceMicrobatch]:
        """Yield this rank's share of samples [first_sample, first_sample + global_batch_size)."""
        shares = zip(
            self.sampler.indices(first_sample, global_batch_size),
            self.sampler.numbers(global_batch_size),
            strict=True,
        )
        for samples, number in shares:
            batch = collate(self.dataset, samples, number, self.options)
            yield DeviceMicrobatch.of(batch, self.device)


@dataclass(frozen=True, kw_only=True)
class Readers:
    """The readers of a run; valid and test may be absent."""

    train: BatchReader | None
    """None only for a run that does not train (`--skip-train`)."""
    valid: BatchReader | None = None
    test: BatchReader | None = None
