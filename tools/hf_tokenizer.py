"""Conversion between the tokenizer of a run and files of transformers' AutoTokenizer."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.data.tokenizer import END_OF_TEXT, build_tokenizer
from megatron.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megatron.data.tokenizer import Tokenizer
    from tools.run_model import SavedModel


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """The contents of the files of a tokenizer, by file name.

    `why_none` gives the reason if there are none. `bos` is the id that begins a text, the end mark
    if the tokenizer has no begin mark, and `eod` the id that ends a document, if known.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    bos: int | None = None
    eod: int | None = None
    why_none: str = ""


def tokenizer_files(described: SavedModel, options: argparse.Namespace) -> TokenizerFiles:
    """Return the files of the tokenizer named by the flags, the run or its data.

    If flags name no tokenizer, one that is missing or damaged is no error: `why_none` tells.

    Raises:
        ConfigError, DataError: Flags name a tokenizer that cannot be built or is not the run's.
    """
    try:
        tokenizer = described.tokenizer(options)
    except (DataError, ConfigError) as error:
        if options.tokenizer_type is not None:
            raise
        return TokenizerFiles(why_none=str(error))
    return _files(tokenizer, positions=described.model.positions)


def _files(tokenizer: Tokenizer, *, positions: int) -> TokenizerFiles:
    described = tokenizer.describe()
    places = described["files"]
    assert isinstance(places, Mapping)
    kind = described["type"]
    bos, eod = (tokenizer.encode("") or [tokenizer.eod])[0], tokenizer.eod
    if kind == "GPT2BPETokenizer":
        return TokenizerFiles(
            files={
                "vocab.json": Path(places["vocab_file"]).read_bytes(),
                "merges.txt": Path(places["merge_file"]).read_bytes(),
                "tokenizer_config.json": _config(
                    "GPT2Tokenizer", bos=END_OF_TEXT, eos=END_OF_TEXT, positions=positions
                ),
            },
            bos=bos,
            eod=eod,
        )
    model = str(places.get("model", ""))
    place = _json_file(model)
    if kind == "HuggingFaceTokenizer" and place is not None:
        return TokenizerFiles(
            files={
                "tokenizer.json": place.read_bytes(),
                "tokenizer_config.json": _config(
                    "PreTrainedTokenizerFast",
                    bos=tokenizer.decode([bos]),
                    eos=tokenizer.decode([eod]),
                    positions=positions,
                ),
            },
            bos=bos,
            eod=eod,
        )
    why = f"{kind} has none that transformers read"
    if kind == "HuggingFaceTokenizer":
        why = (
            f"{model} has no tokenizer.json to copy; transformers finds the tokenizer there itself"
        )
    return TokenizerFiles(bos=bos, eod=eod, why_none=why)


def _json_file(model: str) -> Path | None:
    path = Path(model)
    path = path / "tokenizer.json" if path.is_dir() else path
    return path if path.is_file() else None


def _config(kind: str, *, bos: str, eos: str, positions: int) -> bytes:
    values = {
        "tokenizer_class": kind,
        "model_max_length": positions,
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": eos,
        "clean_up_tokenization_spaces": False,
    }
    if kind == "GPT2Tokenizer":
        values |= {"add_prefix_space": False, "add_bos_token": False}
    return (json.dumps(values, indent=2) + "\n").encode()


def files_of_folder(folder: Path) -> tuple[str, dict[str, str]] | None:
    """Return the tokenizer type of a Hugging Face model folder, and its files by setting.

    None if the folder has no tokenizer that is supported.
    """
    vocab, merges, whole = (folder / n for n in ("vocab.json", "merges.txt", "tokenizer.json"))
    by_bytes = vocab.is_file() and merges.is_file()
    if whole.is_file() and not (by_bytes and _is_gpt2s(whole)):
        return "HuggingFaceTokenizer", {"tokenizer_model": whole.name}
    if by_bytes:
        return "GPT2BPETokenizer", {"vocab_file": vocab.name, "merge_file": merges.name}
    return None


def tokenizer_of_folder(folder: Path, found: tuple[str, Mapping[str, str]]) -> Tokenizer:
    """Build the tokenizer that `files_of_folder` found, from files of these names in `folder`.

    Raises:
        ConfigError, DataError: `build_tokenizer` raises these errors.
    """
    kind, names = found
    places = {field: str(folder / name) for field, name in names.items()}
    return build_tokenizer(
        kind,
        vocab_file=places.get("vocab_file"),
        merge_file=places.get("merge_file"),
        model=places.get("tokenizer_model"),
    )


def _is_gpt2s(path: Path) -> bool:
    """Return whether a tokenizer.json splits text as GPT-2 does.

    A vocabulary and merges are then equivalent. Other tokenizers also have both files, but split
    digits, have more special tokens or set marks around texts.
    """
    try:
        found = json.loads(path.read_bytes())
        before, after = found["pre_tokenizer"], found.get("post_processor")
        marks = {token["content"] for token in found.get("added_tokens") or ()}
    except (ValueError, KeyError, TypeError):
        return False
    return (
        isinstance(before, dict)
        and before.get("type") == "ByteLevel"
        and before.get("use_regex", True)
        and not before.get("add_prefix_space")
        and not found.get("normalizer")
        and marks <= {END_OF_TEXT}
        and (after is None or isinstance(after, dict) and after.get("type") == "ByteLevel")
    )
