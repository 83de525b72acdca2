"""Contract 7 at real sizes: the norm does not depend on how the gradient is cut into buckets."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.data_parallel.norm import sum_of_squares


@pytest.mark.parametrize("entries", [1, 63, 65_536, 65_537, 20_000_000])
def test_sum_of_squares_is_exact_to_fp32_rounding_at_any_length(entries: int) -> None:
    values = torch.randn(entries, generator=torch.Generator().manual_seed(entries))
    exact = math.fsum(part.double().square().sum().item() for part in values.split(1 << 20))
    assert sum_of_squares(values).item() == pytest.approx(exact, rel=2e-6)
    assert sum_of_squares(values.bfloat16()).item() == pytest.approx(exact, rel=1e-2)
