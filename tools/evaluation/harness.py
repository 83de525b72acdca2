"""Scores of the zero-shot tasks by lm-evaluation-harness, on an exported model and local files.

The harness brings prompts and figures; its data sets are replaced by files of this machine.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError, DataError, SparsetronError
from tools.evaluation.figures import BOOTSTRAP_SAMPLES, Estimate, Figures
from tools.evaluation.task import read_lines
from tools.hf_tokenizer import files_of_folder, tokenizer_of_folder

PACKAGE = "lm_eval"
OFFLINE = {
    **dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1"),
    "DISABLE_MULTIPROC": "1",
}
"""Environment of the packages.

None looks for a model or a data set on the network, and the harness draws bootstrap samples in this
process, not in one more for each core.
"""
NAMES = {"acc": "accuracy", "perplexity": "perplexity", "f1": "f1", "em": "exact_match"}
"""Our names of figures by the harness's, in the order of the paper's columns."""


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """A folder in Hugging Face's format.

    `dtype` is that of the weights when they compute, "auto" for that of the file. `max_length` is
    the number of inputs the model sees at once, None for all its positions.
    """

    folder: Path
    dtype: str = "auto"
    max_length: int | None = None


def is_installed() -> bool:
    """Return whether this interpreter finds lm-evaluation-harness, without importing it."""
    return importlib.util.find_spec(PACKAGE) is not None


@dataclass(frozen=True, kw_only=True)
class HarnessScores:
    """Figures and numbers of examples by task, and the version of the harness that computed them.

    `left_out` gives the reason for each task that the harness cannot load here.
    """

    version: str
    figures: Mapping[str, tuple[Figures, int]]
    left_out: Mapping[str, str]


def score(
    model: ExportedModel,
    files: Mapping[str, Path],
    *,
    cache: Path,
    batch_size: int,
    limit: int | None,
    complete: bool,
) -> HarnessScores:
    """Score a model on the lines of each task's file.

    With `complete` a task that the harness cannot load is an error, before any is scored.

    Standard errors are the harness's: of accuracies that of the mean, of perplexity and F1 by
    bootstrap. The harness keeps its tables of the files in the folder `cache`.

    Raises:
        ConfigError: The harness cannot be imported, or, with `complete`, not load a task.
        DataError: The harness cannot read a file.
    """
    harness, manager = _import()
    with contextlib.redirect_stdout(sys.stderr):
        with _failing_in_one_line():
            tasks, left_out = _load(manager, files, cache)
        for name, reason in left_out.items() if complete else ():
            raise ConfigError(f"--by harness: it cannot load {name} ({reason}); leave out --by")
        found = _evaluate(harness, manager, model, tasks, batch_size, limit) if tasks else {}
    return HarnessScores(
        version=str(getattr(harness, "__version__", "")),
        figures={
            name: (_figures(found["results"][name]), int(found["n-samples"][name]["effective"]))
            for name in tasks
        },
        left_out=left_out,
    )


def _import() -> tuple[Any, Any]:
    """Return the package and its task manager, which look for nothing on the network."""
    os.environ.update(OFFLINE)
    try:
        harness: Any = importlib.import_module(PACKAGE)
        importlib.import_module(f"{PACKAGE}.models.huggingface")
        manager = importlib.import_module(f"{PACKAGE}.tasks").TaskManager()
    except ImportError as error:
        raise ConfigError(
            f"--by harness: lm-evaluation-harness cannot be imported ({error}); run: pip install "
            "'lm_eval[hf]', or give --by evaluate"
        ) from error
    if not callable(getattr(manager, "load", None)):
        raise ConfigError(
            "--by harness: this version of lm-evaluation-harness cannot take tasks from local "
            "files; run: pip install -U 'lm_eval[hf]', or give --by evaluate"
        )
    return harness, manager


@contextlib.contextmanager
def _failing_in_one_line() -> Iterator[None]:
    try:
        yield
    except SparsetronError:
        raise
    except Exception as error:  # any error of the package and of those that it calls
        reason = str(error).strip().split("\n")[0]
        raise DataError(
            f"lm-evaluation-harness: {type(error).__name__}: {reason}; --by evaluate names the "
            "line of a file that does not fit its task"
        ) from error


def _load(
    manager: Any, files: Mapping[str, Path], cache: Path
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the harness's tasks on local files, and why others cannot be loaded.

    A task may need a module that the installed packages lack, as ReCoRD's does with transformers 5.
    """
    tasks: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name, file in files.items():
        # A task takes settings of ours only as the member of a group.
        group = {"group": f"local_{name}", "task": [local_task(name, file, cache)]}
        try:
            tasks[name] = manager.load([group])["tasks"][name]
        except ImportError as error:
            left_out[name] = str(error)
    return tasks, left_out


def _evaluate(
    harness: Any,
    manager: Any,
    model: ExportedModel,
    tasks: Mapping[str, Any],
    batch_size: int,
    limit: int | None,
) -> dict[str, Any]:
    import torch

    tokenizer = files_of_folder(model.folder)
    # Our own scores have a begin mark where the tokenizer sets one before each text.
    marked = tokenizer is not None and bool(tokenizer_of_folder(model.folder, tokenizer).encode(""))
    arguments = {"pretrained": str(model.folder), "dtype": model.dtype, "add_bos_token": marked}
    if model.max_length is not None:
        arguments["max_length"] = model.max_length
    return harness.simple_evaluate(
        model="hf",
        model_args=arguments,
        tasks=list(tasks.values()),
        task_manager=manager,
        num_fewshot=0,
        batch_size=batch_size,
        device="cuda" if torch.cuda.is_available() else "cpu",
        limit=limit,
        bootstrap_iters=BOOTSTRAP_SAMPLES,
        log_samples=False,
    )


def local_task(name: str, file: Path, cache: Path) -> dict[str, Any]:
    """Return the harness's task with the lines of a file in place of its data set."""
    task: dict[str, Any] = {
        "task": name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(file.resolve())}, "cache_dir": str(cache)},
        # The file has one split, whatever splits the data set has.
        "training_split": None,
        "validation_split": None,
        "fewshot_split": None,
        "test_split": "test",
    }
    first = next(islice(read_lines(file), 1), ("", {}))[1]
    if "continuation" in first:
        task |= {"doc_to_text": "{{context}}", "doc_to_target": "{{' ' + continuation}}"}
        task["doc_to_decontamination_query"] = "{{context}}"
    return task


def _figures(results: Mapping[str, Any]) -> Figures:
    found: dict[str, Estimate] = {}
    for theirs, ours in NAMES.items():
        if f"{theirs},none" in results:
            stderr = results.get(f"{theirs}_stderr,none")
            found[ours] = Estimate(
                value=float(results[f"{theirs},none"]),
                stderr=float(stderr) if isinstance(stderr, int | float) else None,
            )
    return found
