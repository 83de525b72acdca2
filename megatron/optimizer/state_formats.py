"""Number formats of main parameters and moments, narrower than fp32 or not.

States that are not fp32 are called coded. An update reads them into fp32, changes the numbers and
writes them, rounded once. States of 1-D parameters are fp32 always. Blocks of `STATE_BLOCK`
consecutive entries of a parameter share a scale:

    format           main parameters                     moments
    fp32             fp32                                fp32
    bf16             nearest, stochastic or Kahan        stochastic
    fp16             nearest, stochastic or Kahan        stochastic, times a power of two per block
    int8             -                                   stochastic, times a scale per block; the
                                                         second moment as its square root, unsigned
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from megatron.data_parallel.bucket import STATE_BLOCK
from megatron.optimizer.rounding import NOISE_BITS, TINY, RandomBits, keep_positive, round_to

Rounding = Literal["nearest", "stochastic", "kahan"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}
"""torch's dtypes by the names of the flags."""
_FP16_TOP = 15
"""Scaled moments are at most 2^15, half of the range of fp16."""
_FP16_LEAST = 2.0**-24
_LARGEST = 2.0**127
"""The largest number that is encoded with a scale, so that the scale of its block is finite.

A factor of 2 below the end of fp32's range leaves room for rounding up.
"""
_LOWEST_EXPONENT = -95
"""The lowest exponent of a block, for which the scale and its inverse are normal numbers."""


class StateFormat(Protocol):
    """A number format of a state: where its fp32 values are stored, and how they are rounded."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of `StateVector.values`."""
        ...

    @property
    def has_scales(self) -> bool:
        """True if blocks have a scale."""
        ...

    @property
    def has_compensation(self) -> bool:
        """True if a second vector holds what rounding dropped."""
        ...

    @property
    def is_random(self) -> bool:
        """True if `write` uses random bits."""
        ...

    def read(self, held: StateVector) -> torch.Tensor:
        """Return the values: fp32 [n], a view if they are stored so."""
        ...

    def write(self, held: StateVector, values: torch.Tensor, noise: torch.Tensor | None) -> None:
        """Store fp32 values [n], rounded once; without `noise` (int32 [n]) to nearest."""
        ...


