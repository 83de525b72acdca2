"""The dictionary of one side of a translation: symbols in fairseq's order of ids, and its file.

A file `PREFIX.LANG.dict.txt` has a line "symbol count" for each symbol, the most frequent first, as
fairseq writes it. Ids 0 to 3 are special, and the number of entries is rounded up to a multiple of
8 by entries that no text uses.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron.data.local_file import one_line, read_text
from megatron.data.sidecar import write_atomically
from megatron.errors import DataError

BOS, PAD, EOS, UNK = range(4)
"""Ids of the special symbols: sentence start (unused), padding, sentence end, unknown symbol."""
SPECIAL_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")
MULTIPLE = 8


class Dictionary:
    """Ids by symbol.

    Args:
        counts: Symbols without the special ones, in the order of their ids, with their frequency.
    """

    def __init__(self, counts: Sequence[tuple[str, int]]) -> None:
        self.counts = list(counts)
        self.symbols = [*SPECIAL_SYMBOLS, *(symbol for symbol, _ in counts)]
        self._ids = {symbol: number for number, symbol in enumerate(self.symbols)}

    @classmethod
    def of(cls, sentences: Iterable[Sequence[str]]) -> Dictionary:
        """Return the dictionary of the symbols in `sentences`, by falling frequency, then name."""
        found = Counter(symbol for sentence in sentences for symbol in sentence)
        for symbol in SPECIAL_SYMBOLS:
            del found[symbol]
        return cls(sorted(found.items(), key=lambda item: (-item[1], item[0])))

    @classmethod
    def load(cls, path: Path) -> Dictionary:
        """Read a dictionary file.

        Raises:
            DataError: The file is missing, or a line is not a symbol and its frequency, or repeats
                one.
        """
        counts: dict[str, int] = {}
        for number, line in enumerate(read_text(path).removesuffix("\n").split("\n"), 1):
            symbol, _, count = line.rpartition(" ")
            if not symbol or not (count.isascii() and count.isdigit()) or len(count) > 18:
                raise DataError(
                    f"{path}:{number}: {one_line(line, longest=60)!r} is not a symbol, a blank and "
                    "its frequency; write the data again"
                )
            if symbol in counts or symbol in SPECIAL_SYMBOLS:
                raise DataError(f"{path}:{number}: {symbol!r} occurs twice; write the data again")
            counts[symbol] = int(count)
        return cls(list(counts.items()))

    def save(self, path: Path) -> None:
        """Write the file. Raises `DataError` where it cannot be written."""
        write_atomically(path, self.text().encode())

    def text(self) -> str:
        """Return the content of the file."""
        return "".join(f"{symbol} {count}\n" for symbol, count in self.counts)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the file's content, in hex."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def __len__(self) -> int:
        """Return the number of entries, including those that round it up to a multiple of 8."""
        return -(-len(self.symbols) // MULTIPLE) * MULTIPLE

    def encode(self, symbols: Iterable[str]) -> list[int]:
        """Return the ids of a sentence's symbols, followed by `EOS`; unknown ones are `UNK`."""
        return [*(self._ids.get(symbol, UNK) for symbol in symbols), EOS]

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Return the symbols of ids up to `EOS`, without padding."""
        found = []
        for number in ids:
            if number == EOS:
                break
            if number not in (BOS, PAD):
                known = number < len(self.symbols)
                found.append(self.symbols[number] if known else SPECIAL_SYMBOLS[UNK])
        return found
