"""The memory that "Low-Memory Neural Network Training" reports, counted again beside its tables.

    python -m tools.bench.low_memory.run [--out FOLDER]                          a second, no torch

Counts WRN-28-2 and the DC-Transformer by the report's own conventions (Sohoni et al. 2019) and puts
each count that the report prints, in its tables and its text, beside ours. Draws its figures 1, 2
and 5. Writes README.md, results.json and figure.png to FOLDER. Exit code 1 if a target was missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.low_memory.operation_graph import wide_resnet_graph
from megatron.low_memory.paper_accounting import (
    MB,
    TABLE_3,
    TABLE_4,
    TABLE_4_ACTIVATIONS_MB,
    TABLE_4_BASELINE_MB,
    PaperAccount,
    PaperRow,
    account_of,
    dynamic_conv_network,
    implied_activations,
    translation_total,
    wide_resnet_account,
    wide_resnet_network,
)
from megatron.low_memory.strategies import Strategy, stored_entries
from tools.bench.common.page_files import write_page
from tools.bench.gradient_path.targets import SpeedTarget, at_most
from tools.bench.low_memory.figures import draw

WITHIN_MB = 0.07
"""MB that a total of table 3 may be off: the report prints a tenth of a MB."""
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
  second row of table 3 45.8 MB instead of 42.6 MB.
- The statistics of recomputed normalizations ({statistics:,} bytes in fp32) are in the totals and
  not in the reductions of activations.
- FLOPs are those of convolutions and linear layers, two for a multiplication with an addition.
- Activations of the DC-Transformer are one fitted number, {fitted} MB in 32 bit and half of that in
  16 bit, since the report prints none; with it all eight totals of table 4 come out as printed.
  Model and optimizer are counted from shapes.
"""
CONTRADICTIONS = """\
- Section 4.2.2 says that the setting of 30 % nonzeros needs "just over 6.7 MB" and is a reduction
  of 60.7x. Both cannot be: 404.8 MB / 60.7 = 6.67 MB. The same section says that optimizer memory
  falls by 6x there; its conventions give {optimizer:.1f}x.
- Section 4.3.2 says that RESIDUAL-1 divides the activations of the DC-Transformer by about 5.7.
  Table 4 leaves {fitted} MB of activations at 250 tokens, and the baseline {baseline:,.0f} MB
  at 4,000 tokens: a factor of {factor:.1f}, of which microbatches give 16 and checkpointing
  {left:.1f}.
- Sections 3.1 and 4.2.4 search learning rates in {{0.025, 0.5, 0.1, 0.2}}, appendix A.3 in 0.25,
  0.5, 1 and 2 times 0.1: the 0.5 is a misprint of 0.05.
"""


