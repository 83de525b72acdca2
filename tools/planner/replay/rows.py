"""Tables of measurements with the results of the simulation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FITTED, PREDICTED = "fitted", "predicted"
"""Kinds of numbers: "fitted" determined a constant, "predicted" did not."""
FAR = 10
"""Error, in percent or points, from which on a prediction counts as a miss."""


@dataclass(frozen=True, kw_only=True)
class ReplayRow:
    """A figure of a source, with its `measured` and `simulated` values in a unit.

    A source that gives only a range has `low` and `high` in place of `measured`. `claim` is a value
    that the figure exceeds, as the source says.
    """

    what: str
    unit: str
    simulated: float
    measured: float | None = None
    low: float | None = None
    high: float | None = None
    kind: str = PREDICTED
    digits: int = 2
    claim: float | None = None

    @property
    def is_share(self) -> bool:
        """Whether the error is a difference, in points, and not a ratio."""
        return self.unit == "%"

    @property
    def error(self) -> float:
        """The error in percent of the measurement, or of the nearest value in a range.

        The error of a share is a difference in points.
        """
        near = self.measured
        if near is None:
            assert self.low is not None and self.high is not None
            near = min(max(self.simulated, self.low), self.high)
        return self.simulated - near if self.is_share else 100 * (self.simulated / near - 1)

    @property
    def shown(self) -> str:
        """The error with its unit, as text."""
        return f"{self.error:+.1f}" + (" points" if self.is_share else " %")

    @property
    def is_off(self) -> bool:
        """Whether a prediction misses by more than `FAR`, or contradicts the source's claim."""
        return self.kind == PREDICTED and (abs(self.error) > FAR or not self.holds)

    @property
    def holds(self) -> bool:
        """Whether the claim, if there is one, holds in the simulation."""
        return self.claim is None or self.simulated > self.claim

    @property
    def told(self) -> str:
        """The measurement as text."""
        if self.measured is not None:
            return f"{self.measured:.{self.digits}f}"
        return f"{self.low:g} to {self.high:g}"


@dataclass(frozen=True, kw_only=True)
class ReplayTable:
    """Rows of one source on one machine.

    `constants`: fitted constants, in words with values; `source`: who measured.
    """

    name: str
    machine: str
    constants: Mapping[str, str]
    rows: Sequence[ReplayRow]
    notes: Sequence[str] = field(default_factory=list[str])
    source: str = "paper"

    def errors(self, unit: str | None = None) -> list[float]:
        """Return the errors of all predicted figures, or of those in one unit."""
        return [
            row.error
            for row in self.rows
            if row.kind == PREDICTED and (unit is None or row.unit == unit)
        ]

    @property
    def summary(self) -> str:
        """Mean and largest error of the predictions in words, separately for shares and others."""
        found: list[str] = []
        for shares, unit in ((False, "%"), (True, "points")):
            errors = [
                abs(r.error) for r in self.rows if r.kind == PREDICTED and r.is_share == shares
            ]
            if errors:
                mean = sum(errors) / len(errors)
                found.append(
                    f"{len(errors)} predicted: off by {mean:.1f} {unit} in the mean, "
                    f"{max(errors):.1f} at most"
                )
        return "; ".join(found) or "nothing is predicted"

    @property
    def data(self) -> dict[str, Any]:
        """The table as data for JSON."""
        return {
            "name": self.name,
            "machine": self.machine,
            "source": self.source,
            "fitted": dict(self.constants),
            "rows": [
                {
                    "what": row.what,
                    "unit": row.unit,
                    "measured": row.measured if row.measured is not None else [row.low, row.high],
                    "simulated": row.simulated,
                    "error": row.error,
                    "kind": row.kind,
                    "holds": row.holds,
                }
                for row in self.rows
            ],
            "summary": self.summary,
            "notes": list(self.notes),
        }

    def lines(self) -> Iterator[str]:
        """Yield the table as Markdown."""
        yield f"### {self.name}"
        yield ""
        for constant, value in self.constants.items():
            yield f"- fitted: {constant} = {value}"
        if not self.constants:
            yield "- nothing is fitted"
        yield ""
        yield f"| figure | unit | {self.source} | simulated | error | fitted or predicted |"
        yield "|---|---|---:|---:|---:|---|"
        for row in self.rows:
            yield (
                f"| {row.what} | {row.unit} | {row.told} | {row.simulated:.{row.digits}f} "
                f"| {row.shown} | {row.kind} |"
            )
        yield ""
        yield f"{self.summary}."
        yield ""
        for note in self.notes:
            yield f"- {note}"
        if self.notes:
            yield ""
