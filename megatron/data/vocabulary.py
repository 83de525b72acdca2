"""The number of token ids of a run, and the id that ends a document.

Training needs only these numbers, not a tokenizer. Unless a tokenizer is named, they come from the
data's description, so a prepared data set trains without the packages that prepared it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megatron.data.blended_dataset import DataOptions, split_sources
from megatron.data.indexed_dataset import check_header
from megatron.data.sidecar import read_sidecar
from megatron.data.tokenizer import build_tokenizer
from megatron.errors import ConfigError, DataError

MOCK_VOCABULARY = 1024


class VocabularyOptions(Protocol):
    """The settings that this module reads; `DataConfig` has them."""

    @property
    def mock_data(self) -> bool: ...
    @property
    def tokenizer_type(self) -> str | None: ...
    @property
    def vocab_file(self) -> str | None: ...
    @property
    def merge_file(self) -> str | None: ...
    @property
    def tokenizer_model(self) -> str | None: ...
    @property
    def vocab_size(self) -> int | None: ...


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The token ids of a run.

    `size`: ids are 0 to size - 1, before padding; the tokenizer may have fewer. `eod`: id that ends
    a document, if known. `fingerprint`: of the tokenizer, if known; data of another tokenizer are
    refused.
    """

    size: int
    eod: int | None = None
    fingerprint: str | None = None


def find_vocabulary(
    options: VocabularyOptions, prefixes: list[str], *, hub: bool = False
) -> Vocabulary:
    """Return the vocabulary of a run.

    It comes from the named tokenizer, else from the tokenizer of the first data set, else from
    `--vocab-size`, which may also exceed the size of a tokenizer. Raises `DataError` if a pair is
    missing or its index has no valid header, `ConfigError` if no source gives the size or files of
    a tokenizer come without its type. `hub` allows the download of a tokenizer from the hub (see
    `build_tokenizer`).
    """
    for prefix in prefixes:
        check_header(prefix)  # checked before its sidecar is reported as missing
    if options.tokenizer_type is not None:
        tokenizer = build_tokenizer(
            options.tokenizer_type,
            vocab_file=options.vocab_file,
            merge_file=options.merge_file,
            model=options.tokenizer_model,
            vocab_size=options.vocab_size,
            hub=hub,
        )
        return Vocabulary(
            # --vocab-size of NullTokenizer leaves out the end mark.
            size=max(tokenizer.vocab_size, options.vocab_size or 0),
            eod=tokenizer.eod,
            fingerprint=tokenizer.fingerprint(),
        )
    _refuse_files_without_type(options)
    for prefix in prefixes:
        if (sidecar := read_sidecar(prefix)) is not None:
            return _described(sidecar, prefix, options.vocab_size)
    if options.vocab_size is not None:
        return Vocabulary(size=options.vocab_size)
    if options.mock_data:
        return Vocabulary(size=MOCK_VOCABULARY)
    raise ConfigError(
        f"vocab_size: not given, and {prefixes[0] if prefixes else 'the data'} has no description "
        "of its tokenizer; give --tokenizer-type or --vocab-size"
    )


def data_prefixes(options: DataOptions) -> list[str]:
    """Return the prefixes of every data set the options name, in order, each once."""
    if options.mock_data:
        return []
    sources = [source for source in split_sources(options) if source is not None]
    return list(dict.fromkeys(prefix for s in sources for prefix in s.blend.prefixes))


def _refuse_files_without_type(options: VocabularyOptions) -> None:
    """Raise `ConfigError` for files of a tokenizer without `--tokenizer-type`.

    Megatron would assume GPT2BPETokenizer. Here the data name their tokenizer, and files of another
    one would be ignored silently.
    """
    files = {
        "--vocab-file": ("GPT2BPETokenizer", options.vocab_file),
        "--merge-file": ("GPT2BPETokenizer", options.merge_file),
        "--tokenizer-model": (
            "HuggingFaceTokenizer or GPTSentencePieceTokenizer",
            options.tokenizer_model,
        ),
    }
    for flag, (type, file) in files.items():
        if file is not None:
            raise ConfigError(
                f"{flag}: {file} given without --tokenizer-type; add --tokenizer-type {type}, or "
                f"leave {flag} out to take the tokenizer of the data"
            )


def _described(sidecar: dict[str, object], prefix: str, asked: int | None) -> Vocabulary:
    size, eod, mark = (sidecar.get(key) for key in ("vocab_size", "eod", "fingerprint"))
    if not isinstance(size, int):
        raise DataError(f"{prefix}.json: has no vocab_size; write the data again")
    if asked is not None and asked < size:
        raise ConfigError(
            f"vocab_size: {asked} is less than the {size} ids of {prefix}; leave --vocab-size out"
        )
    return Vocabulary(
        size=asked or size,
        eod=eod if isinstance(eod, int) else None,
        fingerprint=mark if isinstance(mark, str) else None,
    )
