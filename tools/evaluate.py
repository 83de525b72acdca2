"""Score the model of a run on a task: the last word of passages, or multiple choice.

    python tools/evaluate.py RUN --task lambada FILE
    python tools/evaluate.py RUN --task multiple-choice FILE [--limit 100] [--json]

FILE is JSON lines (also .gz, .bz2, .xz). A line of lambada is {"text": ...}, and its last word is
predicted, or {"context": ..., "continuation": ...}. The output is the share of words that greedy
decoding yields, and the perplexity of a word: exp of the mean negative log-likelihood of the words
(Paperno et al. 2016). A line of multiple-choice is

    {"context": "The sky is", "choices": ["blue", "loud"], "answer": 0}

`answer` counts from 0. The model chooses by log-likelihood after the context and, for the second
figure, by log-likelihood per character. A space is inserted between context and continuation if
neither has one there.

Checkpoints of any grid work. Texts longer than the run's sequences lose the beginning of their
context; the output gives their number. Exit code 2 for wrong usage, 3 for a bad file or if no
tokenizer is found, 4 for a missing or damaged checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.closed_pipe import end_with_reader  # noqa: E402
from megatron.errors import ConfigError, DataError, SparsetronError  # noqa: E402
from tools.run_model import (  # noqa: E402
    SavedModel,
    add_tokenizer_flags,
    check_tokenizer_flags,
    find_model,
)

if TYPE_CHECKING:
    from megatron.data.tokenizer import Tokenizer
    from megatron.model.likelihood import Continuation, Likelihood


@dataclass(frozen=True, kw_only=True)
class Example:
    """A line of a task: each of `endings` is scored after `context`.

    `answer` is the index of the right ending, and `where` names file and line in errors.
    """

    where: str
    context: str
    endings: tuple[str, ...]
    answer: int = 0


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
        for name, value in found.items():
            shown = f"{value:.6g}" if isinstance(value, float) else value
            print(f"{name.replace('_', ' ')}: {shown}")
    return 0


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Score the file with the model, and return the figures of the task by name.

    Raises:
        DataError: The file is empty or has a bad line, or no tokenizer fits.
        ConfigError, CheckpointError: `find_model` raises these errors.
    """
    task = TASKS[options.task]
    examples = list(islice(_examples(options.file, task.read), options.limit))
    if not examples:
        raise DataError(f"{options.file}: holds no line")
    saved = find_model(options.run, step=options.checkpoint_step)
    tokenizer = saved.tokenizer(options)
    length = saved.model.seq_length
    wholes = [
        _tokens(example, ending, tokenizer, length)
        for example in examples
        for ending in example.endings
    ]
    asked = [whole.cut(length) for whole in wholes]
    found = iter(_score(saved, asked, options.batch_size))
    scores = [[next(found) for _ in example.endings] for example in examples]
    return {
        "task": options.task,
        "checkpoint": str(saved.step),
        "examples": len(examples),
        "cut_on_the_left": sum(a.context != w.context for a, w in zip(asked, wholes, strict=True)),
        **task.figures(examples, scores),
    }


def _score(saved: SavedModel, asked: Sequence[Continuation], batch_size: int) -> list[Likelihood]:
    from megatron.model.likelihood import likelihoods

    model = saved.load()
    largest = max(max(*one.context, *one.tokens) for one in asked)
    if largest >= model.vocab_size:
        raise DataError(
            f"token {largest}, but the model knows {model.vocab_size}; the tokenizer is not the "
            "one it was trained with"
        )
    return likelihoods(model, asked, batch_size=batch_size)


def _tokens(example: Example, ending: str, tokenizer: Tokenizer, length: int) -> Continuation:
    """Return the tokens to predict, which the ending adds to its context.

    A token that spans context and ending belongs to the ending.
    """
    from megatron.model.likelihood import Continuation

    context = tokenizer.encode(example.context)
    whole = tokenizer.encode(example.context + ending)
    shared = 0
    while shared < min(len(context), len(whole)) and context[shared] == whole[shared]:
        shared += 1
    if shared == len(whole):
        raise DataError(f"{example.where}: {ending!r} adds no token to its context")
    if len(whole) - shared > length:
        raise DataError(
            f"{example.where}: {len(whole) - shared} tokens are to be predicted, the run's "
            f"sequences have {length}"
        )
    # The end mark begins a document, as in training.
    return Continuation(
        context=tuple(whole[:shared] or [tokenizer.eod]), tokens=tuple(whole[shared:])
    )


