"""Dropout streams: random numbers as a function of where in the run they are drawn.

The stock way keeps one generator that runs on, so a dropout mask depends on everything drawn
before it: on the number of ranks, on the order of microbatches, on what was resumed. Then
recomputation needs a stash of generator states and a checkpoint must save them. Here each layer
seeds the default generator from a hash of its place, so nothing is stashed and nothing is saved.

What tensor-parallel ranks hold alike they must drop alike; where each holds a part, of the heads or
of the sequence, each draws for itself.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b

import torch

from megatron.tensor_parallel.collectives import UNCUT, TensorParallel, uncompiled

EMBEDDING_STREAM = -1
"""The place of the embedding's dropout, before layer 0."""


@dataclass(frozen=True)
class StreamPosition:
    """The forward pass of a dropout stream: iteration, and microbatch of the global batch."""

    iteration: int = 0
    microbatch: int = 0


class DropoutStreams:
    """Seeds the default generators from (seed, iteration, microbatch, layer).

    `microbatch` is the number inside the global batch, so a mask does not depend on which
    data-parallel rank draws it. There is no state beyond the position: nothing to save.
    """

    def __init__(self, seed: int, *, device: torch.device, tp: TensorParallel = UNCUT) -> None:
        self.seed = seed
        self.device = device
        self.position = StreamPosition()
        # 0 is what all ranks draw alike, also with one rank: no rank's own stream starts like it.
        self.heads_rank = tp.rank + 1 if tp.size > 1 else 0
        self.hidden_rank = self.heads_rank if tp.cuts_sequence else 0

    def at(self, iteration: int, microbatch: int) -> None:
        """Move to a forward pass; call before each one in training."""
        self.position = StreamPosition(iteration, microbatch)

    @uncompiled
    def enter(
        self, layer: int, *, sharded_rank: int = 0, position: StreamPosition | None = None
    ) -> None:
        """Seed the CPU's default generator, and the device's, for the dropout of `layer`.

        `sharded_rank`: 1 + the tensor-parallel rank where the tensor dropped from is sharded, 0
        where every rank must draw the same. `position`: where to draw if not at the current
        position; recomputation passes the one its first pass saw, as others may have run in
        between.
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
        """The 63-bit seed of one stream."""
        place = position or self.position
        packed = struct.pack(
            "<5q", self.seed, place.iteration, place.microbatch, layer, sharded_rank
        )
        return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class LayerStream:
    """The dropout of one layer in one forward pass: `heads` before its attention, `hidden` after.

    May be entered again once the streams have moved on, to draw the same again.
    """

    streams: DropoutStreams
    layer: int
    position: StreamPosition

    def heads(self) -> None:
        """Seed for the attention weights of the heads that are here, and what follows them."""
        self._enter(self.streams.heads_rank)

    def hidden(self) -> None:
        """Seed for hidden states, where they are not drawn for like heads."""
        if self.streams.hidden_rank != self.streams.heads_rank:
            self._enter(self.streams.hidden_rank)

    def _enter(self, sharded_rank: int) -> None:
        self.streams.enter(self.layer, sharded_rank=sharded_rank, position=self.position)
