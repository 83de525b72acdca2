"""The settings that a checkpoint and a run that loads it must share."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.format import show
from megatron.checkpoint.verify import read_manifest
from megatron.config import Config
from megatron.config.fields import specs_of, split_shares
from megatron.config.megatron_flags import RETIRED_VALUES
from megatron.data.indexed_dataset import bin_path, changes, idx_path, without_suffix
from megatron.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from megatron.checkpoint.find import CheckpointSource

_LATER: dict[str, Any] = {
    "model.use_rope_scaling": False,
    "model.rope_scaling_factor": 8.0,
    "model.qk_layernorm": False,
}
"""Settings that older checkpoints do not have, with the values that these were trained with."""
_ADDED = {
    "diloco.outer_compression": ("none",),
    "diloco.outer_topk_chunk": (4096,),
    "diloco.outer_topk_k": (64,),
    "diloco.outer_decay": (0.95,),
    "diloco.outer_values": ("2bit",),
    "gradient.grad_wire": (None,),
    "gradient.keeps_rounding": (False,),
    "powersgd.powersgd_rank_share": (None,),
    "radius.radius_clip": ("all",),
    "samo.samo_dense": (None,),
    "samo.dsr_frequency": (1.0,),
    "samo.dsr_growth": ("survivors", "zeros"),
}
"""Settings of gradient paths that older checkpoints do not have, with the values that fit them.

Older runs grew by zeros under other rules as well, so they continue under either rule.
"""
_OF_THE_DATA = ("seed", "global_batch_size", "rampup_batch_size")
_PATH = "gradient.grad_path"
_WIRE = "gradient.grad_wire"
_KEEPS_ROUNDING = "gradient.keeps_rounding"
_PLACES = ("data.data_path", "data.train_data_path", "data.valid_data_path", "data.test_data_path")
_OF_A_TOKENIZER = (
    "data.tokenizer_type",
    "data.tokenizer_model",
    "data.vocab_file",
    "data.merge_file",
    "data.vocab_size",
)
_WITHOUT_WEIGHTS = (
    "model.seq_length",
    "model.norm_epsilon",
    "model.max_position_embeddings",
    "model.rotary_base",
    "model.use_rope_scaling",
    "model.rope_scaling_factor",
)
"""Settings that no weight depends on; all but the first two only with rotary positions."""
_SECTIONS = ("model", "data", "training")
"""Sections of an identity that do not belong to the gradient path."""
MAX_DIFFERENCES = 5
"""Differing keys that an error lists; it counts the remaining ones."""


def identity(
    config: Config, *, free: Collection[str] = (), facts: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the settings that a checkpoint and the run that loads it must share, by dotted name.

    Args:
        config: The settings of the run.
        free: Dotted names of settings of the task's sections that may differ: "data.data_path".
        facts: Facts that come from files and not from settings, by dotted names in the sections
            `model` and `data`: the size of a vocabulary, the fingerprint of a tokenizer. They
            replace settings of the same name.
    """
    found = dict(facts or {})
    for section in ("model", "data"):
        for name, value in dataclasses.asdict(getattr(config, section)).items():
            if f"{section}.{name}" not in free:
                found.setdefault(f"{section}.{name}", value)
    for name in _OF_THE_DATA:
        found[f"training.{name}"] = getattr(config.training, name)
    found[_PATH] = config.gradient.grad_path
    found[_WIRE] = config.gradient.grad_wire
    found[_KEEPS_ROUNDING] = config.gradient.keeps_rounding
    for section, options in config.extensions.items():
        for spec in specs_of(type(options), section).values():
            if spec.saved:
                found[f"{section}.{spec.name}"] = getattr(options, spec.name)
    return json.loads(json.dumps(found))


def schedule(config: Config) -> dict[str, Any]:
    """Return the settings that a resumed run may change, with effect from then on."""
    found = {f"optimizer.{k}": v for k, v in dataclasses.asdict(config.optimizer).items()}
    found["precision.predivide_loss"] = config.precision.predivide_loss
    found["training.train_iters"] = config.training.train_iters
    found["training.train_samples"] = config.training.train_samples
    return json.loads(json.dumps(found))  # as a checkpoint has it, with lists


def check_schedule(was: Mapping[str, Any], config: Config, *, where: Path) -> None:
    """Raise `CheckpointError` for a value of `schedule` that its setting cannot have."""
    for key in schedule(config).keys() & was.keys():
        section, name = key.split(".")
        spec = specs_of(type(getattr(config, section)), section)[name]
        if not spec.accepts(was[key]):
            raise CheckpointError(f"{where}: state.schedule[{key}]: {show(was[key])} is no {name}")


