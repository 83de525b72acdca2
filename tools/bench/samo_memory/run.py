"""Bytes of model state a parameter under SAMO, beside Eq. 2 and Fig. 2 of the paper.

    python -m tools.bench.samo_memory.run [--rss] [--out FOLDER]    two minutes; with --rss, five

Trains a GPT of 14M parameters in bf16 for two steps at each sparsity (random masks) and counts its
tensors; at most one dense gradient may be alive in backward. `--moments 1` trains it with momentum
SGD in place of AdamW. The paper's image networks are counted too, dense and at p = 0.9 with
momentum SGD: the tensors are those of training, backward makes random gradients. `--rss` adds the
peak resident memory of runs of `pretrain_gpt.py` (GPT 124M, four steps, a checkpoint), each in a
process of its own, less what it is after torch was imported. Writes README.md, results.json and
figure.png to FOLDER. Exit code 1 if a target was missed.
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
from samo.memory import (
    ADAM,
    MASTER_BYTES,
    MOMENT_BYTES,
    POSITION_BYTES,
    formula,
    paper_bytes,
)
from tools.bench.common.contenders import Ours, Shape, quiet
from tools.bench.common.emulated import EmulatedModel, EngineTraining
from tools.bench.common.methods import method
from tools.bench.common.netlab import REPO
from tools.bench.common.page_files import write_page
from tools.bench.common.tensors import release, storages
from tools.bench.gradient_path.contenders import alone, emulated
from tools.bench.gradient_path.cost_rank import SMALL_GPT2
from tools.bench.gradient_path.targets import SpeedTarget, at_most
from tools.bench.samo_memory.model_state import KINDS, ModelState, count, watch_gradients
from tools.planner.replay.image_networks import NAMES, network
from tools.planner.samo_equations import MOMENTUM_SGD, default_bytes

SPARSITIES = ("0", "0.25", "0.5", "0.8", "0.9", "0.95")
GRADIENTS = {2: ("--grad-reduce-in-bf16",), 4: ()}
"""Bytes per entry of a gradient, with the flags of bf16 runs that select them."""
SHAPE = Shape(sequence=96, batch=2)
"""No activation has the shape of a weight, so that gradients can be told from activations."""
SMOKE = replace(SHAPE, layers=2, hidden=32, heads=2, vocabulary=512, sequence=40)
IMAGE_METHODS = ("dense-bf16", "samo-0.9")
WITHIN = 0.1
"""Tolerance in bytes per parameter; 0.08 of it is the optimizer's chunk of 1 MiB."""
EXACTLY = 0.01
NOTE = """Counted after two steps, a parameter: f is stored over all parameters, p the sparsity of
what is pruned, `scratch` the optimizer's chunk of 1 MiB, `other` what else the steps left.
{equation} is Eq. 2 of the paper; `saved` and its Fig. 2 are of the {dense} bytes of its dense
training, which keeps fp32 copies of gradients.
"""
IMAGE_NOTE = """The paper's image networks in bf16 with 16-bit gradients, in MB (10^6 bytes). This
program counts 12 bytes a parameter dense and 14 f + 2 pruned, the paper 16 and, by Eq. 2 with one
moment, 20 f + 2. At f = 0.1 exactly the paper's count falls
{told};
the vectors that are not pruned make f a little more.
"""
RUN = "--train-iters 4 --eval-iters 0 --log-interval 1 --bf16"


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """A measurement of one sparsity, or of the dense path ("dense").

    `gradients` is the maximum number of whole gradients that were alive at once.
    """

    sparsity: str
    grad_bytes: int
    state: ModelState
    gradients: int
    moments: int = ADAM

    @property
    def equation(self) -> float:
        """18 f + 2 bytes a parameter, 20 f + 2 with fp32 gradients; 4 f less with momentum SGD."""
        return own_bytes(self.grad_bytes, self.moments) * self.state.f + 2

    @property
    def paper(self) -> float:
        """Eq. 2 of the paper, in bytes a parameter."""
        entries = self.state.entries
        return paper_bytes(entries, self.state.stored, self.moments) / entries

    @property
    def saved(self) -> float:
        """Saved share of the paper's dense model state."""
        return 1 - self.state.each / default_bytes(self.moments)


@dataclass(frozen=True, kw_only=True)
class ImageMemoryRow:
    """A measurement of an image network, trained with momentum SGD and 16-bit gradients."""

    network: str
    method: str
    state: ModelState

    @property
    def paper(self) -> int:
        """Bytes by the paper's count: 16 a parameter of dense training, else Eq. 2."""
        state = self.state
        if state.stored == state.entries:
            return default_bytes(MOMENTUM_SGD) * state.entries
        return paper_bytes(state.entries, state.stored, MOMENTUM_SGD)

    @property
    def equation(self) -> int:
        """Bytes by this program's count: 14 f + 2 a parameter, or 12 for the dense path."""
        state = self.state
        each = own_bytes(2, MOMENTUM_SGD) - (0 if state.indexed else POSITION_BYTES)
        return each * state.stored + 2 * state.entries


