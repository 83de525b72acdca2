"""Tests of the zero-shot tasks: prompts, figures, the table and its command."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.errors import DataError
from megatron.model.likelihood import Likelihood
from tests.limits import LIMIT
from tests.tools.zero_shot_lines import LINES, make_place
from tools import zero_shot
from tools.evaluate import TASKS
from tools.evaluation.example import Ending, Example
from tools.evaluation.figures import (
    Estimate,
    accuracy_and_f1,
    accuracy_and_macro_f1,
    credits,
)
from tools.evaluation.record import exact_match, token_f1
from tools.evaluation.scoring import Scorer
from tools.evaluation.zero_shot import ZERO_SHOT
from tools.run_model import find_model

SCRIPT = Path(zero_shot.__file__).parent.parent / "scripts" / "zero_shot.sh"
SAT = "The cat sat."
OTHER_LINES = {
    "lambada": {"text": "the cat sat"},
    "multiple-choice": {"context": "a", "choices": ["b", "c"], "answer": 0},
    "blimp": {"good": "a b", "bad": "b a", "paradigm": "order", "phenomenon": "order"},
}
"""A line of each task that is not of the paper's tables."""
PROMPTS = {
    "lambada_openai": ("the cat sat on the mat and the dog sat on\nthe", [" log"]),
    "lambada_standard": ("the cat did n't sit on the", [" log"]),
    "race": (
        "Article: The cat sat.\n\nThe dog sat.\n\nQuestion: Who sat?\nAnswer: the cat\n"
        "The mat is on the log\nThe dog sat on  _  .",
        [" the cat", " the log", " the mat", " the dog that sat"],
    ),
    "mathqa": (
        "Question: 3 cats and 4 dogs sat on a log . how many ?\nAnswer:",
        [" 7", " 12", " 1", " 43", " none of these"],
    ),
    "piqa": ("Question: sit on a log\nAnswer:", [" sit on the log", " log the mat"]),
    "mnli": (
        f"{SAT}\nQuestion: The dog sat. True, False or Neither?\nAnswer:",
        [" True", " Neither", " False"],
    ),
    "mnli_mismatch": (
        "A log.\nQuestion: A mat. True, False or Neither?\nAnswer:",
        [" True", " Neither", " False"],
    ),
    "qqp": (
        "Question 1: Where is the cat?\nQuestion 2: Where sat a dog?\n"
        "Question: Do both questions ask the same thing?\nAnswer:",
        [" no", " yes"],
    ),
    "qnli": (
        f"Who sat?\n{SAT}\nQuestion: Does this response answer the question?\nAnswer:",
        [" yes", " no"],
    ),
    "sst2": (
        "the cat is on the mat \nQuestion: Is this sentence positive or negative?\nAnswer:",
        [" negative", " positive"],
    ),
    "mrpc": (
        f"Sentence 1: {SAT}\nSentence 2: The dog sat.\n"
        "Question: Do both sentences mean the same thing?\nAnswer:",
        [" no", " yes"],
    ),
    "rte": (f"{SAT}\nQuestion: A cat sat. True or False?\nAnswer:", [" True", " False"]),
    "boolq": (
        "The mat (log) is a mat.\nQuestion: is the mat a log?\nAnswer:",
        [" no", " yes"],
    ),
    "cb": (
        "The cat sat on the log.\nQuestion: the cat sat. True, False, or Neither?\nAnswer:",
        [" True", " False", " Neither"],
    ),
    "copa": ("The cat sat because", ["  the dog sat.", "  a log was on the mat."]),
    "multirc": (
        f"{SAT}\nQuestion: Who sat?\nAnswer:",
        [f" The cat\nIs the answer correct? {word}" for word in ("yes", "no")],
    ),
    "record": (
        "The Cat sat on a Log.\n\n  - A Dog sat.\n  - So it was.",
        [f"\n   - On a log sat {name}." for name in ("Cat", "Dog", "Log", "The Cat")],
    ),
    "sglue_rte": (f"{SAT}\nQuestion: A cat sat. True or False?\nAnswer:", [" True", " False"]),
    "wic": (
        "Sentence 1: The cat sat on a log.\nSentence 2: The log of the dog.\nQuestion: Is the word "
        "'log' used in the same way in the two sentences above?\nAnswer:",
        [" no", " yes"],
    ),
    "wsc": (
        'Passage: The cat, which didn\'t sit on"the log", sat on the mat as *it* was soft.\n'
        'Question: In the passage above, does the pronoun "*it*" refer to "*the mat*"?\nAnswer:',
        [" no", " yes"],
    ),
}
"""Context and endings of the first line of each task; WinoGrande has a context for each ending."""