def with_schedule(config: Config, was: Mapping[str, Any]) -> Config:
    """Return `config` with the settings that `schedule` returned for another configuration."""
    by_section: dict[str, dict[str, Any]] = {"optimizer": {}, "precision": {}, "training": {}}
    for key in schedule(config).keys() & was.keys():
        section, name = key.split(".")
        by_section[section][name] = was[key]
    changed = {
        section: dataclasses.replace(getattr(config, section), **values)
        for section, values in by_section.items()
    }
    return dataclasses.replace(config, **changed)


def check_identity(
    was: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    where: Path,
    own: bool,
    model_only: bool,
    new_data: bool = False,
    log: Callable[[str], None] = lambda text: None,
) -> None:
    """Raise `CheckpointError` naming the settings that differ, outside the gradient path.

    The places of data and of tokenizer files are no settings: `check_data` compares contents, and
    an equal fingerprint makes a tokenizer the same. With `model_only`, for a run that takes only
    the weights, what weights depend on is compared; other settings of the model are logged. With
    `new_data`, a run that begins with the checkpoint of another may read other data in other
    batches. A run that resumes (`own`) and one that begins are told different ways out.
    """
    free, freed = _free(was, now), set[str]()
    weights = {key for key in now if key.startswith("model.")} - free
    checked = {*_settings(now)} - free
    if model_only:
        rotary = _is_rotary(was) and _is_rotary(now)
        freed = {*(_WITHOUT_WEIGHTS if rotary else _WITHOUT_WEIGHTS[:2])} & now.keys()
        checked = weights - freed
    elif new_data and not own:
        freed = {key for key in checked if _is_of_the_data(key)}
        checked -= freed
    differing = _differences(was, now, checked)
    if not differing:
        for text in _differences(was, now, freed):
            log(f"{text}, from here on")
        return
    way_out = "give the same settings"
    if own:
        way_out = "use another --run-dir, or give the same settings"
    elif not _differences(was, now, {key for key in checked if not _is_of_the_data(key)}):
        way_out = "give --accept-new-data to keep its moments, or --finetune to take its weights"
    elif not _differences(was, now, weights - {*_WITHOUT_WEIGHTS}):
        way_out = "give --finetune to take its weights alone, or give the same settings"
    raise CheckpointError(f"{where}: belongs to another run: {_few(differing)}; {way_out}")


def _settings(identity: Mapping[str, Any]) -> list[str]:
    """Return the keys of an identity outside the gradient path."""
    return [key for key in identity if _section(key) in _SECTIONS]


