"""Codecs: how one value of a gradient is written in fewer bits than fp32.

Bytes are uint8 tensors, so that any backend carries them. Equal bytes decode to equal values on
every processor, so ranks that receive the same bytes have the same mean.
"""

from __future__ import annotations

from typing import Protocol

import torch

from megatron.data_parallel.wire_format import BLOCK

PIECE = 1 << 17
"""Number of values that are encoded at a time, so that temporaries stay in a processor's cache."""


class Codec(Protocol):
    """A way to write fp32 values as bytes, as many as `wire_format.encoded_bytes` says."""

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write values (fp32, 1-D, a multiple of the format's block) as bytes (uint8, 1-D)."""
        ...

    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        """Read the values (fp32, 1-D) of bytes that `encode` wrote.

        Where a block had a value that is not finite, at least one decoded value is not finite.
        """
        ...


class FP32Codec:
    """Values as they are: 4 bytes a value."""

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        out.view(torch.float32).copy_(values)

    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(encoded.view(torch.float32))


class BF16Codec:
    """Values rounded to bfloat16: 2 bytes a value."""

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        out.view(torch.bfloat16).copy_(values)

    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(encoded.view(torch.bfloat16))


class IntegerCodec:
    """Symmetric integers of 8 or 4 bits with one bf16 scale for each block of `BLOCK` values.

    A value v of a block with scale s = max |v| / L, rounded to bf16, becomes the nearest integer to
    v / s in [-L, L], where L is 127 or 7. A block takes 2 + 128 or 2 + 64 bytes: 1.016 or 0.516
    bytes a value. All scales come first, then all integers.

    Args:
        bits: 8 or 4.
    """

    def __init__(self, bits: int) -> None:
        assert bits in (4, 8), f"{bits} bits"
        self._bits = bits
        self._largest = 2 ** (bits - 1) - 1

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        scales, integers = self._parts(out)
        for start in range(0, values.numel(), PIECE):
            blocks = values[start : start + PIECE].view(-1, BLOCK)
            scale = (blocks.abs().amax(dim=1) / self._largest).to(torch.bfloat16)
            first = start // BLOCK
            scales[first : first + scale.numel()] = scale
            # A block of zeros has the scale 0. A scale that is not finite makes every value of the
            # block not finite, whatever its integers are.
            inverse = scale.float().reciprocal_().nan_to_num_(0.0, 0.0, 0.0)
            found = blocks * inverse.unsqueeze(1)
            found.round_().clamp_(-self._largest, self._largest)
            self._write(found.view(-1), integers, start)

    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        scales, integers = self._parts(encoded)
        for start in range(0, out.numel(), PIECE):
            blocks = out[start : start + PIECE].view(-1, BLOCK)
            self._read(integers, start, blocks.view(-1))
            first = start // BLOCK
            scale = scales[first : first + len(blocks)].float().unsqueeze_(1)
            blocks.mul_(scale)

    def _parts(self, encoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = encoded.numel() // (2 + BLOCK * self._bits // 8)
        return encoded[: 2 * count].view(torch.bfloat16), encoded[2 * count :]

    def _write(self, found: torch.Tensor, integers: torch.Tensor, start: int) -> None:
        if self._bits == 8:
            integers.view(torch.int8)[start : start + found.numel()] = found.to(torch.int8)
            return
        nibbles = (found.to(torch.int8) + 8).view(torch.uint8).view(-1, 2)
        packed = nibbles[:, 0] | (nibbles[:, 1] << 4)
        integers[start // 2 : (start + found.numel()) // 2] = packed

    def _read(self, integers: torch.Tensor, start: int, out: torch.Tensor) -> None:
        if self._bits == 8:
            out.copy_(integers.view(torch.int8)[start : start + out.numel()])
            return
        packed = integers[start // 2 : (start + out.numel()) // 2]
        pairs = out.view(-1, 2)
        pairs[:, 0] = packed & 15
        pairs[:, 1] = packed >> 4
        out.sub_(8)


class TwoBitCodec:
    """The sign of a value, and one of the two bf16 magnitudes of its block of `BLOCK` values.

    The magnitudes are the means of the block's values below, and not below, their mean magnitude,
    so that the sum of magnitudes is kept up to rounding. In a block with a zero the smaller
    magnitude is 0: zeros arrive as zeros. A block takes 4 + 32 bytes: 0.281 bytes a value. All
    magnitudes come first, then all values, four in a byte.
    """

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        scales, codes = self._parts(out)
        for start in range(0, values.numel(), PIECE):
            blocks = values[start : start + PIECE].view(-1, BLOCK)
            sizes = blocks.abs()
            is_large = sizes >= sizes.mean(dim=1, keepdim=True)
            large, small = _mean_where(sizes, is_large), _mean_where(sizes, ~is_large)
            small *= sizes.amin(dim=1) > 0
            first = start // BLOCK
            scales[first : first + len(blocks)] = torch.stack([small, large], dim=1)
            found = (is_large.byte() | (blocks.signbit().byte() << 1)).view(-1, 4)
            packed = found[:, 0] | found[:, 1] << 2 | found[:, 2] << 4 | found[:, 3] << 6
            codes[start // 4 : (start + blocks.numel()) // 4] = packed

    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        scales, codes = self._parts(encoded)
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=out.device)
        for start in range(0, out.numel(), PIECE):
            blocks = out[start : start + PIECE].view(-1, BLOCK)
            packed = codes[start // 4 : (start + blocks.numel()) // 4].unsqueeze(1)
            found = (packed >> shifts & 3).view(-1, BLOCK)
            first = start // BLOCK
            magnitudes = scales[first : first + len(blocks)].float()
            signed = torch.cat([magnitudes, -magnitudes], dim=1)
            torch.gather(signed, 1, found.long(), out=blocks)

    def _parts(self, encoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = encoded.numel() // (4 + BLOCK // 4)
        return encoded[: 4 * count].view(torch.bfloat16).view(-1, 2), encoded[4 * count :]


def _mean_where(rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the mean of the chosen entries of each row, 0 if there is none."""
    return (rows * chosen).sum(dim=1) / chosen.sum(dim=1).clamp_(min=1)


CODECS: dict[str, Codec] = {
    "fp32": FP32Codec(),
    "bf16": BF16Codec(),
    "int8": IntegerCodec(8),
    "int4": IntegerCodec(4),
    "2bit": TwoBitCodec(),
}
"""Codecs by the name of the format."""
