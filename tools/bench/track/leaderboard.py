"""The leaderboard of the communication track, from rows of runs and step times.

    python -m tools.bench.track.leaderboard                    writes README.md and results.json
    python -m tools.bench.track.leaderboard --results ROWS     prints the board of other rows

An entry of two seeds or more reaches the target if (target - mean loss) sqrt(seeds) is at least
`SURE` sigma, as in the rules of modded-nanogpt: sigma and the target come from `SEEDS` seeds of the
baseline. Of those that reach it, the one whose run takes least time at `RANKED_BY` is first. Every
entry is also compared with a dense run whose schedule ends when the entry's does.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron.config import Config
from megatron.errors import ConfigError, DataError, SparsetronError
from megatron.metrics.log_line import memory_size
from tools.bench.common.netlab import NO_LIMIT
from tools.bench.common.page_files import table, write_page
from tools.bench.track.iso_time import DenseLosses
from tools.bench.track.rules import check_entries, start_of, wire_of
from tools.bench.track.step_times import FILE, TIER, StepTime, before_name, read_times
from tools.studies.commands import Commands
from tools.studies.declaration import DeclaredStudy, read_study
from tools.studies.rows import StudyRow, read_rows
from tools.studies.statistics import SeedGroup, groups_of, losses_of

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "tier_s.jsonl"
SHORTER_TIER, SHORTER = FOLDER / "shorter_s.yaml", FOLDER / "shorter_s.jsonl"
SHORTER_GROUPS = "dense_steps_"
MARGIN = 0.05
"""Nats by which the target is above the mean loss of the baseline."""
SURE = 3.09
"""Quantile (99.9 %) of the normal distribution; of Student's t with 7 degrees of freedom 99.1 %."""
SEEDS = 8
"""Seeds of the baseline, 1 to 8, that fix the target and sigma."""
RANKED_BY = "50mbit"
StepTimes = Mapping[str, Mapping[str, StepTime]]
"""Step times by rate and entry."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The loss to reach, and the standard deviation of the baseline's loss over its seeds."""

    loss: float
    sigma: float
    seeds: int

    @property
    def is_fixed(self) -> bool:
        """Whether all seeds are in; a preliminary target is not reached."""
        return self.seeds == SEEDS

    def z_score(self, losses: Sequence[float]) -> float:
        """Return (target - mean loss) sqrt(seeds) in units of sigma."""
        margin = self.loss - statistics.fmean(losses)
        return margin * math.sqrt(len(losses)) / self.sigma


