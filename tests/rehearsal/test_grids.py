"""Grids of two ranks train on devices as on CPUs, and all ranks issue the same calls over NCCL. A
dropped wait for NCCL, calls out of step and receives posted ahead are noticed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import Ranks
from tests.rehearsal.nccl_log import Call, disagreements
from tests.rehearsal.process import needs_rehearsal
from tests.rehearsal.ranks import call
from tests.rehearsal.test_training import HOST_WAITS, SAMO, loss_bound
from tests.tiers import sampled

pytestmark = [needs_rehearsal, pytest.mark.push]
RADIUS = "--radius-interval 2 --radius-start-iter 0"  # the third step sends what was selected
SCALED = "--fp16 --initial-loss-scale 65536 --accumulate-allreduce-grads-in-fp32"
SEQUENCE = "--sequence-parallel --num-layers 1 --global-batch-size 2"
DATA, TENSORS, STAGES = (1, 1), (2, 1), (1, 2)
CASES = {  # tensor- and pipeline-parallel ranks, flags, what travels over NCCL beside sums
    "dense-fp32": (DATA, "", set()),
    "sharded-fp32": (DATA, "--use-distributed-optimizer", {"reduce-scatter", "all-gather"}),
    "sharded-overlapped-fp32": (
        DATA,
        "--use-distributed-optimizer --overlap-param-gather --ddp-bucket-size 4000",
        {"reduce-scatter", "all-gather"},
    ),
    "radius-fp32": (DATA, f"{RADIUS} --grad-path radius", set()),
    "samo-bf16": (DATA, f"--bf16 --grad-path samo {SAMO}", set()),
    "samo-radius-fp16": (DATA, f"{SCALED} {SAMO} {RADIUS} --grad-path samo+radius", set()),
    "sequence-bf16": (TENSORS, f"--bf16 {SEQUENCE}", {"reduce-scatter", "all-gather"}),
    "stages-fp32": (STAGES, "", {"send", "receive"}),
    "interleaved-fp32": (
        STAGES,
        "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1",
        {"send", "receive"},
    ),
}
ON_PUSH = ("sharded-overlapped-fp32", "sequence-bf16", "interleaved-fp32")
"""Everything that travels over NCCL, at least once."""
STEPS = 3


@pytest.mark.parametrize("name", sampled(CASES, ON_PUSH))
def test_steps_equal_those_on_cpus(name: str, device_ranks: Ranks) -> None:
    grid, flags, kinds = CASES[name]
    calls = check(device_ranks, name, grid, flags)
    assert {each.kind for each in calls} == kinds | {"all-reduce"}
    means = [each.numel for each in calls if each.how == "avg"]
    if "radius" in name:
        assert min(means) < min(means[:3]), "the third step sends less"


def test_messages_travel_over_mpi(mpi_device_ranks: Ranks) -> None:
    flags = "--pipeline-schedule message-driven"
    calls = check(mpi_device_ranks, "mpi-fp32", STAGES, flags)
    assert {each.kind for each in calls} == {"all-reduce"}


def check(ranks: Ranks, name: str, grid: tuple[int, int], flags: str) -> list[Call]:
    """Compare steps on both ranks; returns NCCL's calls of both."""
    tp, pp = grid
    compare = "tests.rehearsal.grids:compare"
    found: list[dict[str, Any]] = call(ranks, compare, flags=flags, tp=tp, pp=pp, steps=STEPS)
    for one in found:
        assert one["wrong"] == []
        assert sorted(one["waits"]) == sorted(HOST_WAITS)
        assert one["late"] == [], "communicators that are made in a step"
        wanted = "cuda" if pp == 1 else "cpu"
        assert one["made_on"] == wanted, "a thread that allocates could deadlock stages"
        assert one["marks"] == ("mpi" in name)
        assert one["losses"] == loss_bound(name, one["wanted"])
        assert one["losses"][0] > 4
    assert disagreements([one["calls"] for one in found]) == []
    return [each for one in found for each in one["calls"]]


@pytest.mark.parametrize("name", ["dense-fp32", "sharded-fp32", "sequence-bf16", "stages-fp32"])
def test_each_wait_that_is_dropped_is_noticed(name: str, device_ranks: Ranks) -> None:
    """One line of the program at a time does not wait for NCCL, in a step of its own."""
    (tp, pp), flags, _ = CASES[name]
    found = call(device_ranks, "tests.rehearsal.grid_mistakes:drop_each", flags=flags, tp=tp, pp=pp)
    assert [one.pop("") for one in found] == [{}, {}], "the program as it is"
    lines = set().union(*found)
    assert lines
    noticed = {line: set().union(*(one[line] for one in found)) for line in lines}
    assert {line: kinds for line, kinds in noticed.items() if not kinds} == {}
    assert set().union(*noticed.values()) <= {"race", "early free"}


def test_receives_that_are_posted_ahead_are_noticed(device_ranks: Ranks) -> None:
    found = call(device_ranks, "tests.rehearsal.grid_mistakes:receives_ahead")
    assert all(set(one) == {"receive ahead"} for one in found)


@pytest.mark.parametrize("function", ["in_another_order", "one_on_the_cpu"])
def test_calls_out_of_step_are_noticed(function: str, device_ranks: Ranks) -> None:
    logs = call(device_ranks, f"tests.rehearsal.grid_mistakes:{function}")
    (line,) = disagreements(logs)
    assert "ranks 0 and 1, call" in line


def test_what_nccl_does_not_carry_is_refused(device_ranks: Ranks) -> None:
    for said in call(device_ranks, "tests.rehearsal.grid_mistakes:refused"):
        for text, word in zip(said, ["alone", "CPU", "contiguous", "int16"], strict=True):
            assert word in text
