"""A mistake in the ordering of streams, a wrong device and pageable memory are noticed."""

from __future__ import annotations

import pytest

from tests.rehearsal.process import Rehearsal, needs_rehearsal

pytestmark = [needs_rehearsal, pytest.mark.push]


def test_each_wait_that_is_dropped_is_noticed(rehearsal: Rehearsal) -> None:
    """One line of the program at a time does not order streams, or does not keep memory."""
    found = rehearsal.call("tests.rehearsal.mistakes:drop_each")
    assert found.pop("") == {}, "the program as it is"
    assert len(found) >= 8
    dropped = {line.rpartition(": ")[2] for line in found}
    assert dropped == {"wait_event", "wait_stream", "record_stream"}
    assert {line: kinds for line, kinds in found.items() if not kinds} == {}
    for line, kinds in found.items():
        assert ("early free" if "record_stream" in line else "race") in kinds, line


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_a_tensor_on_the_wrong_device_is_noticed(device: str, rehearsal: Rehearsal) -> None:
    assert "device" in rehearsal.call("tests.rehearsal.mistakes:gradient_on", device=device)


def test_pageable_memory_is_noticed(rehearsal: Rehearsal) -> None:
    found = rehearsal.call("tests.rehearsal.mistakes:states_in_pageable_memory")
    assert set(found) == {"pageable copy"}


def test_memory_that_is_freed_as_a_test_ends_is_noticed(rehearsal: Rehearsal) -> None:
    (found,) = rehearsal.call("tests.rehearsal.mistakes:freed_as_a_test_ends")
    assert found.startswith("early free")
