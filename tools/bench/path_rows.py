"""From what ranks found to rows of a table: medians, predictions, targets."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.bench.alpha_beta import Link, Timeline, fit, predict
from tools.bench.methods import COMPUTE, Method, method
from tools.bench.netlab import NO_LIMIT, Network
from tools.bench.path_messages import Sizes, counted_share, messages, sent_share

SPREAD = 200
"""T over which a resample's step is spread: the default of `--radius-interval`."""
EMULATED, REAL = "emulated", "real"
BEST_DDP = ("ddp-4mb", "ddp-25mb")
FASTEST_TOPK = ("topk-0.01", "topk-0.1")
TARGET_RATE = "800mbit"
OVER_DENSE = {"radius-0.4": 0.75, "radius-0.1": 0.72}
OVER_DDP = {"radius-0.4": 0.83, "radius-0.1": 0.72}
LEAST_COUNTED = 1_000_000
"""Bytes of a step below which the ranks' barriers and votes are seen beside them."""
PREDICTED_WITHIN, BYTES_WITHIN, COUNTED_WITHIN = 0.10, 0.01, 0.03


@dataclass(frozen=True, kw_only=True)
class Row:
    """A method on one network, seconds and bytes of one step: median and least time of the slowest
    rank, alpha-beta prediction, mean time blocked, bytes that a rank says it sent and that its
    interface counted (None: not told, not counted). `resample`: median step of a resample, None
    where the method has none; `spread`: a step with its share of one over `SPREAD` steps."""

    method: str
    median: float
    least: float
    predicted: float
    blocked: float
    bytes_sent: float | None
    counted: float | None
    resample: float | None = None
    spread: float | None = None


@dataclass(frozen=True, kw_only=True)
class Target:
    """What was to be reached, and whether it was."""

    text: str
    met: bool

    def __str__(self) -> str:
        return f"{self.text}: {'met' if self.met else 'MISSED'}"


@dataclass(frozen=True, kw_only=True)
class Table:
    """All methods on one network under one protocol (`EMULATED` or `REAL` computing)."""

    protocol: str
    network: Network
    link: Link
    rows: Sequence[Row]
    shares: Mapping[str, tuple[float, float]]
    """Of each Radius method: entries of matrices sent over all, as counted and as demanded."""
    turns: Mapping[str, Sequence[float | None]]
    """Seconds of each method's step in every round, None where that was a resample."""

    def __getitem__(self, name: str) -> Row:
        return next(row for row in self.rows if row.method == name)

    @property
    def title(self) -> str:
        """Protocol and network in words."""
        return f"{self.protocol} computing, {self.network}"

    def ratio(self, name: str, base: str) -> float:
        """Step of one method over another's, median over the rounds in which both took one: what
        else the machine did in a round was done to both."""
        pairs = zip(self.turns[name], self.turns[base], strict=True)
        return statistics.median(one / other for one, other in pairs if one and other)

    def has(self, *names: str) -> bool:
        """Whether all of these methods were measured."""
        return set(names) <= {row.method for row in self.rows}


def table(result: Mapping[str, Any], network: Network) -> Table:
    """Make a table of what rank 0 wrote, with the predictions of its own run."""
    settings, steps = result["settings"], result["steps"]
    interval = settings["interval"]
    link = fit(network.ranks, small=_timed(result, 0), large=_timed(result, -1))
    sizes = Sizes(shapes=dict(result["parameters"]), buckets=result["buckets"])
    timeline = Timeline(
        ready=result["ready"],
        backward=result["backward"],
        step=statistics.median(step["seconds"] for step in steps[COMPUTE]),
    )
    rows: list[Row] = []
    shares: dict[str, tuple[float, float]] = {}
    for name in steps:
        kind = method(name, interval=interval)
        sent = messages(kind, sizes, link, interval=interval)
        row = _row(kind, steps[name], predict(timeline, sent, overlap=kind.overlap))
        rows.append(row)
        if kind.kind == "radius" and row.bytes_sent is not None:
            counted = counted_share(sizes, network.ranks, row.bytes_sent)
            shares[name] = (counted, sent_share(kind, sizes, interval=interval))
    return Table(
        protocol=settings["protocol"],
        network=network,
        link=link,
        rows=rows,
        shares=shares,
        turns={
            name: [None if _is_resample(name, step) else step["seconds"] for step in found]
            for name, found in steps.items()
        },
    )


