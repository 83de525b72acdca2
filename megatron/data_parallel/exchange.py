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
from megatron.parallel.groups import Group


class TimingEvent(Protocol):
    """The part of `torch.cuda.Event` that times a stream."""

    def record(self) -> None:
        """Mark the present end of the current stream."""
        ...

    def query(self) -> bool:
        """Whether the stream has reached the mark."""
        ...

    def elapsed_time(self, end_event: Self) -> float:
        """Milliseconds from this mark to the other one; both must have been reached."""
        ...


def _cuda_event() -> TimingEvent:
    return torch.cuda.Event(enable_timing=True)


class Waits:
    """Adds up the seconds in which nothing else goes on because a collective is not done.

    gloo blocks the host, so that a clock tells. NCCL blocks the current stream alone: an event on
    either side of the wait tells how long the stream stood still, and is read once the stream is
    past it, so that the host never waits for it.
    """

    def __init__(self, new_event: Callable[[], TimingEvent] = _cuda_event) -> None:
        self._new_event = new_event
        self._seconds = 0.0
        self._unread: deque[tuple[TimingEvent, TimingEvent]] = deque()

    @contextmanager
    def on(self, device: torch.device) -> Generator[None]:
        """Count the time of the wait inside, which is for a tensor of `device`."""
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
        """Return the seconds found since the last call. A wait that the stream is not past yet is
        left for a later call."""
        while self._unread and self._unread[0][1].query():
            before, after = self._unread.popleft()
            self._seconds += before.elapsed_time(after) / 1000
        seconds, self._seconds = self._seconds, 0.0
        return seconds


@dataclass
class Transfer:
    """A collective under way on `values`."""

    values: torch.Tensor
    pending: Sequence[dist.Work | None]
    exchange: Exchange

    def wait(self) -> torch.Tensor:
        """Return the result. On a CPU the host blocks, on a GPU the current stream waits; the time
        is counted. Waiting again returns at once."""
        pending, self.pending = self.pending, ()
        for work in pending:
            if work is not None:
                with self.exchange.waits.on(self.values.device):
                    work.wait()
        return self.values


class Exchange:
    """The data-parallel ranks as a reducer sees them.

    A reducer chooses the values to exchange; the exchange alone knows the groups and collectives
    that carry the values. A reducer may exchange nothing: each rank then applies its own gradient.
    Every method is collective over `group`, in the same order on all ranks. Nothing blocks before
    `Transfer.wait`. Bytes follow the ring model: an all-reduce of b bytes over n ranks sends
    2 (n - 1) / n b, an all-gather n - 1 times the rank's own bytes.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.waits = Waits()
        self._bytes_sent = 0

    @property
    def ranks(self) -> int:
        """Number of data-parallel ranks."""
        return self._group.size

    @property
    def rank(self) -> int:
        """The place of this rank among them."""
        return self._group.rank

    @property
    def world_ranks(self) -> Sequence[int]:
        """The rank in the world of each data-parallel rank, for messages."""
        return self._group.ranks

    def mean(self, values: torch.Tensor) -> Transfer:
        """Replace a contiguous tensor by its mean over the ranks, in place. 16-bit values are
        divided before they are summed, since a 16-bit sum can overflow where its mean does not."""
        if self.ranks == 1:
            return self._started(values, [], 0)
        if values.dtype == torch.float32:
            op = dist.ReduceOp.AVG
        else:
            values.div_(self.ranks)
            op = dist.ReduceOp.SUM
        return self._reduced(values, op)

    def sum(self, values: torch.Tensor, *, about: str = "") -> Transfer:
        """Replace a contiguous tensor by its sum over the ranks, in place. `about` names the
        collective in reports of ranks that are out of step."""
        return self._reduced(values, dist.ReduceOp.SUM, about=about)

    def gather(self, mine: torch.Tensor) -> Transfer:
        """Bring every rank's 1-D tensor to every rank: [ranks, n], in rank order. The caller keeps
        `mine` unchanged until the result was waited for."""
        if self.ranks == 1:
            return self._started(mine.unsqueeze(0), [], 0)
        received = mine.new_empty(self.ranks, mine.numel())
        pending = self._group.all_gather(received.view(-1), mine, async_op=True)
        return self._started(received, [pending], (self.ranks - 1) * mine.nbytes)

    def mean_of_part(
        self, own: torch.Tensor, whole: torch.Tensor, *, used: torch.Tensor, divides: bool
    ) -> Transfer:
        """Reduce `whole` so that each rank has its part of the mean, in place.

        Args:
            own: This rank's part, a view of `whole`; all ranks' parts are equally long.
            whole: The values, 1-D, as long as all parts together.
            used: The values of `whole` that are not padding, a view of it.
            divides: False for the sum in place of the mean.
        """
        op = dist.ReduceOp.SUM
        if divides and whole.dtype == torch.float32:
            op = dist.ReduceOp.AVG
        elif divides:
            used.div_(self.ranks)
        pending = self._group.reduce_scatter(own, whole, op, async_op=True)
        return self._started(own, [pending], (self.ranks - 1) * own.nbytes)

    def gather_in_place(self, parts: torch.Tensor) -> Transfer:
        """Let every rank have all parts of a 1-D tensor, each of which one rank has set, in rank
        order and equally long."""
        by_rank = parts.chunk(self.ranks)
        own = by_rank[self.rank]
        if parts.is_cuda:
            pending = [self._group.all_gather(parts, own, async_op=True)]
        else:
            # gloo's all-gather copies what comes and goes and takes four times as long (64 MB, 2
            # and 4 ranks: 227 against 56 ms, 343 against 78 ms); on average the ranks send the
            # same.
            pending = [
                self._group.broadcast(part, rank, async_op=True)
                for rank, part in enumerate(by_rank)
            ]
        return self._started(parts, pending, (self.ranks - 1) * own.nbytes)

    def all_gather_str(self, text: str) -> list[str]:
        """Bring a short text of every rank to every rank, in rank order. The host waits; the bytes
        are not counted, since they are few and of the control plane."""
        return self._group.all_gather_str(text)

    def take_counters(self) -> tuple[int, float]:
        """Return bytes sent and seconds waited since the last call, and reset them."""
        sent, self._bytes_sent = self._bytes_sent, 0
        return sent, self.waits.take()

    def _reduced(
        self, values: torch.Tensor, op: dist.ReduceOp.RedOpType, *, about: str = ""
    ) -> Transfer:
        pending = self._group.all_reduce(values, op, async_op=True, about=about)
        return self._started(values, [pending], ring_all_reduce_bytes(values.nbytes, self.ranks))

    def _started(
        self, values: torch.Tensor, pending: Sequence[dist.Work | None], nbytes: int
    ) -> Transfer:
        self._bytes_sent += nbytes
        return Transfer(values, pending, self)
