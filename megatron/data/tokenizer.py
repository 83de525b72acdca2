"""The tokenizers of `--tokenizer-type`, behind one protocol."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron.config.fields import UNREAD_TOKENIZERS
from megatron.data.local_file import (
    is_file,
    is_folder,
    one_line,
    read_bytes,
    read_json_object,
    read_text,
    stat_of,
)
from megatron.data.sidecar import MAX_IDS
from megatron.errors import ConfigError, DataError, missing_extra

END_OF_TEXT = "<|endoftext|>"
"""GPT-2's mark between documents."""


def read_vocab(path: str, *, alphabet: Iterable[str]) -> dict[str, int]:
    """Return the ids of a vocabulary file by token.

    Raises `DataError` for an id that is not a number, occurs twice or leaves a gap. Every symbol of
    `alphabet` (the 256 symbols of bytes) and the end mark must be present, too: the encoder would
    drop bytes without a symbol.
    """
    vocab = read_json_object(path)
    owners: dict[int, str] = {}
    for token, id in vocab.items():
        if not isinstance(id, int) or isinstance(id, bool) or id < 0:
            raise DataError(f"{path}: {token!r} has id {id!r}; wanted a whole number from 0")
        if id in owners:
            raise DataError(f"{path}: {owners[id]!r} and {token!r} both have id {id}")
        owners[id] = token
    gap = next((id for id in range(len(vocab)) if id not in owners), None)
    if gap is not None:
        raise DataError(f"{path}: {len(vocab)} entries, but none has id {gap}; wanted no gap")
    if END_OF_TEXT not in vocab:
        raise DataError(f"{path}: has no {END_OF_TEXT} entry, which ends documents; add it")
    bare = sorted(symbol for symbol in alphabet if symbol not in vocab)
    if bare:
        raise DataError(
            f"{path}: lacks {len(bare)} of the 256 byte symbols ({bare[0]!r}, ...); not the "
            "vocabulary of a byte-level BPE"
        )
    return vocab


def read_merges(path: str, *, vocab: Mapping[str, int], vocab_file: str) -> list[tuple[str, str]]:
    """Return the merges of a file in order of rank.

    The line gives the rank, so `DataError` is raised for any line that is bad or occurs twice.
    """
    merges: list[tuple[str, str]] = []
    lines: dict[tuple[str, str], int] = {}
    # Not splitlines(), which also breaks at U+0085 and other characters of the alphabet.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        if len(parts) != 2 or not all(parts):
            raise DataError(f"{path}:{number}: {line[:40]!r} is not two parts set apart by a space")
        pair = (parts[0], parts[1])
        unknown = next((part for part in (*pair, "".join(pair)) if part not in vocab), None)
        if unknown is not None:
            raise DataError(
                f"{path}:{number}: {unknown!r} is not in {vocab_file}; the two files do not belong "
                "together"
            )
        if pair in lines:
            raise DataError(f"{path}:{number}: {line!r} is on line {lines[pair]} already")
        lines[pair] = number
        merges.append(pair)
    if not merges:
        raise DataError(f"{path}: holds no merges")
    return merges


_HUB_FLAGS = "--tokenizer-model with that name on the command line"
_END_MARKS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


def describe(
    type: str, *, vocab_size: int, eod: int, fingerprint: str, files: Mapping[str, str]
) -> dict[str, object]:
    """Return the sidecar form of a tokenizer.

    `files` maps arguments of `build_tokenizer` to paths.
    """
    return {
        "type": type,
        "vocab_size": vocab_size,
        "eod": eod,
        "fingerprint": fingerprint,
        "files": dict(files),
    }


