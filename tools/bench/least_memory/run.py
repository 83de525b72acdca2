"""GPT 124M trained in the least memory, beside a plain run.

    python -m tools.bench.least_memory.run --data-path PREFIX --steps N    runs what has no row yet
    python -m tools.bench.least_memory.run --report                        writes the page

Runs `pretrain_gpt.py` with configs/gpt_124m.yaml in bf16 on steps of 512 tokens, one process a row:
plain; with every technique that keeps all weights; and with 90 % of the weights pruned, too. PREFIX
is a data set of GPT-2's tokens. A row has the peak of the process, its CPU time, losses and the
memory ledger of a step, and is appended to results.jsonl when its run has ended. A later start
skips rows that are there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from megatron.config import parse, resolve
from megatron.errors import ConfigError, SparsetronError
from megatron.metrics.logger import JSONL
from tools.bench.common.netlab import REPO
from tools.bench.common.page_files import table, write_page
from tools.bench.common.rows import ROWS, append_row, read_rows, records

FOLDER = Path(__file__).parent
CONFIG = "configs/gpt_124m.yaml"
VOCABULARY = 50257
SEQUENCE, SEQUENCES = 128, 4
TOKENS = SEQUENCE * SEQUENCES
EVALUATED = 4
"""Batches of an evaluation."""
LAST = 0.2
"""Share of the steps, the last ones, whose mean training loss is a row's."""
KINDS = ("model", "optimizer", "stored", "total")
"""Fields of a ledger's column that a row has."""
LEAST = (
    *("--micro-batch-size", "1", "--recompute-granularity", "residual"),
    *("--main-params-dtype", "bf16", "--main-params-rounding", "stochastic"),
    *("--exp-avg-dtype", "int8", "--exp-avg-sq-dtype", "int8", "--grad-reduce-in-bf16"),
)
"""Flags of all techniques that keep every weight."""


@dataclass(frozen=True, kw_only=True)
class MemoryRun:
    """A run: its name, its title on the page, and its flags."""

    name: str
    title: str
    flags: tuple[str, ...]


RUNS = (
    MemoryRun(name="plain", title="plain", flags=("--micro-batch-size", str(SEQUENCES))),
    MemoryRun(name="least", title="least", flags=LEAST),
    MemoryRun(
        name="least-samo",
        title="least, 90 % pruned",
        flags=(*LEAST, "--grad-path", "samo", "--samo-sparsity", "0.9"),
    ),
)

Runner = Callable[[MemoryRun, int, Path], dict[str, Any]]
"""Trains a run for a number of steps on a data set; returns its numbers."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    results = options.results or FOLDER / ROWS
    try:
        if not options.report:
            if options.data_path is None:
                raise ConfigError("--data-path: give the prefix of a data set of GPT-2's tokens")
            run_all(options.steps, options.data_path, results, train)
        report(results, options.out or FOLDER)
    except SparsetronError as error:
        print(f"least_memory: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def run_all(steps: int, data: Path, results: Path, runner: Runner) -> None:
    """Make the runs that have no row, and append their rows.

    Raises `ConfigError` for rows of runs of another length.
    """
    done = {row["name"]: row["steps"] for row in read_rows(results)}
    if others := {count for count in done.values() if count != steps}:
        raise ConfigError(
            f"--steps {steps}: {results} has runs of {others.pop()} steps; give as many, or "
            "another --results"
        )
    for run in RUNS:
        if run.name not in done:
            print(f"{run.name}: starts", flush=True)
            numbers = runner(run, steps, data)
            append_row(results, {"name": run.name, "steps": steps, **numbers})


def flags_of(run: MemoryRun, steps: int, data: Path) -> list[str]:
    """Return the flags of a run for `pretrain_gpt.py`."""
    values = {
        "config": REPO / CONFIG,
        "seq-length": SEQUENCE,
        "global-batch-size": SEQUENCES,
        "attention-dropout": 0,
        "hidden-dropout": 0,
        "train-iters": steps,
        "lr-warmup-fraction": 0.1,
        "data-path": data,
        "vocab-size": VOCABULARY,
        "eval-interval": steps,
        "eval-iters": EVALUATED,
        "log-interval": 1,
    }
    flags = [text for name, value in values.items() for text in (f"--{name}", str(value))]
    return [*flags, *run.flags]


def train(run: MemoryRun, steps: int, data: Path) -> dict[str, Any]:
    """Train in a process of its own; return its memory, time and losses, and the ledger's count."""
    with tempfile.TemporaryDirectory() as folder:
        file, run_dir = Path(folder) / "rss.json", Path(folder) / "run"
        program = [sys.executable, "-m", "tools.bench.samo_memory.peak_rss", str(file)]
        flags = [*flags_of(run, steps, data), "--run-dir", str(run_dir)]
        subprocess.run([*program, *flags], check=True, stdout=subprocess.DEVNULL, cwd=REPO)
        seen = json.loads(file.read_text(encoding="utf-8"))
        lines = list(records(run_dir / JSONL))
    stepped = [line for line in lines if "lm_loss" in line]
    seconds = [line["step_seconds"] for line in stepped[1:]]
    last = stepped[-max(1, round(LAST * steps)) :]
    return {
        "step_seconds": statistics.median(seconds),
        "step_cpu_seconds": statistics.median(seen.pop("cpu_seconds")[1:]),
        "train_loss": statistics.fmean(line["lm_loss"] for line in last),
        "valid_loss": next(line["valid_loss"] for line in lines if "valid_loss" in line),
        "curve": [[line["iteration"], round(line["lm_loss"], 4)] for line in stepped],
        **seen,
        "ledger": ledger(run, steps, data),
    }


