"""Formats of optimizer states: what is stored, error bounds, and sums of small updates."""

from __future__ import annotations

import pytest
import torch

from megatron.data_parallel.bucket import STATE_BLOCK
from megatron.optimizer.rounding import RandomBits
from megatron.optimizer.state_formats import (
    FP32,
    Bf16Moment,
    Fp16Moment,
    Int8Moment,
    MainFormat,
    StateFormat,
    StateFormats,
    StateVector,
    Uint8SquareMoment,
    vector_of,
)

SIGNED = [Bf16Moment(), Fp16Moment(), Int8Moment()]
SQUARES = [Bf16Moment(is_square=True), Fp16Moment(is_square=True), Uint8SquareMoment()]
ENTRIES = 3 * STATE_BLOCK + 64
"""Three blocks and a short one."""


def vector(format: StateFormat, numel: int = ENTRIES) -> StateVector:
    return vector_of(format, numel, lambda length, dtype: torch.zeros(length, dtype=dtype))


def noise(numel: int = ENTRIES, step: int = 1) -> torch.Tensor:
    return RandomBits(1, step, "state", torch.arange(numel, dtype=torch.int32)).draw(0)


def values(*, square: bool = False) -> torch.Tensor:
    """Return numbers whose blocks have magnitudes of their own, the second of them of zeros."""
    found = torch.randn(ENTRIES, generator=torch.Generator().manual_seed(1))
    for block, scale in enumerate((1e-4, 0.0, 1e3, 1e-12)):
        found[block * STATE_BLOCK : (block + 1) * STATE_BLOCK] *= scale
    found[5] = 0.0
    return found.square() if square else found


def largest(of: torch.Tensor) -> torch.Tensor:
    """Return for each entry the largest magnitude of its block."""
    return torch.cat([part.abs().amax().expand_as(part) for part in of.split(STATE_BLOCK)])


def bound(format: StateFormat, of: torch.Tensor) -> torch.Tensor:
    """Return the distance of neighbouring numbers: the bound of a stochastic rounding's error."""
    if isinstance(format, Bf16Moment):
        return of.abs() * 2.0**-7
    if isinstance(format, Fp16Moment):
        # Scaled to at least 2^14: 2^-10 of the number, or the subnormal unit.
        return torch.maximum(of.abs() * 2.0**-10, largest(of) * 2.0 ** -(24 + 14))
    if isinstance(format, Int8Moment):
        return largest(of) / 127
    # (r + s)^2 - r^2 with the step s of the root.
    root, step = of.sqrt(), largest(of).sqrt() / 255
    return step * (2 * root + step)


@pytest.mark.parametrize(
    ("format", "square"),
    [*((format, False) for format in SIGNED), *((format, True) for format in SQUARES)],
)
def test_errors_are_below_the_distance_of_neighbouring_numbers(
    format: StateFormat, square: bool
) -> None:
    state, wanted = vector(format), values(square=square)
    for random in (None, noise()):
        state.write(wanted, random)
        limit = bound(format, wanted) * (0.5 if random is None and not square else 1)
        # Two fp32 roundings, of a scale and of a product.
        assert bool(((state.read() - wanted).abs() <= limit * (1 + 1e-4) + 1e-30).all())
        assert torch.equal(state.read() == 0, wanted == 0) or not square


@pytest.mark.parametrize("format", SQUARES)
def test_a_positive_second_moment_never_becomes_zero(format: StateFormat) -> None:
    wanted = torch.zeros(ENTRIES)
    wanted[0], wanted[1], wanted[2], wanted[300] = 1e4, 1e-30, 1e-44, 1e-44
    state = vector(format)
    for step in range(8):
        state.write(wanted, noise(step=step))
        found = state.read()
        assert torch.equal(found > 0, wanted > 0)
        assert found[0].item() == pytest.approx(1e4, rel=2.0**-7)


@pytest.mark.parametrize(("format", "least"), [(Bf16Moment(), 1e-40), (Fp16Moment(), 1e-14)])
def test_small_first_moments_are_rounded_alike_whatever_their_sign(
    format: StateFormat, least: float
) -> None:
    """Numbers far below the smallest subnormal of the format, beside 1.0, become 0."""
    wanted = torch.tensor([1.0, least, -least]).repeat_interleave(64)
    state = vector(format, wanted.numel())
    state.write(wanted)
    assert torch.equal(state.read()[64:128], -state.read()[128:])
    assert state.read()[64:].abs().max() <= 1e-39


@pytest.mark.parametrize("format", [Fp16Moment(), Int8Moment(), *SQUARES[1:]])
@pytest.mark.parametrize("random", [False, True])
def test_an_infinite_entry_leaves_a_block_finite(format: StateFormat, random: bool) -> None:
    wanted = torch.ones(2 * STATE_BLOCK)
    wanted[3] = torch.inf
    state = vector(format, wanted.numel())
    state.write(wanted, noise(wanted.numel()) if random else None)
    found = state.read()
    assert state.scales is not None and state.scales.isfinite().all()
    assert found.isfinite().all() and found[3] > 1e38
    # The other block keeps its numbers, and the first one recovers.
    assert found[STATE_BLOCK:].allclose(torch.ones(STATE_BLOCK), rtol=0.01)
    state.write(torch.ones_like(found))
    assert state.read().allclose(torch.ones_like(found), rtol=0.01)