class _FastTokenizer:
    """A tokenizer of the `tokenizers` package; special tokens in a text are plain text.

    The begin marks of the post-processor precede each text.
    """

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
        self._begin = _begin_marks(inner)
        facts = [self.type, eod, identity, *([self._begin] if self._begin else [])]
        canonical = json.dumps(facts, sort_keys=True, ensure_ascii=True)
        self._fingerprint = hashlib.sha256(canonical.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        # A batch of one computes no character offsets and is 1.4 times as fast as encode().
        try:
            ids = self._inner.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError as error:
            raise unencodable(text) from error
        except BaseException as error:
            _refuse("text: the tokenizer cannot encode it", error)
            raise
        return [*self._begin, *ids] if self._begin else ids

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

    The end mark is the entry `<|endoftext|>`. DataError names the file and the line or entry.
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


def _drops_characters(content: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer.json has no id for a character outside its vocabulary.

    Such ids come from an unknown token, from bytes as a fallback, or from the alphabet of bytes.
    """
    model, before = content.get("model") or {}, content.get("pre_tokenizer") or {}
    steps = [before, *(before.get("pretokenizers") or [])]
    has_bytes = any(step.get("type") == "ByteLevel" for step in steps)
    has_unknown = model.get("unk_token") is not None or model.get("unk_id") is not None
    return not (has_bytes or has_unknown or model.get("byte_fallback"))


class HuggingFaceTokenizer(_FastTokenizer):
    """A `tokenizer.json`, a folder with one, or a name that transformers resolves.

    The end mark is `eos_token` of the `tokenizer_config.json` in the same folder, else the first
    known name in the vocabulary (`<|endoftext|>`, `</s>`, ...). Ids may have gaps: `vocab_size` is
    the largest plus one. A folder without `tokenizer.json` and a hub name need transformers. A hub
    name that is not on this machine is downloaded with `hub` and refused without it. Code of a
    model is never run.

    Each text begins with the marks that the post-processor sets before it, as in Megatron-LM, such
    as <s>; an empty text becomes those marks alone. End marks of a post-processor are not written,
    because --append-eod writes the end mark.
    """

    type = "HuggingFaceTokenizer"
    drops_characters: bool
    """Whether characters without an id of their own get none at all."""

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
        self.drops_characters = _drops_characters(content)
        super().__init__(
            inner,
            eod=_find_eod(model, vocab, named_eos),
            identity=content,
            files={"model": place},
        )


class _SentencePiece:
    """A SentencePiece `.model`.

    SentencePiece normalises (spaces, some Unicode forms), so decoding may not return the exact
    text.
    """

    type: str
    eod: int
    vocab_size: int

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
        self._pieces: int = self._inner.GetPieceSize()
        self._fingerprint = hashlib.sha256(content).hexdigest()

    def encode(self, text: str) -> list[int]:
        try:
            return self._inner.EncodeAsIds(text)
        except (RuntimeError, UnicodeEncodeError) as error:
            raise unencodable(text) from error

    def decode(self, ids: Iterable[int]) -> str:
        return self._inner.DecodeIds([id for id in ids if id < self._pieces])

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


class SentencePieceTokenizer(_SentencePiece):
    """A SentencePiece `.model` with marks after its pieces, as Megatron's tokenizer of this name.

    The marks <CLS>, <SEP>, <EOD> and <MASK>, and <PAD>, <BOS> and <EOS> where the model has no such
    piece, get the ids after the last piece, unless a piece is so named. The end mark is <EOD>.
    Marks in a text are plain text here, while Megatron writes their ids; decoding leaves out marks
    that are no pieces.
    """

    type = "SentencePieceTokenizer"

    def __init__(self, model: str) -> None:
        super().__init__(model)
        inner = self._inner
        named = {"<PAD>": inner.pad_id(), "<BOS>": inner.bos_id(), "<EOS>": inner.eos_id()}
        marks = ["<CLS>", "<SEP>", "<EOD>", "<MASK>"]
        marks += [mark for mark, piece in named.items() if piece < 0]
        ids = {inner.IdToPiece(id): id for id in range(self._pieces)}
        for mark in marks:
            ids.setdefault(mark, len(ids))
        self.vocab_size, self.eod = len(ids), ids["<EOD>"]
        # One model file gives three different encodings, so the fingerprints must differ, too.
        self._fingerprint = hashlib.sha256(f"marks {self._fingerprint}".encode()).hexdigest()


class GPTSentencePieceTokenizer(_SentencePiece):
    """A SentencePiece `.model` alone; the end mark is its end-of-sentence piece."""

    type = "GPTSentencePieceTokenizer"

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.vocab_size = self._pieces
        self.eod = self._inner.eos_id()
        if self.eod < 0:
            raise DataError(f"{model}: has no end-of-sentence piece; train one with --eos_id set")


class Llama2Tokenizer(GPTSentencePieceTokenizer):
    """A SentencePiece `.model` whose texts begin with the begin-of-sentence piece, as Megatron's.

    An empty text becomes that piece alone.
    """

    type = "Llama2Tokenizer"

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._bos: int = self._inner.bos_id()
        if self._bos < 0:
            raise DataError(
                f"{model}: has no begin-of-sentence piece; train one with --bos_id set, or give "
                "--tokenizer-type GPTSentencePieceTokenizer"
            )
        self._fingerprint = hashlib.sha256(f"bos {self._fingerprint}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return [self._bos, *super().encode(text)]


def unencodable(text: str) -> DataError:
    """Return the error for a string without a UTF-8 form (JSON can hold half a surrogate pair)."""
    bad = next((at for at, char in enumerate(text) if "\ud800" <= char <= "\udfff"), 0)
    return DataError(f"text: unpaired surrogate {text[bad : bad + 1]!a} at character {bad}")


def _begin_marks(inner: Any) -> list[int]:
    """Return the ids that the post-processor of a tokenizer sets before a text."""
    with _refusing("text", "the tokenizer cannot encode it"):
        plain, marked = (inner.encode("a", add_special_tokens=marks).ids for marks in (False, True))
    starts = (at for at in range(len(marked)) if marked[at : at + len(plain)] == plain)
    return marked[: next(starts, 0)]


def _absolute(path: str | Path) -> str:
    return os.path.realpath(path)


def _check_ids(place: str, content: Mapping[str, Any]) -> None:
    """Raise `DataError` for a bad id, and for two entries of the model with one id.

    Added tokens may repeat entries of the model.
    """
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
    """Return the `tokenizer.json` text and the eos token of a folder or hub name.

    A tokenizer may include Python code. `trust_remote_code=False` refuses it; without the argument
    transformers would ask on a terminal whether to run it.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise missing_extra("transformers", "data") from error
    try:
        found: Any = AutoTokenizer.from_pretrained(
            name, local_files_only=not hub, trust_remote_code=False
        )
    except Exception as error:  # any error of the package, the network or the hub
        way_out = "" if hub else f"; only this machine was searched: {_HUB_FLAGS} downloads it"
        what = "no such file, and transformers finds no tokenizer by that name"
        if is_folder(name):
            what = "transformers reads no tokenizer in this folder"
        if is_folder(name) or "trust_remote_code" in str(error):
            way_out = "; code that comes with a tokenizer is never run"
        raise DataError(f"{name}: {what}: {one_line(error)}{way_out}") from error
    if not getattr(found, "is_fast", False):
        raise DataError(
            f"{name}: has no fast form (tokenizer.json); a SentencePiece .model can be given to "
            "Llama2Tokenizer or GPTSentencePieceTokenizer"
        )
    return found.backend_tokenizer.to_str(), found.eos_token


@contextmanager
def _refusing(place: str | Path, what: str) -> Iterator[None]:
    """Turn any error of the `tokenizers` package into a `DataError` of one line.

    An unexpected file ends in a Rust panic, which also prints a report on stderr; the report is
    suppressed, since the error says the same.
    """
    try:
        with _silent_stderr():
            yield
    except BaseException as error:
        _refuse(f"{place}: {what}", error)
        raise


def _refuse(what: str, error: BaseException) -> None:
    """Raise a `DataError` for an error of the `tokenizers` package; ignore any other.

    The package raises a bare Exception, or a Rust panic, which is a BaseException of a class that
    no module exports.
    """
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        raise DataError(f"{what}: {one_line(error)}") from error


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Discard output of native code to file descriptor 2 in the context."""
    try:
        kept = os.dup(2)
    except OSError:  # the descriptor is closed, so nothing is shown anyway
        yield
        return
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


class Tokenizer(Protocol):
    """The interface of a tokenizer to the rest of the stack."""

    @property
    def vocab_size(self) -> int:
        """Largest id plus one, including the end mark and excluding padding."""
        ...

    @property
    def eod(self) -> int:
        """Id that ends a document."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without an end mark; DataError if it cannot be represented."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; bytes that are not UTF-8 (a cut character) become U+FFFD."""
        ...

    def fingerprint(self) -> str:
        """Return the sha256 (hex) of everything that determines the ids, and nothing else."""
        ...

    def describe(self) -> dict[str, object]:
        """Return the description for a data set's sidecar; `tokenizer_from_sidecar` inverts it."""
        ...


class ByteTokenizer:
    """A tokenizer without files: the 256 bytes of UTF-8 are ids 0 to 255; 256 is the end mark."""

    vocab_size = 257
    eod = 256

    def encode(self, text: str) -> list[int]:
        try:
            return list(text.encode())
        except UnicodeEncodeError as error:
            raise unencodable(text) from error

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids; end marks are left out, since no byte represents them."""
        return bytes(id for id in ids if id != self.eod).decode(errors="replace")

    def fingerprint(self) -> str:
        return hashlib.sha256(b"bytes 0-255, eod 256").hexdigest()

    def describe(self) -> dict[str, object]:
        return describe(
            "ByteTokenizer",
            vocab_size=self.vocab_size,
            eod=self.eod,
            fingerprint=self.fingerprint(),
            files={},
        )


class NullTokenizer:
    """Tokenizer of text that consists of ids: whole numbers separated by spaces.

    As in Megatron-LM, `ids` is the number of ordinary ids, the end mark is `ids` itself and
    `vocab_size` is one more.
    """

    def __init__(self, ids: int) -> None:
        self.vocab_size = ids + 1
        self.eod = ids

    def encode(self, text: str) -> list[int]:
        numbers: list[int] = []
        for word in text.split():
            plain = len(word) < 20 and word.isascii() and word.isdigit()
            if not plain or int(word) >= self.vocab_size:
                raise DataError(
                    f"text: {word[:20]!r} is not a token id; NullTokenizer takes whole numbers "
                    f"from 0 to {self.vocab_size - 1} set apart by spaces"
                )
            numbers.append(int(word))
        return numbers

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(id) for id in ids)

    def fingerprint(self) -> str:
        return hashlib.sha256(f"null {self.vocab_size}".encode()).hexdigest()

    def describe(self) -> dict[str, object]:
        return describe(
            "NullTokenizer",
            vocab_size=self.vocab_size,
            eod=self.eod,
            fingerprint=self.fingerprint(),
            files={},
        )


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """A type of tokenizer; `needs` maps the arguments that `build` takes to flags."""

    needs: Mapping[str, str]
    build: Callable[..., Tokenizer]


_VOCAB_SIZE = "--vocab-size"
_KINDS: dict[str, _Kind] = {
    "GPT2BPETokenizer": _Kind(
        needs={"vocab_file": "--vocab-file", "merge_file": "--merge-file"}, build=GPT2BPETokenizer
    ),
    "SentencePieceTokenizer": _Kind(
        needs={"model": "--tokenizer-model"}, build=SentencePieceTokenizer
    ),
    "GPTSentencePieceTokenizer": _Kind(
        needs={"model": "--tokenizer-model"}, build=GPTSentencePieceTokenizer
    ),
    "Llama2Tokenizer": _Kind(needs={"model": "--tokenizer-model"}, build=Llama2Tokenizer),
    "HuggingFaceTokenizer": _Kind(needs={"model": "--tokenizer-model"}, build=HuggingFaceTokenizer),
    "ByteTokenizer": _Kind(needs={}, build=ByteTokenizer),
    "NullTokenizer": _Kind(needs={"ids": _VOCAB_SIZE}, build=NullTokenizer),
}

_RENAMED = {
    "SentencePieceTokenizer": "; SentencePieceTokenizer of earlier versions is "
    "GPTSentencePieceTokenizer now",
}
"""The new name of a tokenizer type of earlier versions, as the end of an error."""

TOKENIZER_TYPES = tuple(_KINDS)
"""Names that `--tokenizer-type` accepts."""


def build_tokenizer(
    type: str,
    *,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    model: str | None = None,
    vocab_size: int | None = None,
    hub: bool = False,
) -> Tokenizer:
    """Build the tokenizer of a type name from its files.

    A `model` that is the name of a hub model is downloaded only with `hub`. A caller sets it if the
    user's own flag names the model; a name found in a file may not start a download. ConfigError:
    unknown type, a flag missing, a flag that the type does not take, an absent package, or a
    `vocab_size` that is less than the tokenizer's; the rows of a model's table may be more.
    DataError: a file missing or damaged.
    """
    kind = _KINDS.get(type)
    if kind is None:
        raise ConfigError(f"--tokenizer-type: unknown {type!r}{_nearest(type)}")
    given = {"vocab_file": vocab_file, "merge_file": merge_file, "model": model, "ids": vocab_size}
    flags = {
        "vocab_file": "--vocab-file",
        "merge_file": "--merge-file",
        "model": "--tokenizer-model",
    }
    missing = [flag for name, flag in kind.needs.items() if given[name] is None]
    if missing:
        raise ConfigError(f"--tokenizer-type {type}: needs {' and '.join(missing)}")
    for name, flag in flags.items():
        if given[name] is not None and name not in kind.needs:
            raise ConfigError(
                f"{flag}: given, but {type} reads {_takes(kind)}; remove it or change "
                "--tokenizer-type"
            )
    if vocab_size is not None and vocab_size < 1:
        raise ConfigError(f"{_VOCAB_SIZE}: {vocab_size}; wanted at least 1")
    if vocab_size is not None and vocab_size >= MAX_IDS:
        raise ConfigError(f"{_VOCAB_SIZE}: {vocab_size}; wanted less than {MAX_IDS}")
    arguments: dict[str, object] = {name: given[name] for name in kind.needs}
    if type == "HuggingFaceTokenizer":
        arguments["hub"] = hub
    tokenizer = kind.build(**arguments)
    if "ids" not in kind.needs and vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"{_VOCAB_SIZE}: {vocab_size}, but {type} has {tokenizer.vocab_size} entries; give at "
            "least as many, or another tokenizer"
        )
    return tokenizer


def tokenizer_from_sidecar(
    info: Mapping[str, object], *, folder: str | Path | None = None
) -> Tokenizer:
    """Rebuild the tokenizer that `Tokenizer.describe()` described, and check its fingerprint.

    A file that is not at its recorded path is looked for by name in `folder` (the folder of the
    data). DataError if the description is invalid, a file is missing, or the fingerprint differs.
    """
    kind = info.get("type")
    files = info.get("files", {})
    fingerprint = info.get("fingerprint")
    known = isinstance(kind, str) and kind in _KINDS
    if not known or not isinstance(files, Mapping) or not isinstance(fingerprint, str):
        raise DataError(
            f"tokenizer description: wanted a known type ({', '.join(TOKENIZER_TYPES)}), files and "
            f"a fingerprint, found type {kind!r}; give --tokenizer-type and its files"
        )
    assert isinstance(kind, str)
    arguments: dict[str, object] = {
        str(name): _locate(str(path), folder, kind) for name, path in files.items()
    }
    if kind == "NullTokenizer":
        size = info.get("vocab_size")
        if type(size) is not int or not 2 <= size <= MAX_IDS:
            raise DataError(
                f"tokenizer description: vocab_size is {one_line(repr(size))}; wanted 2 to "
                f"{MAX_IDS}"
            )
        arguments["ids"] = size - 1
    if set(arguments) != set(_KINDS[kind].needs):
        raise DataError(
            f"tokenizer description: {kind} wants files {list(_KINDS[kind].needs)}, found "
            f"{sorted(files)}; give --tokenizer-type and its files"
        )
    tokenizer = _KINDS[kind].build(**arguments)
    if tokenizer.fingerprint() != fingerprint:
        places = ", ".join(str(arguments[name]) for name in files) or kind
        raise DataError(
            f"{places}: not the tokenizer that made the data (fingerprint "
            f"{tokenizer.fingerprint()[:12]}, the data's is {fingerprint[:12]}); find the file it "
            f"was made with or make the data again{_RENAMED.get(kind, '')}"
        )
    return tokenizer


def _locate(recorded: str, folder: str | Path | None, kind: str) -> str:
    path = Path(recorded)
    # A relative name is a hub name, which the tokenizer looks for on this machine only.
    if not path.is_absolute() or stat_of(path) is not None:
        return recorded
    if folder is not None and stat_of(Path(folder) / path.name) is not None:
        return str(Path(folder) / path.name)
    raise DataError(
        f"{recorded}: the tokenizer file that made the data is gone or has moved; put it back, or "
        f"beside the data, or give --tokenizer-type {kind} with its new place"
    )


def _nearest(type: str) -> str:
    if type in UNREAD_TOKENIZERS:
        return f"; {UNREAD_TOKENIZERS[type]}"
    known = {name.lower(): name for name in TOKENIZER_TYPES}
    close = difflib.get_close_matches(type.lower(), known, n=1, cutoff=0.4)
    meant = f"; did you mean {known[close[0]]}?" if close else ";"
    return f"{meant} known: {', '.join(TOKENIZER_TYPES)}"


def _takes(kind: _Kind) -> str:
    return " and ".join(kind.needs.values()) or "no file"
