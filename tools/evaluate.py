"""Score the model of a run on a task.

    python tools/evaluate.py RUN --task lambada FILE
    python tools/evaluate.py RUN --task multiple-choice FILE [--limit 100] [--json]
    python tools/evaluate.py RUN --task blimp FILE
    python tools/evaluate.py RUN --task bits-per-byte FILE [--json-keys text] [--text-unit file]

FILE is JSON lines (also .gz, .bz2, .xz). A line of lambada is {"text": ...}, and its last word is
predicted, or {"context": ..., "continuation": ...}. The output is the share of words that greedy
decoding yields, and the perplexity of a word: exp of the mean negative log-likelihood of the words
(Paperno et al. 2016). A line of multiple-choice is

    {"context": "The sky is", "choices": ["blue", "loud"], "answer": 0}

`answer` counts from 0. The model chooses by log-likelihood after the context and, for the second
figure, by log-likelihood per character. A space is inserted between context and continuation if
neither has one there.

A line of blimp is {"paradigm": ..., "phenomenon": ..., "good": ..., "bad": ...} (Warstadt et al.
2020). The model is right where the log-likelihood of the whole sentence `good` exceeds that of
`bad`. As in lm-evaluation-harness, a space precedes both, and the first token is predicted from the
end mark, which begins each document in training.

For bits-per-byte, FILE is any text that tools/preprocess_data.py reads. The output is the negative
log2-likelihood of all its tokens over its UTF-8 bytes, which compares models of different
tokenizers. Every token is predicted once, in windows of the run's sequence length
(tools/evaluation/bits_per_byte.py).

Other tasks (piqa, boolq, ...) are those of the Radius paper, whose lines have the columns of the
published data sets; tools/zero_shot.py scores them all. Each accuracy has a standard error, the
sample's standard deviation over the root of the number of lines.

Checkpoints of any grid work. Texts longer than the run's sequences lose the beginning of their
context; the output gives their number. Exit code 2 for wrong usage, 3 for a bad file or if no
tokenizer is found, 4 for a missing or damaged checkpoint.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.closed_pipe import end_with_reader  # noqa: E402
from megatron.config.fields import whole_number  # noqa: E402
from megatron.data.raw_text import UNITS_IN_WORDS, text_unit  # noqa: E402
from megatron.errors import ConfigError, SparsetronError  # noqa: E402
from tools.evaluation.bits_per_byte import bits_per_byte, read_documents  # noqa: E402
from tools.evaluation.figures import both_accuracies, of_words, plain, preferences  # noqa: E402
from tools.evaluation.readers import blimp, lambada, multiple_choice  # noqa: E402
from tools.evaluation.scoring import Scorer  # noqa: E402
from tools.evaluation.task import EvaluationTask, read_examples  # noqa: E402
from tools.evaluation.zero_shot import ZERO_SHOT  # noqa: E402
from tools.run_model import (  # noqa: E402
    add_step_flag,
    add_tokenizer_flags,
    check_tokenizer_flags,
    find_model,
)

if TYPE_CHECKING:
    from megatron.model.likelihood import Likelihood
    from tools.evaluation.example import Example

BITS_PER_BYTE = "bits-per-byte"
TASKS: Mapping[str, EvaluationTask] = {
    "lambada": EvaluationTask(read=lambada, figures=of_words),
    "multiple-choice": EvaluationTask(read=multiple_choice, figures=both_accuracies),
    "blimp": EvaluationTask(read=blimp, figures=preferences),
    **ZERO_SHOT,
}
"""The tasks whose lines have endings to compare, by name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    try:
        _check(options)
        found = evaluate(options)
    except SparsetronError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if options.json:
        print(json.dumps(found))
    else:
        _show(found)
    return 0


