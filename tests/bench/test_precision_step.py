"""The benchmark of 16-bit steps runs, at a size that measures nothing."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron.model import causal_attention
from megatron.processor import multiplies_natively
from megatron.tensor_parallel import products
from tools.bench.precision.run import HALF, SMOKE, measure


def test_every_dtype_trains_alike_widened_or_not(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    kept = products.must_widen, causal_attention.blocked_attention_serves
    try:
        found = measure(SMOKE, rounds=1, folder=tmp_path)
    finally:
        torch.set_num_threads(threads)
    assert kept == (products.must_widen, causal_attention.blocked_attention_serves)
    widened = [name for name, dtype in HALF.items() if not multiplies_natively(dtype)]
    slow = [f"{name}, not widened" for name in widened]
    assert [timing.name for timing in found.timings] == ["fp32", "bf16", "fp16", *slow]
    first = {timing.name: timing.first_loss for timing in found.timings}
    for name in ("bf16", "fp16"):
        assert abs(first[name] - first["fp32"]) < 0.02
    assert [(ratio.ours, ratio.theirs) for ratio in found.ratios] == [
        *((name, "fp32") for name in HALF),
        *zip(widened, slow, strict=True),
    ]
