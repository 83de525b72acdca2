"""Rounding of fp32 numbers to 16 bits, and the random bits of stochastic rounding.

Stochastic rounding rounds up with the probability of the remainder, so that the rounded number is
right on average, and updates smaller than half a unit in the last place are not lost. Its bits come
from a counter-based generator (Salmon et al. 2011): a hash of a key and a position, without state.
"""

from __future__ import annotations

import hashlib

import torch

TINY = 2.0**-126
"""The smallest positive normal number of fp32 and of bf16."""
NOISE_BITS = 16
"""Random bits per rounding."""
_FP16_NORMAL, _FP16_UNIT = 2.0**-14, 2.0**-24
"""The smallest positive normal and subnormal numbers of fp16."""


class RandomBits:
    """Random bits for the entries of one tensor in one step, equal on every grid of ranks.

    Args:
        seed: The seed of the run.
        step: The number of the update.
        name: Logical name of the tensor.
        positions: int32 [n]: the entries' positions in the flattened logical tensor.
    """

    def __init__(self, seed: int, step: int, name: str, positions: torch.Tensor) -> None:
        self._key, self._positions = f"{seed}/{step}/{name}", positions
        self._words: dict[int, torch.Tensor] = {}

    def draw(self, stream: int) -> torch.Tensor:
        """Return `NOISE_BITS` bits for each entry: int32 [n]; streams are independent."""
        number, half = divmod(stream, 2)
        if number not in self._words:
            digest = hashlib.blake2b(f"{self._key}/{number}".encode(), digest_size=8).digest()
            self._words[number] = hash_positions(self._positions, digest)
        word = self._words[number]
        return word & 0xFFFF if half else _shifted(word, NOISE_BITS)


def hash_positions(positions: torch.Tensor, key: bytes) -> torch.Tensor:
    """Return 32 bits for each position: int32 [n], from int32 [n] and a key of 8 bytes.

    The key is mixed in twice around the rounds of a 32-bit finalizer with low bias (C. Wellons,
    "Prospecting for Hash Functions", 2018).
    """
    first, second = (int.from_bytes(key[at : at + 4], "little", signed=True) for at in (0, 4))
    word = positions ^ first
    word ^= _shifted(word, 16)
    word.mul_(0x7FEB352D)
    word ^= _shifted(word, 15)
    word.add_(second).mul_(-0x7B935975)
    word ^= _shifted(word, 16)
    return word


def _shifted(word: torch.Tensor, by: int) -> torch.Tensor:
    """Return a logical shift to the right; torch's shift of int32 copies the sign."""
    return (word >> by).bitwise_and_((1 << (32 - by)) - 1)


def round_to(
    values: torch.Tensor, dtype: torch.dtype, noise: torch.Tensor | None = None
) -> torch.Tensor:
    """Round fp32 [n] to bf16 or fp16: to nearest, or stochastically by `noise` (int32 [n]).

    The error of stochastic rounding is below one unit in the last place. NaN and infinity remain,
    and numbers beyond the largest one of the format become infinite or that largest one.
    """
    if noise is None:
        return values.to(dtype)
    if dtype is torch.bfloat16:
        rounded = _truncated(values, 16, noise)
    else:
        # Subnormal numbers have a fixed unit; for others the number of bits to drop is fixed.
        units = (noise * 2.0**-NOISE_BITS).add_(values, alpha=1 / _FP16_UNIT).floor_()
        small = values.abs() < _FP16_NORMAL
        rounded = torch.where(small, units.mul_(_FP16_UNIT), _truncated(values, 13, noise >> 3))
    # A carry turns some patterns of NaN into zeros.
    return torch.where(values == values, rounded, values).to(dtype)


def _truncated(values: torch.Tensor, bits: int, noise: torch.Tensor) -> torch.Tensor:
    """Add noise to the last `bits` bits, which are then dropped."""
    patterns = values.view(torch.int32) + noise
    return patterns.bitwise_and_(-1 << bits).view(torch.float32)


def keep_positive(values: torch.Tensor, least: float = TINY) -> torch.Tensor:
    """Raise positive numbers below `least`, so that no positive number becomes 0 when rounded."""
    return torch.where(values > 0, values.clamp(min=least), values)