@dataclass(frozen=True, kw_only=True)
class EntryStanding:
    """An entry on the leaderboard.

    `z_score` is None without a target. `minutes` is the time of a whole run by rate, `iso_gaps` the
    mean loss less that of a dense run of this time. `minutes_spread` and `iso_spread` are half of
    the range that both have over the rounds in which step times were measured.
    """

    group: SeedGroup
    z_score: float | None
    reaches: bool
    minutes: Mapping[str, float]
    iso_gaps: Mapping[str, float]
    minutes_spread: Mapping[str, float]
    iso_spread: Mapping[str, float]

    @property
    def order(self) -> tuple[bool, float, float]:
        """Sorts entries that reach the target by time, then the others by loss."""
        minutes = self.minutes.get(RANKED_BY, math.inf) if self.reaches else 0.0
        return not self.reaches, minutes, self.group.loss or math.inf


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    is_committed = options.results == RESULTS
    try:
        if not options.results.is_file():
            raise ConfigError(f"--results: {options.results} is no file; tools/study.py makes it")
        for flag, file, usual in (
            ("--shorter", options.shorter, SHORTER),
            ("--times", options.times, FILE),
        ):
            if file != usual and not file.is_file():
                raise ConfigError(f"{flag}: {file} is no file")
        study = read_study(options.tier)
        commands = Commands(study, Path("runs"), Path("data"))
        check_entries(study, commands)
        rows = checked_rows(study, commands, read_rows(options.results))
        if is_committed:
            check_commits(rows)
        dense = dense_losses(study, rows, options.shorter)
        standings = standings_of(study, commands, rows, read_times(options.times), dense)
        target = target_of(study, rows)
        print(text := as_markdown(standings, target, study, dense))
        values = {
            "target": target and asdict(target),
            "entries": [asdict(each) for each in standings],
        }
        write_page(options.out or (FOLDER if is_committed else None), text=text, values=values)
    except SparsetronError as error:
        print(f"leaderboard: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"leaderboard: {error}", file=sys.stderr)
        return DataError.exit_code
    return 0


def checked_rows(
    study: DeclaredStudy, commands: Commands, rows: Sequence[StudyRow]
) -> list[StudyRow]:
    """Return the rows.

    Raises:
        ConfigError: The tier's file does not declare a row, or the seeds of an entry are not 1, 2
            and so on, each once.
    """
    declared = {run.name: commands.digest(run) for run in study.runs}
    for row in rows:
        if declared.get(row.name) != row.settings:
            raise ConfigError(f"{study.path}: {row.name} has a row of other settings, or is no run")
    for group in sorted({row.group for row in rows}):
        seeds = sorted(row.seed for row in rows if row.group == group)
        if seeds != list(range(1, len(seeds) + 1)):
            told = ", ".join(map(str, seeds))
            raise ConfigError(f"rows of {group}: seeds {told}; must be 1, 2 and so on, each once")
    return list(rows)


def check_commits(rows: Sequence[StudyRow]) -> None:
    """Raise `ConfigError` for a row that no commit can make again."""
    for row in rows:
        if not row.commit or row.commit.endswith("-dirty"):
            raise ConfigError(
                f"{row.name} has a row of {row.commit or 'no commit'}: commit the files, and run "
                "it again"
            )


def target_of(study: DeclaredStudy, rows: Sequence[StudyRow]) -> Target | None:
    """Return the target by the seeds of the baseline; None with fewer than two."""
    found = [row for row in rows if row.group == study.baseline and row.seed <= SEEDS]
    known = [row.valid_loss for row in found if row.valid_loss is not None]
    if len(known) < 2:
        return None
    return Target(
        loss=statistics.fmean(known) + MARGIN, sigma=statistics.stdev(known), seeds=len(known)
    )


def dense_losses(
    study: DeclaredStudy, rows: Sequence[StudyRow], results: Path
) -> DenseLosses | None:
    """Return losses of the baseline by length, on seeds that have every declared length.

    None without such a seed. Raises `ConfigError` for a row that is not declared.
    """
    if not results.is_file():
        return None
    declared = read_study(SHORTER_TIER)
    shorter = checked_rows(
        declared, Commands(declared, Path("runs"), Path("data")), read_rows(results)
    )
    by_length = [
        losses_of(row for row in [*rows, *shorter] if row.group == group)
        for group in (study.baseline, *declared.groups)
    ]
    seeds = set.intersection(*(set(losses) for losses in by_length))
    if not seeds:
        return None
    found = [row for row in [*rows, *shorter] if row.seed in seeds]
    return DenseLosses(found, dense=study.baseline, shorter=SHORTER_GROUPS)


def standings_of(
    study: DeclaredStudy,
    commands: Commands,
    rows: Sequence[StudyRow],
    times: StepTimes,
    dense: DenseLosses | None = None,
) -> list[EntryStanding]:
    """Return the entries that have rows, the first place first."""
    target = target_of(study, rows)
    entries = {run.group: run for run in study.runs}
    # First the medians of all rounds, then each round.
    measured = (times, *rounds_of(times))
    found: list[EntryStanding] = []
    for group in groups_of(rows, study.baselines):
        config, steps = commands.config(entries[group.name]), commands.steps(entries[group.name])
        losses = list(group.losses.values())
        z_score = target.z_score(losses) if target and losses else None
        reaches = z_score is not None and z_score >= SURE and len(losses) > 1
        reaches &= target is not None and target.is_fixed and not group.failed
        minutes = [minutes_of(group.name, config, each, steps) for each in measured]
        gaps = [
            iso_gaps_of(group, taken, each, study.baseline, dense)
            for taken, each in zip(minutes, measured, strict=True)
        ]
        found.append(
            EntryStanding(
                group=group,
                z_score=z_score,
                reaches=reaches,
                minutes=minutes[0],
                iso_gaps=gaps[0],
                minutes_spread=half_ranges(minutes[1:]),
                iso_spread=half_ranges(gaps[1:]),
            )
        )
    return sorted(found, key=lambda each: each.order)


def rounds_of(times: StepTimes) -> list[StepTimes]:
    """Return the step times of each round that all entries have."""
    steps = [step for by_entry in times.values() for step in by_entry.values()]
    number = min((len(step.rounds) for step in steps), default=0)
    return [
        {
            rate: {name: replace(step, rounds=[step.rounds[k]]) for name, step in by_entry.items()}
            for rate, by_entry in times.items()
        }
        for k in range(number)
    ]


def half_ranges(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return half of the range of each number over the rounds that have it, if there are two."""
    by_rate: dict[str, list[float]] = {}
    for numbers in found:
        for rate, number in numbers.items():
            by_rate.setdefault(rate, []).append(number)
    return {
        rate: (max(values) - min(values)) / 2 for rate, values in by_rate.items() if len(values) > 1
    }


def minutes_of(entry: str, config: Config, times: StepTimes, steps: int) -> dict[str, float]:
    """Return the minutes of a whole run by rate, without rates at which it was not timed."""
    seconds = {rate: run_seconds(entry, config, by, steps) for rate, by in times.items()}
    return {rate: taken / 60 for rate, taken in seconds.items() if taken is not None}


def iso_gaps_of(
    group: SeedGroup,
    minutes: Mapping[str, float],
    times: StepTimes,
    baseline: str,
    dense: DenseLosses | None,
) -> dict[str, float]:
    """Return `iso_gap` by rate, without rates at which there is none."""
    lengths = {
        rate: 60 * taken / times[rate][baseline].seconds
        for rate, taken in minutes.items()
        if baseline in times[rate]
    }
    gaps = {rate: iso_gap(group.losses, length, dense) for rate, length in lengths.items()}
    return {rate: gap for rate, gap in gaps.items() if gap is not None}


def run_seconds(
    entry: str, config: Config, times: Mapping[str, StepTime], steps: int
) -> float | None:
    """Return the seconds of the steps of a run, the dense ones before its path begins included.

    None if they were not all timed.
    """
    before, dense = start_of(config), before_name(wire_of(config))
    if entry not in times or (before and dense not in times):
        return None
    late = (steps - before) * times[entry].seconds
    return late + (before * times[dense].seconds if before else 0.0)


def iso_gap(losses: Mapping[int, float], length: float, dense: DenseLosses | None) -> float | None:
    """Return the mean loss less that of dense runs of the same seeds that are as long.

    `length` is the time of the entry's run in steps of dense. An entry that takes longer than a
    whole dense run is compared with that one. None without dense runs of the seeds, or if none is
    as short.
    """
    if dense is None or length < dense.lengths[0]:
        return None
    gaps = dense.gaps(losses, length)
    return statistics.fmean(gaps.values()) if gaps else None


HEAD = ("entry", "seeds", "loss", "above", "z", "/ bytes", "memory")


def as_markdown(
    standings: Sequence[EntryStanding],
    target: Target | None,
    study: DeclaredStudy,
    dense: DenseLosses | None,
) -> str:
    """Return the page below its head."""
    scores = [score.name for score in study.scores]
    payload = next((s.group.payload for s in standings if s.group.name == study.reference), 0.0)
    heads = [*HEAD, *(name.replace("_", " ") for name in scores)]
    lines = [*_note(target, study), ""]
    lines += table(heads, [_cells(each, study, payload, scores) for each in standings])
    if rates := sorted({rate for each in standings for rate in each.minutes}, key=_by_rate):
        names = ["no limit" if rate == NO_LIMIT else rate for rate in rates]
        heads = ["entry", *(f"minutes, {name}" for name in names)]
        if dense is not None:
            heads += [f"above equal time, {name}" for name in names]
        lines += ["", *_note_of_times(study, dense), ""]
        lines += table(heads, [_times(each, rates, dense) for each in standings if each.minutes])
    return "\n".join([*lines, ""])


def _cells(
    standing: EntryStanding, study: DeclaredStudy, payload: float, scores: Sequence[str]
) -> list[str]:
    group = standing.group
    failed = f" ({group.failed} failed)" if group.failed else ""
    cells = [group.name, f"{len(group.losses)}{failed}"]
    cells += ["none" if group.loss is None else f"{group.loss:.4f}"]
    above = "" if group.gap is None or group.name == study.baseline else f"{group.gap:+.4f}"
    z_score = "" if standing.z_score is None else f"{standing.z_score:.1f}"
    cells += [above, f"**{z_score}**" if standing.reaches else z_score]
    cells += [
        f"{group.payload / payload:.3f}" if payload else "",
        memory_size(group.peak_memory or 0.0),
    ]
    return cells + [f"{group.scores[name]:.4f}" if name in group.scores else "" for name in scores]


def _times(standing: EntryStanding, rates: Sequence[str], dense: DenseLosses | None) -> list[str]:
    cells = [standing.group.name]
    cells += [
        _cell(standing.minutes.get(rate), standing.minutes_spread.get(rate), ".1f")
        for rate in rates
    ]
    if dense is None:
        return cells
    return cells + [
        _cell(standing.iso_gaps.get(rate), standing.iso_spread.get(rate), "+.3f") for rate in rates
    ]


def _cell(number: float | None, spread: float | None, form: str) -> str:
    if number is None:
        return ""
    return f"{number:{form}}" + ("" if spread is None else f" ±{spread:{form.removeprefix('+')}}")


def _note(target: Target | None, study: DeclaredStudy) -> list[str]:
    goal = "There is no target before two seeds of the baseline."
    if target is not None:
        fixed = "fixed" if target.is_fixed else f"preliminary, {target.seeds} seeds"
        goal = f"Target: {target.loss:.4f} nats, sigma {target.sigma:.4f} ({fixed})."
    return textwrap.wrap(
        f"{goal} Above: mean loss less that of {study.baseline} of the same seeds. z: "
        f"(target - mean loss) sqrt(seeds) / sigma. An entry reaches the fixed target (bold) with "
        f"{SURE} or more and at least two seeds, none of them failed. / bytes: payload of a step "
        f"over that of {study.reference}, mean of the whole run. Entries that reach the target are "
        f"in the order of their minutes at {RANKED_BY}.",
        width=120,
    )


def _note_of_times(study: DeclaredStudy, dense: DenseLosses | None) -> list[str]:
    told = (
        "Minutes: of the steps of a whole run, from means of step times on four ranks that share "
        "two cores, each behind a link of this rate. ±: half of the range over the rounds in which "
        "step times were measured; the loss has an error of its own."
    )
    if dense is not None:
        seeds = ", ".join(map(str, sorted(dense.seeds)))
        lengths = ", ".join(map(str, dense.lengths))
        told += (
            f" Above equal time: loss less that of {study.baseline} with a schedule that ends when "
            f"the entry's does (runs of {lengths} steps, interpolated in the logarithm of the "
            f"steps; seed {seeds}). An entry that takes longer than dense is compared with all "
            f"{dense.steps} steps."
        )
    return textwrap.wrap(told, width=120)


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
    add("--shorter", type=Path, default=SHORTER, help="rows of shorter runs of the baseline")
    add("--times", type=Path, default=FILE, help="its step times")
    add("--out", type=Path, help="folder of the page (default: that of the committed rows)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
