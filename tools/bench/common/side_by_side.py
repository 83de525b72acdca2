"""Interleaved timing of several ways to do one thing, as medians and ratios.

Contenders take turns step by step, so that other load on the machine affects all of them equally; a
ratio of two separate runs on a busy machine means nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Protocol

from tools.bench.common.page_files import write_page


class Contender(Protocol):
    """One way to train: `step` runs one whole optimizer step and returns when it is done."""

    @property
    def name(self) -> str:
        """Name in tables."""
        ...

    def step(self) -> float:
        """Run a step and return its loss, so that tables can show that all train equally."""
        ...


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The steps of one contender.

    Seconds are of a whole step; `cpu_seconds` is the median CPU time of this process. Tokens per
    second follow from the median. `first_loss` is that of the first step, warm-up included.
    """

    name: str
    median_seconds: float
    least_seconds: float
    cpu_seconds: float
    tokens_per_second: float
    first_loss: float
    last_loss: float


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Tokens/s of `ours` divided by tokens/s of `theirs`.

    The ratio is the median over rounds, in each of which both took a step. Without a `target` it is
    for information.
    """

    ours: str
    theirs: str
    ratio: float
    target: float | None

    @property
    def met(self) -> bool:
        """Whether the target, if there is one, is reached."""
        return self.target is None or self.ratio >= self.target


def interleave(
    contenders: Sequence[Contender],
    *,
    rounds: int,
    warm_up: int,
    tokens: int,
    slowest: Callable[[float], float] = lambda seconds: seconds,
    before_step: Callable[[], None] = lambda: None,
) -> tuple[list[Timing], dict[str, list[float]]]:
    """Time `rounds` turns of each contender after `warm_up` unmeasured ones.

    The order rotates from round to round. `before_step` runs unmeasured before each step (a
    barrier); `slowest` turns this rank's seconds into the slowest rank's. Returns a summary, and
    the seconds of every round by name.
    """
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    cpu: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    losses: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for number in range(warm_up + rounds):
        turn = number % len(contenders)
        for contender in [*contenders[turn:], *contenders[:turn]]:
            before_step()
            began, cpu_began = perf_counter(), process_time()
            loss = contender.step()
            took, cpu_took = slowest(perf_counter() - began), process_time() - cpu_began
            losses[contender.name].append(loss)
            if number >= warm_up:
                seconds[contender.name].append(took)
                cpu[contender.name].append(cpu_took)
    timings = [
        Timing(
            name=name,
            median_seconds=statistics.median(took),
            least_seconds=min(took),
            cpu_seconds=statistics.median(cpu[name]),
            tokens_per_second=tokens / statistics.median(took),
            first_loss=losses[name][0],
            last_loss=losses[name][-1],
        )
        for name, took in seconds.items()
    ]
    return timings, seconds


def ratio_of(
    seconds: Mapping[str, Sequence[float]], ours: str, theirs: str, *, target: float | None = None
) -> Ratio:
    """Return the speed of one contender over another's, from the rounds of one `interleave`."""
    pairs = zip(seconds[ours], seconds[theirs], strict=True)
    median = statistics.median(other / mine for mine, other in pairs)
    return Ratio(ours=ours, theirs=theirs, ratio=median, target=target)


@dataclass(frozen=True, kw_only=True)
class TimedComparison:
    """One table of a report: what was compared, a note for readers, and the results."""

    title: str
    note: str
    timings: list[Timing]
    ratios: list[Ratio]
    phases: dict[str, float]
    """Seconds of a step of ours by phase, if measured."""

    def as_json(self) -> dict[str, Any]:
        """Return plain values; ratios include whether their target was met."""
        values = asdict(self)
        for ratio, found in zip(values["ratios"], self.ratios, strict=True):
            ratio["met"] = found.met
        return values

    def as_markdown(self) -> str:
        """Return a heading, the note and up to three tables."""
        lines = [f"### {self.title}", "", self.note, ""]
        lines += [
            "| | tokens/s | median step, ms | least, ms | processor, ms | loss, first to last |"
        ]
        lines += ["|---|---:|---:|---:|---:|---:|"]
        for t in self.timings:
            lines.append(
                f"| {t.name} | {t.tokens_per_second:,.0f} | {1e3 * t.median_seconds:.1f} | "
                f"{1e3 * t.least_seconds:.1f} | {1e3 * t.cpu_seconds:.1f} | "
                f"{t.first_loss:.3f} to {t.last_loss:.3f} |"
            )
        if self.ratios:
            lines += ["", "| ours / other | ratio | target |", "|---|---:|---:|"]
            for r in self.ratios:
                target = (
                    "" if r.target is None else f"{r.target:.2f} {'met' if r.met else 'MISSED'}"
                )
                lines.append(f"| {r.ours} / {r.theirs} | {r.ratio:.3f} | {target} |")
        if self.phases:
            total = sum(self.phases.values())
            lines += ["", "| phase of a step of ours | ms | share |", "|---|---:|---:|"]
            for phase, took in self.phases.items():
                lines.append(f"| {phase} | {1e3 * took:.2f} | {took / total:.1%} |")
        return "\n".join(lines) + "\n"


def write_report(
    folder: Path, comparisons: Sequence[TimedComparison], facts: Mapping[str, Any]
) -> None:
    """Write a page with facts about the machine and every comparison, see `write_page`."""
    values = {"facts": dict(facts), "comparisons": [c.as_json() for c in comparisons]}
    text = "; ".join(f"{name} {value}" for name, value in facts.items()) + "\n\n"
    text += "\n".join(comparison.as_markdown() for comparison in comparisons)
    write_page(folder, text=text, values=values)
