"""What we ask of lm-evaluation-harness and read from it, with a package in its place.

`test_harness_agreement.py` compares scores where the harness itself is installed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron.errors import ConfigError, DataError
from tests.tools.test_hf_tools import make_marked_bpe
from tools.evaluation import harness
from tools.evaluation.figures import Estimate


class Manager:
    """Loads every task but record; a file of another format fails."""

    def load(self, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        (task,) = groups[0]["task"]
        name, file = task["task"], Path(task["dataset_kwargs"]["data_files"]["test"])
        if name == "record":
            raise ImportError("no module squad")
        if "bad" in file.read_text(encoding="utf-8"):
            raise ValueError("a column is missing\nand more")
        return {"tasks": {name: name}}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Put a package in the harness's place; return what it is asked to evaluate."""
    found: dict[str, Any] = {}

    def simple_evaluate(**arguments: Any) -> dict[str, Any]:
        found.update(arguments)
        results = {"acc,none": 0.5, "acc_stderr,none": 0.1, "acc_norm,none": 1.0}
        words = {"perplexity,none": 9.0, "perplexity_stderr,none": "N/A", "acc,none": 0.25}
        return {
            "results": {"piqa": results, "lambada_openai": words},
            "n-samples": {"piqa": {"effective": 2}, "lambada_openai": {"effective": 1}},
        }

    package, tasks = ModuleType("lm_eval"), ModuleType("lm_eval.tasks")
    vars(package).update(__version__="0.0", simple_evaluate=simple_evaluate)
    vars(tasks).update(TaskManager=Manager)
    models = ("lm_eval.models", "lm_eval.models.huggingface")
    for module in (package, tasks, *map(ModuleType, models)):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in harness.OFFLINE:
        monkeypatch.setenv(name, "")
    return found


def files(folder: Path, *names: str, line: Mapping[str, Any]) -> dict[str, Path]:
    found = {name: folder / f"{name}.jsonl" for name in names}
    for path in found.values():
        path.write_text(json.dumps(line) + "\n", encoding="utf-8")
    return found


def score(
    folder: Path, tasks: Mapping[str, Path], *, complete: bool = False
) -> harness.HarnessScores:
    model = harness.ExportedModel(folder=folder / "exported", dtype="float32", max_length=16)
    return harness.score(
        model, tasks, cache=folder / "cache", batch_size=4, limit=3, complete=complete
    )


def test_figures_have_our_names_and_offline_packages(asked: dict[str, Any], tmp_path: Path) -> None:
    found = score(tmp_path, files(tmp_path, "piqa", "lambada_openai", "record", line={"a": 1}))
    assert found.version == "0.0" and found.left_out == {"record": "no module squad"}
    figures, examples = found.figures["piqa"]
    assert figures == {"accuracy": Estimate(value=0.5, stderr=0.1)} and examples == 2
    words, examples = found.figures["lambada_openai"]
    assert list(words) == ["accuracy", "perplexity"] and examples == 1
    assert words["perplexity"] == Estimate(value=9.0, stderr=None)
    assert asked["model_args"] == {
        "pretrained": str(tmp_path / "exported"),
        "dtype": "float32",
        "add_bos_token": False,
        "max_length": 16,
    }
    assert (asked["limit"], asked["batch_size"], asked["num_fewshot"]) == (3, 4, 0)
    assert {os.environ[name] for name in harness.OFFLINE} == {"1"}


def test_it_begins_texts_with_a_mark_where_our_scores_do(
    asked: dict[str, Any], tmp_path: Path
) -> None:
    make_marked_bpe(tmp_path / "exported")
    score(tmp_path, files(tmp_path, "piqa", "lambada_openai", line={"a": 1}))
    assert asked["model_args"]["add_bos_token"] is True


def test_a_task_that_it_cannot_load_is_told_before_any_is_scored(
    asked: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"cannot load record \(no module squad\)"):
        score(tmp_path, files(tmp_path, "piqa", "record", line={"a": 1}), complete=True)
    assert not asked


def test_a_file_that_it_cannot_read_is_one_line(asked: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        score(tmp_path, files(tmp_path, "piqa", line={"bad": 1}))
    assert "ValueError: a column is missing; --by evaluate" in str(raised.value) and not asked


def test_an_error_of_the_evaluation_is_not_the_file_s(
    asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(**arguments: Any) -> dict[str, Any]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(sys.modules["lm_eval"], "simple_evaluate", out_of_memory)
    with pytest.raises(RuntimeError, match="out of memory"):
        score(tmp_path, files(tmp_path, "piqa", line={"a": 1}))


def test_a_version_that_takes_no_local_files_is_refused(
    asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["lm_eval.tasks"], "TaskManager", object)
    with pytest.raises(ConfigError, match="cannot take tasks from local files"):
        score(tmp_path, files(tmp_path, "piqa", line={"a": 1}))


def test_pairs_of_context_and_continuation_are_formatted(tmp_path: Path) -> None:
    line = {"context": "a", "continuation": "b"}
    (file,) = files(tmp_path, "lambada_openai", line=line).values()
    task = harness.local_task("lambada_openai", file, tmp_path)
    assert task["doc_to_target"] == "{{' ' + continuation}}" and task["test_split"] == "test"
    (other,) = files(tmp_path, "piqa", line={"goal": "a"}).values()
    assert "doc_to_target" not in harness.local_task("piqa", other, tmp_path)
