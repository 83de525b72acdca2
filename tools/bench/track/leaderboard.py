"""The leaderboard of the communication track, from rows of runs and step times.

    python -m tools.bench.track.leaderboard     writes README.md and results.json

An entry reaches the target if (target - mean loss) sqrt(seeds) is at least `SURE` sigma, as in the
rules of modded-nanogpt: sigma and the target come from the seeds of the baseline. Of those that
reach it, the one whose run takes least time at `RANKED_BY` is first.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.errors import ConfigError, SparsetronError
from megatron.metrics.log_line import memory_size
from tools.bench.common.page_files import table, write_page
from tools.bench.track.step_times import FILE, TIER, StepTime, read_times, start_of
from tools.studies.declaration import DeclaredRun, DeclaredStudy, read_study
from tools.studies.rows import StudyRow, read_rows
from tools.studies.statistics import SeedGroup, groups_of

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "tier_s.jsonl"
MARGIN = 0.05
"""Nats by which the target is above the mean loss of the baseline."""
SURE = 3.09
"""Quantile (99.9 %) of the normal distribution."""
SEEDS = 8
"""Seeds of the baseline with which target and sigma are fixed."""
RANKED_BY = "200mbit"


@dataclass(frozen=True, kw_only=True)
class Target:
    """The loss to reach, and the standard deviation of the baseline's loss over its seeds."""

    loss: float
    sigma: float
    seeds: int

    def sureness(self, losses: Sequence[float]) -> float:
        """Return (target - mean loss) sqrt(seeds) in units of sigma."""
        margin = self.loss - statistics.fmean(losses)
        return margin * math.sqrt(len(losses)) / self.sigma


@dataclass(frozen=True, kw_only=True)
class Standing:
    """An entry on the leaderboard.

    `sureness` is None without a target. `minutes` is the time of a whole run by rate, whose steps
    before the path begins are those of the baseline.
    """

    group: SeedGroup
    sureness: float | None
    minutes: Mapping[str, float]

    @property
    def reaches(self) -> bool:
        """Whether the entry reaches the target."""
        return self.sureness is not None and self.sureness >= SURE

    @property
    def order(self) -> tuple[bool, float, float]:
        """Sorts entries that reach the target by time, then the others by loss."""
        minutes = self.minutes.get(RANKED_BY, math.inf) if self.reaches else 0.0
        return not self.reaches, minutes, self.group.loss or math.inf


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    try:
        if not options.results.is_file():
            raise ConfigError(f"--results: {options.results} is no file; tools/study.py makes it")
        study, rows = read_study(options.tier), read_rows(options.results)
        standings = standings_of(study, rows, read_times(options.times))
        target = target_of(study, rows)
    except SparsetronError as error:
        print(f"leaderboard: {error}", file=sys.stderr)
        return error.exit_code
    print(text := as_markdown(standings, target, study))
    values = {
        "target": target and asdict(target),
        "entries": [asdict(each) for each in standings],
    }
    write_page(options.out, text=text, values=values)
    return 0


def target_of(study: DeclaredStudy, rows: Sequence[StudyRow]) -> Target | None:
    """Return the target by the seeds of the baseline; None with fewer than two."""
    losses = [row.valid_loss for row in rows if row.group == study.baseline]
    known = [loss for loss in losses if loss is not None]
    if len(known) < 2:
        return None
    return Target(
        loss=statistics.fmean(known) + MARGIN, sigma=statistics.stdev(known), seeds=len(known)
    )


def standings_of(
    study: DeclaredStudy,
    rows: Sequence[StudyRow],
    times: Mapping[str, Mapping[str, StepTime]],
) -> list[Standing]:
    """Return the entries that have rows, the first place first."""
    target = target_of(study, rows)
    entries = {run.group: run for run in study.runs}
    found: list[Standing] = []
    for group in groups_of(rows, study.baselines):
        steps = max(row.steps for row in rows if row.group == group.name)
        minutes = {
            rate: run_seconds(entries[group.name], study.baseline, by_entry, steps) / 60
            for rate, by_entry in times.items()
            if {group.name, study.baseline} <= by_entry.keys()
        }
        losses = list(group.losses.values())
        sureness = target.sureness(losses) if target and losses else None
        found.append(Standing(group=group, sureness=sureness, minutes=minutes))
    return sorted(found, key=lambda each: each.order)


