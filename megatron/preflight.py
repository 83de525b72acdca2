"""Checks of every file that a run will read, before any rank starts.

A wrong path then costs one line at once instead of a wait in a queue. Only names, permissions and
headers are read, and a tokenizer's files if the size of the vocabulary matters, so the checks take
no longer for larger data. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from megatron.checkpoint.find import CheckpointSource, locate_checkpoint
from megatron.config import DataConfig, GPTConfig
from megatron.config.gpt import check_vocabulary
from megatron.errors import DataError

_OF_SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
SKIP = "where only the compute nodes have the data, give --check-paths false"


def check_paths(
    config: GPTConfig, run_dir: Path, *, log: Callable[[str], None]
) -> CheckpointSource | None:
    """Check that data, tokenizer and checkpoint exist; return the checkpoint to start from.

    Raises `DataError` or `CheckpointError` as the run itself would, `ConfigError` if the size of
    the vocabulary is unknown or too small for the tensor-parallel ranks. A configuration that names
    no data is only noted: `--dry-run` is also used before data exist.
    """
    if not (_prefixes(config.data) or config.data.mock_data):
        log("note: no data is named; a run needs --data-path, or --mock-data")
    try:
        check_data(config.data)
        # A single rank accepts any vocabulary, so its tokenizer need not be read.
        shared = config.parallel.tensor_model_parallel_size > 1
        size = vocabulary_size(config.data) if shared else None
    except DataError as error:
        raise DataError(f"{error}; {SKIP}") from error
    if size is not None:
        check_vocabulary(config, size)
    return locate_checkpoint(config, run_dir, log=log, look=True)


def check_data(data: DataConfig) -> None:
    """Raise `DataError` for a data set or a tokenizer file that is missing or cannot be read."""
    from megatron.data.indexed_dataset import check_header
    from megatron.data.vocabulary import find_vocabulary

    prefixes = _prefixes(data)
    for prefix in prefixes:
        check_header(prefix)
    for name in (data.vocab_file, data.merge_file):
        if name is not None and data.tokenizer_type is not None:
            _check_file(name)
    if data.tokenizer_model is not None and _is_path(data):
        _check_place(data.tokenizer_model)
        if data.tokenizer_type == "HuggingFaceTokenizer":
            _check_json(Path(data.tokenizer_model))
    if prefixes and data.tokenizer_type is None:
        find_vocabulary(data, prefixes)


def vocabulary_size(data: DataConfig) -> int | None:
    """Return the number of entries of the run's vocabulary, before padding.

    None if the run names no data, or if the tokenizer may have to be downloaded from the hub: a dry
    run downloads nothing. Raises the errors of `find_vocabulary`.
    """
    from megatron.data.vocabulary import find_vocabulary

    prefixes = _prefixes(data)
    if not prefixes and not data.mock_data:
        return None
    if data.tokenizer_type is not None and data.tokenizer_model is not None and not _is_path(data):
        return None
    return find_vocabulary(data, prefixes).size


def _prefixes(data: DataConfig) -> list[str]:
    """Return the prefixes of the data sets, empty if the run names no data."""
    from megatron.data.vocabulary import data_prefixes

    named = (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path)
    return data_prefixes(data) if any(named) else []


def _is_path(data: DataConfig) -> bool:
    """Return whether the tokenizer's model is a path.

    A name without a folder may be a model of the hub.
    """
    model = data.tokenizer_model or ""
    return data.tokenizer_type in _OF_SENTENCEPIECE or (
        model.endswith(".json") or model.startswith((".", "/"))
    )


def _check_place(name: str) -> None:
    try:
        folder = Path(name).is_dir()
    except OSError as error:
        raise DataError(f"{name}: cannot be looked at: {error.strerror}") from None
    if not folder:
        _check_file(name)
    elif not os.access(name, os.R_OK | os.X_OK):
        raise DataError(f"{name}: cannot be read: Permission denied")


def _check_file(name: str) -> None:
    from megatron.data.local_file import require_regular

    require_regular(name)
    if not os.access(name, os.R_OK):
        raise DataError(f"{name}: cannot be read: Permission denied")


def _check_json(path: Path) -> None:
    """Raise `DataError` unless the file begins as tokenizer.json does, or the folder has files."""
    if path.is_dir():
        if not any(path.iterdir()):
            raise DataError(f"{path}: is empty; wanted the files of a tokenizer")
        return
    with open(path, "rb") as file:
        start = file.read(64)
    if not start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        raise DataError(f"{path}: holds no JSON object; wanted tokenizer.json")
