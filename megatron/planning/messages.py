"""Bytes of messages between pipeline stages on a rank: receives that are posted ahead, and sends
that are not known to be done.

1F1B, `GroupTransport`: `POSTED` receives of either kind; each outgoing edge keeps what it sent
last, on a CPU, whose gloo does not tell that a send is done, all that was not answered.

Message-driven, `MPITransport`: `POSTED` receives of each kind; of sends those that nobody posted a
receive for. All microbatches on their way are among the `limit` in flight and `POSTED` of them have
a receive, so that no more than the rest wait: those in front of a stage that is slower than others,
as the last one with the output layer mostly is. On a GPU whose MPI does not know CUDA they wait in
pinned host memory, of which torch takes powers of two, and so do receives; on the device are copies
of what has landed, and of what is about to leave.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pipeline.schedule import POSTED, Kind, Operation, Place, warm_up
from megatron.planning.layout import Grid


@dataclass(frozen=True)
class MessageBytes:
    """On the device, and in pinned memory of the host."""

    device: int = 0
    pinned: int = 0


@dataclass(frozen=True)
class MessageCounts:
    """Messages at a time: receives that are `posted`, sends that are `kept` until they are done."""

    posted: int
    kept: int


def message_counts(grid: Grid, stage: int, microbatches: int, in_flight: int) -> MessageCounts:
    """The most of a rank of this stage in a step of so many microbatches; `in_flight`: chunk inputs
    that it holds at most."""
    parallel, stages, chunks = grid.config.parallel, grid.dims.pp, len(grid.split[stage])
    place = Place(stage=stage, stages=stages, chunks=chunks)
    passes = [Operation(kind, 0, chunk) for chunk in range(chunks) for kind in Kind]
    comes = [each.kind for p in passes if (each := place.needs(p)) is not None]
    goes = [each.kind for p in passes if (each := place.makes(p)) is not None]
    if parallel.pipeline_schedule == "message-driven":
        limit = min(parallel.pipeline_limit or stages, microbatches)
        posted = min(POSTED, microbatches) * len(comes)
        return MessageCounts(posted, max(limit - POSTED, len(goes)))
    posted = min(POSTED, microbatches * len(comes))
    if grid.device == "cuda":
        return MessageCounts(posted, len(set(goes)))
    most = max(warm_up(0, stages, chunks, microbatches) + 1, stages)
    forwards, backwards = (microbatches * goes.count(kind) for kind in Kind)
    return MessageCounts(posted, min(forwards, in_flight) + min(backwards, most))


def message_bytes(
    grid: Grid, stage: int, size: int, *, microbatches: int, in_flight: int
) -> MessageBytes:
    """Of messages of so many bytes."""
    if grid.dims.pp == 1:
        return MessageBytes()
    counts = message_counts(grid, stage, microbatches, in_flight)
    driven = grid.config.parallel.pipeline_schedule == "message-driven"
    if not driven or grid.device == "cpu" or grid.cuda_aware_mpi:
        return MessageBytes(size * (counts.posted + counts.kept))
    leaving = 1 + (0 < stage < grid.dims.pp - 1)
    return MessageBytes(
        device=size * (counts.posted + leaving),
        pinned=_power_of_two(size) * (counts.posted + counts.kept),
    )


def _power_of_two(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length()
