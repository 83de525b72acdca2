"""Train a small DC-Transformer on Tatoeba pairs, and score its checkpoints by BLEU.

    python -m tools.bench.translation.run --data-path data/de-en --work RUN --minutes 60 \\
        --out tools/bench/translation

Training resumes the run in its folder. With --minutes 0 nothing is trained, and the checkpoints
that are there are scored. Each checkpoint is scored once: rows are kept in RUN/bleu.jsonl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.checkpoint.find import checkpoints_folder, list_steps
from megatron.errors import ConfigError, DataError, SparsetronError
from megatron.processor import processor_model, vector_instructions
from tools import average_checkpoints, translate
from tools.bench.common.figures import plain_axes, save
from tools.bench.common.page_files import write_page

REPO = Path(__file__).resolve().parents[3]
FLAGS = (
    "--encoder-layers 2 --decoder-layers 2 --embed-dim 128 --dropout 0.1 --micro-batch-size 1 "
    "--train-iters 2400 --max-tokens 4000 --adam-beta1 0.9 --adam-beta2 0.98 --weight-decay 1e-4 "
    "--clip-grad 0 --lr 2e-3 --lr-decay-style inverse-square-root --lr-warmup-iters 200 "
    "--lr-warmup-init 1e-7 --eval-interval 200 --full-validation --eval-at-start "
    "--save-interval 100 --log-interval 20"
)
"""A DC-Transformer of width 128 with 2 + 2 layers and a warm-up of 200 updates."""
ROWS = "bleu.jsonl"
AVERAGED = 5
"""Checkpoints in the average at the end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    if options.minutes:
        code = train(options)
        if code not in (0, 75):
            return code
    rows = score_all(options)
    print(table(rows))
    facts = {
        "CPU": f"{processor_model()}, {vector_instructions()}",
        "data": options.data_path,
        "flags": FLAGS,
        "rows": rows,
    }
    write_page(options.out, text=page(rows), values=facts, draw=lambda path: draw(rows, path))
    return 0


def train(options: argparse.Namespace) -> int:
    """Train for some minutes in a process of its own, and return its exit code."""
    command = [sys.executable, str(REPO / "pretrain_translation.py"), *FLAGS.split()]
    command += ["--data-path", options.data_path, "--run-dir", str(options.work)]
    command += ["--exit-duration-in-mins", str(options.minutes)]
    return subprocess.run(command).returncode


def score_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Score each checkpoint that has no row yet, then the average of the last ones.

    Args:
        options: The flags: `work` is the run folder, `limit` the number of test pairs.

    Returns:
        A row for each checkpoint in the order of steps, that of the average last.
    """
    kept = options.work / ROWS
    rows: dict[str, dict[str, Any]] = {}
    if kept.is_file():
        for line in kept.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["pairs"] == options.limit:
                rows[row["name"]] = row
    steps = sorted({one.step for one in list_steps(checkpoints_folder(options.work)).committed})
    if not steps:
        raise DataError(f"{options.work}: no checkpoint was committed there; train it first")
    tracks = _progress(options.work / "metrics.jsonl")
    for step in steps:
        if str(step) not in rows:
            found = _score(options.work, step, options)
            _keep(kept, rows, {"name": str(step), **tracks[step], **found})
            print(f"step {step}: BLEU {found['bleu']:.2f}", flush=True)
    last = steps[-AVERAGED:]
    name = f"mean of steps {last[0]} to {last[-1]}"
    if len(last) == AVERAGED and name not in rows:
        output = options.work / "averaged"
        average_checkpoints.average(
            average_checkpoints.find_steps(options.work, last=AVERAGED), output
        )
        config = (options.work / "config.yaml").read_text(encoding="utf-8")
        (output / "config.yaml").write_text(config, encoding="utf-8")
        _keep(kept, rows, {"name": name, **tracks[last[-1]], **_score(output, last[-1], options)})
    return [row for key, row in rows.items() if key.isdigit() or key == name]


def _score(run: Path, step: int, options: argparse.Namespace) -> dict[str, Any]:
    flags = [str(run), "--bleu", "--checkpoint-step", str(step), "--limit", str(options.limit)]
    flags += ["--data-path", options.data_path, "--max-len-b", "60"]
    given = translate.parse_arguments(flags)
    found = translate.score(
        translate.find_translator(run, step=step, data_path=options.data_path), given
    )
    return {"bleu": round(found["bleu"], 2), "pairs": found["pairs"]}


def _progress(metrics: Path) -> dict[int, dict[str, Any]]:
    """Return target tokens, minutes of steps and the perplexity of evaluations, by step."""
    tokens, seconds = 0, 0.0
    found: dict[int, dict[str, Any]] = {}
    for line in map(json.loads, metrics.read_text(encoding="utf-8").splitlines()):
        if "valid_perplexity" in line:
            if line["iteration"] in found:
                found[line["iteration"]]["valid_perplexity"] = round(line["valid_perplexity"], 2)
        elif "step_seconds" in line:
            tokens += line["tokens"]
            seconds += line["step_seconds"]
            found[line["iteration"]] = {
                "tokens": tokens,
                "minutes": round(seconds / 60, 1),
                "valid_perplexity": None,
            }
    return found


def _keep(path: Path, rows: dict[str, dict[str, Any]], row: dict[str, Any]) -> None:
    rows[row["name"]] = row
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [
        "| update | target tokens, millions | minutes of steps | validation perplexity | BLEU |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        perplexity = row["valid_perplexity"]
        shown = "" if perplexity is None or not row["name"].isdigit() else f"{perplexity:.1f}"
        lines.append(
            f"| {row['name']} | {row['tokens'] / 1e6:.2f} | {row['minutes']:.0f} | {shown} | "
            f"{row['bleu']:.1f} |"
        )
    return "\n".join(lines)


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return the part of the page that follows its mark."""
    return (
        f"BLEU of the first {rows[-1]['pairs']} held-back pairs, lowercased, one reference, beam "
        "4, length penalty 1, at most 60 tokens a translation, sacrebleu's tokenizer 13a.\n\n"
        f"{table(rows)}\n\n![BLEU by updates](figure.png)\n"
    )


def draw(rows: Sequence[dict[str, Any]], path: Path) -> bool:
    """Draw BLEU by updates; return False if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    steps = [row for row in rows if row["name"].isdigit()]
    figure = Figure(figsize=(6.4, 3.6), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot([int(row["name"]) for row in steps], [row["bleu"] for row in steps], marker="o")
    for row in rows:
        if not row["name"].isdigit():
            axes.axhline(row["bleu"], linestyle="--", color="#6b7280", label=row["name"])
            axes.legend(frameon=False)
    axes.set_xlabel("updates of at most 4,000 tokens")
    axes.set_ylabel("BLEU on held-back Tatoeba pairs")
    axes.set_ylim(bottom=0)
    plain_axes(axes)
    save(figure, path)
    return True


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data-path", required=True, help="prefix of preprocess_pairs.py's files")
    add("--work", required=True, type=Path, help="run folder; goes on where it is")
    add("--minutes", type=float, default=60, help="of training; 0 = score only (60)")
    add("--limit", type=int, default=1000, help="test pairs to translate (1000)")
    add("--out", type=Path, help="folder for the page, its numbers and picture")
    options = parser.parse_args(arguments)
    if options.minutes < 0 or options.limit < 1:
        raise ConfigError("--minutes must be at least 0, --limit at least 1")
    return options


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SparsetronError as error:
        print(f"translation: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