# ---- tasks -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EvaluationTask:
    """The functions of a task.

    `read` makes an example of a line and of its place in the file. `figures` computes the figures
    by name from all examples and the likelihoods of their endings.
    """

    read: Callable[[Mapping[str, Any], str], Example]
    figures: Callable[[Sequence[Example], Sequence[Sequence[Likelihood]]], dict[str, float]]


_LAST_WORD = re.compile(r"(.*\S)(\s+\S+)\s*", re.DOTALL)


def _lambada(line: Mapping[str, Any], where: str) -> Example:
    if "text" in line:
        found = _LAST_WORD.fullmatch(_string(line, "text", where))
        if found is None:
            raise DataError(f"{where}: text: must be two or more words, the last to be predicted")
        return Example(where=where, context=found[1], endings=(found[2],))
    context = _string(line, "context", where)
    return _joined(context, (_string(line, "continuation", where),), where)


def _multiple_choice(line: Mapping[str, Any], where: str) -> Example:
    choices, answer = line.get("choices"), line.get("answer")
    if not isinstance(choices, list) or len(choices) < 2:
        raise DataError(f"{where}: choices: must be a list of two or more texts")
    if not all(isinstance(choice, str) and choice.strip() for choice in choices):
        raise DataError(f"{where}: choices: must be texts that are not empty")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise DataError(f"{where}: answer: {answer!r}; must be from 0 to {len(choices) - 1}")
    return _joined(_string(line, "context", where), choices, where, answer)


def _joined(context: str, endings: Sequence[str], where: str, answer: int = 0) -> Example:
    # If the space ended the context, tokenizers would split the continuation differently than in
    # training.
    bare = context.rstrip(" ")
    blank = " " if bare and not bare[-1].isspace() else ""
    parts = tuple(e if not blank or e[0].isspace() else blank + e for e in endings)
    return Example(where=where, context=bare, endings=parts, answer=answer)


def _string(line: Mapping[str, Any], key: str, where: str) -> str:
    value = line.get(key)
    if not isinstance(value, str) or not (value.strip() or key == "context"):
        raise DataError(f"{where}: {key}: must be a text, found {value!r:.40}")
    return value


def _of_words(
    examples: Sequence[Example], scores: Sequence[Sequence[Likelihood]]
) -> dict[str, float]:
    mean = math.fsum(found.log for (found,) in scores) / len(scores)
    right = sum(found.greedy for (found,) in scores)
    perplexity = math.exp(-mean) if mean > -700 else math.inf
    return {"accuracy": right / len(scores), "perplexity": perplexity}


def _of_choices(
    examples: Sequence[Example], scores: Sequence[Sequence[Likelihood]]
) -> dict[str, float]:
    plain = normalized = 0
    for example, found in zip(examples, scores, strict=True):
        logs = [one.log for one in found]
        shares = [one.log / len(e.strip()) for one, e in zip(found, example.endings, strict=True)]
        plain += logs.index(max(logs)) == example.answer
        normalized += shares.index(max(shares)) == example.answer
    return {
        "accuracy": plain / len(examples),
        "length_normalised_accuracy": normalized / len(examples),
    }


TASKS = {
    "lambada": EvaluationTask(read=_lambada, figures=_of_words),
    "multiple-choice": EvaluationTask(read=_multiple_choice, figures=_of_choices),
}


# ---- reading -------------------------------------------------------------------------------------


def _examples(path: Path, read: Callable[[Mapping[str, Any], str], Example]) -> Iterator[Example]:
    from megatron.data.raw_text import find_inputs, read_batches

    files = find_inputs([str(path)], log=lambda text: None)
    for batch in read_batches(files, keys=(), text_unit="line"):
        for number, record in batch.records:
            where = f"{path}:{number}"
            if not isinstance(record, bytes):
                raise DataError(f"{where}: not a line of JSON")
            yield read(_parsed(record, where), where)


def _parsed(record: bytes, where: str) -> dict[str, Any]:
    try:
        line = json.loads(record)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    if not isinstance(line, dict):
        raise DataError(f"{where}: must be a JSON object")
    return line


def _check(options: argparse.Namespace) -> None:
    check_tokenizer_flags(options)
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
    add("file", type=Path, metavar="FILE", help="JSON lines of the task")
    add("--task", choices=tuple(TASKS), required=True, help="what the lines are")
    add("--batch-size", type=int, default=8, help="texts computed at once (default: 8)")
    add("--limit", type=int, default=None, metavar="N", help="the first N lines alone")
    add("--checkpoint-step", type=int, default=None, help="step to load (default: the newest)")
    add("--json", action="store_true", help="one JSON object in place of lines")
    add_tokenizer_flags(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    end_with_reader()
    sys.exit(main())
