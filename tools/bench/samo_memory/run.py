"""Bytes of model state a parameter under SAMO, beside Eq. 2 and Fig. 2 of the paper.

    python -m tools.bench.samo_memory.run [--rss] [--out FOLDER]        a minute; with --rss, five

Trains a GPT of 14M parameters in bf16 for two steps at each sparsity (random masks) and counts its
tensors; at most one dense gradient may be alive in backward. `--rss` adds the peak resident memory
of runs of `pretrain_gpt.py` (GPT 124M, four steps, a checkpoint), each in a process of its own,
less what it is after torch was imported. Writes README.md, results.json and figure.png to FOLDER.
Exit code 1 if a target was missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from megatron.errors import missing_extra
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from megatron.report.charts import PALETTE
from samo.memory import paper_bytes
from tools.bench.common.contenders import Ours, Shape, quiet
from tools.bench.common.netlab import REPO
from tools.bench.common.page_files import write_page
from tools.bench.common.tensors import storages
from tools.bench.gradient_path.cost_rank import SMALL_GPT2
from tools.bench.gradient_path.targets import SpeedTarget, at_most
from tools.bench.samo_memory.model_state import KINDS, ModelState, count, watch_gradients

SPARSITIES = ("0", "0.25", "0.5", "0.8", "0.9", "0.95")
GRADIENTS = {2: ("--grad-reduce-in-bf16",), 4: ()}
"""Bytes per entry of a gradient, with the flags of bf16 runs that select them."""
SHAPE = Shape(sequence=96, batch=2)
"""No activation has the shape of a weight, so that gradients can be told from activations."""
SMOKE = replace(SHAPE, layers=2, hidden=32, heads=2, vocabulary=512, sequence=40)
PAPER = 20
"""Bytes per parameter of the paper's dense training, which keeps fp32 copies of gradients."""
WITHIN = 0.1
"""Tolerance in bytes per parameter; 0.08 of it is the optimizer's chunk of 1 MiB."""
EXACTLY = 0.01
NOTE = f"""Counted after two steps, a parameter: f is stored over all parameters, p the sparsity of
what is pruned, `scratch` the optimizer's chunk of 1 MiB, `other` what else the steps left. 24 f + 2
is Eq. 2 of the paper; `saved` and its Fig. 2 are of the {PAPER} bytes of its dense training.
"""
RUN = "--train-iters 4 --eval-iters 0 --log-interval 1 --bf16"


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """A measurement of one sparsity ("dense": the dense path).

    `gradients`: maximum number of whole gradients alive at once.
    """

    sparsity: str
    grad_bytes: int
    state: ModelState
    gradients: int

    @property
    def equation(self) -> float:
        """18 f + 2, or 20 f + 2 with gradients in fp32."""
        return (self.grad_bytes + 16) * self.state.f + 2

    @property
    def paper(self) -> float:
        """Eq. 2."""
        return paper_bytes(self.state.entries, self.state.stored) / self.state.entries

    @property
    def saved(self) -> float:
        """Share of the paper's dense states."""
        return 1 - self.state.each / PAPER


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    shape = SMOKE if options.smoke else SHAPE
    rows = [
        measure(shape, sparsity, grad_bytes)
        for grad_bytes in GRADIENTS
        for sparsity in ("dense", *SPARSITIES)
    ]
    peaks = (
        peak_rss(replace(SMOKE if options.smoke else SMALL_GPT2, batch=1)) if options.rss else {}
    )
    reached = [target for grad_bytes in GRADIENTS for target in targets(rows, grad_bytes)]
    text = as_markdown(rows, peaks, reached)
    print(text)
    if options.out is not None:
        write(options.out, text, rows, peaks, reached)
    return 1 if not all(target.met for target in reached) and not options.smoke else 0


def measure(shape: Shape, sparsity: str, grad_bytes: int) -> MemoryRow:
    """Train two steps and count; the second step counts whole gradients alive at once."""
    groups = ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=1), rank=0)
    before = storages()
    with tempfile.TemporaryDirectory() as folder, quiet(Path(folder) / "console"):
        flags = [*path_flags(sparsity, "random"), *GRADIENTS[grad_bytes]]
        ours = Ours(shape.flags(dtype="bf16", extra=flags), groups, Path(folder))
        ours.step()
        watch = watch_gradients(ours.trainer)
        ours.step()
        assert watch.seen > 0, "there were gradients"
        state = count(ours.trainer.optimizer, before)
        ours.metrics.close()
    return MemoryRow(sparsity=sparsity, grad_bytes=grad_bytes, state=state, gradients=watch.most)


def path_flags(sparsity: str, ticket: str) -> list[str]:
    """Return the flags of `sparsity` with masks of this ticket, or of the dense path."""
    if sparsity == "dense":
        return ["--grad-path", "dense"]
    return ["--grad-path", "samo", "--samo-sparsity", sparsity, "--samo-pruning", ticket]


def peak_rss(shape: Shape) -> dict[str, int]:
    """Return peak bytes of short training runs beyond an imported torch, by name of the run."""
    found: dict[str, int] = {}
    for grad_bytes, how in GRADIENTS.items():
        for sparsity in ("dense", "0.9"):
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "rss.json"
                flags = shape.flags(dtype="bf16", extra=[*path_flags(sparsity, "magnitude"), *how])
                flags += [*RUN.split(), "--run-dir", str(Path(folder) / "run")]
                program = [sys.executable, "-m", "tools.bench.samo_memory.peak_rss", str(file)]
                subprocess.run(
                    [*program, *flags],
                    check=True,
                    stdout=subprocess.DEVNULL,
                    cwd=REPO,
                )
                seen = json.loads(file.read_text(encoding="utf-8"))
            path = "dense" if sparsity == "dense" else f"samo-{sparsity}"
            found[f"{path}, {8 * grad_bytes}-bit gradients"] = seen["peak"] - seen["before"]
    return found


