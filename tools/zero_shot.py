"""Score a trained model on the tasks of tables 4 to 6 of the Radius paper, without fine-tuning.

    python tools/zero_shot.py RUN --tasks-dir DIR [--only lambada_openai,piqa] [--limit N] [--json]
    python tools/zero_shot.py --list

DIR has a file for each task, such as DIR/piqa.jsonl (also .gz, .bz2, .xz), whose lines have the
columns of the published data set; --list gives the data set of each task. No file is
downloaded, and an absent file is refused unless --only leaves out its task.

RUN is a run, a checkpoints or step folder, or a folder of tools/export_hf.py. Where
lm-evaluation-harness is installed, it computes the scores on the model in Hugging Face's format;
elsewhere, or with --by evaluate, tools/evaluate.py computes them with the same prompts. The table
has a row for each figure of the paper: accuracies, F1 and exact match in per cent, the perplexity
of LAMBADA's last words, each with its standard error and the number of examples.

Exit code 2 for wrong usage and absent files, 3 for a bad file or if no tokenizer is found, 4 for a
missing or damaged checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.closed_pipe import end_with_reader  # noqa: E402
from megatron.config.fields import whole_number  # noqa: E402
from megatron.errors import ConfigError, DataError, SparsetronError  # noqa: E402
from tools.evaluation import harness  # noqa: E402
from tools.evaluation.example import Example  # noqa: E402
from tools.evaluation.figures import Figures, plain  # noqa: E402
from tools.evaluation.scoring import Scorer  # noqa: E402
from tools.evaluation.task import read_examples  # noqa: E402
from tools.evaluation.zero_shot import ZERO_SHOT  # noqa: E402
from tools.run_model import (  # noqa: E402
    add_step_flag,
    add_tokenizer_flags,
    check_tokenizer_flags,
    find_model,
    weight_dtype,
)

HARNESS, EVALUATE = "harness", "evaluate"
OURS = "tools/evaluate.py"
COLUMNS = {"accuracy": "acc", "perplexity": "ppl", "f1": "F1", "exact_match": "EM"}
"""The paper's names of figures."""
_SUFFIXES = ("", ".gz", ".bz2", ".xz")

Scored = Mapping[str, tuple[Figures, int]]
"""Figures and number of examples by task."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    try:
        if options.list:
            print("\n".join(_listed()))
            return 0
        _check(options)
        files = find_files(options.tasks_dir, options.only)
        by, scored = _score(options, files)
    except SparsetronError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return DataError.exit_code
    if options.json:
        print(json.dumps({"scored_by": by, "tasks": _as_json(scored)}))
    else:
        print(f"{options.run}, scored by {by}\n")
        print("\n".join(table(scored)))
    return 0


def find_files(folder: Path, only: str | None) -> dict[str, Path]:
    """Return the file of each task, or of the tasks whose names `only` separates by commas.

    Raises:
        ConfigError: A name is unknown, or a task has no file; every such task is named.
    """
    names = list(ZERO_SHOT) if only is None else [name.strip() for name in only.split(",")]
    unknown = [name for name in names if name not in ZERO_SHOT]
    if unknown:
        raise ConfigError(f"--only: {unknown[0]!r}; must be names among {', '.join(ZERO_SHOT)}")
    found = {name: _file(folder, name) for name in ZERO_SHOT if name in names}
    absent = [name for name, file in found.items() if file is None]
    if absent:
        way_out = "give it" if len(absent) == 1 else "give them"
        raise ConfigError(
            f"{', '.join(absent)}: no file {folder / absent[0]}.jsonl"
            + (" and so on" if len(absent) > 1 else "")
            + f"; {way_out}, or name the tasks that are there with --only"
        )
    return {name: file for name, file in found.items() if file is not None}


def _file(folder: Path, name: str) -> Path | None:
    places = [folder / f"{name}.jsonl{suffix}" for suffix in _SUFFIXES]
    return next((place for place in places if place.is_file()), None)


# ---- scores ------------------------------------------------------------------------------------


def _score(options: argparse.Namespace, files: Mapping[str, Path]) -> tuple[str, Scored]:
    """Return the name of the program that scores, and the figures of every task.

    Tasks that the harness cannot load here are left to tools/evaluate.py, unless `--by` asks for
    the harness.
    """
    by = options.by or (HARNESS if harness.is_installed() else EVALUATE)
    # A bad line is told before any score is computed, whoever computes it.
    examples = {
        name: read_examples(file, ZERO_SHOT[name].read, limit=options.limit)
        for name, file in files.items()
    }
    with tempfile.TemporaryDirectory(prefix="zero_shot") as name:
        folder = Path(name)
        if by == EVALUATE:
            return OURS, _by_evaluate(options, examples, folder)
        found = harness.score(
            _exported(options, folder),
            files,
            cache=folder / "cache",
            batch_size=options.batch_size,
            limit=options.limit,
            complete=options.by == HARNESS,
        )
        rest = {task: lines for task, lines in examples.items() if task in found.left_out}
        scored = {**found.figures, **(_by_evaluate(options, rest, folder) if rest else {})}
    by = f"lm-evaluation-harness {found.version}".rstrip()
    for task, reason in found.left_out.items():
        by += f"; {task} by {OURS}, since the harness cannot load it ({reason})"
    return by, {task: scored[task] for task in files}


def _by_evaluate(
    options: argparse.Namespace, examples: Mapping[str, Sequence[Example]], folder: Path
) -> Scored:
    run = options.run
    if _is_exported(run):
        run = _imported(run, folder / "run")
    saved = find_model(run, step=options.checkpoint_step)
    scorer = Scorer(saved, saved.tokenizer(options), options.batch_size)
    return {
        name: (ZERO_SHOT[name].figures(lines, scorer.score(lines)[0]), len(lines))
        for name, lines in examples.items()
    }


def _is_exported(run: Path) -> bool:
    return (run / "config.json").is_file()


def _imported(exported: Path, output: Path) -> Path:
    """Bring a folder of Hugging Face's format into a run folder."""
    from tools.import_hf import bring_in

    with contextlib.redirect_stdout(sys.stderr):
        bring_in(exported, output, seq_length=None)
    return output


