"""Rounding to 16 bits, and the random bits that stochastic rounding draws."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.optimizer.rounding import NOISE_BITS, RandomBits, keep_positive, round_to

FORMATS = [torch.bfloat16, torch.float16]
DRAWS = 1 << NOISE_BITS


def bits(numel: int, *, step: int = 1, name: str = "weight", first: int = 0) -> RandomBits:
    return RandomBits(1234, step, name, torch.arange(first, first + numel, dtype=torch.int32))


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Return fp32 numbers of many magnitudes within the normal and subnormal range of a format."""
    generator = torch.Generator().manual_seed(1)
    low, high = (-23, 15) if dtype is torch.float16 else (-120, 120)
    exponents = torch.randint(low, high, (4096,), generator=generator)
    return torch.ldexp(torch.randn(4096, generator=generator).clamp(-1.9, 1.9), exponents)


@pytest.mark.parametrize("dtype", FORMATS)
def test_without_noise_the_nearest_number_is_torchs(dtype: torch.dtype) -> None:
    values = numbers(dtype)
    assert torch.equal(round_to(values, dtype), values.to(dtype))


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_stochastic_number_is_one_of_the_two_neighbours(dtype: torch.dtype) -> None:
    values = numbers(dtype)
    rounded = round_to(values, dtype, bits(values.numel()).draw(0))
    nearest = values.to(dtype)
    towards = torch.where(nearest.float() < values, math.inf, -math.inf).to(dtype)
    other = torch.nextafter(nearest, towards)
    is_exact = nearest.float() == values
    assert bool(((rounded == nearest) | (~is_exact & (rounded == other))).all())
    assert (rounded == other).float().mean() > 0.1, "numbers are rounded away from the nearest, too"


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("value", [1.0 + 1 / 3 * 2**-9, -3.0001, 1e-3, 5.3e-6, -1.7e-7])
def test_the_mean_of_stochastic_numbers_is_the_number(dtype: torch.dtype, value: float) -> None:
    rounded = round_to(torch.full((DRAWS,), value), dtype, bits(DRAWS).draw(0)).double()
    low, high = rounded.min().item(), rounded.max().item()
    assert low <= value <= high and len(rounded.unique()) == 2
    # Of n draws of a share p the standard error is sqrt(p (1 - p) / n); the bits that noise cannot
    # reach add at most 2^-16 of the distance.
    share = (value - low) / (high - low)
    error = 4.5 * math.sqrt(share * (1 - share) / DRAWS) + 2.0**-NOISE_BITS
    assert rounded.mean().item() == pytest.approx(value, abs=error * (high - low))


@pytest.mark.parametrize("dtype", FORMATS)
def test_numbers_of_the_format_and_those_beyond_it_remain(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    values = torch.tensor([0.0, -0.0, 1.5, most, -most, math.inf, -math.inf, math.nan])
    for stream in range(4):
        rounded = round_to(values, dtype, bits(8).draw(stream))
        assert torch.equal(rounded[:7], values[:7].to(dtype)) and rounded[7].isnan()


def test_every_pattern_of_nan_stays_nan() -> None:
    patterns = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000], dtype=torch.int32)
    full = torch.full((4,), 0xFFFF, dtype=torch.int32)
    for dtype in FORMATS:
        assert bool(round_to(patterns.view(torch.float32), dtype, full).isnan().all())


def test_bits_follow_from_seed_step_name_and_position_alone() -> None:
    whole = bits(512).draw(0)
    order = torch.randperm(512, generator=torch.Generator().manual_seed(1))
    assert torch.equal(RandomBits(1234, 1, "weight", order.int()).draw(0), whole[order])
    assert torch.equal(bits(100, first=37).draw(0), whole[37:137])
    for other in (bits(512, step=2), bits(512, name="bias"), bits(512, first=512)):
        assert (other.draw(0) == whole).float().mean() < 0.01
    # The bits are part of a run's reproducibility: these change only with the generator.
    assert whole[:4].tolist() == [7146, 3088, 36503, 33684]


def test_bits_are_evenly_spread_and_streams_are_independent() -> None:
    drawn = [bits(DRAWS).draw(stream) for stream in range(3)] + [bits(DRAWS, step=2).draw(0)]
    for stream in drawn:
        assert 0 <= int(stream.min()) and int(stream.max()) < DRAWS
        ones = (stream[:, None] >> torch.arange(NOISE_BITS)) & 1
        # Half of DRAWS fair bits, within five standard deviations.
        assert (ones.double().mean(0) - 0.5).abs().max() < 5 * 0.5 / math.sqrt(DRAWS)
    drawn.append(drawn[0].roll(1))
    correlations = torch.corrcoef(torch.stack(drawn).double()) - torch.eye(len(drawn))
    assert correlations.abs().max() < 5 / math.sqrt(DRAWS)


def test_positive_numbers_are_raised_and_others_remain() -> None:
    values = torch.tensor([0.0, 1e-45, 1e-30, 1.0, -1e-45])
    raised = keep_positive(values, 1e-20)
    assert torch.equal(raised, torch.tensor([0.0, 1e-20, 1e-20, 1.0, -1e-45]))
