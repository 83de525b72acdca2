"""One share of peak for all products, or a law of their shapes: errors on products and papers.

    python tools/simulate.py --paper shapes [--out FOLDER]

writes `shapes.md` and `shapes.json`. The law is `tools.planner.products.ShapeLaw`. Its constant is
fitted to the published rates of products of a V100; the papers' constants are then fitted again
with it, as without it, to the same rows.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tools.planner.products import Product, ShapeLaw
from tools.planner.replay import axonn, radius, samo
from tools.planner.replay.axonn_scaling import scaling
from tools.planner.replay.rows import PREDICTED, ReplayTable

PEAK = 125.0
PRODUCTS = (
    # m, n, k, TFLOP/s: cuBLAS on a V100, 16-bit inputs and 32-bit sums, without transposed first
    # matrices; products of 128 and more in each dimension. Baidu's DeepBench, at commit da81ba7,
    # results/train/DeepBench_NV_V100.xlsx (https://github.com/baidu-research/DeepBench).
    # fmt: off
    (1760, 128, 1760, 25.6),
    (1760, 7000, 1760, 89.4),
    (2048, 128, 2048, 34.6),
    (2048, 7000, 2048, 98.0),
    (2560, 128, 2560, 46.6),
    (2560, 7000, 2560, 103.8),
    (4096, 128, 4096, 64.1),
    (4096, 7000, 4096, 112.3),
    (1760, 7133, 1760, 97.8),
    (2048, 7133, 2048, 104.1),
    (2560, 7133, 2560, 105.2),
    (4096, 7133, 4096, 108.8),
    (5124, 9124, 1760, 94.4),
    (5124, 9124, 2048, 96.1),
    (5124, 9124, 2560, 96.6),
    (5124, 9124, 4096, 103.5),
    (7680, 128, 2560, 68.0),
    (3072, 128, 1024, 33.6),
    (3072, 7435, 1024, 102.6),
    (7680, 5481, 2560, 108.6),
    (1024, 700, 512, 40.8),
    (7680, 24000, 2560, 104.8),
    (6144, 24000, 2048, 106.2),
    (4608, 24000, 1536, 98.6),
    (8448, 24000, 2816, 106.8),
    (3072, 24000, 1024, 93.8),
    (7680, 48000, 2560, 105.4),
    (6144, 48000, 2048, 107.3),
    (4608, 48000, 1536, 99.8),
    (8448, 48000, 2816, 107.6),
    (3072, 48000, 1024, 95.3),
    # fmt: on
)
STEP = 4
MOST = 1024


@dataclass(frozen=True)
class ProductFit:
    """The law's two constants for `PRODUCTS`, and the errors that it leaves, in percent."""

    half: float
    share: float
    errors: Sequence[float]

    @property
    def mean(self) -> float:
        """The mean error in percent."""
        return statistics.mean(self.errors)


def product_fit(half: float) -> ProductFit:
    """Return the best share of peak of large products with a constant of the law.

    It is the median, which single products do not move.
    """
    law = ShapeLaw(half)
    ideal = [1 / law.slowness([Product(m, n, k)]) for m, n, k, _ in PRODUCTS]
    ratios = [rate / PEAK / each for each, (*_, rate) in zip(ideal, PRODUCTS, strict=True)]
    share = math.exp(statistics.median(map(math.log, ratios)))
    return ProductFit(half, share, [100 * abs(share / ratio - 1) for ratio in ratios])


def best_fit() -> ProductFit:
    """Return the fit with the least mean error."""
    return min(map(product_fit, range(0, MOST + 1, STEP)), key=lambda fit: fit.mean)