def targets(rows: Sequence[MemoryRow], grad_bytes: int) -> list[SpeedTarget]:
    """Return the targets of the rows with such gradients, by the row closest to missing them."""
    mine = [row for row in rows if row.grad_bytes == grad_bytes and row.sparsity != "dense"]
    pruned = [row for row in mine if row.state.indexed]

    def exactly(row: MemoryRow) -> float:
        kinds, entries = row.state.bytes, row.state.entries
        rest = (kinds["scratch"] + kinds["other"]) / entries
        return abs(row.state.each - rest - row.state.expected(grad_bytes))

    def worst(
        what: str, of: Sequence[MemoryRow], limit: float, value: Callable[[MemoryRow], float]
    ) -> SpeedTarget:
        row = max(of, key=value)
        return at_most(f"{name}: {what}, most at p = {row.sparsity}", value(row), limit, digits=4)

    name = f"{8 * grad_bytes}-bit gradients"
    formula = f"{grad_bytes + 16} f + 2"
    return [
        worst("bytes a parameter / (24 f + 2)", mine, 1.0, lambda r: r.state.each / r.paper),
        worst(f"bytes above {formula}", pruned, WITHIN, lambda r: r.state.each - r.equation),
        worst("off what entries and index are, in bytes", mine, EXACTLY, exactly),
        worst("dense gradients alive at once", mine, 1, lambda r: r.gradients),
    ]


def as_markdown(
    rows: Sequence[MemoryRow], peaks: Mapping[str, int], reached: Sequence[SpeedTarget]
) -> str:
    """Return tables by bytes of a gradient, peaks of runs, and targets."""
    parts = [NOTE]
    for grad_bytes in GRADIENTS:
        mine = [row for row in rows if row.grad_bytes == grad_bytes]
        parts.append(_table(mine, grad_bytes))
    if peaks:
        lines = ["### Peak resident memory of a run, GPT 124M in bf16, less an imported torch", ""]
        lines += ["| run | MB | of dense |", "|---|---:|---:|"]
        dense = 1
        for name, peak in peaks.items():
            dense = peak if name.startswith("dense") else dense
            lines.append(f"| {name} | {peak / 1e6:,.0f} | {peak / dense:.2f} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join([*parts, "### Targets\n", "".join(f"- {target}\n" for target in reached)])


def _table(rows: Sequence[MemoryRow], grad_bytes: int) -> str:
    entries, formula = rows[0].state.entries, f"{grad_bytes + 16} f + 2"
    columns = ["p", "f", *KINDS, "all", "/ dense", formula, "24 f + 2", "saved", "Fig. 2"]
    lines = [f"### Bytes a parameter, {entries:,} of them in bf16, {8 * grad_bytes}-bit gradients"]
    columns += ["gradients alive"]
    lines += ["", f"| {' | '.join(columns)} |", "|---:" * len(columns) + "|"]
    for row in rows:
        kinds = [row.state.bytes[kind] / entries for kind in KINDS]
        each = row.state.each
        numbers = [row.state.f, *kinds, each, each / rows[0].state.each, row.equation, row.paper]
        cells = [row.sparsity, *(f"{number:.3f}" for number in numbers)]
        cells += [f"{row.saved:.1%}", f"{1 - row.paper / PAPER:.1%}", str(row.gradients)]
        if row.sparsity == "dense":
            cells[-5:-1] = [
                "",
                "",
                f"{row.saved:.1%}",
                "",
            ]  # the equations are about compressed states
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write(
    folder: Path,
    text: str,
    rows: Sequence[MemoryRow],
    peaks: Mapping[str, int],
    reached: Sequence[SpeedTarget],
) -> None:
    """Write README.md, results.json and figure.png to `folder`."""
    values = {
        "rows": [asdict(row) for row in rows],
        "peaks": dict(peaks),
        "targets": [asdict(target) for target in reached],
    }
    write_page(folder, text=text, values=values, draw=partial(plot, rows=rows))


def plot(file: Path, rows: Sequence[MemoryRow]) -> None:
    """Draw the percentage of dense states saved by the share of pruned entries, as in Fig. 2."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("matplotlib", "log") from None
    figure = Figure(figsize=(5.5, 3.8), dpi=130, layout="constrained")
    axes = figure.subplots()
    pruned = [number / 100 for number in range(101)]
    paper = [100 * (1 - (24 * (1 - p) + 2) / PAPER) for p in pruned]
    axes.plot(pruned, paper, color="#6b7280", label="Fig. 2: 24 f + 2")
    for color, grad_bytes in zip(PALETTE, GRADIENTS, strict=False):
        mine = [r for r in rows if r.grad_bytes == grad_bytes and r.sparsity != "dense"]
        label = f"measured, {8 * grad_bytes}-bit gradients"
        saved = [100 * row.saved for row in mine]
        axes.plot([1 - row.state.f for row in mine], saved, "o-", color=color, label=label)
    axes.axhline(0, color="#111827", linewidth=0.8)
    axes.set_xlabel("share of all parameters that were pruned, 1 - f")
    axes.set_ylabel(f"% saved of {PAPER} bytes a parameter")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(file, format="png")


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.samo_memory.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rss", action="store_true", help="also peak memory of runs of GPT 124M")
    parser.add_argument("--out", type=Path, default=None, help="folder for the report")
    parser.add_argument("--smoke", action="store_true", help="a tiny model: does the tool work?")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
