"""Tests that the pipeline does not deadlock on devices whose work queues block.

CUDA's queues block with NCCL. gloo's receives block nothing, so a pipeline that works over gloo may
still deadlock on a GPU; here the runner, the schedules and the transport issue their work to
devices that block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product
from random import Random
from typing import Any

import pytest
import torch

from megatron.pipeline.schedule import POSTED, Kind, Message, StagePosition
from megatron.pipeline.transport import GroupTransport
from tests.pipeline.queues import Entry, Meeting, QueuedLaunch, Recorder, edges, play, record

PLAIN = [(2, 1, 1), (2, 1, 4), (3, 1, 5), (4, 1, 2), (4, 1, 8), (8, 1, 16)]
INTERLEAVED = [(2, 2, 4), (2, 3, 4), (4, 2, 8), (4, 3, 4), (8, 2, 8)]
"""Stages, chunks, microbatches."""
CONNECTIONS = (1, 2, 8, 32)


class Ahead(GroupTransport):
    """A transport that posts receives ahead on any device."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._ahead = POSTED


class LateTransport(GroupTransport):
    """A transport that allocates the memory of a receive when the receive is posted."""

    def _prepare(self) -> None:
        pass


@cache
def traces(
    shape: tuple[int, int, int], transport: type[GroupTransport] = GroupTransport
) -> list[list[Entry]]:
    stages, chunks, microbatches = shape
    places = [StagePosition(stage=rank, stages=stages, chunks=chunks) for rank in range(stages)]
    return [record(place, microbatches, transport=transport) for place in places]


def with_waits(ranks: Sequence[Sequence[Entry]], share: float, seed: int) -> list[list[Entry]]:
    """Let the host wait for the device at random launches and allocations."""
    drawn = Random(seed)
    return [
        [
            entry._replace(waits=drawn.random() < share)
            if isinstance(entry, QueuedLaunch)
            else entry
            for entry in entries
        ]
        for entries in ranks
    ]


@pytest.mark.parametrize("shape", PLAIN + INTERLEAVED, ids=str)
def test_every_shape_gets_through(shape: tuple[int, int, int]) -> None:
    for connections in CONNECTIONS:
        assert not play(traces(shape), connections=connections, lazy=False)


@pytest.mark.parametrize("shape", PLAIN, ids=str)
def test_1f1b_gets_through_however_kernels_are_loaded(shape: tuple[int, int, int]) -> None:
    for connections in CONNECTIONS:
        assert not play(traces(shape), connections=connections, lazy=True)


def test_interleaved_stages_would_stand_still_where_kernels_are_loaded_late() -> None:
    """A run with CUDA_MODULE_LOADING=LAZY is refused for this reason: see `megatron.launch`."""
    stuck = [play(traces(shape), connections=32, lazy=True) for shape in INTERLEAVED]
    assert any("'add of chunk" in line for lines in stuck for line in lines)


@pytest.mark.parametrize("shape", PLAIN + INTERLEAVED, ids=str)
def test_streams_may_share_queues_in_any_way(shape: tuple[int, int, int]) -> None:
    for connections, seed in product((2, 4), range(3)):
        assert not play(traces(shape), connections=connections, lazy=False, seed=seed)


@pytest.mark.parametrize("shape", PLAIN, ids=str)
def test_1f1b_gets_through_wherever_a_rank_waits_for_its_device(
    shape: tuple[int, int, int],
) -> None:
    """A host waits for a kernel that is loaded late, or an allocation that has to free memory."""
    for share, seed in product((0.1, 0.5, 1.0), range(5)):
        late = with_waits(traces(shape), share, seed)
        assert not play(late, connections=8, lazy=True)


def test_memory_that_is_taken_after_a_send_would_stand_still() -> None:
    late = with_waits(traces((2, 1, 4), LateTransport), 1.0, 0)
    stuck = play(late, connections=8, lazy=False)
    assert stuck and all("'allocation'" in line for line in stuck)


@pytest.mark.parametrize("shape", [s for s in PLAIN + INTERLEAVED if s[2] > 1], ids=str)
def test_receives_ahead_would_stand_still(shape: tuple[int, int, int]) -> None:
    assert play(traces(shape, Ahead), connections=1, lazy=False)
    late = with_waits(traces(shape, Ahead), 0.5, 1)
    stuck = play(late, connections=8, lazy=True)
    assert any("host at QueuedLaunch" in line for line in stuck)


@pytest.mark.parametrize(("device", "ahead"), [("cpu", POSTED), ("meta", 0)])
def test_receives_are_posted_ahead_on_a_cpu_alone(device: str, ahead: int) -> None:
    recorder, messages = Recorder(), [Message(Kind.FORWARD, i, 0) for i in range(4)]
    transport = GroupTransport(
        edges(recorder, StagePosition(stage=1, stages=2)),
        shape=(1,),
        dtype=torch.float32,
        device=torch.device(device),
    )

    def posted() -> int:
        return sum(isinstance(entry, Meeting) for entry in recorder.entries)

    transport.expect(messages, unanswered=2)
    assert posted() == ahead
    for number, message in enumerate(messages, start=1):
        assert transport.receive(message).device == torch.device(device)
        assert posted() == min(number + ahead, len(messages))


def test_a_rank_that_never_sends_is_told() -> None:
    first, second = traces((2, 1, 1))
    silent = [entry for entry in first if not isinstance(entry, Meeting)]
    stuck = play([silent, second], connections=8, lazy=False)
    assert any(line.startswith("rank 1") and "activations 0>1" in line for line in stuck)
