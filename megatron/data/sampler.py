"""The samples that a rank reads in an iteration, and their collation into microbatches.

A global batch is samples [consumed, consumed + global batch size). It is divided into global
microbatches; block b of rank r is number b * data_parallel_size + r. The samples of a number depend
on the micro batch size alone, never on the number of ranks.

    global batch of 8, micro batch 2, two ranks:   samples 0 1 | 2 3 | 4 5 | 6 7
                                                   number    0     1     2     3
                                                   rank      0     1     0     1
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.data.blended_dataset import SampleSource
from megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """A microbatch of b samples of s tokens; labels[i, j] follows tokens[i, : j + 1]."""

    tokens: NDArray[np.int64]  # [b, s]
    labels: NDArray[np.int64]  # [b, s]
    loss_mask: NDArray[np.float32] | None  # [b, s]; None: every token counts
    position_ids: NDArray[np.int64] | None  # [b, s]; None: 0 to s - 1
    document_ids: NDArray[np.int64] | None  # [b, s]; None: a token sees all before it
    index: int
    """Number of this microbatch within the global batch, over all ranks."""


@dataclass(frozen=True, kw_only=True)
class CollateOptions:
    """The effects of the end-of-document token `eod`.

    Raises `ConfigError` for an effect if the tokenizer has no such token.
    """

    eod: int | None = None
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False

    def __post_init__(self) -> None:
        for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
            if getattr(self, name) and self.eod is None:
                raise ConfigError(
                    f"{name}: the tokenizer has no end-of-document id; leave --"
                    f"{name.replace('_', '-')} out or use another tokenizer"
                )


@dataclass(frozen=True)
class MicrobatchSampler:
    """The share of one data-parallel rank in each global batch."""

    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int

    def __post_init__(self) -> None:
        assert self.micro_batch_size > 0 and 0 <= self.data_parallel_rank < self.data_parallel_size

    def numbers(self, global_batch_size: int) -> list[int]:
        """Return the global numbers of this rank's microbatches, in order."""
        block = self.micro_batch_size * self.data_parallel_size
        assert global_batch_size > 0 and global_batch_size % block == 0, (global_batch_size, block)
        count = global_batch_size // self.micro_batch_size
        return list(range(self.data_parallel_rank, count, self.data_parallel_size))

    def indices(self, consumed_samples: int, global_batch_size: int) -> list[range]:
        """Return the samples of each of this rank's microbatches, in the order of `numbers`."""
        size = self.micro_batch_size
        starts = [consumed_samples + number * size for number in self.numbers(global_batch_size)]
        return [range(start, start + size) for start in starts]


def collate(
    dataset: SampleSource,
    samples: range,
    number: int,
    options: CollateOptions | None = None,
    *,
    partial: bool = False,
) -> Microbatch:
    """Read the samples of one microbatch; `number` becomes its `index`.

    In a `partial` global batch, samples past the end of the data set repeat its last sample, and
    the loss mask, which each microbatch then has, leaves them out.

    As in Megatron, an end-of-document token belongs to the document that it ends. With
    `eod_mask_loss`, positions with that token as input do not count, since the next document does
    not follow from it.
    """
    options = options or CollateOptions()
    last = len(dataset) - 1
    # Pipeline stages exchange tensors of one shape, so padding has rows like other samples.
    places = [min(index, last) for index in samples] if partial else samples
    text = np.stack([dataset[index] for index in places])  # [b, s + 1]
    tokens = np.ascontiguousarray(text[:, :-1])
    ends = tokens == options.eod if options.eod is not None else np.zeros_like(tokens, dtype=bool)
    mask = (~ends).astype(np.float32) if options.eod_mask_loss else None
    if partial:
        exists = np.array([[index <= last] for index in samples], dtype=np.float32)
        mask = exists * (np.ones_like(tokens, dtype=np.float32) if mask is None else mask)
    return Microbatch(
        tokens=tokens,
        labels=np.ascontiguousarray(text[:, 1:]),
        loss_mask=mask,
        position_ids=_positions(ends) if options.reset_position_ids else None,
        document_ids=_documents(ends) if options.reset_attention_mask else None,
        index=number,
    )


def _starts(ends: NDArray[np.bool_]) -> NDArray[np.bool_]:
    starts = np.zeros_like(ends)
    starts[:, 1:] = ends[:, :-1]
    return starts


def _positions(ends: NDArray[np.bool_]) -> NDArray[np.int64]:
    place = np.broadcast_to(np.arange(ends.shape[1], dtype=np.int64), ends.shape)
    return place - np.maximum.accumulate(np.where(_starts(ends), place, 0), axis=1)


def _documents(ends: NDArray[np.bool_]) -> NDArray[np.int64]:
    return np.cumsum(_starts(ends), axis=1, dtype=np.int64)
