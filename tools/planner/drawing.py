"""A simulated step as lines of letters, one row per stage."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.pipeline.schedule import Kind
from tools.planner.simulation import SimulatedStep
from tools.planner.timeline import Passed

MARKS = {"reduce": "=", "norm": "~", "optimizer": "#", "gather": "+"}
IDLE = "."
LEGEND = (
    f"A B C ... forward and a b c ... backward of microbatches 0, 1, 2, ...; {IDLE} idle",
    f"below a stage: {MARKS['reduce']} gradients are reduced, {MARKS['gather']} parameters are "
    f"gathered, {MARKS['norm']} norm, {MARKS['optimizer']} optimizer",
)
"""Legend of the letters and signs of a drawing."""


def drawing(step: SimulatedStep, *, width: int = 88, stages: int = 16) -> Iterator[str]:
    """Draw the first pipeline.

    Each of the first `stages` has a row of passes: capitals are forward, small letters backward, by
    microbatch, repeating the alphabet. The rows below show its network (= reductions, + gathers),
    its norm (~) and its optimizer (#). Microbatches that were not simulated are left out. The
    legend comes last.
    """
    course = step.courses[0]
    length = step.length - course.skipped
    cell = length / width
    for stage, passed in enumerate(course.timeline.ranks[:stages]):
        row = [IDLE] * width
        for each in passed:
            _fill(row, float(each.start) / cell, float(each.stop) / cell, _letter(each))
        yield f"stage {stage:<3d} {''.join(row)}"
        row = [" "] * width
        for event in step.events:
            if event.stage == stage and event.stop > event.start:
                start, stop = event.start - course.skipped, event.stop - course.skipped
                _fill(row, start / cell, stop / cell, MARKS[event.lane])
        yield f"          {''.join(row)}".rstrip()
    left = len(course.timeline.ranks) - stages
    if left > 0:
        yield f"... {left} more stages"
    scale = f"0 s{f'{length:.4g} s':>{width - 3}}"
    yield f"          {scale}"
    if course.skipped:
        share = 1 - 1 / course.rounds
        yield (
            f"          {share:.0%} of the microbatches, {course.skipped:.4g} s, are not drawn: "
            "they go on as those in the middle do"
        )
    yield from (f"          {line}" for line in LEGEND)


def _fill(row: list[str], start: float, stop: float, mark: str) -> None:
    """Fill each cell whose middle is within an activity; a short activity fills its first cell."""
    first, last = round(start), max(round(stop), round(start) + 1)
    for cell in range(max(first, 0), min(last, len(row))):
        row[cell] = mark


def _letter(passed: Passed) -> str:
    kind, microbatch, _ = passed.operation
    return chr(ord("A" if kind is Kind.FORWARD else "a") + microbatch % 26)