def run_seconds(
    entry: DeclaredRun, baseline: str, times: Mapping[str, StepTime], steps: int
) -> float:
    """Return the seconds of the steps of a run: the baseline's until the path begins."""
    before = start_of(entry)
    return before * times[baseline].seconds + (steps - before) * times[entry.group].seconds


HEAD = ("entry", "seeds", "loss", "above", "sureness", "/ bytes", "memory")


def as_markdown(standings: Sequence[Standing], target: Target | None, study: DeclaredStudy) -> str:
    """Return the page below its head."""
    rates = sorted({rate for each in standings for rate in each.minutes}, key=_by_rate)
    scores = [score.name for score in study.scores]
    payload = next((s.group.payload for s in standings if s.group.name == study.reference), 0.0)
    rows = [_cells(each, study, payload, scores, rates) for each in standings]
    heads = [*HEAD, *(name.replace("_", " ") for name in scores)]
    heads += [f"minutes, {'no limit' if rate == 'none' else rate}" for rate in rates]
    return "\n".join([*_note(target, study), "", *table(heads, rows), ""])


def _cells(
    standing: Standing,
    study: DeclaredStudy,
    payload: float,
    scores: Sequence[str],
    rates: Sequence[str],
) -> list[str]:
    group = standing.group
    cells = [group.name, str(len(group.losses))]
    cells += ["none" if group.loss is None else f"{group.loss:.4f}"]
    above = "" if group.gap is None or group.name == study.baseline else f"{group.gap:+.4f}"
    sureness = "" if standing.sureness is None else f"{standing.sureness:.1f}"
    cells += [above, f"**{sureness}**" if standing.reaches else sureness]
    cells += [
        f"{group.payload / payload:.3f}" if payload else "",
        memory_size(group.peak_memory or 0.0),
    ]
    cells += [f"{group.scores[name]:.4f}" if name in group.scores else "" for name in scores]
    minutes = standing.minutes
    return [*cells, *(f"{minutes[rate]:.1f}" if rate in minutes else "" for rate in rates)]


def _note(target: Target | None, study: DeclaredStudy) -> list[str]:
    goal = "There is no target before two seeds of the baseline."
    if target is not None:
        fixed = "fixed" if target.seeds >= SEEDS else f"preliminary, {target.seeds} seeds"
        goal = f"Target: {target.loss:.4f} nats, sigma {target.sigma:.4f} ({fixed})."
    return textwrap.wrap(
        f"{goal} Above: mean loss less that of {study.baseline} of the same seeds. Sureness: "
        f"(target - mean loss) sqrt(seeds) / sigma; at least {SURE} (bold) reaches the target. / "
        f"bytes: payload of a step over that of {study.reference}, mean of the whole run. Minutes: "
        "of the steps of a whole run, from step times on four ranks that share two cores, each "
        f"behind a link of this rate; entries that reach the target are in the order of "
        f"{RANKED_BY}.",
        width=120,
    )


def _by_rate(rate: str) -> float:
    """Sort by falling rate, no limit first."""
    units = {"gbit": 1e9, "mbit": 1e6}
    found = [float(rate[: -len(unit)]) * size for unit, size in units.items() if unit in rate]
    return -found[0] if found else -math.inf


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.track.leaderboard",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--tier", type=Path, default=TIER, help="the study that declares the entries")
    add("--results", type=Path, default=RESULTS, help="its rows")
    add("--times", type=Path, default=FILE, help="its step times")
    add("--out", type=Path, default=FOLDER, help="folder of the page")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