def own_bytes(grad_bytes: int, moments: int) -> int:
    """Return the bytes of a stored parameter in this program, its position included."""
    return grad_bytes + MASTER_BYTES + MOMENT_BYTES * moments + POSITION_BYTES


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    shape = SMOKE if options.smoke else SHAPE
    rows = [
        measure(shape, sparsity, grad_bytes, options.moments)
        for grad_bytes in GRADIENTS
        for sparsity in ("dense", *SPARSITIES)
    ]
    images = [
        measure_image(name, row, smoke=options.smoke) for name in NAMES for row in IMAGE_METHODS
    ]
    peaks = (
        peak_rss(replace(SMOKE if options.smoke else SMALL_GPT2, batch=1)) if options.rss else {}
    )
    reached = [target for grad_bytes in GRADIENTS for target in targets(rows, grad_bytes)]
    reached += image_targets(images)
    text = as_markdown(rows, images, peaks, reached)
    print(text)
    if options.out is not None:
        write(options.out, text, rows, images, peaks, reached)
    return 1 if not all(target.met for target in reached) and not options.smoke else 0


def measure(shape: Shape, sparsity: str, grad_bytes: int, moments: int = ADAM) -> MemoryRow:
    """Train two steps, and count tensors afterwards and whole gradients during the second."""
    optimizer = ("--optimizer", "sgd") if moments == MOMENTUM_SGD else ()
    groups = ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=1), rank=0)
    before = storages()
    with tempfile.TemporaryDirectory() as folder, quiet(Path(folder) / "console"):
        flags = [*path_flags(sparsity, "random"), *GRADIENTS[grad_bytes], *optimizer]
        flags += ["--prefetch-batches", "false"]  # the next batch is not of the model's state
        ours = Ours(shape.flags(dtype="bf16", extra=flags), groups, Path(folder))
        ours.step()
        watch = watch_gradients(ours.trainer)
        ours.step()
        assert watch.seen > 0, "there were gradients"
        state = count(ours.trainer.optimizer, before)
        ours.metrics.close()
    return MemoryRow(
        sparsity=sparsity,
        grad_bytes=grad_bytes,
        state=state,
        gradients=watch.most,
        moments=moments,
    )


def measure_image(name: str, row: str, *, smoke: bool = False) -> ImageMemoryRow:
    """Take two steps of a network's real tensors, whose backward makes random gradients."""
    kind, training = method(row), emulated(name, smoke=smoke)
    gradients = training.gradients(0, kind.dtype)
    before = storages()
    model = EmulatedModel(training, gradients)
    model.pace = 0.0
    ours = EngineTraining(kind.flags, model, alone(), name=row, image=True)
    for _ in range(2):
        ours.step()
    state = count(ours.optimizer, before)
    ours.engine.detach()
    del ours, model, gradients
    release()
    return ImageMemoryRow(network=network(name).title, method=row, state=state)


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
        return abs(row.state.each - rest - row.state.expected(grad_bytes, moments=row.moments))

    def worst(
        what: str, of: Sequence[MemoryRow], limit: float, value: Callable[[MemoryRow], float]
    ) -> SpeedTarget:
        row = max(of, key=value)
        return at_most(f"{name}: {what}, most at p = {row.sparsity}", value(row), limit, digits=4)

    name = f"{8 * grad_bytes}-bit gradients"
    moments = mine[0].moments
    own = f"{own_bytes(grad_bytes, moments)} f + 2"
    return [
        worst(
            f"bytes a parameter / ({formula(moments)})", mine, 1.0, lambda r: r.state.each / r.paper
        ),
        worst(f"bytes above {own}", pruned, WITHIN, lambda r: r.state.each - r.equation),
        worst("off what entries and index are, in bytes", mine, EXACTLY, exactly),
        worst("dense gradients alive at once", mine, 1, lambda r: r.gradients),
    ]


def image_targets(images: Sequence[ImageMemoryRow]) -> list[SpeedTarget]:
    """Return the targets of image networks: the bytes of this program's count, below Eq. 2."""
    found: list[SpeedTarget] = []
    for row in images:
        name = f"{row.network}, {row.method}"
        kept = sum(row.state.bytes.values())
        rest = row.state.bytes["scratch"] + row.state.bytes["other"]
        off = abs(kept - rest - row.equation) / row.state.entries
        found.append(at_most(f"{name}: off its count, in bytes", off, EXACTLY, digits=4))
        found.append(at_most(f"{name}: bytes / the paper's count", kept / row.paper, 1.0))
    return found