@dataclass(frozen=True)
class StateVector:
    """A flat state in its format.

    Attributes:
        format: The number format.
        values: [n], in the format's dtype.
        scales: fp32, one for each block of `STATE_BLOCK` entries; None without scales.
        compensation: [n], in the format's dtype: what rounding dropped; None without compensation.
    """

    format: StateFormat
    values: torch.Tensor
    scales: torch.Tensor | None = None
    compensation: torch.Tensor | None = None

    @property
    def numel(self) -> int:
        """Number of entries."""
        return self.values.numel()

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors in which the state is stored."""
        found = (self.values, self.scales, self.compensation)
        return tuple(tensor for tensor in found if tensor is not None)

    @property
    def is_fp32(self) -> bool:
        """True if the state is stored as it is computed."""
        return self.values.dtype is torch.float32

    def cut(self, start: int, stop: int) -> StateVector:
        """Return a view of entries `[start, stop)`; `start` begins a block."""
        blocks = slice(start // STATE_BLOCK, -(-stop // STATE_BLOCK) if stop > start else 0)
        return StateVector(
            self.format,
            self.values[start:stop],
            None if self.scales is None else self.scales[blocks],
            None if self.compensation is None else self.compensation[start:stop],
        )

    def read(self) -> torch.Tensor:
        """Return the values: fp32 [n], a view if they are stored so."""
        return self.format.read(self)

    def write(self, values: torch.Tensor, noise: torch.Tensor | None = None) -> None:
        """Store fp32 values [n], rounded once; without `noise` (int32 [n]) to nearest."""
        self.format.write(self, values, noise)


@dataclass(frozen=True)
class Fp32Format:
    """fp32."""

    dtype = torch.float32
    has_scales = has_compensation = is_random = False

    def read(self, held: StateVector) -> torch.Tensor:
        return held.values

    def write(self, held: StateVector, values: torch.Tensor, noise: torch.Tensor | None) -> None:
        if values.data_ptr() != held.values.data_ptr():
            held.values.copy_(values)


@dataclass(frozen=True)
class MainFormat:
    """Main parameters in the 16-bit dtype of the model's parameters.

    With Kahan's rounding, a weight is the sum of the rounded number and its compensation, so that
    small updates add up (Zamirai et al. 2020, "Revisiting BFloat16 Training").
    """

    dtype: torch.dtype
    rounding: Rounding
    has_scales = False

    @property
    def has_compensation(self) -> bool:
        return self.rounding == "kahan"

    @property
    def is_random(self) -> bool:
        return self.rounding == "stochastic"

    def read(self, held: StateVector) -> torch.Tensor:
        values = held.values.float()
        return values if held.compensation is None else values.add_(held.compensation)

    def write(self, held: StateVector, values: torch.Tensor, noise: torch.Tensor | None) -> None:
        held.values.copy_(round_to(values, self.dtype, noise if self.is_random else None))
        if held.compensation is not None:
            held.compensation.copy_(values - held.values)


@dataclass(frozen=True)
class Bf16Moment:
    """A moment in bf16, rounded stochastically; a positive second moment never becomes 0.

    Rounded to nearest, a second moment would never decay: beta2 = 0.999 changes it by less than
    half a unit in the last place.
    """

    is_square: bool = False
    dtype = torch.bfloat16
    has_scales = has_compensation = False
    is_random = True

    def read(self, held: StateVector) -> torch.Tensor:
        return held.values.float()

    def write(self, held: StateVector, values: torch.Tensor, noise: torch.Tensor | None) -> None:
        values = keep_positive(values, TINY) if self.is_square else values
        held.values.copy_(round_to(values, self.dtype, noise))


class _ScaledMoment:
    """A moment with a scale per block: the number stored, times the scale of its block."""

    has_scales = is_random = True
    has_compensation = False

    def read(self, held: StateVector) -> torch.Tensor:
        assert held.scales is not None
        return _times(held.values.float(), held.scales)


@dataclass(frozen=True)
class Fp16Moment(_ScaledMoment):
    """A moment in fp16, multiplied by a power of two per block that keeps it within the range.

    The power of two brings the block's largest number to at most 2^15. A positive second
    moment never becomes 0.
    """

    is_square: bool = False
    dtype = torch.float16

    def write(self, held: StateVector, values: torch.Tensor, noise: torch.Tensor | None) -> None:
        assert held.scales is not None
        values = values.clamp(-_LARGEST, _LARGEST)
        _, exponents = torch.frexp(_largest(values.abs()))
        exponents = exponents.clamp_(min=_LOWEST_EXPONENT).sub_(_FP16_TOP)
        held.scales.copy_(torch.ldexp(torch.ones_like(held.scales), exponents))
        scaled = _times(values, torch.ldexp(torch.ones_like(held.scales), -exponents))
        scaled = keep_positive(scaled, _FP16_LEAST) if self.is_square else scaled
        held.values.copy_(round_to(scaled, self.dtype, noise))


@dataclass(frozen=True)
class Int8Moment(_ScaledMoment):
    """A first moment in int8: -127 to 127 times 1/127 of the block's largest magnitude."""

    dtype = torch.int8

    def write(self, held: StateVector, values: torch.Tensor, noise: torch.Tensor | None) -> None:
        codes = _codes(held, values, 127, noise)
        held.values.copy_(codes.clamp_(-127, 127))


@dataclass(frozen=True)
class Uint8SquareMoment(_ScaledMoment):
    """A second moment v in 8 bits: sqrt(v) is 0 to 255 times 1/255 of the block's largest root.

    A positive number has at least code 1.
    """

    dtype = torch.uint8

    def read(self, held: StateVector) -> torch.Tensor:
        return super().read(held).square_()

    def write(self, held: StateVector, values: torch.Tensor, noise: torch.Tensor | None) -> None:
        codes = _codes(held, values.clamp(max=_LARGEST).sqrt(), 255, noise)
        held.values.copy_(torch.maximum(codes, (values > 0).float()).clamp_(max=255))