def ledger(run: MemoryRun, steps: int, data: Path) -> dict[str, dict[str, int]]:
    """Return the columns of the memory ledger: bytes of states, activations and the peak."""
    # The measured peak is the growth of a process that has run nothing else.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_ledger, flags_of(run, steps, data)).result()


def _ledger(flags: Sequence[str]) -> dict[str, dict[str, int]]:
    from megatron.data.vocabulary import Vocabulary
    from megatron.low_memory.ledger import memory_ledger
    from megatron.tasks.gpt import LoadedGPT
    from pretrain_gpt import GPT_TASK, GRADIENT_PATHS

    config = resolve(parse(flags, paths=GRADIENT_PATHS), 1)
    found = memory_ledger(
        LoadedGPT(GPT_TASK, config, Vocabulary(size=VOCABULARY)),
        config,
        GRADIENT_PATHS,
        vocabulary=VOCABULARY,
        columns=("planned", "measured"),
    )
    return {
        name: {kind: getattr(column, kind) for kind in KINDS}
        for name, column in found.columns.items()
    }


def report(results: Path, out: Path) -> None:
    """Write the page of the rows. Raises `ConfigError` where there are none."""
    rows = read_rows(results)
    if not rows:
        raise ConfigError(f"--results: {results} holds no finished run")
    values = [{name: value for name, value in row.items() if name != "curve"} for row in rows]
    write_page(out, text=as_markdown(rows), values=values)


def as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the page: memory, time and losses, and the memory ledger."""
    found = {row["name"]: row for row in rows}
    shown = [(each, found[each.name]) for each in RUNS if each.name in found]
    plain, steps = shown[0][1], rows[0]["steps"]
    lines = [
        f"{CONFIG} in bf16, {steps} steps of {SEQUENCES} x {SEQUENCE} tokens, without dropout, "
        "with a tenth of the steps to warm up and a checkpoint at the end. Peak: resident memory "
        "of the process (VmHWM), in MB (10^6 bytes); without torch: less that of a process that "
        "has imported torch. Tokens/s are those of the median step on a machine that other "
        "programs shared; CPU time, user and system time of the median step in all threads, is "
        "what they change less. Losses: the mean of the last fifth of the training steps, "
        f"and of {EVALUATED * TOKENS:,} validation tokens.",
        "",
    ]
    header = ("run", "peak", "of plain", "without torch", "of plain", "tokens/s", "CPU ms a token")
    header += ("of plain", "training loss", "validation loss")
    cells: list[list[str]] = []
    for run, row in shown:
        own, whole = row["peak"] - row["before"], plain["peak"] - plain["before"]
        cost = row["step_cpu_seconds"] / TOKENS
        cells.append(
            [
                run.title,
                f"{row['peak'] / 1e6:,.0f}",
                f"{row['peak'] / plain['peak']:.2f}",
                f"{own / 1e6:,.0f}",
                f"{own / whole:.2f}",
                f"{TOKENS / row['step_seconds']:.1f}",
                f"{cost * 1e3:.1f}",
                f"{row['step_cpu_seconds'] / plain['step_cpu_seconds']:.2f}",
                f"{row['train_loss']:.3f}",
                f"{row['valid_loss']:.3f}",
            ]
        )
    lines += table(header, cells)
    lines += [
        "",
        "The memory ledger of a step (`tools/profile_memory.py`), in MB: model and optimizer "
        "(weights, gradients, states), what one microbatch stores for backward, and the peak. "
        "Measured: on real tensors, the peak as the growth of the process. Pruned runs are only "
        "planned.",
        "",
    ]
    ledgers = [
        [f"{run.title}, {name}"]
        + [
            f"{size / 1e6:,.1f}"
            for size in (column["model"] + column["optimizer"], column["stored"], column["total"])
        ]
        for run, row in shown
        for name, column in row["ledger"].items()
    ]
    lines += table(("run, column", "model and optimizer", "stored", "peak"), ledgers)
    lines += ["", "Flags of the runs, beside those that all share:", ""]
    lines += [f"- {run.title}: `{' '.join(run.flags)}`" for run, _ in shown]
    return "\n".join([*lines, ""])


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.least_memory.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--data-path", type=Path, help="prefix of a data set of GPT-2's tokens")
    add("--steps", type=int, default=200, help="steps of a run; default: %(default)s")
    add("--results", type=Path, help="file of results; default: the committed one")
    add("--out", type=Path, help="folder of the page; default: the committed one")
    add("--report", action="store_true", help="only write the page of the results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
