"""Rows of the benchmark of message-driven pipelines, with theoretical values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from megatron.pipeline.schedule import Kind, Operation
from tools.bench.common.netlab import NO_LIMIT, Network
from tools.bench.message_driven.uneven_stage import (
    CONTENDERS,
    ONLY_ON_PAPER,
    REFERENCE,
    UnevenContender,
    factor_of,
)
from tools.planner.timeline import Factor

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class EmulationRow:
    """The emulated steps of the ranks of one network.

    `forward` and `backward` are the seconds of a pass of an even stage, and `shape` is the shape of
    an activation.
    """

    forward: float
    backward: float
    shape: tuple[int, ...]
    profiles: Sequence[str]
    microbatches: Sequence[int]
    rounds: int

    def busy(self, stage: int, microbatches: int, factor: Factor) -> float:
        """Return the seconds that a stage sleeps in a step."""
        seconds = {Kind.FORWARD: self.forward, Kind.BACKWARD: self.backward}
        passes = [Operation(kind, number) for kind in Kind for number in range(microbatches)]
        return sum(seconds[each.kind] * float(factor(stage, each)) for each in passes)

    def transfer(self, network: Network) -> float:
        """Return the seconds of a message on an idle link, 0 without a limit."""
        if network.rate == NO_LIMIT:
            return 0.0
        size = FP32_BYTES
        for length in self.shape:
            size *= length
        # A packet crosses its sender's and its receiver's link at the same time.
        return 8 * size / _number(network.rate.removesuffix("bit")) + 2 * _number(network.delay)


def rows_of(
    network: Network, emulation: EmulationRow, steps: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return a row for each case and contender; times are medians over rounds, in seconds.

    `seconds` is None if the contender is only simulated. `ratio` is relative to the reference,
    round by round. `bubbles` has idle over busy time of each stage. `paper` is the simulated step,
    in which only passes and transfers take time, and `paper_ratio` its ratio. `in_flight` is the
    maximum number of microbatches that a stage held.
    """
    taken = {
        (step["profile"], step["microbatches"], step["contender"], step["round"]): step
        for step in steps
    }
    rounds = sorted({step["round"] for step in steps})
    rows: list[dict[str, Any]] = []
    for profile in emulation.profiles:
        factors = [factor_of(profile, number) for number in rounds]
        for count in emulation.microbatches:
            papers = {
                contender.name: _on_paper(contender, network, emulation, count, factors)
                for contender in (*CONTENDERS, ONLY_ON_PAPER)
            }
            for name, paper in papers.items():
                row: dict[str, Any] = {
                    "network": str(network),
                    "stages": network.ranks,
                    "profile": profile,
                    "microbatches": count,
                    "contender": name,
                    "seconds": None,
                    "paper": median(paper),
                    "paper_ratio": _ratio(paper, papers[REFERENCE]),
                }
                if name != ONLY_ON_PAPER.name:
                    mine, theirs = (
                        [taken[profile, count, which, number] for number in rounds]
                        for which in (name, REFERENCE)
                    )
                    seconds = [step["seconds"] for step in mine]
                    row |= {
                        "seconds": median(seconds),
                        "ratio": _ratio(seconds, [step["seconds"] for step in theirs]),
                        "bubbles": _bubbles(network.ranks, emulation, count, seconds, factors),
                        "in_flight": max(_held(rank) for step in mine for rank in step["passes"]),
                    }
                rows.append(row)
    return rows


def _on_paper(
    contender: UnevenContender,
    network: Network,
    emulation: EmulationRow,
    count: int,
    factors: Sequence[Factor],
) -> list[float]:
    """Return the seconds of the step in each round."""
    seconds = {
        "forward": emulation.forward,
        "backward": emulation.backward,
        "transfer": emulation.transfer(network),
    }
    steps = (contender.on_paper(network.ranks, count, factor=f, **seconds) for f in factors)
    return [float(step.length) for step in steps]


def _bubbles(
    stages: int,
    emulation: EmulationRow,
    count: int,
    seconds: Sequence[float],
    factors: Sequence[Factor],
) -> list[float]:
    """Return idle time divided by busy time of each stage, the median over rounds."""
    return [
        median(
            taken / emulation.busy(stage, count, factor) - 1
            for taken, factor in zip(seconds, factors, strict=True)
        )
        for stage in range(stages)
    ]


def _ratio(mine: Sequence[float], theirs: Sequence[float]) -> float:
    return median(a / b for a, b in zip(mine, theirs, strict=True))


def _held(passes: Sequence[Sequence[Any]]) -> int:
    """Return the maximum number of microbatches between forward and backward."""
    held = most = 0
    for kind, *_ in passes:
        held += 1 if kind == "forward" else -1
        most = max(most, held)
    return most


def _number(text: str) -> float:
    """Return a rate or time as tc writes it, without `bit`."""
    found = re.fullmatch(r"([0-9.]+)([a-z]*)", text)
    assert found is not None, "netlab.sh has refused anything else"
    return float(found[1]) * _UNITS[found[2]]
