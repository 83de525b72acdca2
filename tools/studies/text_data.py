"""A tokenizer and two data sets from a folder of text, for studies whose flags name `{data}`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.errors import ConfigError

TOOLS = Path(__file__).resolve().parents[1]
KINDS = ("train", "valid")
READ_BY_TOKENIZER = 16_040_000
"""Bytes of text from which the tokenizer is trained: the documents that the studies' rows had."""


def prepare(text: Path, folder: Path, *, vocabulary: int) -> Path:
    """Prepare tokenizer.json, train_text_document and valid_text_document in `folder`.

    Existing ones are kept. `text` holds files train* and valid* that `tools/preprocess_data.py`
    reads; a byte-level BPE of `vocabulary` entries is trained on the first. Returns `folder`.
    Raises `ConfigError` if files are missing or a tool fails.
    """
    made = [folder / "tokenizer.json"]
    made += [folder / f"{kind}_text_document.{end}" for kind in KINDS for end in ("bin", "idx")]
    if all(path.is_file() for path in made):
        _check_tokenizer(made[0], vocabulary)
        return folder
    files = {kind: sorted(str(path) for path in text.glob(f"{kind}*")) for kind in KINDS}
    for kind, found in files.items():
        if not found:
            raise ConfigError(f"--text-folder: {text} holds no file {kind}*, as {kind}.jsonl.bz2")
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer(files["train"], made[0], vocabulary=vocabulary)
    for kind, found in files.items():
        _run_tool(
            ["preprocess_data.py", "--input", *found, "--output-prefix", str(folder / kind)]
            + ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(made[0])]
            + ["--append-eod", "--overwrite"]
        )
    return folder


def train_tokenizer(files: Sequence[str], output: Path, *, vocabulary: int) -> None:
    """Train a byte-level BPE of `vocabulary` entries on the first text of `files`.

    Raises `ConfigError` if the tool fails.
    """
    command = ["train_tokenizer.py", "--input", *files, "--output", str(output), "--overwrite"]
    command += ["--vocab-size", str(vocabulary), "--max-bytes", str(READ_BY_TOKENIZER)]
    _run_tool(command)


def _check_tokenizer(path: Path, vocabulary: int) -> None:
    """Raise `ConfigError` for a tokenizer of another study, which has another vocabulary."""
    try:
        size = len(json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"])
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"--data: {path} is no tokenizer: {error!r}") from None
    if size > vocabulary:
        raise ConfigError(
            f"--data: {path} has {size} entries, and the study's vocabulary {vocabulary}; give "
            "another folder"
        )


def _run_tool(command: Sequence[str]) -> None:
    done = subprocess.run([sys.executable, str(TOOLS / command[0]), *command[1:]])
    if done.returncode:
        raise ConfigError(f"{command[0]} failed with exit code {done.returncode}; see above")