def _free(was: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """Return the keys that name places, whose contents decide."""
    tokenizer = now.get("data.tokenizer")
    same = tokenizer is not None and tokenizer == was.get("data.tokenizer")
    return {*_PLACES, *(_OF_A_TOKENIZER if same else ())}


def _is_rotary(identity: Mapping[str, Any]) -> bool:
    return identity.get("model.position_embedding_type") == "rope"


def _is_of_the_data(key: str) -> bool:
    """Return whether a setting says which data are read and in which batches."""
    is_data = key.startswith("data.") and key not in ("data.tokenizer", "data.vocabulary")
    return is_data or key in [f"training.{name}" for name in _OF_THE_DATA]


def check_settings(config: Config, origin: CheckpointSource) -> None:
    """Raise `CheckpointError` for settings with which a run would refuse its checkpoint.

    Facts of data and tokenizer are not compared, so that no file of theirs is read.
    """
    was, asked = read_manifest(origin.path).state.get("identity", {}), config.checkpoint
    mine = identity(config)
    # What is not set here may follow from files.
    compared = mine.keys() & was.keys() - {*_OF_A_TOKENIZER}
    known = {key: mine[key] for key in sorted(compared) if mine[key] is not None}
    weights_only = asked.finetune and not origin.own
    check_identity(
        was,
        known,
        where=origin.path,
        own=origin.own,
        model_only=weights_only,
        new_data=asked.accept_new_data,
    )
    if not weights_only:
        check_path(
            was,
            mine,
            where=origin.path,
            own=origin.own,
            reset=asked.reset_grad_state,
            log=lambda text: None,
        )


def path_differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return how the gradient path and its options differ, as text for an error."""
    return _differences(was, now, {key for key in {*was, *now} if _section(key) not in _SECTIONS})


def check_path(
    was: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    where: Path,
    own: bool,
    reset: bool,
    log: Callable[[str], None],
) -> None:
    """Raise `CheckpointError` if the gradient path differs.

    A resumed run (`own`) keeps its path. Another run may start from the checkpoint of a dense run;
    with `reset` any path may start from any other, without what that path had not sent yet.
    """
    differing = path_differences(was, now)
    path, new = was.get(_PATH), now.get(_PATH)
    if not differing:
        if reset and own:
            log(
                "--reset-grad-state is ignored: this run resumes on the gradient path that it "
                "began with; it is for --load and another --run-dir"
            )
        elif reset:
            log(
                f"gradient path {new} starts with empty state: --reset-grad-state drops its state "
                "in the checkpoint, with what had not been sent yet"
            )
        return
    has_state = path != "dense" or was.get(_KEEPS_ROUNDING)
    if not reset and (own or has_state):
        raise CheckpointError(
            f"{where}: was saved on another gradient path: {_few(differing)}; give the same "
            "settings, or --reset-grad-state to drop what that path has not sent yet"
        )
    log(f"gradient path {_path_text(now)} starts here; the checkpoint is of {_path_text(was)}")


def _path_text(identity: Mapping[str, Any]) -> str:
    wire = identity.get(_WIRE)
    return f"{identity.get(_PATH)}{f' over {wire}' if wire else ''}"


def check_data(
    was: Mapping[str, Any],
    now: Mapping[str, Any],
    files: tuple[Mapping[str, Any], Mapping[str, Any]],
    *,
    where: Path,
    own: bool,
    accept: bool,
    log: Callable[[str], None],
) -> None:
    """Raise `CheckpointError` naming data that changed; with `accept` only log them.

    Args:
        was: The identity in the checkpoint.
        now: That of this run.
        files: `data_files` of both. The data of a setting are equal if they have the same weights,
            and files of the same sizes and indices, wherever these are.
        where: The checkpoint.
        own: Whether the run resumes its own checkpoint.
        accept: Whether other data are accepted.
        log: Receives a line for data that are accepted.
    """
    found = changes(*files)
    for key in sorted({key for key in _PLACES if key in was or now.get(key) is not None}):
        there, here = was.get(key), now.get(key)
        if _contents(there, files[0]) != _contents(here, files[1]):
            found.append(f"{key}: {there!r} there, {here!r} here")
    if found and not accept:
        another = "" if own else ", or --finetune to take the weights alone"
        raise CheckpointError(
            f"{where}: data changed since: {_few(found)}; restore the old files, or give "
            f"--accept-new-data to continue with these{another}"
        )
    if found:
        log(f"data changed since {where.name}, continuing with it: {_few(found)}")


def _contents(value: object, files: Mapping[str, Any]) -> list[object]:
    """Return what a setting names: weights, and the facts of the files that each path leads to.

    A path about whose files nothing is known stands for itself.
    """
    found: list[object] = []
    for item in map(str, value if isinstance(value, list) else [value]):
        with contextlib.suppress(ValueError):
            found.append(float(item))
            continue
        # As `file_facts` writes paths.
        prefix = str(Path(without_suffix(item.strip())))
        pair = [str(bin_path(prefix)), str(idx_path(prefix))]
        paths = pair if pair[1] in files else sorted(p for p in files if p.startswith(prefix))
        known = [(p[len(prefix) :], files[p]["bytes"], files[p].get("sha256")) for p in paths]
        found.append(known or os.path.realpath(prefix))
    return found


def _today(key: str, value: object) -> object:
    """Return the current name of a setting's value that an older version saved."""
    name = key.rpartition(".")[2]
    if isinstance(value, str) and (name, value) in RETIRED_VALUES:
        return RETIRED_VALUES[name, value][0]
    return value


def _in_one_spelling(key: str, value: object) -> object:
    """Return shares of a split as numbers, other values as they are."""
    if key == "data.split" and isinstance(value, str):
        with contextlib.suppress(ConfigError):  # of a manifest that no run has written
            return split_shares(value)
    return value


def _differences(was: Mapping[str, Any], now: Mapping[str, Any], keys: set[str]) -> list[str]:
    return [
        f"{key}: {there!r} there, {here!r} here"
        for key in sorted(keys)
        if key in was or now.get(key) not in _ADDED.get(key, ())
        if _in_one_spelling(key, there := _today(key, was.get(key, _LATER.get(key))))
        != _in_one_spelling(key, here := now.get(key))
    ]


def _section(key: str) -> str:
    return key.split(".", 1)[0]


def _few(differences: list[str]) -> str:
    rest = len(differences) - MAX_DIFFERENCES
    more = f" and {rest} more" if rest > 0 else ""
    return "; ".join(differences[:MAX_DIFFERENCES]) + more