def paper_tables(half: float) -> list[ReplayTable]:
    """Return the papers' tables with the law, all constants of the machines fitted anew.

    The image networks of SAMO have convolutions and are left out.
    """
    own, summit = (
        module.fitted(replace(start, half_size=half))
        for module, start in ((radius, radius.PERLMUTTER), (axonn, axonn.SUMMIT))
    )
    theirs = samo.fitted(replace(axonn.SUMMIT, half_size=half))
    return [
        *radius.tables(own), axonn.ablation(summit), scaling(summit),
        *samo.tables(theirs, summit),
    ]  # fmt: skip


def paper_errors(tables: Sequence[ReplayTable]) -> dict[str, list[float]]:
    """Return the mean error of each table, [percent, points]; NaN for a table without such rows."""
    found: dict[str, list[float]] = {}
    kept = {"every predicted row": [row for table in tables for row in table.rows]}
    for name, rows in {**{table.name: table.rows for table in tables}, **kept}.items():
        found[name] = []
        for shares in (False, True):
            errors = [
                abs(row.error) for row in rows if row.kind == PREDICTED and row.is_share == shares
            ]
            found[name].append(statistics.mean(errors) if errors else math.nan)
    return found


def data() -> dict[str, Any]:
    """Return the errors of both, for JSON."""
    best = best_fit()
    fits = [product_fit(0), best]
    return {
        "products": [
            {"half": fit.half, "share": fit.share, "mean": fit.mean, "most": max(fit.errors)}
            for fit in fits
        ],
        "papers": [paper_errors(paper_tables(fit.half)) for fit in fits],
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the page."""
    one, law = found["products"]
    ends = [papers["every predicted row"] for papers in found["papers"]]
    wins = all(after <= before for before, after in zip(*ends, strict=True))
    yield "# One share of peak, or a law of shapes"
    yield ""
    yield (
        f"A law of the shapes of products brings the mean error on {len(PRODUCTS)} published "
        f"products from {one['mean']:.0f} to {law['mean']:.0f} %."
    )
    yield (
        f"On the papers' predicted rows it brings the error from {ends[0][0]:.2f} to "
        f"{ends[1][0]:.2f} %, and of shares from {ends[0][1]:.2f} to {ends[1][1]:.2f} points."
    )
    yield (
        "Both fall, so a site with `PRODUCT_HALF_SIZE` gains."
        if wins
        else "Not both fall, so one number stays the default: no site sets `PRODUCT_HALF_SIZE`."
    )
    yield (
        "Differences of a tenth of a point are noise: which message comes first depends on the "
        "last digits of the constants."
    )
    yield ""
    yield "    python tools/simulate.py --paper shapes --out tools/planner/replay"
    yield ""
    yield (
        "A product of [m, k] and [k, n] reaches m / (m + d) n / (n + d) k / (k + d) of the rate of "
        "large products (`tools/planner/products.py`)."
    )
    yield (
        "The constant d is fitted to cuBLAS on a V100, by Baidu's DeepBench; the papers' own "
        "constants are fitted to the same rows as without the law."
    )
    yield (
        "A dimension that a tile does not divide, and a GPU whose last wave of tiles is not full, "
        "are not in the law."
    )
    yield ""
    yield "| | one number | law |"
    yield "|---|---:|---:|"
    yield f"| d, entries | 0 | {law['half']:.0f} |"
    yield f"| products: share of peak of large ones | {one['share']:.3f} | {law['share']:.3f} |"
    yield f"| products: mean error | {one['mean']:.1f} % | {law['mean']:.1f} % |"
    yield f"| products: largest error | {one['most']:.0f} % | {law['most']:.0f} % |"
    for name, before in found["papers"][0].items():
        after = found["papers"][1][name]
        for old, new, unit in zip(before, after, ("%", "points"), strict=True):
            if not math.isnan(old):
                yield f"| {name} | {old:.2f} {unit} | {new:.2f} {unit} |"


def write(found: dict[str, Any], folder: Path) -> None:
    """Write shapes.md and shapes.json to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "shapes.md").write_text("\n".join(lines(found)) + "\n", encoding="utf-8")
    (folder / "shapes.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
