"""Messages of a replica's largest changes of weights, and error feedback for the other changes.

Sarfi et al. 2025, "Communication Efficient LLM Pre-training with SparseLoCo" (arXiv 2508.15706).

    unsent  <- decay x unsent + (anchor - weights)
    message  = positions and encoded values of the k largest entries of each chunk of unsent
    unsent  <- unsent - decoded message

    message of a bucket:   [ K values, those of each parameter padded | K positions in chunks ]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from megatron.data_parallel.bucket import GradBucket, Slice
from megatron.data_parallel.codecs import CODECS, PIECE
from megatron.data_parallel.reducer import PerEntryState
from megatron.data_parallel.wire_format import (
    POSITION_BYTES,
    TopKCompression,
    encoded_bytes,
    padded_count,
)


class TopKFeedback:
    """The changes of a bucket's weights that this replica has not sent yet: fp32, with gaps of 0.

    They include the rounding of values that were sent. The mean over replicas is the change that is
    still due, so a run with another number of replicas continues from the mean.

    Args:
        bucket: The bucket.
        slices: The entries of each parameter on this rank, without padding.
        compression: The entries that are sent, and their format.

    Attributes:
        unsent: The changes, as long as the bucket.
    """

    is_pending = True
    """True: changes are always compressed, even where nothing was kept."""

    def __init__(
        self, bucket: GradBucket, slices: Mapping[str, Slice], compression: TopKCompression
    ) -> None:
        self.unsent = torch.zeros_like(bucket.grad, dtype=torch.float32)
        self._bucket, self._slices, self._compression = bucket, slices, compression
        self._codec = CODECS[compression.values]
        lengths = [where.numel for where in bucket.slices.values()]
        self._count = compression.count(lengths)
        self._bytes = compression.message_bytes(lengths)

    def send(self, difference: torch.Tensor) -> torch.Tensor:
        """Add the change of a round, and take out the largest entries as a message: uint8, 1-D."""
        self.unsent.mul_(self._compression.decay).add_(difference)
        message = torch.zeros(self._bytes, dtype=torch.uint8, device=difference.device)
        encoded, positions = self._parts(message)
        values = self.unsent.new_zeros(self._count)
        for rows, where in self._chunks(self.unsent):
            k = min(self._compression.k, rows.shape[1])
            found = rows.abs().topk(k, dim=1, sorted=False).indices
            positions[where] = found.view(-1)
            values[where] = rows.gather(1, found).view(-1)
        self._codec.encode(values, encoded)
        self._codec.decode(encoded, values)
        self._add(positions, values.neg_(), self.unsent)
        return message

    def mean(self, received: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the mean of the messages of all replicas, [replicas, bytes], to `out`.

        Messages are added in the order of replicas, so that all replicas have equal bits.

        Returns:
            `out`: fp32, as long as the bucket.
        """
        out.zero_()
        for message in received:
            encoded, positions = self._parts(message)
            values = self.unsent.new_zeros(self._count)
            self._codec.decode(encoded, values)
            self._add(positions, values, out)
        return out.div_(len(received))

    def states(self) -> Iterator[tuple[str, PerEntryState]]:
        """Yield the unsent changes by parameter."""
        for name, where in self._slices.items():
            yield name, PerEntryState(param=name, values=partial(where.of, self.unsent))

    def load(self, own: Mapping[str, torch.Tensor]) -> None:
        """Load what `states` yielded."""
        self.unsent.zero_()
        for name, where in self._slices.items():
            where.of(self.unsent).copy_(own[name])

    def _parts(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of a message: its encoded values, and its positions (int16 [K])."""
        head = encoded_bytes(self._compression.values, self._count)
        tail = message[head : head + POSITION_BYTES * self._count]
        return message[:head], tail.view(torch.int16)

    def _chunks(self, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, slice]]:
        """Yield chunks as rows of views, each with the slice of their entries in a message."""
        chunk, k, start = self._compression.chunk, self._compression.k, 0
        for where in self._bucket.slices.values():
            param, at = where.of(flat), start
            whole = param.numel() // chunk * chunk
            pieces = param[:whole].view(-1, chunk).split(max(PIECE // chunk, 1))
            for rows in (*pieces, param[whole:].unsqueeze(0)):
                count = len(rows) * min(k, rows.shape[1])
                if count:
                    yield rows, slice(at, at + count)
                at += count
            start += padded_count(self._compression.values, at - start)

    def _add(self, positions: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        """Add the values of a message to a tensor as long as the bucket, in place."""
        for rows, where in self._chunks(out):
            found = positions[where].view(len(rows), -1).long()
            rows.scatter_add_(1, found, values[where].view(found.shape))
