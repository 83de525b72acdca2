"""Microbatches of tokens as tensors on a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from megatron.data.batches import fingerprint_of
from megatron.data.blended_dataset import SampleSource
from megatron.data.sampler import CollateOptions, Microbatch, MicrobatchSampler, collate
from megatron.documents import Documents
from megatron.transfer import to_device


@dataclass(frozen=True, kw_only=True)
class DeviceMicrobatch:
    """A `Microbatch` on a device, with the same fields, [b, s] each, and its documents.

    Documents are copied with all else, before a step: during a pipeline schedule, a copy from
    pinned memory can wait for the device, and stages that wait for each other never end.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    documents: Documents | None
    index: int
    counted: int
    """Tokens whose loss counts."""

    @property
    def uneven(self) -> bool:
        """True with a mask, since ranks then count what their samples hold."""
        return self.loss_mask is not None

    @classmethod
    def of(cls, batch: Microbatch, device: torch.device) -> DeviceMicrobatch:
        """Return a copy of a microbatch on the device, made asynchronously on a GPU."""

        def place(array: np.ndarray | None) -> torch.Tensor | None:
            return None if array is None else to_device(torch.from_numpy(array), device)

        mask, ids = batch.loss_mask, batch.document_ids
        tokens, labels = place(batch.tokens), place(batch.labels)
        assert tokens is not None and labels is not None
        return cls(
            tokens=tokens,
            labels=labels,
            loss_mask=place(mask),
            position_ids=place(batch.position_ids),
            documents=None if ids is None else Documents.of(ids, device),
            index=batch.index,
            counted=int(batch.labels.size if mask is None else mask.sum()),
        )


@dataclass(frozen=True, kw_only=True)
class BatchReader:
    """A `Reader` of token samples."""

    dataset: SampleSource
    sampler: MicrobatchSampler
    options: CollateOptions
    device: torch.device

    @property
    def samples(self) -> int:
        """The samples of the data set."""
        return len(self.dataset)

    def read(self, first_sample: int, global_batch_size: int) -> Iterator[DeviceMicrobatch]:
        """Yield this rank's part of samples [first_sample, first_sample + global_batch_size).

        Raises `DataError` if a sample has a token outside the vocabulary.
        """
        shares = zip(
            self.sampler.indices(first_sample, global_batch_size),
            self.sampler.numbers(global_batch_size),
            strict=True,
        )
        partial = first_sample + global_batch_size > self.samples
        for samples, number in shares:
            batch = collate(self.dataset, samples, number, self.options, partial=partial)
            yield DeviceMicrobatch.of(batch, self.device)

    def fingerprint(self) -> str:
        """Return the number of samples, and a digest of three of them."""
        return self.order(self.samples)

    def order(self, count: int) -> str:
        """Return a digest of three of the first `count` samples, and their number.

        The documents of all epochs are shuffled together, and a run has as many epochs as it needs.
        """
        count = min(count, self.samples)
        return fingerprint_of(count, lambda number: self.dataset[number].tobytes())
