"""Dropout streams: random numbers that depend on their position in the run only.

With one running generator a dropout mask depends on all earlier draws, hence on the number of
ranks, the order of microbatches and the resumed step, and recomputation and checkpoints must save
generator states. Here each layer seeds the default generator from a hash of its position.

Tensor-parallel ranks draw the same masks for replicated tensors, and different masks for tensors
sharded by head or along the sequence.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b

import torch

from megatron.tensor_parallel.collectives import UNCUT, TensorParallel, uncompiled

EMBEDDING_STREAM = -1
"""The layer number of the embedding's dropout, before layer 0."""


@dataclass(frozen=True)
class StreamPosition:
    """A forward pass: the iteration, and the microbatch's number in the global batch."""

    iteration: int = 0
    microbatch: int = 0


class DropoutStreams:
    """Streams that seed the default generators from (seed, iteration, microbatch, layer).

    `microbatch` is the number in the global batch, so that masks do not depend on the data-parallel
    rank. The position is the only state, so that checkpoints save none.
    """

    def __init__(self, seed: int, *, device: torch.device, tp: TensorParallel = UNCUT) -> None:
        self.seed = seed
        self.device = device
        self.position = StreamPosition()
        # 0 is the stream that all ranks share; each rank's own stream has another number.
        self.heads_rank = tp.rank + 1 if tp.size > 1 else 0
        self.hidden_rank = self.heads_rank if tp.cuts_sequence else 0

    def at(self, iteration: int, microbatch: int) -> None:
        """Set the position to a forward pass; call this before each forward pass in training."""
        self.position = StreamPosition(iteration, microbatch)

    @uncompiled
    def enter(
        self, layer: int, *, sharded_rank: int = 0, position: StreamPosition | None = None
    ) -> None:
        """Seed the default generators of the CPU and the device for the dropout of `layer`.

        Args:
            sharded_rank: 1 + the tensor-parallel rank if the dropped tensor is sharded, 0 if every
                rank must draw the same.
            position: None for the current position; recomputation passes the position of its first
                pass.
        """
        seed = self.key(layer, sharded_rank=sharded_rank, position=position)
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            index = self.device.index
            if index is None:
                index = torch.cuda.current_device()
            torch.cuda.default_generators[index].manual_seed(seed)

    def key(
        self, layer: int, *, sharded_rank: int = 0, position: StreamPosition | None = None
    ) -> int:
        """Return the 63-bit seed of one stream."""
        place = position or self.position
        packed = struct.pack(
            "<5q", self.seed, place.iteration, place.microbatch, layer, sharded_rank
        )
        return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class LayerStream:
    """The dropout of one layer in one forward pass: `heads` before attention, `hidden` after it.

    The stream can be entered again after others have moved on, and then draws the same masks.
    """

    streams: DropoutStreams
    layer: int
    position: StreamPosition

    def heads(self) -> None:
        """Seed the generators for dropout of this rank's heads, and of later tensors."""
        self._enter(self.streams.heads_rank)

    def hidden(self) -> None:
        """Seed the generators for dropout of hidden states, unless they share the heads' stream."""
        if self.streams.hidden_rank != self.streams.heads_rank:
            self._enter(self.streams.hidden_rank)

    def _enter(self, sharded_rank: int) -> None:
        self.streams.enter(self.layer, sharded_rank=sharded_rank, position=self.position)