def test_prompts_are_those_of_the_harness() -> None:
    """`test_harness_agreement` shows for the same lines that the harness computes the same."""
    for name, (context, texts) in PROMPTS.items():
        endings = ZERO_SHOT[name].read(LINES[name][0], name).endings
        assert [(one.context, one.text) for one in endings] == [(context, t) for t in texts], name
    gaps = ZERO_SHOT["winogrande"].read(LINES["winogrande"][0], "").endings
    before = "The cat sat on the mat, not the log, as the"
    assert [one.context for one in gaps] == [f"{before} mat", f"{before} log"]
    assert {one.text for one in gaps} == {" was soft."}
    assert PROMPTS.keys() | {"winogrande"} == ZERO_SHOT.keys()


def test_answers_are_those_of_the_lines() -> None:
    """Not MultiRC's, whose harness takes label 1, a correct answer, for the choice "no"."""
    for name, task in ZERO_SHOT.items():
        labels = [
            line.get("label", line.get("correct", line.get("answer"))) for line in LINES[name]
        ]
        wanted = [str(label).translate(str.maketrans("abcde12", "0123401")) for label in labels]
        answers = [task.read(line, name).answer for line in LINES[name]]
        if "label" in LINES[name][0]:
            assert answers == labels
        elif name in ("mathqa", "winogrande"):
            assert answers == list(map(int, wanted))
    assert [ZERO_SHOT["race"].read(line, "").answer for line in LINES["race"]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        ("piqa", {"label": -1}, "label: -1; must be from 0 to 1"),
        ("piqa", {"sol2": None}, "sol2: must be a text"),
        ("qqp", {"question2": 3}, "question2: must be a text"),
        ("mnli", {"label": 3}, "label: 3; must be from 0 to 2"),
        ("winogrande", {"sentence": "no gap"}, "sentence: has no gap"),
        ("winogrande", {"answer": 1}, "answer: 1; must be one of 1, 2"),
        ("winogrande", {"answer": ""}, "answer: ''; must be one of 1, 2"),
        ("mathqa", {"options": "24"}, "options: none of the form"),
        ("mathqa", {"correct": "f"}, "correct: 'f'; must be one of a, b, c, d, e"),
        ("race", {"problems": "[1"}, "problems: not the text of a list"),
        ("race", {"problems": "[]"}, "problems: must be a list of one or more"),
        ("copa", {"question": "why"}, "question: 'why'; must be one of cause, effect"),
        ("record", {"entities": []}, "entities: must be a list of texts"),
        ("wic", {"end1": 400}, "end1: 400; must be from 0 to 21"),
        ("wsc", {"span2_index": 99}, "span2_index: 99; must be from 0 to"),
    ],
)
def test_lines_of_other_data_sets_are_named(name: str, changed: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match="file:7: ") as caught:
        ZERO_SHOT[name].read(LINES[name][0] | changed, "file:7")
    assert words in str(caught.value)


# ---- figures -----------------------------------------------------------------------------------


def judged(pairs: Iterable[tuple[int, int]], size: int) -> tuple[list[Example], Any]:
    """Return examples with a right and a chosen ending each, and likelihoods that choose so."""
    endings = tuple(Ending(context="a", text=" b") for _ in range(size))
    examples, scores = [], []
    for right, chosen in pairs:
        examples.append(Example(where="", endings=endings, answer=right))
        scores.append([Likelihood(log=-float(i != chosen), greedy=False) for i in range(size)])
    return examples, scores


