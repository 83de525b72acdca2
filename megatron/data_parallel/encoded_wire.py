"""A wire that encodes values in 16, 8 or 4 bits, and rounds a mean twice for any number of ranks.

    all-to-all    each rank sends chunk r of its values, encoded, to rank r
    mean          rank r decodes what came and adds it in fp32 in rank order, its own values
                  unrounded; it divides once and encodes the mean of its chunk
    all-gather    every rank receives the encoded mean of every chunk, and decodes it

A ring would round at each of its hops, and its ranks would round differently. A rank sends
2 (n - 1) / n of the encoded bytes, as a ring all-reduce does of plain ones. If optimizer states are
sharded (ZeRO-1), chunks are the shards, rank r keeps its mean in fp32, and nothing is gathered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch

from megatron.data_parallel.codecs import CODECS
from megatron.data_parallel.exchange import Exchange
from megatron.data_parallel.wire import Wire
from megatron.data_parallel.wire_format import chunk_length, format_of, padded_count, part_bytes
from megatron.parallel.groups import Group, ProcessGroups
from megatron.parallel.traffic import Waitable

if TYPE_CHECKING:
    from megatron.config import Config


def open_exchange(config: Config, groups: ProcessGroups) -> Exchange:
    """Open the exchange over data-parallel ranks with the wire that `--grad-wire` names.

    Collective over the world.
    """
    name = config.gradient.grad_wire
    if name is None or groups.dims.dp == 1:
        return Exchange(groups.dp)
    return Exchange(groups.dp, EncodedWire(name, groups.second_dp))


class EncodedWire(Wire):
    """A wire that encodes matrices in one format, and other parameters in at least 16 bits.

    On a CPU the mean and the all-gather run on one thread, since no hook may wait for the
    all-to-all. The thread issues all-gathers in the order of the all-to-alls, over connections of
    its own, so that their order is equal on all ranks. On a GPU everything is enqueued at once on
    one stream beside the computation.

    Args:
        name: The format of matrices, a value of `--grad-wire`.
        returns: A group of the same ranks with connections of its own, for the means on a CPU.
    """

    is_exact = False

    def __init__(self, name: str, returns: Group) -> None:
        self._name, self._returns = name, returns
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="wire")

    def mean(
        self,
        group: Group,
        values: torch.Tensor,
        *,
        matrix: bool = True,
        lost: torch.Tensor | None = None,
    ) -> tuple[Sequence[Waitable | None], int]:
        form = format_of(self._name, matrix=matrix)
        chunk = chunk_length(form, values.numel(), group.size)
        mean = _EncodedMean(form, group, values, lost, chunk)
        returns = group if values.is_cuda else self._returns
        done = self._started(mean, partial(mean.gather, returns=returns))
        return [done], 2 * mean.bytes_scattered

    def mean_of_part(
        self,
        group: Group,
        own: torch.Tensor,
        whole: torch.Tensor,
        *,
        used: torch.Tensor,
        matrix: bool = True,
        lost: torch.Tensor | None = None,
    ) -> tuple[Sequence[Waitable | None], int]:
        form = format_of(self._name, matrix=matrix)
        mean = _EncodedMean(form, group, used, lost, own.numel())
        return [self._started(mean, mean.keep)], mean.bytes_scattered

    def _started(self, mean: _EncodedMean, end: Callable[[Waitable | None], None]) -> Waitable:
        """Send the chunks, and start to call `end` once they arrive."""
        if not mean.is_cuda:
            return _Done(self._thread.submit(end, mean.scatter()))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            end(mean.scatter())
            reached = torch.cuda.Event()
            reached.record()
        return _Reached(reached, mean)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()


class _EncodedMean:
    """One mean: its encoded chunks of `chunk` values, fewer where the last ones lack some.

    Means of all buckets may be in progress, so the object holds encoded chunks only. Each call
    allocates the chunks that it needs in fp32: `scatter` one, `keep` and `gather` two.
    """

    def __init__(
        self,
        form: str,
        group: Group,
        values: torch.Tensor,
        lost: torch.Tensor | None,
        chunk: int,
    ) -> None:
        self._codec = CODECS[form]
        self._group, self._values, self._lost, self._chunk_length = group, values, lost, chunk
        self._row_bytes = part_bytes(form, chunk)
        self._padded_length = padded_count(form, chunk)
        self._mine = self._new_rows()

    @property
    def bytes_scattered(self) -> int:
        """Bytes that this rank sends to the owners of chunks."""
        return (self._group.size - 1) * self._row_bytes

    @property
    def is_cuda(self) -> bool:
        """Whether the values are on a GPU."""
        return self._values.is_cuda

    def scatter(self) -> Waitable | None:
        """Encode the chunks of the other ranks, and start to send each to its rank."""
        scratch = self._new_chunk()
        for rank in range(self._group.size):
            if rank == self._group.rank:
                self._mine[rank].zero_()
                continue
            self._codec.encode(self._values_of(rank, scratch), self._mine[rank])
            if self._lost is not None:
                chunk = self._chunk(rank)
                self._codec.decode(self._mine[rank], scratch)
                torch.sub(chunk, scratch[: chunk.numel()], out=self._of(self._lost, rank))
        self._received = self._new_rows()
        return self._group.all_to_all(self._received, self._mine, async_op=True)

    def keep(self, arrives: Waitable | None) -> None:
        """Wait for the chunks, and replace this rank's chunk by its mean, which is not rounded."""
        mean, group = self._mean(arrives, self._new_chunk()), self._group
        own = self._chunk(group.rank)
        own.copy_(mean[: own.numel()])
        if self._lost is not None:
            self._of(self._lost, group.rank).zero_()

    def gather(self, arrives: Waitable | None, returns: Group) -> None:
        """Average this rank's chunk, and gather the means of all chunks over `returns`.

        Waits for both collectives.
        """
        group, codec, scratch = self._group, self._codec, self._new_chunk()
        mean = self._mean(arrives, scratch)
        codec.encode(mean, self._received[group.rank])
        if self._lost is not None:
            lost = self._of(self._lost, group.rank)
            codec.decode(self._received[group.rank], scratch)
            mean.sub_(scratch).mul_(group.size)
            lost.copy_(mean[: lost.numel()])
        returns.all_gather(self._received, self._received[group.rank])
        for rank in range(group.size):
            chunk = self._chunk(rank)
            codec.decode(self._received[rank], scratch)
            chunk.copy_(scratch[: chunk.numel()])

    def _mean(self, arrives: Waitable | None, scratch: torch.Tensor) -> torch.Tensor:
        """Wait for the chunks; return the mean of this rank's chunk: fp32, padded with zeros."""
        if arrives is not None:
            arrives.wait()
        group, mean = self._group, self._new_chunk().zero_()
        for rank in range(group.size):
            if rank == group.rank:
                own = self._chunk(rank)
                mean[: own.numel()] += own
            else:
                self._codec.decode(self._received[rank], scratch)
                mean += scratch
        return mean.div_(group.size)

    def _chunk(self, rank: int) -> torch.Tensor:
        return self._of(self._values, rank)

    def _of(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        return flat[rank * self._chunk_length : (rank + 1) * self._chunk_length]

    def _values_of(self, rank: int, scratch: torch.Tensor) -> torch.Tensor:
        """Return a chunk in fp32, with zeros up to whole blocks: the values, or else `scratch`."""
        chunk = self._chunk(rank)
        if chunk.dtype == torch.float32 and chunk.numel() == scratch.numel():
            return chunk
        scratch[: chunk.numel()] = chunk
        scratch[chunk.numel() :] = 0.0
        return scratch

    def _new_chunk(self) -> torch.Tensor:
        """Return uninitialized memory for a chunk, padded to whole blocks: fp32."""
        return self._values.new_empty(self._padded_length, dtype=torch.float32)

    def _new_rows(self) -> torch.Tensor:
        rows = (self._group.size, self._row_bytes)
        return torch.empty(rows, dtype=torch.uint8, device=self._values.device)


@dataclasses.dataclass
class _Done:
    """The end of work on the wire's thread."""

    result: Future[None]

    def wait(self) -> None:
        self.result.result()


@dataclasses.dataclass
class _Reached:
    """The end of work on the wire's stream; `mean` keeps its memory until then."""

    end: torch.cuda.Event
    mean: _EncodedMean

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.end)