def as_markdown(
    rows: Sequence[MemoryRow],
    images: Sequence[ImageMemoryRow],
    peaks: Mapping[str, int],
    reached: Sequence[SpeedTarget],
) -> str:
    """Return the page: a table for each width of gradients, image networks, peaks and targets."""
    moments = rows[0].moments
    parts = [NOTE.format(equation=formula(moments), dense=default_bytes(moments))]
    for grad_bytes in GRADIENTS:
        mine = [row for row in rows if row.grad_bytes == grad_bytes]
        parts.append(_table(mine, grad_bytes))
    parts.append(_image_table(images))
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
    entries, moments = rows[0].state.entries, rows[0].moments
    own = f"{own_bytes(grad_bytes, moments)} f + 2"
    columns = ["p", "f", *KINDS, "all", "/ dense", own, formula(moments), "saved", "Fig. 2"]
    lines = [f"### Bytes a parameter, {entries:,} of them in bf16, {8 * grad_bytes}-bit gradients"]
    columns += ["gradients alive"]
    lines += ["", f"| {' | '.join(columns)} |", "|---:" * len(columns) + "|"]
    for row in rows:
        kinds = [row.state.bytes[kind] / entries for kind in KINDS]
        each = row.state.each
        numbers = [row.state.f, *kinds, each, each / rows[0].state.each, row.equation, row.paper]
        cells = [row.sparsity, *(f"{number:.3f}" for number in numbers)]
        cells += [
            f"{row.saved:.1%}",
            f"{1 - row.paper / default_bytes(moments):.1%}",
            str(row.gradients),
        ]
        if row.sparsity == "dense":
            cells[-5:-1] = [
                "",
                "",
                f"{row.saved:.1%}",
                "",
            ]  # the equations are about compressed states
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _image_table(images: Sequence[ImageMemoryRow]) -> str:
    tenth = {row.network: row.state.entries for row in images}
    told = " and ".join(
        f"from {default_bytes(MOMENTUM_SGD) * entries / 1e6:,.0f} to "
        f"{paper_bytes(entries, entries // 10, MOMENTUM_SGD) / 1e6:,.0f} MB ({name})"
        for name, entries in tenth.items()
    )
    columns = ["network", "path", "f", *KINDS, "all", "this program's count", "the paper's count"]
    lines = ["### MB of two image networks, momentum SGD", "", IMAGE_NOTE.format(told=told)]
    lines += [f"| {' | '.join([*columns, 'saved of 16'])} |", "|---|---|" + "---:|" * len(columns)]
    lines[-1] = lines[-1].removesuffix("---:|")
    for row in images:
        kept = sum(row.state.bytes.values())
        saved = 1 - kept / (default_bytes(MOMENTUM_SGD) * row.state.entries)
        sizes = [*(row.state.bytes[kind] for kind in KINDS), kept, row.equation, row.paper]
        cells = [row.network, row.method, f"{row.state.f:.4f}"]
        cells += [*(f"{size / 1e6:,.1f}" for size in sizes), f"{saved:.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write(
    folder: Path,
    text: str,
    rows: Sequence[MemoryRow],
    images: Sequence[ImageMemoryRow],
    peaks: Mapping[str, int],
    reached: Sequence[SpeedTarget],
) -> None:
    """Write README.md, results.json and figure.png to `folder`."""
    values = {
        "rows": [asdict(row) for row in rows],
        "images": [asdict(row) for row in images],
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
    moments = rows[0].moments
    whole = default_bytes(moments)
    paper = [100 * (1 - paper_bytes(100, 100 - p, moments) / 100 / whole) for p in range(101)]
    label = f"Fig. 2: {formula(moments)}" if moments == ADAM else formula(moments)
    axes.plot(pruned, paper, color="#6b7280", label=label)
    for color, grad_bytes in zip(PALETTE, GRADIENTS, strict=False):
        mine = [r for r in rows if r.grad_bytes == grad_bytes and r.sparsity != "dense"]
        label = f"measured, {8 * grad_bytes}-bit gradients"
        saved = [100 * row.saved for row in mine]
        axes.plot([1 - row.state.f for row in mine], saved, "o-", color=color, label=label)
    axes.axhline(0, color="#111827", linewidth=0.8)
    axes.set_xlabel("share of all parameters that were pruned, 1 - f")
    axes.set_ylabel(f"% saved of {whole} bytes a parameter")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(file, format="png")


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.samo_memory.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rss", action="store_true", help="also peak memory of runs of GPT 124M")
    parser.add_argument(
        "--moments",
        type=int,
        choices=[MOMENTUM_SGD, ADAM],
        default=ADAM,
        help="fp32 numbers that the optimizer of the GPT keeps: 1 for momentum SGD, 2 for AdamW",
    )
    parser.add_argument("--out", type=Path, default=None, help="folder for the report")
    parser.add_argument("--smoke", action="store_true", help="a tiny model: does the tool work?")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