def _exported(options: argparse.Namespace, folder: Path) -> harness.ExportedModel:
    """Return the model in Hugging Face's format, exported to `folder` if RUN is not.

    Raises `ConfigError` if the model or its tokenizer has no such format.
    """
    if _is_exported(options.run):
        return harness.ExportedModel(folder=options.run)
    import torch

    from tools.export_hf import export

    saved = find_model(options.run, step=options.checkpoint_step)
    saved.tokenizer(options)
    output = folder / "exported"
    exporting = {"source": options.run, "output": output, "step": options.checkpoint_step}
    with contextlib.redirect_stdout(sys.stderr), _way_out():
        export(argparse.Namespace(**{**vars(options), **exporting, "dtype": "float32"}))
    if not (output / "tokenizer_config.json").is_file():
        raise ConfigError(
            f"{options.run}: transformers reads no files of its tokenizer; give --by {EVALUATE}"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = weight_dtype(saved.param_dtype, device)
    return harness.ExportedModel(
        folder=output, dtype=str(dtype).removeprefix("torch."), max_length=saved.model.seq_length
    )


@contextlib.contextmanager
def _way_out() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{error}; --by {EVALUATE} scores it without an export") from error


# ---- output ------------------------------------------------------------------------------------


def table(scored: Scored) -> list[str]:
    """Return the lines of a table with a row for each figure, in the order of the paper."""
    head = ("table", "task", "metric", "value", "std. error", "examples")
    rows: list[tuple[str, ...]] = [head]
    for name, (figures, examples) in scored.items():
        task = ZERO_SHOT[name]
        for number, (figure, estimate) in enumerate(figures.items()):
            scale = 1 if figure == "perplexity" else 100
            stderr = "-" if estimate.stderr is None else f"{scale * estimate.stderr:.2f}"
            first = (str(task.table), task.title) if number == 0 else ("", "")
            value = f"{scale * estimate.value:.2f}"
            rows.append((*first, COLUMNS[figure], value, stderr, str(examples)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return [_row(row, widths) for row in rows]


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return a line with task and metric on the left of their columns, numbers on the right."""
    aligned = [
        cell.ljust(width) if column in (1, 2) else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(aligned).rstrip()


def _as_json(scored: Scored) -> dict[str, Any]:
    return {
        name: {
            "table": ZERO_SHOT[name].table,
            "examples": examples,
            **plain(figures),
        }
        for name, (figures, examples) in scored.items()
    }


def _listed() -> list[str]:
    width = max(map(len, ZERO_SHOT))
    lines = [f"{'task':{width}}  table  data set, its configuration and split"]
    return lines + [f"{n:{width}}  {t.table:5}  {t.source}" for n, t in ZERO_SHOT.items()]


# ---- usage -------------------------------------------------------------------------------------


def _check(options: argparse.Namespace) -> None:
    check_tokenizer_flags(options)
    for flag in ("run", "tasks_dir"):
        if getattr(options, flag) is None:
            raise ConfigError(
                f"{'RUN' if flag == 'run' else '--tasks-dir'}: missing; give a folder"
            )
    for flag in ("batch_size", "limit"):
        value = getattr(options, flag)
        if value is not None and value < 1:
            raise ConfigError(f"--{flag.replace('_', '-')}: {value}; must be at least 1")
    if options.by == HARNESS and not harness.is_installed():
        raise ConfigError(
            f"--by {HARNESS}: lm-evaluation-harness is not installed; run: pip install "
            "'lm_eval[hf]'"
        )
    if not options.run.exists():
        raise ConfigError(f"{options.run}: no such folder; give a run or an exported model")
    if _is_exported(options.run):
        for flag in ("checkpoint_step", "tokenizer_type"):
            if getattr(options, flag) is not None:
                raise ConfigError(
                    f"--{flag.replace('_', '-')}: given, but {options.run} is an exported model, "
                    "which has one step and its own tokenizer; leave the flag out"
                )


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="zero_shot.py",
        description="Score a trained model on the tasks of tables 4 to 6 of the Radius paper.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", type=Path, nargs="?", metavar="RUN", help="run, step or exported folder")
    add("--tasks-dir", type=Path, metavar="DIR", help="folder with a file TASK.jsonl for each task")
    add("--only", metavar="TASKS", help="names of tasks, set apart by commas (default: all)")
    add(
        "--by",
        choices=(HARNESS, EVALUATE),
        default=None,
        help="program that scores: lm-evaluation-harness or tools/evaluate.py (default: the first "
        "where it is installed)",
    )
    add("--list", action="store_true", help="print the tasks and their data sets, and end")
    add("--batch-size", type=whole_number, default=8, help="texts computed at once (default: 8)")
    add(
        "--limit",
        type=whole_number,
        default=None,
        metavar="N",
        help="the first N lines of each file alone",
    )
    add_step_flag(parser)
    add("--json", action="store_true", help="one JSON object in place of the table")
    add_tokenizer_flags(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    end_with_reader()
    sys.exit(main())
