"""The sizes of encoded values, by the name of their format. Imports no torch.

`--grad-wire` and `--outer-values` name formats.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

BITS = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4, "2bit": 2}
"""Bits of a value."""
BLOCK = 128
"""Number of 8-, 4- or 2-bit values that share scales."""
SCALE_BYTES = {"int8": 2, "int4": 2, "2bit": 4}
"""Bytes of the scales of a block."""
POSITION_BYTES = 2
"""Bytes of an entry's position in its chunk."""


def format_of(wire: str, *, matrix: bool) -> str:
    """Return the format of a parameter's values: 1-D parameters travel in at least 16 bits."""
    return wire if matrix or BITS[wire] >= 16 else "bf16"


def block_of(form: str) -> int:
    """Return the number of values that are encoded together."""
    return BLOCK if BITS[form] < 16 else 1


def encoded_bytes(form: str, count: int) -> int:
    """Return the bytes of `count` values, a multiple of `block_of`."""
    return SCALE_BYTES.get(form, 0) * (count // BLOCK) + count * BITS[form] // 8


def chunk_length(form: str, count: int, ranks: int) -> int:
    """Return the number of values of each rank's chunk of `count` values, padding included."""
    block = block_of(form)
    return max(-(-count // (ranks * block)), 1) * block


def padded_count(form: str, count: int) -> int:
    """Return the number of values of the whole blocks, at least one, that hold `count` values."""
    block = block_of(form)
    return max(-(-count // block), 1) * block


def part_bytes(form: str, count: int) -> int:
    """Return the bytes of `count` values that are padded to whole blocks."""
    return encoded_bytes(form, padded_count(form, count))


def mean_bytes(form: str, count: int, ranks: int) -> int:
    """Return the bytes of all chunks; a mean sends 2 (n - 1) / n of them from each of n ranks."""
    return ranks * encoded_bytes(form, chunk_length(form, count, ranks))


@dataclass(frozen=True, kw_only=True)
class TopKCompression:
    """Messages with the entries of largest magnitude of each chunk of each parameter (SparseLoCo).

    Attributes:
        chunk: Number of consecutive entries of a chunk; a parameter's last chunk may be shorter.
        k: Number of entries of a chunk that are sent, all if the chunk has fewer.
        values: The format of the values.
        decay: Factor by which a round multiplies what the rounds before it did not send.
    """

    chunk: int
    k: int
    values: str
    decay: float

    def entries(self, numel: int) -> int:
        """Return the number of entries that are sent of a parameter of `numel` entries."""
        chunks, rest = divmod(numel, self.chunk)
        return chunks * min(self.k, self.chunk) + min(self.k, rest)

    def count(self, lengths: Iterable[int]) -> int:
        """Return the values in a message of parameters of these lengths.

        Each parameter's values are padded to whole blocks, so that parameters share no scales.
        """
        return sum(padded_count(self.values, self.entries(numel)) for numel in lengths)

    def message_bytes(self, lengths: Iterable[int]) -> int:
        """Return the bytes of a message of parameters of these lengths, a multiple of 4."""
        count = self.count(lengths)
        return -(-(encoded_bytes(self.values, count) + POSITION_BYTES * count) // 4) * 4
