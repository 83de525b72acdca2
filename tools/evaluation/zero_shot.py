"""The tasks of tables 4 to 6 of the Radius paper, with the prompts of lm-evaluation-harness.

A line has the columns of the published data set. Prompts, choices and figures are those of the
harness (version 0.4.13), to which tests compare them, so that scores can be set beside the paper's.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any

from megatron.errors import DataError
from tools.evaluation.example import (
    Example,
    Line,
    Reader,
    choice_endings,
    index_of,
    name_index,
    string_of,
    strings_of,
    text_of,
)
from tools.evaluation.figures import (
    accuracy,
    accuracy_and_f1,
    accuracy_and_macro_f1,
    credits,
    of_words,
)
from tools.evaluation.readers import lambada
from tools.evaluation.record import exact_match, token_f1
from tools.evaluation.task import EvaluationTask


@dataclass(frozen=True, kw_only=True)
class ZeroShotTask(EvaluationTask):
    """A task of the paper: the number of its table, the title of its column there.

    `source` is the published data set, its configuration and split.
    """

    table: int
    title: str
    source: str


def prompted(prompt: str, *choices: str) -> Reader:
    """Return the reader of a task whose prompt is filled from the columns that it names.

    The column `label` is the index of the right choice.
    """
    columns = [name for _, name, _, _ in Formatter().parse(prompt) if name is not None]

    def read(line: Line, where: str) -> Example:
        context = prompt.format(**{name: string_of(line, name, where) for name in columns})
        answer = index_of(line, "label", where, count=len(choices))
        return Example(where=where, endings=choice_endings(context, choices), answer=answer)

    return read


# ---- table 4 -----------------------------------------------------------------------------------


def race(line: Line, where: str) -> Example:
    """Read an article with its problems; the last problem is asked, the others are answered."""
    context = f"Article: {string_of(line, 'article', where)}\n\n"
    *before, last = _problems(line, where)
    for problem in before:
        right = problem.options[problem.answer]
        if problem.question.endswith("  _  ."):
            context += f"{problem.question[:-5]}{right}\n"
        else:
            context += f"Question: {problem.question}\nAnswer: {right}\n"
    endings = choice_endings(context + last.question, last.options)
    return Example(where=where, endings=endings, answer=last.answer)


@dataclass(frozen=True)
class _Problem:
    question: str
    options: list[str]
    answer: int


def _problems(line: Line, where: str) -> list[_Problem]:
    """Return the problems, which the data set holds as the text of a Python list."""
    try:
        found = ast.literal_eval(string_of(line, "problems", where))
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise DataError(f"{where}: problems: not the text of a list") from error
    if not isinstance(found, list) or not found or not all(isinstance(p, dict) for p in found):
        raise DataError(f"{where}: problems: must be a list of one or more objects")
    return [_problem(problem, where) for problem in found]


def _problem(problem: Mapping[str, Any], where: str) -> _Problem:
    options = strings_of(problem, "options", where)
    if len(options) != 4:
        raise DataError(f"{where}: options: {len(options)}; must be 4")
    answer = name_index(problem.get("answer"), "ABCD", "answer", where)
    return _Problem(text_of(problem, "question", where), options, answer)


_MATHQA_OPTIONS = re.compile(r"[abcd] \) .*?, |e \) .*?$")


def mathqa(line: Line, where: str) -> Example:
    """Read a problem with its options, such as "a ) 24 , b ) 120 , ... , e ) 9"."""
    context = f"Question: {string_of(line, 'Problem', where)}\nAnswer:"
    options = _MATHQA_OPTIONS.findall(string_of(line, "options", where))
    if not options:
        raise DataError(f"{where}: options: none of the form 'a ) 24 , b ) 120'")
    answer = name_index(line.get("correct"), "abcde"[: len(options)], "correct", where)
    endings = choice_endings(context, [option[4:].rstrip(" ,") for option in options])
    return Example(where=where, endings=endings, answer=answer)


def piqa(line: Line, where: str) -> Example:
    """Read a goal with two solutions."""
    context = f"Question: {string_of(line, 'goal', where)}\nAnswer:"
    solutions = [string_of(line, key, where) for key in ("sol1", "sol2")]
    answer = index_of(line, "label", where, count=2)
    return Example(where=where, endings=choice_endings(context, solutions), answer=answer)


def winogrande(line: Line, where: str) -> Example:
    """Read a sentence with a gap "_"; what follows the gap is scored after each option."""
    sentence = text_of(line, "sentence", where)
    before, gap, after = sentence.partition("_")
    if not gap:
        raise DataError(f"{where}: sentence: has no gap '_'")
    options = [string_of(line, key, where) for key in ("option1", "option2")]
    endings = tuple(
        ending for one in options for ending in choice_endings(before + one, [after.strip()])
    )
    answer = name_index(line.get("answer"), "12", "answer", where)
    return Example(where=where, endings=endings, answer=answer)


# ---- tables 5 and 6 ----------------------------------------------------------------------------


def mnli(line: Line, where: str) -> Example:
    """Read a premise with a hypothesis; label 0 is True, 1 Neither, 2 False."""
    hypothesis = string_of(line, "hypothesis", where).strip()
    stop = "" if hypothesis.endswith(".") else "."
    context = (
        f"{string_of(line, 'premise', where)}\nQuestion: {hypothesis}{stop} True, False or "
        "Neither?\nAnswer:"
    )
    answer = index_of(line, "label", where, count=3)
    endings = choice_endings(context, ["True", "Neither", "False"])
    return Example(where=where, endings=endings, answer=answer)


def copa(line: Line, where: str) -> Example:
    """Read a premise with two causes or effects, which continue it after a conjunction."""
    asked = name_index(line.get("question"), ("cause", "effect"), "question", where)
    context = f"{text_of(line, 'premise', where).strip()[:-1]} {('because', 'therefore')[asked]}"
    texts = [text_of(line, key, where) for key in ("choice1", "choice2")]
    # The harness has a second space there.
    endings = choice_endings(context, [f" {text[0].lower()}{text[1:]}" for text in texts])
    answer = index_of(line, "label", where, count=2)
    return Example(where=where, endings=endings, answer=answer)


def multirc(line: Line, where: str) -> Example:
    """Read a paragraph with a question and one answer, whose correctness is asked.

    Label 1 is a correct answer in the data set, but choice 1, which the harness then counts as
    right, says "no". The paper's scores are counted in this way.
    """
    paragraph, question, text = (
        string_of(line, key, where) for key in ("paragraph", "question", "answer")
    )
    context = f"{paragraph}\nQuestion: {question}\nAnswer:"
    choices = [f"{text}\nIs the answer correct? {word}" for word in ("yes", "no")]
    answer = index_of(line, "label", where, count=2)
    return Example(where=where, endings=choice_endings(context, choices), answer=answer)


def record(line: Line, where: str) -> Example:
    """Read a passage with a query, whose @placeholder every entity fills in turn."""
    first, *highlights = string_of(line, "passage", where).strip().split("\n@highlight\n")
    context = f"{first}\n\n" + "".join(f"  - {one}.\n" for one in highlights)
    query = string_of(line, "query", where)
    entities, answers = (
        sorted(set(strings_of(line, key, where))) for key in ("entities", "answers")
    )
    filled = [f"  - {query}".replace("@placeholder", entity) for entity in entities]
    worth = {
        "f1": tuple(token_f1(entity, answers) for entity in entities),
        "exact_match": tuple(exact_match(entity, answers) for entity in entities),
    }
    return Example(where=where, endings=choice_endings(context, filled), credits=worth)


def wic(line: Line, where: str) -> Example:
    """Read two sentences with the place of a word in the first."""
    first, second = (string_of(line, key, where) for key in ("sentence1", "sentence2"))
    start, end = (index_of(line, key, where, count=len(first) + 1) for key in ("start1", "end1"))
    context = (
        f"Sentence 1: {first}\nSentence 2: {second}\nQuestion: Is the word '{first[start:end]}' "
        "used in the same way in the two sentences above?\nAnswer:"
    )
    answer = index_of(line, "label", where, count=2)
    return Example(where=where, endings=choice_endings(context, ["no", "yes"]), answer=answer)


def wsc(line: Line, where: str) -> Example:
    """Read a passage with a pronoun, given by the number of its word, and a noun."""
    text, noun, pronoun = (string_of(line, k, where) for k in ("text", "span1_text", "span2_text"))
    words = text.split()
    before = " ".join(words[: index_of(line, "span2_index", where, count=len(words))])
    after = text[len(before) + len(pronoun) + 1 :]
    context = (
        f"Passage: {_detokenized(f'{before} *{pronoun}*{after}')}\nQuestion: In the passage above, "
        f'does the pronoun "*{pronoun}*" refer to "*{noun}*"?\nAnswer:'
    )
    answer = index_of(line, "label", where, count=2)
    return Example(where=where, endings=choice_endings(context, ["no", "yes"]), answer=answer)


def _detokenized(text: str) -> str:
    for old, new in ((" n't", "n't"), (" )", ")"), ("( ", "("), ('" ', '"'), (' "', '"')):
        text = text.replace(old, new)
    return re.sub(r" (['.,])", r"\1", text)


# ---- all ---------------------------------------------------------------------------------------

_GLUE = "nyu-mll/glue"
_SUPER = "aps/super_glue"

ZERO_SHOT = {
    "lambada_openai": ZeroShotTask(
        table=4,
        title="LAMBADA OpenAI",
        read=lambada,
        figures=of_words,
        source="EleutherAI/lambada_openai, test",
    ),
    "lambada_standard": ZeroShotTask(
        table=4,
        title="LAMBADA Standard",
        read=lambada,
        figures=of_words,
        source="cimec/lambada, test",
    ),
    "race": ZeroShotTask(
        table=4, title="RACE", read=race, figures=accuracy, source="EleutherAI/race, high, test"
    ),
    "mathqa": ZeroShotTask(
        table=4, title="MathQA", read=mathqa, figures=accuracy, source="regisss/math_qa, test"
    ),
    "piqa": ZeroShotTask(
        table=4, title="PIQA", read=piqa, figures=accuracy, source="baber/piqa, validation"
    ),
    "winogrande": ZeroShotTask(
        table=4,
        title="WinoGrande",
        read=winogrande,
        figures=accuracy,
        source="allenai/winogrande, winogrande_xl, validation",
    ),
    "mnli": ZeroShotTask(
        table=5,
        title="MNLI-m",
        read=mnli,
        figures=accuracy,
        source=f"{_GLUE}, mnli, validation_matched",
    ),
    "mnli_mismatch": ZeroShotTask(
        table=5,
        title="MNLI-mm",
        read=mnli,
        figures=accuracy,
        source=f"{_GLUE}, mnli, validation_mismatched",
    ),
    "qqp": ZeroShotTask(
        table=5,
        title="QQP",
        read=prompted(
            "Question 1: {question1}\nQuestion 2: {question2}\nQuestion: Do both questions ask the "
            "same thing?\nAnswer:",
            *("no", "yes"),
        ),
        figures=accuracy_and_f1,
        source=f"{_GLUE}, qqp, validation",
    ),
    "qnli": ZeroShotTask(
        table=5,
        title="QNLI",
        read=prompted(
            "{question}\n{sentence}\nQuestion: Does this response answer the question?\nAnswer:",
            *("yes", "no"),
        ),
        figures=accuracy,
        source=f"{_GLUE}, qnli, validation",
    ),
    "sst2": ZeroShotTask(
        table=5,
        title="SST-2",
        read=prompted(
            "{sentence}\nQuestion: Is this sentence positive or negative?\nAnswer:",
            *("negative", "positive"),
        ),
        figures=accuracy,
        source=f"{_GLUE}, sst2, validation",
    ),
    "mrpc": ZeroShotTask(
        table=5,
        title="MRPC",
        read=prompted(
            "Sentence 1: {sentence1}\nSentence 2: {sentence2}\nQuestion: Do both sentences mean "
            "the same thing?\nAnswer:",
            *("no", "yes"),
        ),
        figures=accuracy_and_f1,
        source=f"{_GLUE}, mrpc, validation",
    ),
    "rte": ZeroShotTask(
        table=5,
        title="RTE",
        read=prompted(
            "{sentence1}\nQuestion: {sentence2} True or False?\nAnswer:", *("True", "False")
        ),
        figures=accuracy,
        source=f"{_GLUE}, rte, validation",
    ),
    "boolq": ZeroShotTask(
        table=6,
        title="BoolQ",
        read=prompted("{passage}\nQuestion: {question}?\nAnswer:", *("no", "yes")),
        figures=accuracy,
        source=f"{_SUPER}, boolq, validation",
    ),
    "cb": ZeroShotTask(
        table=6,
        title="CB",
        read=prompted(
            "{premise}\nQuestion: {hypothesis}. True, False, or Neither?\nAnswer:",
            *("True", "False", "Neither"),
        ),
        figures=accuracy_and_macro_f1,
        source=f"{_SUPER}, cb, validation",
    ),
    "copa": ZeroShotTask(
        table=6, title="COPA", read=copa, figures=accuracy, source=f"{_SUPER}, copa, validation"
    ),
    "multirc": ZeroShotTask(
        table=6,
        title="MultiRC",
        read=multirc,
        figures=accuracy,
        source=f"{_SUPER}, multirc, validation",
    ),
    "record": ZeroShotTask(
        table=6,
        title="ReCoRD",
        read=record,
        figures=credits,
        source=f"{_SUPER}, record, validation",
    ),
    "sglue_rte": ZeroShotTask(
        table=6,
        title="RTE",
        read=prompted(
            "{premise}\nQuestion: {hypothesis} True or False?\nAnswer:", *("True", "False")
        ),
        figures=accuracy,
        source=f"{_SUPER}, rte, validation",
    ),
    "wic": ZeroShotTask(
        table=6, title="WiC", read=wic, figures=accuracy, source=f"{_SUPER}, wic, validation"
    ),
    "wsc": ZeroShotTask(
        table=6, title="WSC", read=wsc, figures=accuracy, source=f"{_SUPER}, wsc.fixed, validation"
    ),
}
"""The tasks by the harness's names, in the order of the paper's columns."""
