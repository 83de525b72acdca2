"""Codecs round values as their formats say, and the mean over an encoded wire is rounded twice."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.data_parallel.codecs import CODECS
from megatron.data_parallel.encoded_wire import EncodedWire
from megatron.data_parallel.exchange import Exchange
from megatron.data_parallel.wire_format import (
    BITS,
    BLOCK,
    block_of,
    chunk_length,
    encoded_bytes,
    format_of,
    mean_bytes,
)
from megatron.parallel.groups import ProcessGroups
from tests.ranks import Ranks

EVERY = list(BITS)
WIRES = EVERY[:4]
"""Formats of `--grad-wire`."""
INTEGERS = {"int8": 127, "int4": 7}
LONG = (1 << 17) + 3 * BLOCK
"""Values of more than one piece of a codec."""


def decoded(name: str, values: torch.Tensor) -> torch.Tensor:
    """Return the values that arrive."""
    encoded = torch.empty(encoded_bytes(name, values.numel()), dtype=torch.uint8)
    CODECS[name].encode(values, encoded)
    out = torch.full_like(values, math.nan)
    CODECS[name].decode(encoded, out)
    return out


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_the_nearest_multiples_of_a_scale(name: str) -> None:
    # Every block has another magnitude.
    values = torch.randn(LONG, generator=torch.Generator().manual_seed(1)).view(-1, BLOCK)
    values = values * torch.logspace(-12, 12, len(values)).unsqueeze(1)
    found = decoded(name, values.reshape(-1)).view(-1, BLOCK)
    scale = (values.abs().amax(1, keepdim=True) / INTEGERS[name]).bfloat16().float()
    # Half a unit; the largest value may lie outside by the rounding of the scale, at most 2^-8 of
    # it. The product v * (1 / s) has two roundings.
    bound = scale * (0.5 + INTEGERS[name] * (2**-8 + 2**-22))
    assert ((found - values).abs() <= bound).all()
    inside = values.abs() <= scale * INTEGERS[name]
    half = scale * (0.5 + INTEGERS[name] * 2**-22)
    assert ((found - values).abs() <= half)[inside].all()
    # Rounding finds every integer there is, and nothing else.
    integers = (found / scale).round()
    assert torch.equal(integers * scale, found)
    assert integers.unique().tolist() == list(range(-INTEGERS[name], INTEGERS[name] + 1))


def test_two_bits_are_a_sign_and_one_of_two_means_of_magnitudes() -> None:
    values = torch.randn(LONG, generator=torch.Generator().manual_seed(3)).view(-1, BLOCK)
    values = values * torch.logspace(-12, 12, len(values)).unsqueeze(1)
    values[7, 5] = 0
    found = decoded("2bit", values.reshape(-1)).view(-1, BLOCK)
    for row, arrived in zip(values.tolist(), found.tolist(), strict=True):
        mean = math.fsum(map(abs, row)) / BLOCK
        large = [abs(each) for each in row if abs(each) >= mean]
        small = [abs(each) for each in row if abs(each) < mean]
        levels = [0.0 if 0 in row else math.fsum(small) / len(small), math.fsum(large) / len(large)]
        expected = [math.copysign(levels[abs(each) >= mean], each) for each in row]
        # The means are rounded to bf16.
        assert arrived == pytest.approx(expected, rel=2**-8, abs=0)


def test_two_bits_are_exact_for_one_magnitude() -> None:
    values = torch.tensor([1.5, -1.5, -1.5, 0.0]).repeat(BLOCK)
    assert torch.equal(decoded("2bit", values), values)


def test_bf16_is_rounded_to_nearest_and_fp32_not_at_all() -> None:
    values = torch.randn(LONG, generator=torch.Generator().manual_seed(2))
    assert torch.equal(decoded("bf16", values), values.bfloat16().float())
    assert torch.equal(decoded("fp32", values), values)


@pytest.mark.parametrize("name", EVERY)
def test_zeros_arrive_as_zeros(name: str) -> None:
    assert torch.equal(decoded(name, torch.zeros(2 * BLOCK)), torch.zeros(2 * BLOCK))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", EVERY)
def test_a_value_that_is_not_finite_stays_so_and_spoils_its_block_alone(
    name: str, bad: float
) -> None:
    values = torch.ones(3 * BLOCK)
    values[BLOCK + 5] = bad
    finite = decoded(name, values).isfinite().view(3, BLOCK)
    assert finite[0].all() and finite[2].all() and not finite[1, 5]
    assert bool(finite[1].any()) == (name not in {*INTEGERS, "2bit"})


@pytest.mark.parametrize("name", EVERY)
def test_values_are_encoded_in_as_many_bytes_as_the_format_says(name: str) -> None:
    share = encoded_bytes(name, 1024 * BLOCK) / (1024 * BLOCK)
    blocks = {"int8": 1 + 2 / BLOCK, "int4": 0.5 + 2 / BLOCK, "2bit": 0.25 + 4 / BLOCK}
    assert share == ({"fp32": 4, "bf16": 2} | blocks)[name]
    for ranks in (2, 3, 4):
        for count in (1, BLOCK, 1000, 4096):
            length = chunk_length(name, count, ranks)
            assert length * ranks >= count and length % block_of(name) == 0
            assert length * ranks - count < ranks * block_of(name)
            assert mean_bytes(name, count, ranks) == ranks * encoded_bytes(name, length)
    assert encoded_bytes("int4", 1024 * BLOCK) <= 0.135 * encoded_bytes("fp32", 1024 * BLOCK)


def test_other_parameters_than_matrices_have_16_bits_at_least() -> None:
    assert [format_of(name, matrix=True) for name in WIRES] == WIRES
    assert [format_of(name, matrix=False) for name in WIRES] == ["fp32", "bf16", "bf16", "bf16"]


# ---- the mean over ranks -------------------------------------------------------------------------


def on_rank(groups: ProcessGroups, name: str, count: int) -> dict[str, Any]:
    exchange = Exchange(groups.dp, EncodedWire(name, groups.second_dp))
    of_rank = [
        torch.randn(count, generator=torch.Generator().manual_seed(rank))
        for rank in range(groups.dp.size)
    ]
    values, lost = of_rank[groups.dp.rank].clone(), torch.full((count,), math.nan)
    groups.dp.traffic.take()
    exchange.mean(values, lost=lost).wait()
    sent, counted = groups.dp.traffic.take(), exchange.take_counters()[0]
    return {"mean": values, "lost": lost, "values": of_rank, "sent": sent, "counted": counted}


@pytest.mark.parametrize("count", [1, 1000, 5 * BLOCK])
@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("world", [2, 4])
def test_a_mean_is_equal_on_all_ranks_and_what_it_lost_is_known(
    ranks: Ranks, world: int, name: str, count: int
) -> None:
    found = ranks.run(world, on_rank, name, count)
    mean = found[0]["mean"]
    assert all(torch.equal(other["mean"], mean) for other in found)
    values = torch.stack(found[0]["values"]).double()
    lost = torch.stack([each["lost"] for each in found]).double()
    # Sums of `world` values of size 5 in fp32.
    torch.testing.assert_close(
        values.sum(0), world * mean.double() + lost.sum(0), rtol=0, atol=1e-5
    )
    if name == "fp32":
        assert not lost.any()
        torch.testing.assert_close(mean.double(), values.mean(0), rtol=1e-6, atol=1e-6)
    elif count > 1:
        assert lost.any()
    # One rounding of each rank's values, and one of the mean, whatever the number of ranks.
    steps = {"fp32": 0, "bf16": 2**-8, "int8": 1 / 127, "int4": 1 / 7}[name]
    largest = float(values.abs().max())
    assert float((mean - values.mean(0)).abs().max()) <= largest * steps * (1 + 2**-7) + 1e-6
    for each in found:
        assert each["counted"] == 2 * (world - 1) * mean_bytes(name, count, world) // world
        # Each broadcast of the gather is counted in whole bytes.
        assert each["counted"] - world <= each["sent"] <= each["counted"]