@pytest.mark.push
def test_f1_of_two_and_of_three_classes() -> None:
    pairs = [(1, 1)] * 6 + [(1, 0)] * 2 + [(0, 1)] * 4 + [(0, 0)] * 3
    found = accuracy_and_f1(*judged(pairs, 2))
    assert found["accuracy"].value == pytest.approx(9 / 15)
    assert found["f1"].value == pytest.approx(2 * 6 / (2 * 6 + 2 + 4))
    # By drawing examples, in place of counts, with another generator.
    drawn = [pairs[i] for i in np.random.default_rng(5).integers(0, 15, size=15 * 200)]
    parts = [drawn[first : first + 15] for first in range(0, len(drawn), 15)]
    again = [accuracy_and_f1(*judged(part, 2))["f1"].value for part in parts]
    assert found["f1"].stderr == pytest.approx(np.std(again), rel=0.2)
    three = accuracy_and_macro_f1(*judged([(0, 0), (1, 0), (2, 0), (2, 2)], 3))["f1"]
    assert three.value == pytest.approx((0.5 + 0 + 2 / 3) / 3)
    assert accuracy_and_f1(*judged([(0, 0), (0, 0)], 2))["f1"].value == 0


def test_an_entity_has_the_credit_of_its_best_answer() -> None:
    assert exact_match("The U.S.", ["a us", "france"]) == 1
    assert token_f1("Bank of France", ["France", "a bank in  France!"]) == pytest.approx(2 / 3)
    assert token_f1("the", ["an"]) == 1 and token_f1("the", ["cat"]) == 0
    (line,) = LINES["record"][:1]
    example = ZERO_SHOT["record"].read(line, "")
    scores = [[Likelihood(log=log, greedy=False) for log in (-3.0, -1.0, -2.0, -4.0)]]
    found = credits([example], scores)
    assert list(found) == ["f1", "exact_match"]
    assert [estimate.value for estimate in found.values()] == [0, 0]  # the dog, not the cat


@pytest.mark.parametrize("name", TASKS)
def test_figures_have_the_names_that_a_study_may_ask_for(name: str) -> None:
    task = TASKS[name]
    lines = LINES[name] if name in ZERO_SHOT else [OTHER_LINES[name]]
    examples = [task.read(line, "") for line in lines]
    scores = [[Likelihood(log=-1.0, greedy=False) for _ in example.endings] for example in examples]
    assert tuple(task.figures(examples, scores)) == task.figure_names


# ---- the command -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("zero_shot"))


def test_likelihoods_are_those_of_transformers(place: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="optional package")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(place / "exported").eval()
    cut = transformers.AutoTokenizer.from_pretrained(place / "exported")
    saved = find_model(place / "run")
    scorer = Scorer(saved, saved.tokenizer(), 4)
    examples = [t.read(line, n) for n, t in ZERO_SHOT.items() for line in LINES[n][:2]]
    scores, _ = scorer.score(examples)
    for example, found in zip(examples, scores, strict=True):
        for ending, likelihood in zip(example.endings, found, strict=True):
            context = cut(ending.context)["input_ids"]
            whole = cut(ending.context + ending.text)["input_ids"]
            inputs = torch.tensor([whole[-161:]])
            wanted = inputs[0, len(context) - len(whole) :]
            with torch.no_grad():
                logs = theirs(inputs[:, :-1]).logits[0, -len(wanted) :].log_softmax(-1)
            assert likelihood.log == pytest.approx(
                float(logs.gather(1, wanted[:, None]).sum()), rel=1e-5
            )
            assert likelihood.greedy == bool((logs.argmax(-1) == wanted).all())


