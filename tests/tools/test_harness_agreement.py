"""Tests that lm-evaluation-harness and `tools/evaluate.py` agree, where the harness is installed.

The harness reads the exported model and local files, as nodes of a cluster must.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.tools.zero_shot_lines import LINES, make_place
from tools import evaluate, zero_shot
from tools.evaluation import harness
from tools.evaluation.record import exact_match, token_f1
from tools.evaluation.scoring import Scorer
from tools.evaluation.zero_shot import ZERO_SHOT
from tools.run_model import find_model

pytestmark = [
    pytest.mark.skipif(not harness.is_installed(), reason="optional package: lm_eval[hf]"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.push,
]
TEXTS = ["the cat sat on the mat", "the dog sat on\n\nthe log and the mat " * 20, "a cat, élan"]
CHOICES = [
    {"context": "the cat sat on", "choices": ["the mat", "a", "the dog that sat"], "answer": 0},
    {"context": "the dog", "choices": ["sat on the log and the mat", "log"], "answer": 1},
    {"context": "the log", "choices": ["mat", "and the cat sat on the log"], "answer": 1},
    {"context": "on the mat", "choices": ["x", "the cat and the dog sat on the mat"], "answer": 0},
]
PAIRS = [
    {"phenomenon": "a", "paradigm": "b", "good": good, "bad": bad}
    for good, bad in (("The cat sat.", "The cat sit."), ("dogs sit.", "sit dogs."), ("on", "mat"))
]
OURS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    # The fields of the harness's own blimp, with our columns.
    "pairs": {
        "output_type": "multiple_choice",
        "doc_to_text": "",
        "doc_to_choice": "{{[good, bad]}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
}
"""Tasks of the harness for the formats of `tools/evaluate.py`."""


class SquadMetrics(ModuleType):
    """Stand-in for the module of transformers 4 by which the harness judges entities of ReCoRD."""

    @staticmethod
    def compute_f1(answer: str, entity: str) -> float:
        return token_f1(entity, [answer])

    @staticmethod
    def compute_exact(answer: str, entity: str) -> float:
        return exact_match(entity, [answer])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_place(tmp_path_factory.mktemp("harness"))
    lines = {"choices": CHOICES, "pairs": PAIRS, "texts": [{"text": text} for text in TEXTS]}
    for name, documents in lines.items():
        text = "".join(json.dumps(document) + "\n" for document in documents)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


@pytest.fixture(scope="module")
def theirs(place: Path) -> Iterator[dict[str, Any]]:
    """Score every task by the harness, which then also returns each likelihood."""
    squad = "transformers.data.metrics.squad_metrics"
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HUB_OFFLINE", "1")
    patch.setenv("HF_HOME", str(place / "hf"))
    try:
        importlib.import_module(squad)
    except ImportError:
        metrics: Any = ModuleType("metrics")
        metrics.squad_metrics = SquadMetrics(squad)
        patch.setitem(sys.modules, "transformers.data.metrics", metrics)
        patch.setitem(sys.modules, squad, metrics.squad_metrics)
    package: Any = importlib.import_module("lm_eval")
    local = [
        harness.local_task(name, place / "tasks" / f"{name}.jsonl", place / "cache")
        for name in ZERO_SHOT
    ]
    formats: list[dict[str, Any]] = []
    for name, fields in OURS.items():
        files = {"test": str(place / f"{name}.jsonl")}
        data = {"data_files": files, "cache_dir": str(place / "cache")}
        common = {"task": name, "dataset_path": "json", "test_split": "test"}
        formats.append({**common, "dataset_kwargs": data, **fields})
    yield package.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(place / "exported"), "dtype": "float32"},
        tasks=[{"group": "local", "task": local}, *formats],
        num_fewshot=0,
        batch_size=4,
        device="cpu",
        bootstrap_iters=0,
        log_samples=True,
    )
    patch.undo()


def results_of(theirs: Mapping[str, Any], name: str) -> dict[str, float]:
    return theirs["results"][name]


def test_every_ending_of_every_task_has_the_same_likelihood(
    place: Path, theirs: dict[str, Any]
) -> None:
    saved = find_model(place / "run")
    scorer = Scorer(saved, saved.tokenizer(), 8)
    for name, task in ZERO_SHOT.items():
        examples = [task.read(line, name) for line in LINES[name]]
        scores, _ = scorer.score(examples)
        samples = sorted(theirs["samples"][name], key=lambda sample: sample["doc_id"])
        assert len(samples) == len(examples)
        for sample, found in zip(samples, scores, strict=True):
            logs = [float(log) for log, _ in sample["filtered_resps"]]
            assert [one.log for one in found] == pytest.approx(logs, rel=1e-5), name
            assert [one.greedy for one in found] == [bool(g) for _, g in sample["filtered_resps"]]
        figures = {key: estimate.value for key, estimate in task.figures(examples, scores).items()}
        for key, value in figures.items():
            named = {ours: name for name, ours in harness.NAMES.items()}[key]
            assert value == pytest.approx(results_of(theirs, name)[f"{named},none"], rel=1e-5), name
        if name in ("lambada_openai", "lambada_standard"):
            assert 0 < figures["accuracy"] < 1


def ours(place: Path, task: str, name: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    asked = [str(place / "run"), "--task", task, str(place / f"{name}.jsonl"), "--json"]
    assert evaluate.main(asked) == 0
    return json.loads(capsys.readouterr().out)


def test_multiple_choice_pairs_and_bits_per_byte_agree(
    place: Path, theirs: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    choices, found = (
        results_of(theirs, "choices"),
        ours(place, "multiple-choice", "choices", capsys),
    )
    assert 0 < found["accuracy"] == choices["acc,none"]
    assert 0 < found["length_normalised_accuracy"] == choices["acc_norm,none"]
    assert found["accuracy"] != found["length_normalised_accuracy"]
    pairs, found = results_of(theirs, "pairs"), ours(place, "blimp", "pairs", capsys)
    assert found["accuracy"] == pytest.approx(pairs["acc,none"])
    texts, found = results_of(theirs, "texts"), ours(place, "bits-per-byte", "texts", capsys)
    assert found["bits_per_byte"] == pytest.approx(texts["bits_per_byte,none"], rel=1e-6)
    assert found["tokens"] > 160 and math.isfinite(found["bits_per_byte"])


def test_the_table_by_the_harness_is_ours(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    only = ("--only", "lambada_openai,piqa", "--json", "--tasks-dir", str(place / "tasks"))
    tables = []
    for by in ("harness", "evaluate"):
        capsys.readouterr()
        assert zero_shot.main([str(place / "run"), *only, "--by", by]) == 0
        tables.append(json.loads(capsys.readouterr().out))
    assert "lm-evaluation-harness" in tables[0]["scored_by"]
    for name in ("lambada_openai", "piqa"):
        for key, value in tables[0]["tasks"][name].items():
            if key != "perplexity_stderr":  # by bootstrap there, by the delta method here
                assert value == pytest.approx(tables[1]["tasks"][name][key], rel=1e-5), key


def test_a_task_that_the_harness_cannot_load_is_scored_here(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ReCoRD's functions import a module of transformers 4."""
    for module in [name for name in sys.modules if name.startswith("lm_eval.tasks.super_glue")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "transformers.data.metrics", None)
    only = ("--only", "piqa,record", "--json", "--tasks-dir", str(place / "tasks"))
    capsys.readouterr()
    assert zero_shot.main([str(place / "exported"), *only, "--by", "harness"]) == 2
    assert "--by harness: it cannot load record (" in capsys.readouterr().err
    assert zero_shot.main([str(place / "exported"), *only]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["tasks"]) == ["piqa", "record"]
    assert "record by tools/evaluate.py" in found["scored_by"]