@dataclass(frozen=True)
class Count:
    """A number that the report prints, and ours.

    `digits`: those after the point that the report prints.
    """

    what: str
    paper: float
    ours: float
    digits: int = 1

    @property
    def line(self) -> str:
        """Return the row of the table."""
        return (
            f"| {self.what} | {self.paper:,.{self.digits}f} | {self.ours:,.{self.digits + 1}f} "
            f"| {self.ours - self.paper:+,.{self.digits + 1}f} |"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    options = _arguments(arguments)
    reached = targets()
    text = "\n".join(_page(reached))
    print(text)
    values = {
        "table 3": [_as_data(row, account_of(row)) for row in TABLE_3],
        "table 4": [_table_4_data(row) for row in TABLE_4],
        "counts": [asdict(count) for count in counts()],
        "figure 5": {name.replace("\\", ""): _strategy_data(s) for name, s in STRATEGIES.items()},
        "targets": [asdict(target) for target in reached],
    }
    write_page(options.out, text=text, values=values, draw=draw)
    return 1 if not all(target.met for target in reached) else 0


def targets() -> list[SpeedTarget]:
    """Return what the counts must reproduce."""
    most = max(TABLE_3, key=lambda row: abs(_off(row)))
    none, star = (
        wide_resnet_account(strategy=s).activations for s in list(STRATEGIES.values())[::3][:2]
    )
    ratio = none.peak.total / star.peak.total
    return [
        at_most(f"MB off a total of table 3, most at {_setting(most)}", abs(_off(most)), WITHIN_MB),
        at_most("RESIDUAL-2*: activations' reduction off 5.77", abs(ratio - 5.77), 0.005, digits=4),
        at_most("table 4: MB off a total, printed in whole MB", _most_off_4(), 0.5),
        at_most("RESIDUAL-2*: FLOPs off +31.1 %", abs(100 * star.flops_ratio - 131.1), 0.05),
    ]


ELEMENTWISE = 3
"""Operations an entry of a recomputed normalization with its ReLU: scale, shift, maximum."""


def counts() -> Iterator[Count]:
    """Yield every count that the report's text prints."""
    network, graph, translation = wide_resnet_network(), wide_resnet_graph(), dynamic_conv_network()
    dense, sparse = account_of(TABLE_3[0]).bytes, account_of(TABLE_3[3]).bytes
    no_norm = Strategy("no-norm")
    cheap = wide_resnet_account(strategy=no_norm).activations
    star = wide_resnet_account(strategy=Strategy("residual-star", 2))
    kept, whole = (stored_entries(graph, n)[0] for n in (no_norm.kept(graph), graph.needed))
    more = ELEMENTWISE * cheap.recomputed_entries / cheap.training_flops
    yield Count("WRN-28-2: million parameters", 1.46, network.parameters / 1e6, digits=2)
    share = 100 * network.prunable / network.parameters
    yield Count('WRN-28-2: % of the parameters in sparse tensors ("over")', 99.6, share)
    yield Count(
        'NO-BN: % of stored entries saved ("nearly")', 50, 100 * (1 - kept / whole), digits=0
    )
    yield Count('NO-BN: % more FLOPs ("less than")', 1, 100 * more, digits=0)
    factor = dense.activations / star.bytes.activations
    yield Count("RESIDUAL-2\\*: reduction of activations", 5.8, factor)
    more = star.activations.flops_ratio - 1
    yield Count('RESIDUAL-2\\*: % more FLOPs ("approximately")', 30, 100 * more, digits=0)
    for kind, paper in (("activations", 115), ("model", 4), ("optimizer", 6)):
        factor = getattr(dense, kind) / getattr(sparse, kind)
        yield Count(f"30 % nonzeros, 10 images: reduction of {kind}", paper, factor, digits=0)
    yield Count("DC-Transformer: million parameters", 38.7, translation.parameters / 1e6)
    share = 100 * translation.prunable / translation.parameters
    yield Count('DC-Transformer: % in sparse tensors ("over")', 98, share, digits=0)
    factor = _baseline_activations() / TABLE_4_ACTIVATIONS_MB / MICROBATCHES
    yield Count('DC-Transformer, RESIDUAL-1: reduction that table 4 leaves ("about")', 5.7, factor)


MICROBATCHES = 4000 // 250
"""Microbatches of the DC-Transformer's minibatch."""


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
    yield "\n### Table 4: DC-Transformer, 250 tokens, RESIDUAL-1\n"
    columns = ["paper, MB", "ours, MB", "difference", "model", "optimizer"]
    yield f"| nonzeros, bits | {' | '.join(columns)} | left for activations by the paper's total |"
    yield "|---|" + "---:|" * (len(columns) + 1)
    for row in TABLE_4:
        model, optimizer = dynamic_conv_network().states(bits=row.bits, nonzero=row.nonzero)
        ours = translation_total(row)
        yield (
            f"| {row.nonzero:.0%}, {row.bits} | {row.printed_mb:.0f} | {ours:.1f} "
            f"| {ours - row.printed_mb:+.1f} | {model / MB:.1f} | {optimizer / MB:.1f} "
            f"| {implied_activations(row):.1f} |"
        )
    yield "\n### Table 1: what each technique alone does to WRN-28-2\n"
    yield from _table_1()
    yield "\nTable 2 prints accuracies alone, of microbatches that are rows of table 3.\n"
    yield "### Counts in the report's text\n"
    yield "| what | paper | ours | difference |\n|---|---:|---:|---:|"
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
    yield ASSUMED.format(statistics=wide_resnet_network().statistics, fitted=TABLE_4_ACTIVATIONS_MB)
    yield "### Where the report contradicts itself\n"
    factor = _baseline_activations() / TABLE_4_ACTIVATIONS_MB
    yield CONTRADICTIONS.format(
        fitted=TABLE_4_ACTIVATIONS_MB,
        baseline=_baseline_activations(),
        factor=factor,
        left=factor / MICROBATCHES,
        optimizer=base.optimizer / account_of(TABLE_3[3]).bytes.optimizer,
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
        "checkpointing: RESIDUAL-2\\*": wide_resnet_account(strategy=Strategy("residual-star", 2)),
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


def _setting(row: PaperRow) -> str:
    strategy = {"none": "NONE", "residual-star-2": "RESIDUAL-2\\*"}[str(row.strategy)]
    return f"{row.nonzero:.0%}, {row.bits}, {row.microbatch}, {strategy}"


def _as_data(row: PaperRow, account: PaperAccount) -> Mapping[str, object]:
    counted = asdict(account.bytes) | {"total": account.bytes.total}
    return asdict(row) | {"strategy": str(row.strategy)} | counted


def _table_4_data(row: PaperRow) -> dict[str, object]:
    model, optimizer = dynamic_conv_network().states(bits=row.bits, nonzero=row.nonzero)
    counted = {"model": model, "optimizer": optimizer, "total MB": translation_total(row)}
    return asdict(row) | {"strategy": str(row.strategy)} | counted


def _strategy_data(strategy: Strategy) -> dict[str, object]:
    course = wide_resnet_account(strategy=strategy).activations
    return {"peak": asdict(course.peak), "flops ratio": course.flops_ratio}


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
