"""The trained model of a run for other tools: shape, weights and tokenizer.

Checkpoints of any grid work. The shape comes from config.yaml in the run folder or, for a step
folder alone, from the checkpoint.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.find import CHECKPOINTS, find_checkpoint, recorded_directory
from megatron.checkpoint.io import failing_as
from megatron.checkpoint.verify import open_to_all, read_manifest
from megatron.config import DataConfig, ModelConfig, parse
from megatron.config.fields import FieldSpec, show, specs_of, whole_number
from megatron.data.tokenizer import TOKENIZER_TYPES
from megatron.errors import CheckpointError, ConfigError, DataError
from pretrain_gpt import GRADIENT_PATHS

if TYPE_CHECKING:
    import torch

    from megatron.checkpoint.store import Checkpoint
    from megatron.data.tokenizer import Tokenizer
    from megatron.model.gpt import GPT

PARAM = "param/"
WORD_TABLE = f"{PARAM}embedding.word_embeddings.weight"
CONFIG = "config.yaml"
GPT_SCRIPT = "pretrain_gpt.py"


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """A step folder that verifies, and the facts about its model that are known before loading."""

    step: Path
    model: ModelConfig
    data: DataConfig
    seed: int
    param_dtype: str

    def tokenizer(self, options: argparse.Namespace | None = None) -> Tokenizer:
        """Return the tokenizer that `options` name (`add_tokenizer_flags`).

        If they name none, return the tokenizer of the run, else the one that made its data. Raises
        `DataError` if none is known or its files are damaged, or if it is not the tokenizer of the
        checkpoint's data, and `ConfigError` for wrong flags.
        """
        tokenizer = _tokenizer(self.data, options)
        self._check_tokenizer(tokenizer)
        return tokenizer

    def _check_tokenizer(self, tokenizer: Tokenizer) -> None:
        identity = read_manifest(self.step).state.get("identity", {})
        known = identity.get("data.tokenizer") if isinstance(identity, Mapping) else None
        if isinstance(known, str) and known != tokenizer.fingerprint():
            raise DataError(
                "tokenizer: not the one that made the data of this run: their vocabularies or "
                "rules differ; leave out --tokenizer-type, or give the run's own"
            )

    def load(self) -> GPT:
        """Return the whole model in evaluation mode, on the GPU if there is one.

        Raises `CheckpointError` if weights do not have the shapes of the configuration.
        """
        return _load(self)


def find_model(place: Path, *, step: int | None = None) -> SavedModel:
    """Find the model in a run folder, its `checkpoints`, or one step folder.

    It is the model of `step`, by default of the newest step that verifies. Raises `ConfigError` if
    nothing there describes the model, `CheckpointError` for a missing or damaged checkpoint.
    """
    with failing_as(place, "read"):
        run, there = run_folder(place), place.exists()
        danger = open_to_all(run) if run is not None else None
    if danger is not None:
        raise ConfigError(f"{run}: {danger}")
    if run is None and not there:
        raise ConfigError(f"{place}: no {CONFIG} there; give the folder of a run")
    if run is not None and (script := script_of(run / CONFIG)) != GPT_SCRIPT:
        raise ConfigError(
            f"{run}: is a run of {script}, and only runs of {GPT_SCRIPT} are read here"
        )
    described = (
        None if run is None else parse(["--config", str(run / CONFIG)], paths=GRADIENT_PATHS)
    )
    found = find_step(place, step=step, log=lambda text: print(text, file=sys.stderr))
    if found is None:
        if described is None:
            raise ConfigError(f"{place}: no {CONFIG} there; give the folder of a run")
        raise CheckpointError(f"{place}: no checkpoint was committed there; train it first")
    if described is not None:
        return SavedModel(
            step=found,
            model=described.model,
            data=described.data,
            seed=described.training.seed,
            param_dtype=described.precision.param_dtype,
        )
    identity = read_manifest(found).state.get("identity", {})
    if not isinstance(identity, Mapping):
        raise CheckpointError(f"{found}: state.identity: must be an object; give a run folder")
    model = _section(ModelConfig, "model", identity)
    if model is None:
        raise ConfigError(
            f"{found}: neither it nor a {CONFIG} above it says what the model is; give the folder "
            "of a run"
        )
    return SavedModel(
        step=found,
        model=model,
        data=_section(DataConfig, "data", identity) or DataConfig(),
        seed=0,
        param_dtype="float32",
    )


def script_of(config: Path) -> str:
    """Return the script of a run: that in the first line of its configuration, else of GPT."""
    try:
        text = config.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return GPT_SCRIPT
    named = re.search(r"pretrain_[a-z0-9_]+\.py", text.partition("\n")[0])
    return named[0] if named else GPT_SCRIPT


def add_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags that name the tokenizer."""
    named = parser.add_argument_group("tokenizer, where neither the run nor its data names it")
    add = named.add_argument
    add(
        "--tokenizer-type", choices=TOKENIZER_TYPES, metavar="TYPE", help=", ".join(TOKENIZER_TYPES)
    )
    add("--tokenizer-model", metavar="PATH", help="file or name of its model")
    add("--vocab-file", metavar="PATH", help="of GPT2BPETokenizer")
    add("--merge-file", metavar="PATH", help="of GPT2BPETokenizer")


