"""Export the model of a run to the format of Hugging Face's transformers.

    python tools/export_hf.py RUN|CHECKPOINT OUT [--step N] [--dtype float32|bfloat16|float16]

OUT gets config.json, model.safetensors and, if the tokenizer of the run has them, tokenizer files.
The format is GPT-2's, or Llama's for models that are exactly Llama (rotary, RMSNorm, SwiGLU, no
biases). Weights are the optimizer's fp32 weights, of any grid and gradient path, without padding of
the vocabulary; pruned entries are zeros. One tensor at a time is in memory.

Exit code 2 for wrong usage and for a model that neither format can hold exactly, 3 for missing or
damaged tokenizer files that flags name, 4 for a missing or damaged checkpoint.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.checkpoint.io import (  # noqa: E402  # noqa: E402
    FILES,
    TensorToWrite,
    chunks,
    header,
    in_order,
    remove_folder,
    sync_folder,
    write_file,
)
from megatron.closed_pipe import end_with_reader  # noqa: E402
from megatron.config.fields import whole_number  # noqa: E402
from megatron.errors import CheckpointError, ConfigError, SparsetronError  # noqa: E402
from megatron.model.huggingface_config import (  # noqa: E402
    LLAMA,
    choose_format,
    to_hf_config,
)
from tools.hf_tokenizer import TokenizerFiles, tokenizer_files  # noqa: E402
from tools.run_model import (  # noqa: E402
    PARAM,
    WORD_TABLE,
    SavedModel,
    add_tokenizer_flags,
    check_tokenizer_flags,
    find_model,
)

if TYPE_CHECKING:
    import torch

    from megatron.checkpoint.store import Checkpoint
    from megatron.config import ModelConfig

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    try:
        check_tokenizer_flags(options)
        export(options)
    except SparsetronError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {options.output}: cannot be written: {error.strerror}", file=sys.stderr)
        return ConfigError.exit_code
    return 0


def export(options: argparse.Namespace) -> None:
    """Write OUT completely or not at all, and print a summary."""
    from megatron.checkpoint.store import Checkpoint

    output: Path = options.output
    # The current folder, which has no name as ".", is not replaced below the user's feet.
    is_new = not output.exists() or output.is_dir() and not any(output.iterdir())
    if not (output.name and is_new):
        raise ConfigError(f"{output}: exists; name a folder that is new")
    described = find_model(options.source, step=options.step)
    format = choose_format(described.model)
    tokenizer = tokenizer_files(described, options)
    draft = output.with_name(f".{output.name}.tmp-{secrets.token_hex(4)}")
    draft.mkdir(parents=True)
    try:
        with Checkpoint.open(described.step, verify=False) as saved:
            vocab_size = saved.shape(WORD_TABLE)[0]
            items = in_order(list(_items(saved, described, format, options.dtype)))
            size = len(header(items)) + sum(item.bytes for item in items)
            write_file(FILES, draft / "model.safetensors", chunks(items), size)
        values = to_hf_config(
            described.model,
            format,
            vocab_size=vocab_size,
            bos=_row(tokenizer.bos, vocab_size),
            eod=_row(tokenizer.eod, vocab_size),
            dtype=options.dtype,
        )
        (draft / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        for name, content in tokenizer.files.items():
            (draft / name).write_bytes(content)
        sync_folder(FILES, draft)
        draft.rename(output)
    except BaseException:
        with suppress(OSError):
            remove_folder(FILES, draft)
        raise
    _tell(described, output, format, len(items), tokenizer)


def _row(id: int | None, vocab_size: int) -> int | None:
    """Return an id that the table has; None for any other."""
    return id if id is not None and id < vocab_size else None


def _tell(
    described: SavedModel, output: Path, format: str, tensors: int, tokenizer: TokenizerFiles
) -> None:
    title = "Llama" if format == LLAMA else "GPT-2"
    print(f"{output}: {described.step.name} in {title}'s format, {tensors} tensors")
    if not tokenizer.files:
        print(f"no tokenizer files: {tokenizer.why_none}", file=sys.stderr)


def _items(
    saved: Checkpoint, described: SavedModel, format: str, dtype: str
) -> Iterator[TensorToWrite]:
    """Yield the tensors of the file; the data of each is read when it is written."""
    import torch

    config = described.model
    converted = _llama if format == LLAMA else _gpt2
    names = [name.removeprefix(PARAM) for name in saved.names(PARAM)]
    _check_names(saved, names, config)
    for name in names:
        # Names and shapes come from a tensor on the meta device.
        blank = torch.empty(saved.shape(f"{PARAM}{name}"), device="meta")
        for number, (theirs, part) in enumerate(converted(name, blank, config)):
            yield TensorToWrite(
                key=theirs,
                dtype=DTYPES[dtype],
                shape=tuple(part.shape),
                data=partial(_bytes, saved, name, number, converted, config, dtype),
            )


Converted = Sequence[tuple[str, "torch.Tensor"]]


def _gpt2(name: str, tensor: torch.Tensor, config: ModelConfig) -> Converted:
    from megatron.model.huggingface import gpt2_name, gpt2_tensor

    return [(gpt2_name(name), gpt2_tensor(name, tensor, num_heads=config.num_attention_heads))]


def _llama(name: str, tensor: torch.Tensor, config: ModelConfig) -> Converted:
    from megatron.model.huggingface import llama_names, llama_parts

    return list(zip(llama_names(name), llama_parts(name, tensor, config), strict=True))


def _bytes(
    saved: Checkpoint,
    name: str,
    number: int,
    converted: Callable[[str, torch.Tensor, ModelConfig], Converted],
    config: ModelConfig,
    dtype: str,
) -> memoryview:
    import torch

    whole = saved.read(f"{PARAM}{name}")
    theirs, part = converted(name, whole, config)[number]
    written = part.to(getattr(torch, dtype)).reshape(-1)
    if not torch.isfinite(written).all():
        finite = torch.isfinite(whole).all()
        raise CheckpointError(
            f"{theirs}: "
            + (f"has entries beyond the range of {dtype}" if finite else "is not finite")
        )
    return written.view(torch.uint8).numpy().data


def _check_names(saved: Checkpoint, names: list[str], config: ModelConfig) -> None:
    """Raise `CheckpointError` if the weights do not fit the configuration."""
    layers = {name.split(".")[1] for name in names if name.startswith("layers.")}
    shape = saved.shape(WORD_TABLE)
    fits = len(layers) == config.num_layers and shape[1] == config.hidden_size
    if not fits or ("output_layer.weight" in names) == config.tied:
        raise CheckpointError(
            f"{saved.path}: {len(layers)} layers of width {shape[1]}, the configuration says "
            f"{config.num_layers} of {config.hidden_size}; the two are not of one run"
        )


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="export_hf.py",
        description="Write the model of a run as Hugging Face's transformers read it.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("source", type=Path, metavar="RUN", help="run, checkpoints or step folder")
    add("output", type=Path, metavar="OUT", help="folder to make")
    add(
        "--step",
        type=whole_number,
        default=None,
        metavar="N",
        help="step to read (default: the newest)",
    )
    add("--dtype", choices=tuple(DTYPES), default="float32", help="of the file (default: float32)")
    add_tokenizer_flags(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    end_with_reader()
    sys.exit(main())
