"""The memory that "Low-Memory Neural Network Training" reports, counted again beside its tables.

    python -m tools.bench.low_memory.run [--out FOLDER]                          a second, no torch

Counts WRN-28-2 and the DC-Transformer by the conventions of the report (Sohoni et al. 2019) and
puts the memory columns of its tables 3 and 4 and the counts of its text beside ours. Activations of
table 4 are one fitted number. Draws figures 1, 2 and 5. Writes README.md, results.json and
figure.png to FOLDER. Exit code 1 if a target was missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.low_memory.operation_graph import wide_resnet_graph
from megatron.low_memory.strategies import Strategy, stored_entries
from tools.bench.common.page_files import write_page
from tools.bench.gradient_path.targets import SpeedTarget, at_most
from tools.bench.low_memory.figures import draw
from tools.planner.paper_accounting import (
    MB,
    NONE,
    STAR_2,
    TABLE_3,
    TABLE_4,
    TABLE_4_ACTIVATIONS_MB,
    TABLE_4_BASELINE_MB,
    PaperAccount,
    PaperRow,
    account_of,
    dynamic_conv_network,
    fitted_activations,
    implied_activations,
    translation_total,
    wide_resnet_account,
    wide_resnet_network,
)

WITHIN_MB = 0.07
"""MB that a total of table 3 may be off: 0.05 by its rounding, the rest by its cached quantities.

Appendix B caches small quantities of each normalization, and does not print how many."""
REDUCTION, REDUCTION_WITHIN = 5.8, 0.05
"""Activations without RESIDUAL-2* over those with it (section 3.4), rounded to a tenth."""
MORE_FLOPS, MORE_FLOPS_WITHIN = 30, 5
"""% more FLOPs under RESIDUAL-2* ("approximately", section 4.2.2), rounded to tens."""
STRATEGIES = {
    "NONE (A)": Strategy("none"),
    "NO-BN (B)": Strategy("no-norm"),
    "RESIDUAL-1\\* (C)": Strategy("residual-star", 1),
    "RESIDUAL-2\\* (D)": Strategy("residual-star", 2),
    "RESIDUAL-1": Strategy("residual", 1),
    "RESIDUAL-2": Strategy("residual", 2),
    "EVERY-6": Strategy("every", 6),
    "EVERY-12": Strategy("every", 12),
}
"""Strategies by the report's name; the letters are those of figure 5."""
ASSUMED = """\
- The output of the first convolution is not stored under RESIDUAL-m and RESIDUAL-m\\*: it is no
  residual block, so the first segment recomputes it from the image. Storing it would make the
  second row of table 3 {with_stem:.1f} MB instead of {without_stem:.1f} MB; the report prints
  {printed} MB.
- The statistics of recomputed normalizations ({statistics:,} bytes in fp32) are in the totals and
  not in the reductions of activations.
- FLOPs are those of convolutions and linear layers, two for a multiplication with an addition.
- Activations of the DC-Transformer are fitted to table 4 and not counted: one number, {fitted} MB
  in 32 bit and half of that in 16 bit, since the report prints none. With it all eight totals of
  table 4 come out as printed. Model and optimizer are counted from shapes.
"""
CONTRADICTIONS = """\
- Section 4.2.2 says that the setting of 30 % nonzeros needs "just over {printed} MB" and is a
  reduction of {reduction}x. Both cannot be: {baseline_3} MB / {reduction} = {needed:.2f} MB. The
  same section says that optimizer memory falls by 6x there; its conventions give {optimizer:.1f}x.
- Section 4.3.2 says that RESIDUAL-1 divides the activations of the DC-Transformer by about 5.7.
  Table 4 leaves {fitted} MB of activations at 250 tokens, and the baseline {baseline:,.0f} MB
  at 4,000 tokens: a factor of {factor:.1f}, of which microbatches give {microbatches} and
  checkpointing {left:.1f}.
- Sections 3.1 and 4.2.4 search learning rates in {{0.025, 0.5, 0.1, 0.2}}, appendix A.3 in 0.25,
  0.5, 1 and 2 times 0.1: the 0.5 is a misprint of 0.05.
"""