def scored(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert zero_shot.main([*map(str, arguments), "--by", "evaluate", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_and_its_export_have_the_same_table(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = scored(capsys, place / "run", "--tasks-dir", place / "tasks")
    assert found["scored_by"] == "tools/evaluate.py"
    assert list(found["tasks"]) == list(ZERO_SHOT)
    wanted = {name: len(lines) for name, lines in LINES.items()}
    assert {name: task["examples"] for name, task in found["tasks"].items()} == wanted
    assert found == scored(capsys, place / "exported", "--tasks-dir", place / "tasks")
    tasks = ("--tasks-dir", str(place / "tasks"), "--by", "evaluate")
    assert zero_shot.main([str(place / "run"), *tasks]) == 0
    first, _, *table = capsys.readouterr().out.splitlines()
    assert "scored by tools/evaluate.py" in first
    assert len(table) == 1 + len(ZERO_SHOT) + 6  # the tasks with two figures
    assert len({len(row) for row in table}) == 1
    mrpc = next(number for number, row in enumerate(table) if " MRPC " in row)
    accuracy = 100 * found["tasks"]["mrpc"]["accuracy"]
    assert table[mrpc].split()[:4] == ["5", "MRPC", "acc", f"{accuracy:.2f}"]
    assert table[mrpc + 1].split()[0] == "F1"


def test_a_bad_line_is_told_before_the_harness_scores(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The label of GLUE's test files, -1, would count as wrong there."""
    (line, *_) = (place / "tasks" / "sst2.jsonl").read_text().splitlines()
    bad = tmp_path / "sst2.jsonl"
    bad.write_text(f"{line}\n{json.dumps(json.loads(line) | {'label': -1})}\n")
    monkeypatch.setattr(zero_shot.harness, "is_installed", lambda: True)
    monkeypatch.setattr(zero_shot.harness, "score", None)
    arguments = [str(place / "run"), "--tasks-dir", str(tmp_path), "--only", "sst2"]
    assert zero_shot.main(arguments) == 3
    told = capsys.readouterr().err
    assert told.startswith(f"error: {bad}:2: ") and told.count("\n") == 1


def test_a_name_that_is_too_long_is_one_line(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert zero_shot.main(["a" * 300, "--tasks-dir", str(place / "tasks")]) == 3
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1


def test_json_has_null_for_an_infinite_perplexity() -> None:
    figures = {"perplexity": Estimate(value=math.inf, stderr=math.nan)}
    found = json.loads(
        json.dumps(zero_shot._as_json({"lambada_openai": (figures, 1)}), allow_nan=False)
    )
    assert found["lambada_openai"]["perplexity"] is None
    assert found["lambada_openai"]["perplexity_stderr"] is None


@pytest.mark.push
def test_absent_files_are_refused_by_the_names_of_their_tasks(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("piqa", "lambada_openai"):
        text = (place / "tasks" / f"{name}.jsonl").read_text()
        (tmp_path / f"{name}.jsonl").write_text(text)
    environment = os.environ | {"PYTHON": sys.executable, "TASKS": str(tmp_path)}
    refused = subprocess.run(
        [SCRIPT, place / "run"], env=environment, capture_output=True, text=True, timeout=LIMIT
    )
    assert (refused.returncode, refused.stdout) == (2, "")
    absent = refused.stderr.partition(": no file")[0].removeprefix("error: ").split(", ")
    assert absent == [name for name in ZERO_SHOT if name not in ("piqa", "lambada_openai")]
    assert refused.stderr.count("\n") == 1 and "--only" in refused.stderr
    chosen = ("--tasks-dir", tmp_path, "--only", "piqa,lambada_openai")
    assert list(scored(capsys, place / "run", *chosen)["tasks"]) == ["lambada_openai", "piqa"]
    (tmp_path / "piqa.jsonl").unlink()
    assert zero_shot.main([str(place / "run"), *map(str, chosen)]) == 2
    assert capsys.readouterr().err.startswith(f"error: piqa: no file {tmp_path / 'piqa.jsonl'};")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--only", "piqa,nli"), 2, "--only: 'nli'"),
        (("--only", "piqa", "--limit", "0"), 2, "--limit: 0"),
        (("--only", "piqa", "--checkpoint-step", "9"), 4, "9"),
        (("--only", "piqa", "--by", "harness"), 2, "--by harness: lm-evaluation-harness"),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: tuple[str, ...],
    code: int,
    words: str,
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zero_shot.harness, "is_installed", lambda: False)
    assert (
        zero_shot.main([str(place / "run"), "--tasks-dir", str(place / "tasks"), *arguments])
        == code
    )
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_model_of_transformers_has_its_own_step_and_tokenizer(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [str(place / "exported"), "--tasks-dir", str(place / "tasks"), "--checkpoint-step", "1"]
    assert zero_shot.main(asked) == 2
    assert "--checkpoint-step: given, but" in capsys.readouterr().err
    assert zero_shot.main(["--tasks-dir", str(place / "tasks")]) == 2
    assert "RUN: missing" in capsys.readouterr().err
    assert zero_shot.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(ZERO_SHOT)
