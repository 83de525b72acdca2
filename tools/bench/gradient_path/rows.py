"""Rows of a table from the results of ranks: medians and predictions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.bench.common.alpha_beta import AlphaBetaLink, AlphaBetaTimeline, fit, predict
from tools.bench.common.methods import Method, method
from tools.bench.common.netlab import Network
from tools.bench.gradient_path.messages import Sizes, counted_share, messages, sent_share
from tools.planner.replay.image_networks import network as network_of

SPREAD = 200
"""T over which a resample's step is averaged: the default of `--radius-interval`."""
EMULATED, REAL = "emulated", "real"
TARGET_RATE = "800mbit"


@dataclass(frozen=True, kw_only=True)
class GradientPathRow:
    """A method on one network: seconds and bytes of one step.

    `median` and `least` are times of the slowest rank in steps that are no resample, and
    `predicted` is the time by the alpha-beta model. `blocked`, `bytes_sent` (as a rank reports
    them) and `counted` (by its interface) are medians of the mean over ranks, None if unavailable.
    `resample` is the median of a resample, None if there was none; `spread` is a mean step over an
    interval of `SPREAD` steps.
    """

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
class GradientPathTable:
    """All methods on one network under one protocol (`EMULATED` or `REAL` computing)."""

    protocol: str
    network: Network
    link: AlphaBetaLink
    rows: Sequence[GradientPathRow]
    shares: Mapping[str, tuple[float, float]]
    """Share of matrix entries sent by each Radius method, as counted and as configured."""
    stored: Mapping[str, float]
    """Share f of each SAMO method: stored entries over all parameters."""
    turns: Mapping[str, Sequence[float | None]]
    """Seconds of each method's step in every round, None where that was a resample."""
    model: str = ""
    """The image network and its batch in words; empty for the GPT."""

    def __getitem__(self, name: str) -> GradientPathRow:
        return next(row for row in self.rows if row.method == name)

    @property
    def title(self) -> str:
        """Protocol and network in words."""
        model = f", {self.model}" if self.model else ""
        return f"{self.protocol} computing{model}, {self.network}"

    def ratio(self, name: str, base: str) -> float:
        """Return one method's step over another's, median over rounds in which both ran a step.

        Other load on the machine in a round affects both.
        """
        pairs = zip(self.turns[name], self.turns[base], strict=True)
        return statistics.median(one / other for one, other in pairs if one and other)

    def saved(self, name: str) -> float | None:
        """Return 1 - t / t_dense, with the dense row whose numbers are as wide; None without it."""
        dense = "dense-bf16" if method(name).dtype == "bfloat16" else "dense"
        return 1 - self.ratio(name, dense) if self.has(dense) else None

    def has(self, *names: str) -> bool:
        """Return whether all of these methods were measured."""
        return set(names) <= {row.method for row in self.rows}


def table(result: Mapping[str, Any], network: Network) -> GradientPathTable:
    """Return the table of the results that rank 0 wrote, with predictions from the same run."""
    settings, steps = result["settings"], result["steps"]
    interval = settings["interval"]
    link = fit(network.ranks, small=_timed(result, 0), large=_timed(result, -1))
    shapes = dict(result["parameters"])
    rows: list[GradientPathRow] = []
    shares: dict[str, tuple[float, float]] = {}
    stored: dict[str, float] = {}
    for name in steps:
        kind = method(name, interval=interval)
        sizes = Sizes(
            shapes=shapes, entry_bytes=kind.entry_bytes, **result["coordinates"].get(name, {})
        )
        base = kind.compute
        timeline = AlphaBetaTimeline(
            **result["arrivals"][base],
            step=statistics.median(step["seconds"] for step in steps[base]),
        )
        sent = messages(kind, sizes, link, interval=interval)
        row = _row(kind, steps[name], predict(timeline, sent, overlap=kind.overlap))
        rows.append(row)
        if kind.resamples and row.bytes_sent is not None:
            counted = counted_share(sizes, network.ranks, row.bytes_sent)
            shares[name] = (counted, sent_share(kind, sizes, interval=interval))
        if kind.kind.startswith("samo"):
            stored[name] = sizes.stored_share
    return GradientPathTable(
        protocol=settings["protocol"],
        network=network,
        link=link,
        rows=rows,
        shares=shares,
        stored=stored,
        turns={
            name: [None if _is_resample(name, step) else step["seconds"] for step in found]
            for name, found in steps.items()
        },
        model=_model(settings),
    )


def _model(settings: Mapping[str, Any]) -> str:
    name = settings.get("network")
    if name is None:
        return ""
    title = network_of(name).title
    if settings["protocol"] == EMULATED:
        return title
    count = settings["images"]
    return f"{title}, {count} {'image' if count == 1 else 'images'} a rank"


def _timed(result: Mapping[str, Any], which: int) -> tuple[int, float]:
    """Return bytes and median seconds of the smallest (0) or largest (-1) all-reduce."""
    size = sorted(result["links"], key=int)[which]
    return int(size), statistics.median(result["links"][size])


def _is_resample(name: str, step: Mapping[str, Any]) -> bool:
    return method(name).resamples and step["density"] >= 1.0


def _row(kind: Method, steps: Sequence[Mapping[str, Any]], predicted: float) -> GradientPathRow:
    resamples = [step for step in steps if _is_resample(kind.name, step)]
    plain = [step for step in steps if step not in resamples]

    def median(name: str) -> float | None:
        values = [step[name] for step in plain if step[name] is not None]
        return statistics.median(values) if values else None

    usual, blocked = median("seconds"), median("blocked")
    assert usual is not None and blocked is not None, "every step is timed"
    resample = statistics.median(s["seconds"] for s in resamples) if resamples else None
    return GradientPathRow(
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