@dataclass(frozen=True)
class Count:
    """A number that the report prints, and ours.

    Attributes:
        what: The quantity and its unit.
        source: The section or footnote of the report.
        paper: The report's number.
        ours: Our number.
        digits: Digits after the point that the report prints.
        is_fitted: Whether our number follows from the fitted activations of table 4.
    """

    what: str
    source: str
    paper: float
    ours: float
    digits: int = 1
    is_fitted: bool = False

    @property
    def line(self) -> str:
        """The row of the table."""
        ours = f"{self.ours:,.{self.digits + 1}f}{' (fitted)' if self.is_fitted else ''}"
        return (
            f"| {self.what} | {self.source} | {self.paper:,.{self.digits}f} | {ours} "
            f"| {self.ours - self.paper:+,.{self.digits + 1}f} |"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    reached = targets()
    text = "\n".join(_page(reached))
    print(text)
    values = {
        "table_3": [_as_data(row, account_of(row)) for row in TABLE_3],
        "table_4": [_table_4_data(row) for row in TABLE_4],
        "counts": [asdict(count) for count in counts()],
        "figure_5": {name.replace("\\", ""): _strategy_data(s) for name, s in STRATEGIES.items()},
        "targets": [asdict(target) for target in reached],
    }
    write_page(options.out, text=text, values=values, draw=draw)
    return 1 if not all(target.met for target in reached) else 0


def targets() -> list[SpeedTarget]:
    """Return the figures of the report that the counts must reproduce."""
    most = max(TABLE_3, key=lambda row: abs(_off(row)))
    none, star = (wide_resnet_account(strategy=s).activations for s in (NONE, STAR_2))
    ratio = none.peak.total / star.peak.total
    more = 100 * (star.flops_ratio - 1)
    return [
        at_most(f"table 3: MB off a total, most at {_setting(most)}", abs(_off(most)), WITHIN_MB),
        at_most(
            "table 4, activations fitted: MB off a total, printed in whole MB", _most_off_4(), 0.5
        ),
        at_most(
            f"RESIDUAL-2\\*: activations reduced {ratio:.2f}x, off the report's {REDUCTION}x by",
            abs(ratio - REDUCTION),
            REDUCTION_WITHIN,
        ),
        at_most(
            f"RESIDUAL-2\\*: {more:.1f} % more FLOPs, off the report's {MORE_FLOPS} % by",
            abs(more - MORE_FLOPS),
            MORE_FLOPS_WITHIN,
            digits=1,
        ),
    ]


ELEMENTWISE = 3
"""Operations an entry of a recomputed normalization with its ReLU: scale, shift, maximum."""


def counts() -> Iterator[Count]:
    """Yield the counts that the report's text prints."""
    network, graph, translation = wide_resnet_network(), wide_resnet_graph(), dynamic_conv_network()
    dense, sparse = account_of(TABLE_3[0]).bytes, account_of(TABLE_3[3]).bytes
    no_norm = Strategy("no-norm")
    cheap = wide_resnet_account(strategy=no_norm).activations
    star = wide_resnet_account(strategy=STAR_2)
    kept, whole = (stored_entries(graph, n)[0] for n in (no_norm.kept(graph), graph.needed))
    more = ELEMENTWISE * cheap.recomputed_entries / cheap.training_flops
    yield Count("WRN-28-2: million parameters", "4.2.1", 1.46, network.parameters / 1e6, digits=2)
    share = 100 * network.prunable / network.parameters
    yield Count(
        'WRN-28-2: % of the parameters in sparse tensors ("over")', "footnote 2", 99.6, share
    )
    saved = 100 * (1 - kept / whole)
    yield Count('NO-BN: % of stored entries saved ("nearly")', "3.4", 50, saved, digits=0)
    yield Count('NO-BN: % more FLOPs ("less than")', "3.4", 1, 100 * more, digits=0)
    factor = dense.activations / star.bytes.activations
    yield Count("RESIDUAL-2\\*: reduction of activations", "3.4", REDUCTION, factor)
    more = 100 * (star.activations.flops_ratio - 1)
    yield Count(
        'RESIDUAL-2\\*: % more FLOPs ("approximately")', "4.2.2", MORE_FLOPS, more, digits=0
    )
    for kind, paper in (("activations", 115), ("model", 4), ("optimizer", 6)):
        factor = getattr(dense, kind) / getattr(sparse, kind)
        what = f"30 % nonzeros, 10 images: reduction of {kind}"
        yield Count(what, "4.2.2", paper, factor, digits=0)
    yield Count("DC-Transformer: million parameters", "4.3.1", 38.7, translation.parameters / 1e6)
    share = 100 * translation.prunable / translation.parameters
    yield Count('DC-Transformer: % in sparse tensors ("over")', "4.3.1", 98, share, digits=0)
    factor = _baseline_activations() / TABLE_4_ACTIVATIONS_MB / MICROBATCHES
    yield Count(
        'DC-Transformer, RESIDUAL-1: reduction that table 4 leaves ("approximately")',
        "4.3.2",
        5.7,
        factor,
        is_fitted=True,
    )


MICROBATCHES = 4000 // TABLE_4[0].microbatch
"""Microbatches of the DC-Transformer's minibatch of 4,000 tokens (caption of table 4)."""


def _page(reached: Sequence[SpeedTarget]) -> Iterator[str]:
    yield "MB are 10^6 bytes. Nothing was trained: the report's memory figures are counts too.\n"
    yield "### Table 3: WRN-28-2, the peak of a step\n"
    columns = ["paper, MB", "ours, MB", "difference", "paper", "ours"]
    columns += ["model", "optimizer", "activations"]
    yield f"| nonzeros, bits, images, strategy | {' | '.join(columns)} |"
    yield "|---|" + "---:|" * len(columns)
    base = account_of(TABLE_3[0]).bytes
    for row in TABLE_3:
        counted = account_of(row).bytes
        times = f"{row.printed_reduction:.1f}x" if row.printed_reduction else "-"
        kinds = (counted.model, counted.optimizer, counted.activations + counted.statistics)
        cells = [
            _setting(row),
            f"{row.printed_mb:.1f}",
            f"{counted.total / MB:.3f}",
            f"{_off(row):+.3f}",
            times,
            f"{base.total / counted.total:.1f}x",
            *(f"{kind / MB:.3f}" for kind in kinds),
        ]
        yield f"| {' | '.join(cells)} |"
    yield "\n### Table 4: DC-Transformer, 250 tokens, RESIDUAL-1; activations are fitted\n"
    columns = ["paper, MB", "ours, MB", "difference", "model", "optimizer"]
    columns += ["activations, fitted", "left for activations by the paper's total"]
    yield f"| nonzeros, bits | {' | '.join(columns)} |"
    yield "|---|" + "---:|" * len(columns)
    for row in TABLE_4:
        model, optimizer = dynamic_conv_network().states(bits=row.bits, nonzero=row.nonzero)
        ours = translation_total(row)
        yield (
            f"| {row.nonzero:.0%}, {row.bits} | {row.printed_mb:.0f} | {ours:.1f} "
            f"| {ours - row.printed_mb:+.1f} | {model / MB:.1f} | {optimizer / MB:.1f} "
            f"| {fitted_activations(row):.2f} | {implied_activations(row):.1f} |"
        )
    yield "\n### Table 1: what each technique alone does to WRN-28-2\n"
    yield from _table_1()
    yield "\nTable 2 prints accuracies alone, of microbatches that are rows of table 3.\n"
    yield "### Counts in the report's text\n"
    yield "| what | section | paper | ours | difference |\n|---|---|---:|---:|---:|"
    yield from (count.line for count in counts())
    yield "\n### Figure 1: shares of a step's memory\n"
    yield from _figure_1()
    yield "\n### Figure 5: operations against activations, fp32, 100 images\n"
    yield "| strategy | activations at the peak, MB | reduction | FLOPs | the peak is at |"
    yield "|---|---:|---:|---:|---|"
    for name, strategy in STRATEGIES.items():
        course = wide_resnet_account(strategy=strategy).activations
        peak = course.peak
        yield (
            f"| {name} | {peak.total / MB:.2f} | {base.activations / peak.total:.2f}x "
            f"| {course.flops_ratio:.3f} | `{peak.operation}`, backward |"
        )
    yield "\n### What the counts assume where the report is silent\n"
    without_stem = account_of(TABLE_3[1]).bytes.total / MB
    yield ASSUMED.format(
        statistics=wide_resnet_network().statistics,
        fitted=TABLE_4_ACTIVATIONS_MB,
        without_stem=without_stem,
        with_stem=without_stem + _stem_mb(TABLE_3[1]),
        printed=TABLE_3[1].printed_mb,
    )
    yield "### Where the report contradicts itself\n"
    factor = _baseline_activations() / TABLE_4_ACTIVATIONS_MB
    best = TABLE_3[3]
    assert best.printed_reduction is not None
    yield CONTRADICTIONS.format(
        printed=best.printed_mb,
        reduction=best.printed_reduction,
        baseline_3=TABLE_3[0].printed_mb,
        needed=TABLE_3[0].printed_mb / best.printed_reduction,
        microbatches=MICROBATCHES,
        fitted=TABLE_4_ACTIVATIONS_MB,
        baseline=_baseline_activations(),
        factor=factor,
        left=factor / MICROBATCHES,
        optimizer=base.optimizer / account_of(best).bytes.optimizer,
    )
    yield "### Targets\n"
    yield from (f"- {target}" for target in reached)
    yield ""


def _table_1() -> Iterator[str]:
    yield "| technique | model, MB | optimizer, MB | activations, MB | FLOPs |"
    yield "|---|---:|---:|---:|---:|"
    alone = {
        "none": wide_resnet_account(),
        "sparsity: 30 % nonzeros": wide_resnet_account(nonzero=0.3),
        "low precision: 16 bit": wide_resnet_account(bits=16),
        "microbatching: 10 images": wide_resnet_account(microbatch=10),
        "checkpointing: RESIDUAL-2\\*": wide_resnet_account(strategy=STAR_2),
    }
    for name, account in alone.items():
        each = account.bytes
        kinds = (each.model, each.optimizer, each.activations + each.statistics)
        # Only nonzeros are multiplied; 16-bit operations are cheaper, not fewer.
        flops = "fewer" if "sparsity" in name else f"{account.activations.flops_ratio:.3f}"
        yield f"| {name} | {' | '.join(f'{kind / MB:.2f}' for kind in kinds)} | {flops} |"


def _figure_1() -> Iterator[str]:
    yield "| model | parameters | optimizer | activations | all, MB |\n|---|---:|---:|---:|---:|"
    wide = account_of(TABLE_3[0]).bytes
    shares = " | ".join(f"{share:.1%}" for share in wide.shares.values())
    yield f"| WRN-28-2, 100 images | {shares} | {wide.total / MB:,.1f} |"
    states = [each / MB for each in dynamic_conv_network().states(bits=32)]
    kinds = (*states, _baseline_activations())
    total = TABLE_4_BASELINE_MB
    shares = " | ".join(f"{kind / total:.1%}" for kind in kinds)
    yield f"| DC-Transformer, 4,000 tokens, its total the paper's | {shares} | {total:,} |"


def _baseline_activations() -> float:
    return TABLE_4_BASELINE_MB - sum(dynamic_conv_network().states(bits=32)) / MB


def _off(row: PaperRow) -> float:
    return account_of(row).bytes.total / MB - row.printed_mb


def _most_off_4() -> float:
    return max(abs(translation_total(row) - row.printed_mb) for row in TABLE_4)


def _stem_mb(row: PaperRow) -> float:
    """Return the MB by which a row's peak grows if the first convolution's output is stored.

    The peak is in the backward pass of a later segment, during which the output would be stored.
    """
    peak = account_of(row).activations.peak
    assert peak.is_backward and peak.block > row.strategy.m, "behind the first segment"
    return wide_resnet_graph().size("conv0") * row.microbatch * row.bits / 8 / MB


def _setting(row: PaperRow) -> str:
    strategy = {"none": "NONE", "residual-star-2": "RESIDUAL-2\\*"}[str(row.strategy)]
    return f"{row.nonzero:.0%}, {row.bits}, {row.microbatch}, {strategy}"


def _as_data(row: PaperRow, account: PaperAccount) -> Mapping[str, object]:
    counted = asdict(account.bytes) | {"total": account.bytes.total}
    return asdict(row) | {"strategy": str(row.strategy)} | counted


def _table_4_data(row: PaperRow) -> dict[str, object]:
    model, optimizer = dynamic_conv_network().states(bits=row.bits, nonzero=row.nonzero)
    counted = {
        "model": model,
        "optimizer": optimizer,
        "activations_fitted_mb": fitted_activations(row),
        "total_with_fitted_mb": translation_total(row),
    }
    return asdict(row) | {"strategy": str(row.strategy)} | counted


def _strategy_data(strategy: Strategy) -> dict[str, object]:
    course = wide_resnet_account(strategy=strategy).activations
    return {"peak": asdict(course.peak), "flops_ratio": course.flops_ratio}


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.low_memory.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=None, help="folder for the report")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