@pytest.mark.parametrize("format", [*SIGNED, Uint8SquareMoment()])
def test_moments_decay_on_average(format: StateFormat) -> None:
    """Rounded to nearest, beta2 = 0.999 would leave a bf16 or int8 moment where it is."""
    steps, beta = 700, 0.999
    wanted = torch.rand(STATE_BLOCK, generator=torch.Generator().manual_seed(1)) + 0.5
    wanted[0] = 4.0
    state = vector(format, STATE_BLOCK)
    state.write(wanted)
    start = state.read().clone()
    for step in range(steps):
        new = state.read() * beta
        new[0] = 4.0  # which keeps the scale as it is
        state.write(new, noise(STATE_BLOCK, step))
    ratio = (state.read()[1:] / start[1:]).mean().item()
    assert ratio == pytest.approx(beta**steps, rel=0.05)
    if not isinstance(format, Fp16Moment):
        state.write(start)
        stuck = state.read() * beta
        stuck[0] = 4.0
        state.write(stuck)
        assert torch.equal(state.read()[1:], start[1:])


def test_scales_of_fp16_are_powers_of_two_that_fill_the_range() -> None:
    state, wanted = vector(Fp16Moment()), values()
    state.write(wanted, noise())
    assert state.scales is not None
    used = state.scales[[0, 2, 3]]
    assert torch.equal(torch.frexp(used)[0], torch.full((3,), 0.5))
    tops = torch.stack([part.float().abs().amax() for part in state.values.split(STATE_BLOCK)])
    assert bool((tops[[0, 2, 3]] >= 2**14).all()) and tops.max() <= 2**15 and tops[1] == 0


def test_codes_of_int8_moments() -> None:
    signed, square = vector(Int8Moment(), 256), vector(Uint8SquareMoment(), 256)
    wanted = torch.zeros(256)
    wanted[:4] = torch.tensor([-12.7, 12.7, 0.1, 0.04])
    signed.write(wanted)
    assert signed.values.dtype is torch.int8 and signed.values[:5].tolist() == [-127, 127, 1, 0, 0]
    wanted[:4] = torch.tensor([25.5**2, 0.1**2, 1e-9, 12.8**2])
    square.write(wanted)
    assert square.values.dtype is torch.uint8 and square.values[:5].tolist() == [255, 1, 1, 128, 0]


@pytest.mark.parametrize("format", [*SIGNED, *SQUARES, MainFormat(torch.bfloat16, "kahan")])
def test_a_cut_is_a_view_of_whole_blocks(format: StateFormat) -> None:
    state, wanted = vector(format), values(square=True)
    state.write(wanted)
    again = vector(format)
    for start, stop in ((0, 512), (512, 512), (512, ENTRIES)):
        again.cut(start, stop).write(wanted[start:stop])
    for one, other in zip(state.tensors, again.tensors, strict=True):
        assert torch.equal(one, other)


def drift(format: MainFormat, steps: int = 2000) -> tuple[torch.Tensor, torch.Tensor]:
    """Add updates that are smaller than half a unit of bf16; return the weights, and fp32 sums."""
    state = vector(format, 512)
    exact = torch.rand(512, generator=torch.Generator().manual_seed(1)) + 0.5
    state.write(exact := exact.bfloat16().float())
    for step in range(steps):
        update = (exact + step) % 2 * 1e-4
        exact = exact + update
        state.write(state.read() + update, noise(512, step))
    return state.read(), exact


def test_kahans_sum_is_the_fp32_sum() -> None:
    summed, exact = drift(MainFormat(torch.bfloat16, "kahan"))
    # Of a compensation of 8 bits, each of 2000 steps loses at most 2^-18 of a weight below 2^0.5.
    assert (summed - exact).abs().max() < 2000 * 2.0**-18 and (summed - exact).abs().mean() < 1e-3


def test_stochastic_sums_are_right_on_average_and_nearest_ones_are_lost() -> None:
    summed, exact = drift(MainFormat(torch.bfloat16, "stochastic"))
    lost, _ = drift(MainFormat(torch.bfloat16, "nearest"))
    assert (summed - exact).mean().abs() < 0.02, "512 random walks of 2000 steps"
    assert (exact - lost).mean() > 0.1


def test_what_the_model_reads_of_a_kahan_pair_is_its_nearest_number() -> None:
    state = vector(MainFormat(torch.bfloat16, "kahan"))
    wanted = values()
    state.write(wanted)
    assert torch.equal(state.values, wanted.bfloat16())
    assert state.compensation is not None and state.compensation.any()


def test_which_states_have_which_format() -> None:
    matrix, bias = torch.zeros(4, 4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.bfloat16)
    formats = StateFormats(main=torch.bfloat16, exp_avg="int8", exp_avg_sq="int8")
    kinds = ("exp_avg", "exp_avg_sq")
    assert formats.of_main(matrix) == MainFormat(torch.bfloat16, "stochastic")
    assert formats.of_moments(matrix, kinds) == [Int8Moment(), Uint8SquareMoment()]
    assert formats.of_moments(matrix, ("momentum",)) == [Int8Moment()]
    assert formats.of_main(bias) is FP32 and formats.of_moments(bias, kinds) == [FP32, FP32]
    assert formats.of_main(matrix.float()) is FP32, "fp32 parameters of a 16-bit model"
    assert formats.has_blocks and not StateFormats(exp_avg="bf16").has_blocks
