"""Contract 7 at real sizes: the norm does not depend on how the gradient is cut into buckets."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.data_parallel.norm import sum_of_squares


@pytest.mark.parametrize("entries", [1, 63, 65_536, 65_537, 20_000_000])
def test_sum_of_squares_is_exact_to_fp32_rounding_at_any_length(entries: int) -> None:
    values = torch.randn(entries, generator=torch.Generator().manual_seed(entries))
    exact = math.fsum(part.double().square().sum().item() for part in values.split(1 << 20))
    assert sum_of_squares(values).item() == pytest.approx(exact, rel=2e-6)
    assert sum_of_squares(values.bfloat16()).item() == pytest.approx(exact, rel=1e-2)


class NormCalls(TorchDispatchMode):
    """Counts launched operations, and the entries of the longest tensor that they make."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.longest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count += 1
        if not func.is_view and isinstance(out, torch.Tensor):
            self.longest = max(self.longest, out.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_on_a_device_launches_do_not_grow_with_the_bucket(dtype: torch.dtype) -> None:
    found = []
    for entries in (100_000, 1 << 32):
        values = torch.empty(entries, dtype=dtype, device="meta")
        with NormCalls() as calls:
            sum_of_squares(values)
        # No fp32 copy either: a number for each row at most.
        assert calls.longest <= entries // 1024
        found.append(calls.count)
    assert found[0] == found[1]