def _codes(
    held: StateVector, values: torch.Tensor, most: int, noise: torch.Tensor | None
) -> torch.Tensor:
    """Set the scales so that codes are at most `most`, and return the rounded codes in fp32."""
    assert held.scales is not None
    values = values.clamp(-_LARGEST, _LARGEST)
    largest = _largest(values.abs())
    # Below TINY a scale and its inverse would not be normal numbers.
    scales = torch.where(largest > 0, (largest / most).clamp_(min=TINY), largest)
    held.scales.copy_(scales)
    codes = _times(values, torch.where(scales > 0, 1 / scales, scales))
    return codes.round_() if noise is None else codes.add_(noise * 2.0**-NOISE_BITS).floor_()


def _largest(values: torch.Tensor) -> torch.Tensor:
    """Return the largest number of each block, of which the last may be short."""
    whole = values.numel() // STATE_BLOCK * STATE_BLOCK
    found = values[:whole].view(-1, STATE_BLOCK).amax(1)
    return found if whole == values.numel() else torch.cat([found, values[whole:].amax(0, True)])


def _times(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the values times the scale of their block."""
    whole = values.numel() // STATE_BLOCK * STATE_BLOCK
    out = torch.empty_like(values)
    blocks = values[:whole].view(-1, STATE_BLOCK)
    torch.mul(blocks, scales[: blocks.shape[0], None], out=out[:whole].view(-1, STATE_BLOCK))
    if whole < values.numel():
        torch.mul(values[whole:], scales[blocks.shape[0]], out=out[whole:])
    return out


FP32 = Fp32Format()


def vector_of(
    format: StateFormat, numel: int, zeros: Callable[[int, torch.dtype], torch.Tensor]
) -> StateVector:
    """Return a state of `numel` zeros, in memory that `zeros` allocates."""
    blocks = -(-numel // STATE_BLOCK)
    return StateVector(
        format,
        zeros(numel, format.dtype),
        zeros(blocks, torch.float32) if format.has_scales else None,
        zeros(numel, format.dtype) if format.has_compensation else None,
    )


@dataclass(frozen=True, kw_only=True)
class StateFormats:
    """The formats of the states of matrices, and the seed of the random bits.

    Args:
        main: fp32, or the dtype of the parameters. Parameters of another dtype have fp32 main
            parameters.
        rounding: How main parameters that are not fp32 are rounded.
        exp_avg: "fp32", "bf16", "fp16" or "int8", for the first moment and SGD's momentum.
        exp_avg_sq: The same for the second moment.
        seed: The seed of the run.
    """

    main: torch.dtype = torch.float32
    rounding: Rounding = "stochastic"
    exp_avg: str = "fp32"
    exp_avg_sq: str = "fp32"
    seed: int = 0

    @property
    def has_blocks(self) -> bool:
        """True if slices and shards must begin at multiples of `STATE_BLOCK`."""
        return bool({self.exp_avg, self.exp_avg_sq} & {"fp16", "int8"})

    def of_main(self, param: torch.Tensor) -> StateFormat:
        """Return the format of a parameter's main weight."""
        if param.dim() < 2 or self.main is torch.float32 or param.dtype is not self.main:
            return FP32
        return MainFormat(self.main, self.rounding)

    def of_moments(self, param: torch.Tensor, kinds: Sequence[str]) -> list[StateFormat]:
        """Return the formats of a parameter's moments, of the kinds that the rule names."""
        if param.dim() < 2:
            return [FP32 for _ in kinds]
        return [
            _of_square(self.exp_avg_sq) if kind == "exp_avg_sq" else _of_signed(self.exp_avg)
            for kind in kinds
        ]


def _of_signed(dtype: str) -> StateFormat:
    formats = {"fp32": FP32, "bf16": Bf16Moment(), "fp16": Fp16Moment(), "int8": Int8Moment()}
    return formats[dtype]


def _of_square(dtype: str) -> StateFormat:
    formats = {
        "fp32": FP32,
        "bf16": Bf16Moment(is_square=True),
        "fp16": Fp16Moment(is_square=True),
        "int8": Uint8SquareMoment(),
    }
    return formats[dtype]


def write_all(
    states: Sequence[StateVector], values: Sequence[torch.Tensor], bits: RandomBits
) -> None:
    """Store fp32 values in all states of some entries; each state has random bits of its own."""
    for stream, (state, new) in enumerate(zip(states, values, strict=True)):
        state.write(new, bits.draw(stream) if state.format.is_random else None)
