"""Tests of how the logs of NCCL calls have to fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.rehearsal.nccl_log import Call, disagreements

SUM = Call("dp", (0, 1), "all-reduce", "sum", 8, "float32")
SEND = Call("dp", (0, 1), "send", "", 8, "float32", peer=1)
RECEIVE = replace(SEND, kind="receive", peer=0)


def test_logs_that_fit() -> None:
    """Messages may come anywhere in between, since they have their own communicator."""
    assert disagreements([[SUM, SEND, SEND, SUM], [RECEIVE, SUM, SUM, RECEIVE]]) == []


@pytest.mark.parametrize(
    "other",
    [
        [SUM, SUM],
        [],
        [replace(SUM, numel=4)],
        [replace(SUM, dtype="float64")],
        [replace(SUM, how="max")],
        [replace(SUM, kind="broadcast")],
        [SUM, RECEIVE],
        [SUM, replace(SEND, peer=0)],
    ],
)
def test_logs_that_do_not_fit(other: list[Call]) -> None:
    assert len(disagreements([[SUM], other])) == 1


def test_messages_pair_in_their_order() -> None:
    longer = replace(SEND, numel=9), replace(RECEIVE, numel=9)
    assert disagreements([[SEND, longer[0]], [RECEIVE, longer[1]]]) == []
    (line,) = disagreements([[SEND, longer[0]], [longer[1], RECEIVE]])
    assert "rank 0 that sends to rank 1, call 1: 8 float32, 9 float32" in line
