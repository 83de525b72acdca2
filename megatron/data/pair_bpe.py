"""The joint BPE of both languages of a translation (Sennrich et al. 2016), lowercased.

A blank becomes part of the symbol after it, and punctuation stands apart from words, so that
symbols join to the text that they came from, tokenized beforehand or not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron.data.dictionary import SPECIAL_SYMBOLS, UNK, Dictionary
from megatron.data.local_file import one_line
from megatron.data.sidecar import write_atomically
from megatron.errors import ConfigError, DataError, missing_extra

BLANK = "▁"
"""The symbol that stands for a blank before a word, as in SentencePiece."""
MOST_MERGES = 1 << 20


class PairBPE:
    """A trained joint BPE.

    Args:
        text: The content of a `tokenizer.json` of the `tokenizers` package.
        where: A name for `text` in errors.

    Raises:
        ConfigError: The package is not installed.
        DataError: `text` is no BPE.
    """

    def __init__(self, text: str, *, where: str | Path = "BPE") -> None:
        tokenizers = _package()
        try:
            self._inner = tokenizers.Tokenizer.from_str(text)
        except BaseException as error:
            # The package raises bare exceptions, and panics of a class that no module exports.
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise DataError(f"{where}: not a tokenizer.json: {one_line(error)}") from None
        if json.loads(text).get("model", {}).get("type") != "BPE":
            raise DataError(f"{where}: not a BPE; write the data again")
        self.text = text

    def save(self, path: Path) -> None:
        """Write the file. Raises `DataError` where it cannot be written."""
        write_atomically(path, self.text.encode())

    @property
    def merges(self) -> int:
        """The number of merges."""
        return len(json.loads(self.text)["model"]["merges"])

    def split(self, sentences: Sequence[str]) -> list[list[str]]:
        """Return the symbols of each sentence; the unknown symbol for unseen characters."""
        return [found.tokens for found in self._inner.encode_batch(list(sentences))]

    def normalize(self, sentence: str) -> str:
        """Return the sentence as the BPE reads it: lowercased, in composed form (NFC)."""
        return self._inner.normalizer.normalize_str(sentence)

    @staticmethod
    def join(symbols: Iterable[str]) -> str:
        """Return the sentence that symbols make."""
        return "".join(symbols).replace(BLANK, " ").strip()


def pair_fingerprint(bpe: str, dictionary: Dictionary) -> str:
    """Return the fingerprint of a language's tokens: hashes of the BPE's text and dictionary."""
    return f"{hashlib.sha256(bpe.encode()).hexdigest()}:{dictionary.fingerprint()}"


def train_pair_bpe(sentences: Sequence[str], *, merges: int) -> PairBPE:
    """Train on the sentences of both languages; the same sentences give the same BPE.

    A small text may give fewer merges than asked for. Uses every core.

    Raises:
        ConfigError: `merges` is out of range, or the `tokenizers` package is not installed.
        DataError: The sentences hold no text.
    """
    if not 1 <= merges <= MOST_MERGES:
        raise ConfigError(f"--merges: {merges}; must be from 1 to {MOST_MERGES}")
    package = _package()
    unknown = SPECIAL_SYMBOLS[UNK]
    inner: Any = package.Tokenizer(package.models.BPE(unk_token=unknown))
    normalizers, splitters = package.normalizers, package.pre_tokenizers
    inner.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    inner.pre_tokenizer = splitters.Sequence(
        [splitters.Metaspace(replacement=BLANK), splitters.Punctuation()]
    )
    characters = {c for text in sentences for c in inner.normalizer.normalize_str(text)} - {" "}
    if not characters:
        raise DataError("the training pairs hold no text to learn merges from")
    trainer = package.trainers.BpeTrainer(
        # The trainer counts characters and special symbols among its entries.
        vocab_size=len(characters | {BLANK}) + 1 + merges,
        special_tokens=[unknown],
        show_progress=False,
    )
    inner.train_from_iterator(sentences, trainer)
    return PairBPE(inner.to_str(pretty=True))


def _package() -> Any:
    try:
        import tokenizers
        import tokenizers.models
        import tokenizers.normalizers
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise missing_extra("tokenizers", "data") from error
    return tokenizers
