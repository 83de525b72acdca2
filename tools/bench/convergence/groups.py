"""Groups of runs that differ in their seed only, and their gaps to dense training."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tools.bench.convergence.rows import Row, setting
from tools.bench.convergence.study import DENSE
from tools.studies.statistics import scatter_of, standard_error


@dataclass(frozen=True, kw_only=True)
class RunGroup:
    """Runs that differ in their seed only.

    `gap` is the mean over seeds of the validation loss minus that of the dense run of the same
    seed, beta2 and optimizer. `error` is its standard error; with one seed it comes from the
    scatter of groups with several (`error_is_own` False). Both are None if no seed has a gap, and
    the error also if no group has several seeds.
    """

    name: str
    variant: str
    beta2: float
    start: float | None
    interval: int | None
    ranks: int
    seeds: tuple[int, ...]
    losses: tuple[float, ...]
    gaps: tuple[float, ...]
    gap: float | None
    error: float | None
    error_is_own: bool
    payload: float
    largest_payload: float
    clipped: float
    failed: int

    @property
    def title(self) -> str:
        """Name in the table."""
        return title_of(self.name)


def title_of(name: str) -> str:
    """Return the name of a group in tables."""
    return name.replace("-", ", ").replace("_", " ")


def groups_of(rows: Sequence[Row]) -> list[RunGroup]:
    """Return the rows by group, with gaps to the available dense runs."""
    members: dict[str, list[Row]] = {}
    for row in rows:
        members.setdefault(row["group"], []).append(row)
    gaps = gaps_of(rows)
    scatter = scatter_of(gaps.values())
    return [_group(name, found, gaps[name], scatter) for name, found in members.items()]


def gaps_of(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Return the gap to the dense run by group and seed, if both runs ended well."""
    dense = {setting(row): row["valid_loss"] for row in rows if row["variant"] == DENSE}
    found: dict[str, dict[int, float]] = {row["group"]: {} for row in rows}
    for row in sorted(rows, key=lambda row: row["seed"]):
        reference = dense.get(setting(row))
        if row["variant"] != DENSE and None not in (row["valid_loss"], reference):
            found[row["group"]][row["seed"]] = row["valid_loss"] - reference
    return found


def _group(
    name: str, rows: Sequence[Row], gaps: Mapping[int, float], scatter: float | None
) -> RunGroup:
    first, values = rows[0], list(gaps.values())
    own = len(values) > 1
    error = standard_error(values) if own else scatter
    return RunGroup(
        name=name,
        variant=first["variant"],
        beta2=first["beta2"],
        start=first["start"],
        interval=first["interval"],
        ranks=first["ranks"],
        seeds=tuple(sorted(row["seed"] for row in rows)),
        losses=tuple(row["valid_loss"] for row in rows if row["valid_loss"] is not None),
        gaps=tuple(values),
        gap=statistics.fmean(values) if values else None,
        error=error if values else None,
        error_is_own=own,
        payload=statistics.fmean(row["payload"]["mean"] for row in rows),
        largest_payload=max(row["payload"]["most"] for row in rows),
        clipped=statistics.fmean(row["clipped"] for row in rows),
        failed=sum(row["valid_loss"] is None for row in rows),
    )
