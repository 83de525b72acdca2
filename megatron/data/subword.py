"""Tokenizers learnt from text and kept in files: GPT-2's BPE, SentencePiece, `tokenizer.json`.

The packages that run them take damaged files quietly (a merge of unknown parts is dropped, a
token that occurs twice gets one of its ids), so the files are checked here first.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.data.bpe_files import END_OF_TEXT, read_merges, read_vocab
from megatron.data.local_file import (
    is_file,
    is_folder,
    one_line,
    read_bytes,
    read_json_object,
    stat_of,
)
from megatron.data.sidecar import MAX_IDS
from megatron.errors import DataError, missing_extra

_HUB_FLAGS = "--tokenizer-model with that name on the command line"
_END_MARKS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


def describe(
    type: str, *, vocab_size: int, eod: int, fingerprint: str, files: Mapping[str, str]
) -> dict[str, object]:
    """Sidecar form of a tokenizer; `files` maps arguments of `build_tokenizer` to places."""
    return {
        "type": type,
        "vocab_size": vocab_size,
        "eod": eod,
        "fingerprint": fingerprint,
        "files": dict(files),
    }


class _FastTokenizer:
    """A tokenizer of the `tokenizers` package, held to the protocol: text is only text."""

    type: str
    eod: int
    vocab_size: int

    def __init__(self, inner: Any, *, eod: int, identity: object, files: Mapping[str, str]) -> None:
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True
        self._inner = inner
        self.eod = eod
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        self._files = files
        canonical = json.dumps([self.type, eod, identity], sort_keys=True, ensure_ascii=True)
        self._fingerprint = hashlib.sha256(canonical.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        # A batch of one skips the character offsets: 1.4 times as fast as encode().
        try:
            return self._inner.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError as error:
            raise unencodable(text) from error
        except BaseException as error:
            _refuse("text: the tokenizer cannot encode it", error)
            raise

    def decode(self, ids: Iterable[int]) -> str:
        try:
            return self._inner.decode(list(ids), skip_special_tokens=False)
        except BaseException as error:
            _refuse("token ids: the tokenizer cannot decode them", error)
            raise

    def fingerprint(self) -> str:
        return self._fingerprint

    def describe(self) -> dict[str, object]:
        return describe(
            self.type,
            vocab_size=self.vocab_size,
            eod=self.eod,
            fingerprint=self._fingerprint,
            files=self._files,
        )


class GPT2BPETokenizer(_FastTokenizer):
    """GPT-2's byte-level BPE from its `encoder.json`/`vocab.json` and `vocab.bpe`/`merges.txt`.

    The end mark is the entry `<|endoftext|>`. DataError names the file and line or entry.
    """

    type = "GPT2BPETokenizer"

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        try:
            from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        except ImportError as error:
            raise missing_extra("tokenizers", "data") from error
        vocab = read_vocab(vocab_file, alphabet=pre_tokenizers.ByteLevel.alphabet())
        merges = read_merges(merge_file, vocab=vocab, vocab_file=vocab_file)
        with _refusing(vocab_file, "not the vocabulary of a byte-level BPE"):
            inner = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
        inner.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
        super().__init__(
            inner,
            eod=vocab[END_OF_TEXT],
            identity=[vocab, merges],
            files={"vocab_file": _absolute(vocab_file), "merge_file": _absolute(merge_file)},
        )


class HuggingFaceTokenizer(_FastTokenizer):
    """A `tokenizer.json`, a folder that holds one, or else what transformers finds by that name.

    The end mark is `eos_token` of the `tokenizer_config.json` beside it, else the first known
    name in the vocabulary (`<|endoftext|>`, `</s>`, ...). Ids may have gaps: `vocab_size` is the
    largest plus one. A folder without `tokenizer.json` and a hub name need transformers; a hub
    name that is not on this machine is downloaded with `hub` and refused without. Code that comes
    with a model is never run.
    """

    type = "HuggingFaceTokenizer"

    def __init__(self, model: str, *, hub: bool = False) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise missing_extra("tokenizers", "data") from error
        path = Path(model)
        if is_folder(path) and is_file(path / "tokenizer.json"):
            path = path / "tokenizer.json"
        named_file = path.suffix == ".json" or path.is_absolute() or model.startswith(".")
        there = stat_of(path) is not None
        place = _absolute(path) if there else model
        if is_folder(path) or not (there or named_file):
            text, named_eos = _from_transformers(model, hub=hub and not there)
            content = json.loads(text)
        else:
            content = read_json_object(path)
            text, named_eos = json.dumps(content), _configured_eos(path.parent)
        _check_ids(model, content)
        with _refusing(path, "not a tokenizer.json"):
            inner = Tokenizer.from_str(text)
            vocab = inner.get_vocab(with_added_tokens=True)
        if max(vocab.values(), default=0) >= MAX_IDS:
            raise DataError(f"{path}: id {max(vocab.values())}; token ids are less than {MAX_IDS}")
        content.pop("truncation", None)
        content.pop("padding", None)
        super().__init__(
            inner,
            eod=_find_eod(model, vocab, named_eos),
            identity=content,
            files={"model": place},
        )


class SentencePieceTokenizer:
    """A SentencePiece `.model`; the end mark is its end-of-sentence piece.

    SentencePiece normalises (spaces, some Unicode forms), so decoding may not give the very text.
    """

    type = "SentencePieceTokenizer"

    def __init__(self, model: str) -> None:
        content = read_bytes(model)
        try:
            import sentencepiece
        except ImportError as error:
            raise missing_extra("sentencepiece", "data") from error
        self._path = _absolute(model)
        try:
            self._inner: Any = sentencepiece.SentencePieceProcessor()
            self._inner.LoadFromSerializedProto(content)
        except (RuntimeError, OSError, TypeError) as error:
            raise DataError(f"{model}: not a SentencePiece model ({error})") from error
        self.vocab_size: int = self._inner.GetPieceSize()
        self.eod: int = self._inner.eos_id()
        if self.eod < 0:
            raise DataError(f"{model}: has no end-of-sentence piece; train one with --eos_id set")
        self._fingerprint = hashlib.sha256(content).hexdigest()

    def encode(self, text: str) -> list[int]:
        try:
            return self._inner.EncodeAsIds(text)
        except (RuntimeError, UnicodeEncodeError) as error:
            raise unencodable(text) from error

    def decode(self, ids: Iterable[int]) -> str:
        return self._inner.DecodeIds(list(ids))

    def fingerprint(self) -> str:
        return self._fingerprint

    def describe(self) -> dict[str, object]:
        return describe(
            self.type,
            vocab_size=self.vocab_size,
            eod=self.eod,
            fingerprint=self._fingerprint,
            files={"model": self._path},
        )


class Llama2Tokenizer(SentencePieceTokenizer):
    """A SentencePiece `.model` whose texts begin with the begin-of-sentence piece, as Megatron's.

    An empty text is that piece alone.
    """

    type = "Llama2Tokenizer"

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._bos: int = self._inner.bos_id()
        if self._bos < 0:
            raise DataError(
                f"{model}: has no begin-of-sentence piece; train one with --bos_id set, or give "
                "--tokenizer-type SentencePieceTokenizer"
            )
        # One model file gives two series of ids, so the fingerprints differ too.
        self._fingerprint = hashlib.sha256(f"bos {self._fingerprint}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return [self._bos, *super().encode(text)]


def unencodable(text: str) -> DataError:
    """The error for a string that has no UTF-8 form (JSON can spell half of a surrogate pair)."""
    bad = next((at for at, char in enumerate(text) if "\ud800" <= char <= "\udfff"), 0)
    return DataError(f"text: unpaired surrogate {text[bad : bad + 1]!a} at character {bad}")


def _absolute(path: str | Path) -> str:
    return os.path.realpath(path)


def _check_ids(place: str, content: Mapping[str, Any]) -> None:
    """Refuse two ordinary entries with one id (added tokens may repeat entries of the model)."""
    model = content.get("model")
    if not isinstance(model, Mapping):
        raise DataError(f"{place}: has no 'model'; not a tokenizer.json")
    vocab = model.get("vocab")
    if isinstance(vocab, Mapping):
        owners: dict[int, str] = {}
        for token, id in vocab.items():
            if type(id) is not int or not 0 <= id < MAX_IDS:
                raise DataError(
                    f"{place}: {one_line(token)!r} has id {one_line(repr(id))}; wanted a whole "
                    f"number from 0 to {MAX_IDS - 1}"
                )
            if owners.setdefault(id, token) != token:
                raise DataError(f"{place}: {owners[id]!r} and {token!r} both have id {id!r}")


def _configured_eos(folder: Path) -> str | None:
    path = folder / "tokenizer_config.json"
    if not is_file(path):
        return None
    named = read_json_object(path).get("eos_token")
    if isinstance(named, Mapping):
        named = named.get("content")
    return named if isinstance(named, str) else None


def _find_eod(place: str, vocab: Mapping[str, int], named: str | None) -> int:
    if named is not None and named not in vocab:
        raise DataError(f"{place}: eos_token {named!r} is not in the vocabulary")
    for mark in (named, *_END_MARKS):
        if mark is not None and mark in vocab:
            return vocab[mark]
    raise DataError(
        f"{place}: no end mark; name one as eos_token in tokenizer_config.json beside it (looked "
        f"for {', '.join(_END_MARKS)})"
    )


def _from_transformers(name: str, *, hub: bool) -> tuple[str, str | None]:
    """The `tokenizer.json` text and the eos token of a folder or hub name.

    A tokenizer may bring Python code of its own. `trust_remote_code=False` refuses that code;
    without the argument transformers would ask on a terminal whether to run it.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise missing_extra("transformers", "data") from error
    try:
        found: Any = AutoTokenizer.from_pretrained(
            name, local_files_only=not hub, trust_remote_code=False
        )
    except Exception as error:  # whatever the package, the network or the hub made of it
        way_out = "" if hub else f"; only this machine was searched: {_HUB_FLAGS} downloads it"
        if is_folder(name) or "trust_remote_code" in str(error):
            way_out = "; code that comes with a tokenizer is never run"
        raise DataError(
            f"{name}: no such file, and transformers finds no tokenizer by that name: "
            f"{one_line(error)}{way_out}"
        ) from error
    if not getattr(found, "is_fast", False):
        raise DataError(
            f"{name}: has no fast form (tokenizer.json); a SentencePiece .model can be given to "
            "SentencePieceTokenizer"
        )
    return found.backend_tokenizer.to_str(), found.eos_token


@contextmanager
def _refusing(place: str | Path, what: str) -> Iterator[None]:
    """Turn any error of the `tokenizers` package into a `DataError` of one line.

    A file that the package does not foresee ends in a Rust panic, which prints a report of its own
    on stderr; the report is held back, as the error says the same.
    """
    try:
        with _silent_stderr():
            yield
    except BaseException as error:
        _refuse(f"{place}: {what}", error)
        raise


def _refuse(what: str, error: BaseException) -> None:
    """Raise a `DataError` for an error of the `tokenizers` package: a bare Exception, or a Rust
    panic, which is a BaseException of a class that no module exports. Leave any other alone."""
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        raise DataError(f"{what}: {one_line(error)}") from error


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Drop what native code writes to file descriptor 2 meanwhile."""
    try:
        kept = os.dup(2)
    except OSError:  # the descriptor is closed: nothing is shown anyway
        yield
        return
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
