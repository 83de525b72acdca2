"""The targets of the gradient paths on these networks, and whether each was reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.bench.common.methods import method
from tools.bench.common.netlab import NO_LIMIT
from tools.bench.gradient_path.rows import EMULATED, TARGET_RATE, GradientPathRow, GradientPathTable

BEST_DDP = ("ddp-4mb", "ddp-25mb")
FASTEST_TOPK = ("topk-0.01", "topk-0.1")
AT_EQUAL_DENSITY = (("radius-0.1", "topk-0.1"), ("radius-0.01", "topk-0.01"))
OVER_DENSE = {"radius-0.4": 0.75, "radius-0.1": 0.72}
OVER_DDP = {"radius-0.4": 0.83, "radius-0.1": 0.72}
SAMO_OVER_DDP = {"samo-0.9": 0.72}
OVER_DENSE_BF16 = {"800mbit": 0.85, "200mbit": 0.55}
"""Limits, by the rate of a link, of a Radius step with bf16 values on four ranks."""
LEAST_COUNTED = 1_000_000
"""Bytes of a step below which the ranks' barriers and votes are a visible part."""
PREDICTED_WITHIN, BYTES_WITHIN, COUNTED_WITHIN = 0.10, 0.01, 0.03


@dataclass(frozen=True, kw_only=True)
class SpeedTarget:
    """A target, and whether it was reached."""

    text: str
    met: bool

    def __str__(self) -> str:
        return f"{self.text}: {'met' if self.met else 'MISSED'}"


def at_most(text: str, value: float, limit: float, *, digits: int = 3) -> SpeedTarget:
    """Return a target that is reached if `value` is at most `limit`."""
    told = f"{text} {value:.{digits}f} (at most {limit:g})"
    return SpeedTarget(text=told, met=value <= limit)


def targets(tables: Sequence[GradientPathTable]) -> list[SpeedTarget]:
    """Return the targets on these networks, and whether each was reached."""
    found: list[SpeedTarget] = []
    for each in tables:
        found += [*_speed(each), *_bytes(each), *_stored(each), *_predictions(each)]
        found += _of_images(each) + _of_sixteen_bits(each)
    return [*found, *_against_topk(tables)]


def _speed(each: GradientPathTable) -> list[SpeedTarget]:
    emulated = each.protocol == EMULATED
    if each.network.rate != TARGET_RATE or (each.network.ranks > 2 and not emulated):
        return []  # four ranks that really compute share two cores, which would dominate the result
    limits = [(("dense",), OVER_DENSE)] if emulated else [(BEST_DDP, OVER_DDP)]
    found: list[SpeedTarget] = []
    for base, over_base in [*limits, (BEST_DDP, SAMO_OVER_DDP)]:
        if each.has(*base):
            best = min((each[name] for name in base), key=lambda row: row.median).method
            found += [
                at_most(f"{each.title}: {name} / {best}", each.ratio(name, best), limit)
                for name, limit in over_base.items()
                if each.has(name)
            ]
    return found


def _bytes(each: GradientPathTable) -> list[SpeedTarget]:
    found = [
        at_most(
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
        found.append(at_most(what, _miscount(worst), COUNTED_WITHIN))
    return found


def _stored(each: GradientPathTable) -> list[SpeedTarget]:
    """Return the targets that SAMO's bytes over dense bytes of the same width are f.

    A dense row of the same width is best, since both leave the norms of an image network in fp32.
    """
    found: list[SpeedTarget] = []
    for name, share in each.stored.items():
        kind = method(name)
        base = next((b for b in ("dense-bf16", "dense") if each.has(b)), None)
        if kind.resamples or base is None:
            continue
        row, dense = each[name], each[base]
        bits = kind.entry_bytes / method(base).entry_bytes
        pairs = [("sends", row.bytes_sent, dense.bytes_sent, BYTES_WITHIN)]
        if row.counted and row.counted > LEAST_COUNTED:
            pairs += [("is counted at", row.counted, dense.counted, COUNTED_WITHIN)]
        for verb, mine, its, within in pairs:
            assert mine and its, "both tell it, and are counted on the same network"
            part = mine / its / bits
            text = f"{each.title}: {name} {verb} {part:.4f} of dense's bytes at equal width"
            found.append(at_most(f"{text}, off f = {share:.4f} by", abs(part / share - 1), within))
    return found


def _of_images(each: GradientPathTable) -> list[SpeedTarget]:
    """Return the target that a step of an image network with SAMO is not longer than dense."""
    if not each.model or not each.has("samo-0.9", "dense-bf16"):
        return []
    ratio = each.ratio("samo-0.9", "dense-bf16")
    return [at_most(f"{each.title}: samo-0.9 / dense-bf16", ratio, 1.0)]


def _of_sixteen_bits(each: GradientPathTable) -> list[SpeedTarget]:
    """Return the target of a Radius step over a dense one if both send bf16 values."""
    limit = OVER_DENSE_BF16.get(each.network.rate)
    name, base = "radius-0.4-bf16", "dense-bf16"
    if limit is None or each.network.ranks != 4 or each.protocol != EMULATED:
        return []
    if not each.has(name, base):
        return []
    return [at_most(f"{each.title}: {name} / {base}", each.ratio(name, base), limit)]


def _miscount(row: GradientPathRow) -> float:
    assert row.bytes_sent and row.counted
    return abs(row.bytes_sent / row.counted - 1)


def _predictions(each: GradientPathTable) -> list[SpeedTarget]:
    radius = [row for row in each.rows if row.method.startswith("radius-")]
    if each.protocol != EMULATED or each.network.rate == NO_LIMIT or not radius:
        return []
    worst = max(radius, key=lambda row: abs(row.median / row.predicted - 1))
    what = f"{each.title}: radius off its prediction, most of all {worst.method}, by"
    return [at_most(what, abs(worst.median / worst.predicted - 1), PREDICTED_WITHIN)]


def _against_topk(tables: Sequence[GradientPathTable]) -> list[SpeedTarget]:
    """Compare Radius with topk on all networks: d = 0.4 with 0.1, and equal d."""
    pairs = [(name, *FASTEST_TOPK) for name in OVER_DENSE] + list(AT_EQUAL_DENSITY)
    found: list[SpeedTarget] = []
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
            found.append(at_most(worst, ratios[worst], 1.0))
    return list({target.text: target for target in found}.values())