def _timed(result: Mapping[str, Any], which: int) -> tuple[int, float]:
    """Bytes and median seconds of the smallest (0) or largest (-1) all-reduce."""
    size = sorted(result["links"], key=int)[which]
    return int(size), statistics.median(result["links"][size])


def _is_resample(name: str, step: Mapping[str, Any]) -> bool:
    return method(name).kind == "radius" and step["density"] >= 1.0


def _row(kind: Method, steps: Sequence[Mapping[str, Any]], predicted: float) -> Row:
    resamples = [step for step in steps if _is_resample(kind.name, step)]
    plain = [step for step in steps if step not in resamples]

    def median(name: str) -> float | None:
        values = [step[name] for step in plain if step[name] is not None]
        return statistics.median(values) if values else None

    usual, blocked = median("seconds"), median("blocked")
    assert usual is not None and blocked is not None, "every step is timed"
    resample = statistics.median(s["seconds"] for s in resamples) if resamples else None
    return Row(
        method=kind.name,
        median=usual,
        least=min(step["seconds"] for step in plain),
        predicted=predicted,
        blocked=blocked,
        bytes_sent=median("bytes_sent"),
        counted=median("counted"),
        resample=resample,
        spread=None if resample is None else (usual * (SPREAD - 1) + resample) / SPREAD,
    )


def targets(tables: Sequence[Table]) -> list[Target]:
    """What of issue and paper is to be reached on these networks, and whether it was."""
    found: list[Target] = []
    for each in tables:
        found += [*_speed(each), *_bytes(each), *_predictions(each)]
    return [*found, *_against_topk(tables)]


def _speed(each: Table) -> list[Target]:
    if each.network.rate != TARGET_RATE:
        return []
    if each.protocol == EMULATED:
        base, limits = ("dense",), OVER_DENSE
    else:
        base, limits = BEST_DDP, OVER_DDP
    if not each.has(*base) or (each.protocol == REAL and each.network.ranks > 2):
        return []  # four ranks that really compute share two cores: they measure those
    best = min((each[name] for name in base), key=lambda row: row.median)
    return [
        _at_most(f"{each.title}: {name} / {best.method}", each.ratio(name, best.method), limit)
        for name, limit in limits.items()
        if each.has(name)
    ]


def _bytes(each: Table) -> list[Target]:
    found = [
        _at_most(
            f"{each.title}: {name} sends {counted:.4f} of dense matrices, off {wanted:.4f} by",
            abs(counted / wanted - 1),
            BYTES_WITHIN,
        )
        for name, (counted, wanted) in each.shares.items()
    ]
    both = [row for row in each.rows if row.bytes_sent and (row.counted or 0) > LEAST_COUNTED]
    if both:
        worst = max(both, key=_miscount)
        what = f"{each.title}: bytes_sent off the interface's count, most of all {worst.method}, by"
        found.append(_at_most(what, _miscount(worst), COUNTED_WITHIN))
    return found


def _miscount(row: Row) -> float:
    assert row.bytes_sent and row.counted
    return abs(row.bytes_sent / row.counted - 1)


def _predictions(each: Table) -> list[Target]:
    radius = [row for row in each.rows if row.method.startswith("radius-")]
    if each.protocol != EMULATED or each.network.rate == NO_LIMIT or not radius:
        return []
    worst = max(radius, key=lambda row: abs(row.median / row.predicted - 1))
    what = f"{each.title}: radius off its prediction, most of all {worst.method}, by"
    return [_at_most(what, abs(worst.median / worst.predicted - 1), PREDICTED_WITHIN)]


def _against_topk(tables: Sequence[Table]) -> list[Target]:
    """Radius over topk on all networks: at d = 0.4 and 0.1 over the fastest, and at equal d."""
    pairs = [(name, *FASTEST_TOPK) for name in OVER_DENSE] + [("radius-0.1", "topk-0.1")]
    found: list[Target] = []
    for name, *others in pairs:
        ratios: dict[str, float] = {}
        for each in tables:
            there = [each[other] for other in others if each.has(other)]
            if there and each.has(name):
                fastest = min(there, key=lambda row: row.median)
                what = f"{name} / {fastest.method}, at worst ({each.title})"
                ratios[what] = each.ratio(name, fastest.method)
        if ratios:
            worst = max(ratios, key=lambda what: ratios[what])
            found.append(_at_most(worst, ratios[worst], 1.0))
    return list({target.text: target for target in found}.values())


def _at_most(text: str, value: float, limit: float) -> Target:
    return Target(text=f"{text} {value:.3f} (at most {limit:g})", met=value <= limit)
