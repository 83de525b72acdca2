"""Whether a checkpoint and a run belong together: what must be the same, and what may change."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.data.file_facts import changes, file_facts
from megatron.data.vocabulary import Vocabulary, data_prefixes
from megatron.errors import CheckpointError

_FREE_TO_CHANGE = {
    "model": {
        "attention_dropout",
        "hidden_dropout",
        "init_method_std",
        "make_vocab_size_divisible_by",
    },
    "data": {"data_cache_path", "no_mmap_bin_files", "dataloader_type"},
}
_OF_THE_DATA = ("seed", "global_batch_size", "rampup_batch_size")
MAX_DIFFERENCES = 5
"""Differing keys an error names before it counts the rest."""


def identity(config: Config, vocabulary: Vocabulary) -> dict[str, Any]:
    """Settings that a checkpoint and the run that loads it must share, by dotted name."""
    found: dict[str, Any] = {"data.tokenizer": vocabulary.fingerprint}
    for section in ("model", "data"):
        values = dataclasses.asdict(getattr(config, section))
        for name in values.keys() - _FREE_TO_CHANGE[section]:
            found[f"{section}.{name}"] = values[name]
    for name in _OF_THE_DATA:
        found[f"training.{name}"] = getattr(config.training, name)
    found["model.vocab_size"] = vocabulary.size
    found["gradient.grad_path"] = config.gradient.grad_path
    for section, options in config.extensions.items():
        for name, value in dataclasses.asdict(options).items():  # type: ignore[call-overload]
            found[f"{section}.{name}"] = value
    return json.loads(json.dumps(found))


def data_files(config: Config) -> dict[str, Any]:
    """Facts by which a resumed run tells that its data changed. Raises `DataError`."""
    return file_facts(data_prefixes(config.data))


def schedule(config: Config) -> dict[str, Any]:
    """Settings that a resumed run may change, with effect from here on."""
    found = {f"optimizer.{k}": v for k, v in dataclasses.asdict(config.optimizer).items()}
    found["training.train_iters"] = config.training.train_iters
    found["training.train_samples"] = config.training.train_samples
    return found


def check_identity(
    was: Mapping[str, Any], now: Mapping[str, Any], *, where: Path, model_only: bool
) -> None:
    """Raise `CheckpointError` naming the settings that differ, those of the model alone where
    training starts anew on its weights."""
    weights = {key for key in now if key.startswith("model.") and key != "model.seq_length"}
    differing = [
        f"{key}: {was.get(key)!r} there, {now[key]!r} here"
        for key in sorted(now)
        if was.get(key) != now[key] and (key in weights or not model_only)
    ]
    if differing:
        raise CheckpointError(
            f"{where}: belongs to another run: {_few(differing)}; use another --run-dir, or give "
            "the same settings"
        )


def check_data(
    was: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    where: Path,
    accept: bool,
    say: Callable[[str], None],
) -> None:
    """Raise `CheckpointError` naming the data files that changed since, or only tell of them."""
    found = changes(was, now)
    if found and not accept:
        raise CheckpointError(
            f"{where}: data changed since: {_few(found)}; bring the old files back, or give "
            "--accept-new-data to go on with these"
        )
    if found:
        say(f"data changed since {where.name}, going on with it: {_few(found)}")


def _few(differences: list[str]) -> str:
    rest = len(differences) - MAX_DIFFERENCES
    more = f" and {rest} more" if rest > 0 else ""
    return "; ".join(differences[:MAX_DIFFERENCES]) + more