def add_step_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names the checkpoint of a run."""
    parser.add_argument(
        "--checkpoint-step",
        type=whole_number,
        metavar="N",
        help="step to load (default: the newest)",
    )


def check_tokenizer_flags(options: argparse.Namespace) -> None:
    """Raise `ConfigError` for tokenizer files without a tokenizer type."""
    if options.tokenizer_type is not None:
        return
    for name in ("tokenizer_model", "vocab_file", "merge_file"):
        if getattr(options, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag}: given without --tokenizer-type; give both")


def run_folder(place: Path) -> Path | None:
    """Return the folder with config.yaml that belongs to a run, checkpoints or step folder.

    None if there is no such file.
    """
    folders = [place, place.parent] if place.name == CHECKPOINTS else [place]
    if place.parent.name == CHECKPOINTS:
        folders.append(place.parent.parent)
    return next((folder for folder in folders if (folder / CONFIG).is_file()), None)


def find_step(place: Path, *, step: int | None, log: Callable[[str], None]) -> Path | None:
    """Return the step folder to read as `find_checkpoint` does; of a run, from where it saves.

    Raises `CheckpointError` as `find_checkpoint` does, and if a run with --save has saved nothing.
    """
    recorded = recorded_directory(place)
    if recorded == place / CHECKPOINTS or not (place / CONFIG).is_file():
        return find_checkpoint(place, step=step, log=log)
    found = find_checkpoint(recorded, step=step, log=log, literal=True)
    if found is None:
        raise CheckpointError(
            f"{recorded}: no checkpoint was committed there, where {place} saves; train it first, "
            "or give the folder of its checkpoints"
        )
    return found


def _section(kind: type, name: str, identity: Mapping[str, Any]) -> Any:
    """Return a section from the settings in a checkpoint; None if they are incomplete.

    Raises `CheckpointError` for a value that the configuration would refuse.
    """
    known: dict[str, Any] = {}
    specs = specs_of(kind, name)
    for key in specs.keys() & {text.removeprefix(f"{name}.") for text in identity}:
        value = identity.get(f"{name}.{key}", specs[key].default)
        if not _is_legal(specs[key], value):
            raise CheckpointError(
                f"state.identity: {name}.{key} is {show(value)}, which no run can have; give the "
                "folder of a run"
            )
        known[key] = tuple(value) if isinstance(value, list) else value
    try:
        return kind(**known)
    except TypeError:
        return None


def _is_legal(spec: FieldSpec, value: Any) -> bool:
    """Return whether a JSON value has the type and range of a field."""
    if value is None:
        return spec.optional
    items = value if spec.many else [value]
    kinds = (int, float) if spec.kind is float else (spec.kind,)
    if not isinstance(items, list) or not all(type(item) in kinds for item in items):
        return False
    if spec.choices and not set(items) <= set(spec.choices):
        return False
    return spec.within is None or all(item in spec.within for item in items)


def _tokenizer(data: DataConfig, options: argparse.Namespace | None) -> Tokenizer:
    from megatron.data.sidecar import read_sidecar
    from megatron.data.tokenizer import build_tokenizer, tokenizer_from_sidecar
    from megatron.data.vocabulary import data_prefixes

    named = data if options is None or options.tokenizer_type is None else options
    if named.tokenizer_type is not None:
        return build_tokenizer(
            named.tokenizer_type,
            vocab_file=named.vocab_file,
            merge_file=named.merge_file,
            model=named.tokenizer_model,
            vocab_size=data.vocab_size,
            hub=named is options,  # a name found in a run's files may not start a download
        )
    sources = (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path)
    prefixes = data_prefixes(data) if any(sources) else []
    for prefix in prefixes:
        if (described := read_sidecar(prefix)) is not None:
            return tokenizer_from_sidecar(described, folder=Path(prefix).parent)
    where = "mock data has none" if data.mock_data else "no data is named"
    if prefixes:
        where = f"no {prefixes[0]}.json"
        where += "" if Path(prefixes[0]).is_absolute() else f" (looked from {Path.cwd()})"
    raise DataError(
        f"tokenizer: not named by the run, and {where}; give --tokenizer-type and its files"
    )


def _load(described: SavedModel) -> GPT:
    import torch

    from megatron.checkpoint.store import Checkpoint
    from megatron.model.gpt import GPT

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with Checkpoint.open(described.step, verify=False) as saved:
        model = GPT(
            described.model,
            vocab_size=saved.shape(WORD_TABLE)[0],
            seed=described.seed,
            dtype=weight_dtype(described.param_dtype, device),
            device=device,
        )
        values = {}
        for info in model.parameter_infos():
            check_shape(saved, info.name, tuple(info.logical_shape))
            values[info.name] = saved.read(f"{PARAM}{info.name}")
    model.load_values(values)
    return model.eval()


def check_shape(saved: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    """Raise `CheckpointError` if a weight of the checkpoint does not have this shape."""
    if saved.shape(f"{PARAM}{name}") != shape:
        raise CheckpointError(
            f"{saved.path}: {PARAM}{name}: shape {saved.shape(f'{PARAM}{name}')}, config.yaml says "
            f"{shape}; the two are not of one run"
        )


def weight_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype named `name`, but fp32 in place of fp16 on a CPU, which is very slow."""
    import torch

    return torch.float32 if name == "float16" and device.type == "cpu" else getattr(torch, name)
