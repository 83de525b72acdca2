"""Collectives over data-parallel ranks, as a reducer sees them, with the seconds spent waiting."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, Self

import torch
import torch.distributed as dist

from megatron.data_parallel.bucket_plan import ring_all_reduce_bytes
from megatron.data_parallel.wire import Wire
from megatron.parallel.groups import Group
from megatron.parallel.traffic import Waitable


class TimingEvent(Protocol):
    """The part of `torch.cuda.Event` that times a stream."""

    def record(self) -> None:
        """Record the event at the current end of the current stream."""
        ...

    def query(self) -> bool:
        """Return whether the stream has reached the event."""
        ...

    def elapsed_time(self, end_event: Self) -> float:
        """Return the milliseconds between two events, which the stream must have reached."""
        ...


def _cuda_event() -> TimingEvent:
    return torch.cuda.Event(enable_timing=True)


class Waits:
    """The total time for which collectives block computation.

    gloo blocks the host, so a clock measures the time. NCCL blocks only the current stream: events
    before and after the wait measure the time and are read later, so that the host never waits.
    """

    def __init__(self, new_event: Callable[[], TimingEvent] = _cuda_event) -> None:
        self._new_event = new_event
        self._seconds = 0.0
        self._unread: deque[tuple[TimingEvent, TimingEvent]] = deque()

    @contextmanager
    def on(self, device: torch.device) -> Generator[None]:
        """Measure the wait inside the context, which is for a tensor on `device`."""
        if device.type != "cuda":
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
            return
        before, after = self._new_event(), self._new_event()
        before.record()
        yield
        after.record()
        self._unread.append((before, after))

    def take(self) -> float:
        """Return the seconds of the waits that ended since the last call."""
        while self._unread and self._unread[0][1].query():
            before, after = self._unread.popleft()
            self._seconds += before.elapsed_time(after) / 1000
        seconds, self._seconds = self._seconds, 0.0
        return seconds


@dataclass
class Transfer:
    """A collective in progress on `values`."""

    values: torch.Tensor
    pending: Sequence[Waitable | None]
    exchange: Exchange

    def wait(self) -> torch.Tensor:
        """Return the result after blocking the host (CPU) or the current stream (GPU).

        The blocked time is measured. Repeated calls return at once.
        """
        pending, self.pending = self.pending, ()
        for work in pending:
            if work is not None:
                with self.exchange.waits.on(self.values.device):
                    work.wait()
        return self.values

    def arrive(self) -> None:
        """Block as `wait` does without measuring the time, on a thread or stream of its own."""
        pending, self.pending = self.pending, ()
        for work in pending:
            if work is not None:
                work.wait()


class Exchange:
    """The collectives over one group of data-parallel ranks, as a reducer sees them.

    A reducer chooses the values to exchange; only the exchange knows the group, the collectives and
    the `wire` that encodes means (None: values travel as they are). A reducer may exchange nothing:
    each rank then applies its own gradient. A reducer that works on shards within a node has two
    exchanges, one for each group:

        inner.mean_of_part(own, whole, ...)     this rank's shard of the node's mean
        outer.mean(own)                         its mean over the nodes
        inner.gather_in_place(whole)            all shards on every rank of the node

    Every method is collective over the exchange's group, in the same order on all its ranks.
    Nothing blocks before `Transfer.wait`. Bytes follow the ring model: an all-reduce of b bytes
    over n ranks sends 2 (n - 1) / n b, an all-gather n - 1 times the rank's own bytes.
    """

    def __init__(self, group: Group, wire: Wire | None = None) -> None:
        self._group = group
        self._wire = wire or Wire()
        self.waits = Waits()
        self._bytes_sent = 0

    @property
    def ranks(self) -> int:
        """Number of data-parallel ranks."""
        return self._group.size

    @property
    def rank(self) -> int:
        """Index of this rank in the data-parallel group."""
        return self._group.rank

    @property
    def is_exact(self) -> bool:
        """True if `mean` rounds nothing but its additions."""
        return self.ranks == 1 or self._wire.is_exact

    @property
    def world_ranks(self) -> Sequence[int]:
        """Global rank of each data-parallel rank, for messages."""
        return self._group.ranks

    def mean(
        self, values: torch.Tensor, *, matrix: bool = True, lost: torch.Tensor | None = None
    ) -> Transfer:
        """Average a contiguous tensor over the ranks, in place, through the wire.

        `matrix` and `lost` are those of `Wire.mean`.
        """
        if self.ranks == 1:
            return self._started(values, [], 0)
        sent = self._wire.mean(self._group, values, matrix=matrix, lost=lost)
        return self._started(values, *sent)

    def sum(self, values: torch.Tensor, *, about: str = "") -> Transfer:
        """Sum a contiguous tensor over the ranks, in place.

        `about` names the collective in reports of desynchronised ranks.
        """
        pending = self._group.all_reduce(values, dist.ReduceOp.SUM, async_op=True, about=about)
        return self._started(values, [pending], ring_all_reduce_bytes(values.nbytes, self.ranks))

    def gather(self, mine: torch.Tensor) -> Transfer:
        """All-gather a 1-D tensor into a tensor [ranks, n], in rank order.

        The caller must not modify `mine` before the result was waited for.
        """
        if self.ranks == 1:
            return self._started(mine.unsqueeze(0), [], 0)
        received = mine.new_empty(self.ranks, mine.numel())
        pending = self._group.all_gather(received.view(-1), mine, async_op=True)
        return self._started(received, [pending], (self.ranks - 1) * mine.nbytes)

    def mean_of_part(
        self,
        own: torch.Tensor,
        whole: torch.Tensor,
        *,
        used: torch.Tensor,
        divides: bool = True,
        matrix: bool = True,
        lost: torch.Tensor | None = None,
    ) -> Transfer:
        """Reduce-scatter `whole` in place, so that each rank has its part of the mean.

        Args:
            own: This rank's part, a view of `whole`; the parts of all ranks have equal length.
            whole: 1-D tensor, as long as all parts together.
            used: View of the values of `whole` that are not padding.
            divides: If False, sum instead of average; a wire encodes means only.
            matrix: As for `Wire.mean`.
            lost: As for `Wire.mean`, as long as `used`.
        """
        if divides:
            sent = self._wire.mean_of_part(
                self._group, own, whole, used=used, matrix=matrix, lost=lost
            )
            return self._started(own, *sent)
        assert self.is_exact, "sums are not encoded"
        pending = self._group.reduce_scatter(own, whole, dist.ReduceOp.SUM, async_op=True)
        return self._started(own, [pending], (self.ranks - 1) * own.nbytes)

    def gather_in_place(self, parts: torch.Tensor) -> Transfer:
        """All-gather equal parts of a 1-D tensor in place; each rank has set its own part."""
        mine = parts.chunk(self.ranks)[self.rank]
        pending = self._group.all_gather(parts, mine, async_op=True)
        return self._started(parts, [pending], (self.ranks - 1) * mine.nbytes)

    def all_gather_str(self, text: str) -> list[str]:
        """All-gather a short text, in rank order; blocks the host.

        The bytes are not counted: they are few and belong to the control plane.
        """
        return self._group.all_gather_str(text)

    def take_counters(self) -> tuple[int, float]:
        """Return the bytes sent and the seconds waited since the last call, and reset both."""
        sent, self._bytes_sent = self._bytes_sent, 0
        return sent, self.waits.take()

    def _started(
        self, values: torch.Tensor, pending: Sequence[Waitable | None], nbytes: int
    ) -> Transfer:
        self._bytes_sent += nbytes
        return Transfer(values, pending, self)
