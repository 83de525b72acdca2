"""Convert a GPT-2 or Llama folder of Hugging Face into a checkpoint to start from.

    python tools/import_hf.py HF_FOLDER OUT [--seq-length N]
    python pretrain_gpt.py --config OUT/model.yaml --load OUT --finetune --run-dir NEW \\
        --data-path PREFIX --lr 1e-5 --train-iters 1000 --micro-batch-size 4

OUT gets a checkpoint of step 0, model.yaml with the shape of the network and its tokenizer, and the
tokenizer's files. Any grid loads it; tools/generate.py and tools/evaluate.py accept OUT as a run.
Weights are kept in fp32, which represents 16-bit weights exactly. Only safetensors are read, not
pickles.

Exit code 2 for wrong usage and for a network that cannot be represented, 3 for a damaged tokenizer
file, 4 for missing or damaged weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.checkpoint.find import CHECKPOINTS  # noqa: E402
from megatron.checkpoint.io import FILES, remove_folder  # noqa: E402
from megatron.closed_pipe import end_with_reader  # noqa: E402
from megatron.config import DataConfig, GPTConfig, ModelConfig, TrainingConfig, resolve, to_yaml  # noqa: E402
from megatron.config.fields import whole_number  # noqa: E402
from megatron.data.local_file import read_json_object  # noqa: E402
from megatron.data.vocabulary import Vocabulary  # noqa: E402
from megatron.errors import CheckpointError, ConfigError, SparsetronError  # noqa: E402
from megatron.model.huggingface_config import LLAMA, from_hf_config  # noqa: E402
from tools.hf_tokenizer import files_of_folder, tokenizer_of_folder  # noqa: E402
from tools.run_model import PARAM  # noqa: E402

if TYPE_CHECKING:
    import torch

MODEL_YAML = "model.yaml"
_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HEAD = "lm_head.weight"
_WRAPPED = re.compile(r"^((_orig_mod|module)\.)+")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    try:
        bring_in(options.source, options.output, seq_length=options.seq_length)
    except SparsetronError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        place = error.filename or options.output
        print(f"error: {place}: {error.strerror or error}", file=sys.stderr)
        return ConfigError.exit_code
    return 0


def bring_in(source: Path, output: Path, *, seq_length: int | None) -> None:
    """Write OUT, and print how to train from it. An error removes what was written.

    Raises:
        ConfigError: The source has no config.json, OUT is not new, or the network is unknown here.
        CheckpointError: Weights are missing, damaged or of another network.
        DataError: The tokenizer's files are damaged.
    """
    if not (source / "config.json").is_file():
        raise ConfigError(f"{source}: no config.json there; give a folder of Hugging Face's")
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"{output}: exists; name a folder that is new")
    values = read_json_object(source / "config.json")
    model = from_hf_config(values, seq_length=seq_length)
    weights = _weights(source, values, model)
    _check(weights, model)
    output.mkdir(parents=True, exist_ok=True)
    try:
        written = _write(source, output, model, weights)
    except BaseException:
        with suppress(OSError):
            remove_folder(FILES, output)
        raise
    # A reader of this output that has left does not undo the import.
    print(written)
    config_file, folder = (shlex.quote(str(each)) for each in (output / MODEL_YAML, output))
    print(
        f"train from it:\n  python pretrain_gpt.py --config {config_file} --load {folder} "
        "--finetune --run-dir NEW --data-path PREFIX --lr 1e-5 --train-iters N --micro-batch-size B"
    )


def _write(
    source: Path, output: Path, model: ModelConfig, weights: Mapping[str, torch.Tensor]
) -> str:
    """Write tokenizer, checkpoint and model.yaml; return a line that says what was written."""
    import torch

    from megatron.checkpoint.store import save_checkpoint, whole
    from megatron.tasks.gpt import gpt_identity

    vocab_size = weights["embedding.word_embeddings.weight"].shape[0]
    data, vocabulary = _bring_tokenizer(source, output, vocab_size=vocab_size)
    # A run that loads the checkpoint must share the network only; it chooses everything else.
    config = resolve(
        GPTConfig(model=model, data=data, training=TrainingConfig(micro_batch_size=1)), 1
    )
    known = gpt_identity(config, vocabulary)
    kept = {k: v for k, v in known.items() if k.startswith(("model.", "data.tokenizer"))}
    kept |= {f"data.{name}": v for name, v in dataclasses.asdict(data).items() if v is not None}
    path = save_checkpoint(
        output / CHECKPOINTS,
        step=0,
        tensors=[
            dataclasses.replace(whole(f"{PARAM}{name}", tensor), dtype=torch.float32)
            for name, tensor in weights.items()
        ],
        state={"identity": json.loads(json.dumps(kept)), "imported": True},
    )
    (output / MODEL_YAML).write_text(_model_yaml(config), encoding="utf-8")
    return f"{path}: {len(weights)} tensors, vocabulary {vocabulary.size}"


def _weights(
    source: Path, values: Mapping[str, Any], model: ModelConfig
) -> dict[str, torch.Tensor]:
    """Return all weights by logical name, in the dtype of the files."""
    from megatron.model.huggingface import from_gpt2, from_llama

    with ExitStack() as stack:
        state = _WeightState(source, stack, leave_out=(_HEAD,) if model.tied else ())
        if model.num_layers > len(state):
            raise CheckpointError(
                f"{source}: {len(state)} tensors, config.json says {model.num_layers} layers; the "
                "two are not of one model"
            )
        if values["model_type"] == LLAMA:
            found = from_llama(state, model)
        else:
            found = from_gpt2(
                state, num_heads=model.num_attention_heads, hidden_size=model.hidden_size
            )
            if not model.tied and _HEAD in state:
                found["output_layer.weight"] = state[_HEAD]
    return found


class _WeightState(Mapping[str, "torch.Tensor"]):
    """Tensors by their names in a file, or in the files of an index, read on access.

    `leave_out` has the names that transformers ignores if config.json ties their weights. Prefixes
    that torch.compile and data-parallel wrappers set before all names are left out.
    """

    def __init__(self, source: Path, stack: ExitStack, *, leave_out: Sequence[str]) -> None:
        from safetensors import SafetensorError, safe_open

        self._source, self._error = source, SafetensorError
        self._files: dict[str, tuple[Any, str]] = {}
        for name in _weight_files(source):
            with self._failing(name):
                # safe_open reports an unreadable file as missing.
                (source / name).open("rb").close()
                file = stack.enter_context(safe_open(str(source / name), framework="pt"))
            for key in file.keys():  # noqa: SIM118
                if (known := _WRAPPED.sub("", key)) not in leave_out:
                    self._files[known] = file, key

    def __getitem__(self, key: str) -> torch.Tensor:
        file, stored = self._files[key]
        with self._failing(stored):
            return file.get_tensor(stored)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except (self._error, OSError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{self._source / what}: cannot be read: {reason}") from error


def _weight_files(source: Path) -> list[str]:
    """Return the files that transformers would read: one file wins over an index of several."""
    if (source / _ONE).is_file():
        if (source / _INDEX).is_file():
            print(f"{source}: {_ONE} is read; {_INDEX} and its files are not", file=sys.stderr)
        return [_ONE]
    if (source / _INDEX).is_file():
        names = read_json_object(source / _INDEX).get("weight_map", {})
        if not isinstance(names, Mapping):
            raise CheckpointError(f"{source / _INDEX}: weight_map: must be an object")
        return sorted({Path(str(name)).name for name in names.values()})
    pickled = (source / "pytorch_model.bin").exists()
    more = "; pytorch_model.bin is a pickle and is not opened: save it again as safetensors"
    raise CheckpointError(f"{source}: no {_ONE} there{more if pickled else ''}")


def _check(weights: Mapping[str, torch.Tensor], model: ModelConfig) -> None:
    """Raise `CheckpointError` if weights and config.json do not belong together."""
    import torch

    from megatron.model.gpt import GPT

    table = weights.get("embedding.word_embeddings.weight")
    # Checked first, since a huge hidden size in config.json could not even be described.
    if table is None or table.ndim != 2 or table.shape[1] != model.hidden_size:
        found = "missing" if table is None else tuple(table.shape)
        raise CheckpointError(
            f"embedding.word_embeddings.weight: {found}, config.json makes it "
            f"(vocabulary, {model.hidden_size}); the two are not of one model"
        )
    small = dataclasses.replace(model, num_layers=1)
    like = GPT(small, vocab_size=1, seed=0, dtype=torch.float32, device="meta")
    shapes = {info.name: tuple(info.logical_shape) for info in like.parameter_infos()}
    wanted = {n: s for n, s in shapes.items() if not n.startswith("layers.")}
    for number in range(model.num_layers):
        inner = {n: s for n, s in shapes.items() if n.startswith("layers.")}
        wanted |= {n.replace("layers.0.", f"layers.{number}.", 1): s for n, s in inner.items()}
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in wanted:
            wanted[name] = (table.shape[0], model.hidden_size)
    for name in sorted(wanted.keys() | weights.keys()):
        found = tuple(weights[name].shape) if name in weights else "missing"
        if name not in wanted or found != wanted[name]:
            raise CheckpointError(
                f"{name}: {found}, config.json makes it {wanted.get(name, 'absent')}; the two are "
                "not of one model"
            )


def _bring_tokenizer(
    source: Path, output: Path, *, vocab_size: int
) -> tuple[DataConfig, Vocabulary]:
    """Copy the tokenizer's files and return the settings that name them.

    A tokenizer with more entries than the table has rows is left out, with a note.
    """
    without = DataConfig(vocab_size=vocab_size), Vocabulary(size=vocab_size)
    found = files_of_folder(source)
    if found is None:
        return without
    kind, names = found
    folder = (output / "tokenizer").resolve()
    folder.mkdir(exist_ok=True)
    for name in (*names.values(), "tokenizer_config.json"):
        if (source / name).is_file():
            (folder / name).write_bytes((source / name).read_bytes())
    places = {field: str(folder / name) for field, name in names.items()}
    tokenizer = tokenizer_of_folder(folder, found)
    if tokenizer.vocab_size > vocab_size:
        print(
            f"the tokenizer has {tokenizer.vocab_size} entries, the model {vocab_size}: it is in "
            f"{folder}, and {MODEL_YAML} names the number alone",
            file=sys.stderr,
        )
        return without
    vocabulary = Vocabulary(size=vocab_size, eod=tokenizer.eod, fingerprint=tokenizer.fingerprint())
    rows = vocab_size if vocab_size > tokenizer.vocab_size else None
    data = DataConfig(tokenizer_type=kind, vocab_size=rows, **places)  # type: ignore[arg-type]
    return data, vocabulary


def _model_yaml(config: GPTConfig) -> str:
    """Return the lines of the configuration that the import decides: model and tokenizer."""
    kept, section = ["# The network and its tokenizer, for --config.\n"], ""
    for line in to_yaml(config).splitlines(keepends=True):
        if line.startswith("#"):
            continue
        if not line.startswith(" "):
            section = line.strip().rstrip(":")
        key, _, value = line.strip().partition(": ")
        data = section == "data" and (
            not value or (key.startswith(("tokenizer", "vocab", "merge")) and value != "null")
        )
        if section == "model" or data:
            kept.append(line)
    return "".join(kept)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="import_hf.py",
        description="Turn a GPT-2 or Llama folder of Hugging Face's into a checkpoint.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("source", type=Path, metavar="HF_FOLDER", help="config.json and safetensors")
    add("output", type=Path, metavar="OUT", help="folder to make")
    add(
        "--seq-length",
        type=whole_number,
        default=None,
        metavar="N",
        help="tokens in a sample of the training to come (default: all positions)",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    end_with_reader()
    sys.exit(main())