def _show(found: Mapping[str, Any], indent: str = "") -> None:
    for name, value in found.items():
        shown = f"{value:.6g}" if isinstance(value, float) else value
        if isinstance(value, dict):
            print(f"{indent}{name.replace('_', ' ')}:")
            _show(value, indent + "  ")
        elif value is not None:
            print(f"{indent}{name.replace('_', ' ')}: {shown}")


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Score the file with the model, and return the figures of the task by name.

    Raises:
        DataError: The file is empty or has a bad line, or no tokenizer fits.
        ConfigError, CheckpointError: `find_model` raises these errors.
    """
    if options.task == BITS_PER_BYTE:
        (key,) = options.json_keys or ("text",)
        unit = options.text_unit or "file"
        documents = read_documents(options.file, key=key, text_unit=unit, limit=options.limit)
        scorer = _scorer(options)
        return {**_head(options, scorer), **bits_per_byte(scorer, documents)}
    task = TASKS[options.task]
    examples = read_examples(options.file, task.read, limit=options.limit)
    scorer = _scorer(options)
    scores, cut = scorer.score(examples)
    return {
        **_head(options, scorer),
        "examples": len(examples),
        "cut_on_the_left": cut,
        **plain(task.figures(examples, scores)),
        **_by_group(task, examples, scores),
    }


def _scorer(options: argparse.Namespace) -> Scorer:
    saved = find_model(options.run, step=options.checkpoint_step)
    return Scorer(saved, saved.tokenizer(options), options.batch_size)


def _head(options: argparse.Namespace, scorer: Scorer) -> dict[str, Any]:
    return {"task": options.task, "checkpoint": str(scorer.saved.step)}


def _by_group(
    task: EvaluationTask, examples: Sequence[Example], scores: Sequence[Sequence[Likelihood]]
) -> dict[str, Any]:
    """Return the figures of each part of the task, if it has parts."""
    names = sorted({example.group for example in examples if example.group})
    found: dict[str, Any] = {}
    for name in names:
        chosen = [number for number, example in enumerate(examples) if example.group == name]
        of_part = task.figures([examples[i] for i in chosen], [scores[i] for i in chosen])
        found[name] = {**plain(of_part), "examples": len(chosen)}
    return {"by_phenomenon": found} if found else {}


def _check(options: argparse.Namespace) -> None:
    check_tokenizer_flags(options)
    for flag in ("json_keys", "text_unit"):
        if options.task != BITS_PER_BYTE and getattr(options, flag) is not None:
            raise ConfigError(f"--{flag.replace('_', '-')}: for --task {BITS_PER_BYTE} alone")
    if options.batch_size < 1:
        raise ConfigError(f"--batch-size: {options.batch_size}; must be at least 1")
    if options.limit is not None and options.limit < 1:
        raise ConfigError(f"--limit: {options.limit}; must be at least 1")


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="evaluate.py", description="Score the model of a run on a task.", allow_abbrev=False
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="run, checkpoints or step folder")
    add("file", type=Path, metavar="FILE", help="JSON lines of the task, or text")
    add(
        "--task",
        choices=(*TASKS, BITS_PER_BYTE),
        required=True,
        metavar="TASK",
        help="what the lines are: " + ", ".join((*TASKS, BITS_PER_BYTE)),
    )
    add("--batch-size", type=whole_number, default=8, help="texts computed at once (default: 8)")
    add(
        "--limit",
        type=whole_number,
        default=None,
        metavar="N",
        help="the first N lines or documents alone",
    )
    add_step_flag(parser)
    add("--json", action="store_true", help="one JSON object in place of lines")
    text = parser.add_argument_group(f"text of {BITS_PER_BYTE}")
    text.add_argument(
        "--json-keys",
        nargs=1,
        metavar="KEY",
        help="key of the text in JSON lines (default: text)",
    )
    text.add_argument(
        "--text-unit",
        type=text_unit,
        metavar="UNIT",
        help=f"what is a document in plain text: {UNITS_IN_WORDS} (default: file)",
    )
    add_tokenizer_flags(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    end_with_reader()
    sys.exit(main())
