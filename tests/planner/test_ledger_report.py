"""The report of a memory ledger: what it draws, and what it refuses to draw."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.low_memory.ledger import MemoryLedger
from megatron.low_memory.memory_recorder import MemorySample
from tools.planner.ledger_report import draw_ledger, thin


def test_a_ledger_without_columns_is_not_drawn(tmp_path: Path) -> None:
    empty = MemoryLedger(
        summary="", rank=0, world=1, columns={}, missing={"planned": "why"}, samples=(), flops=None
    )
    with pytest.raises(ConfigError, match=r"memory\.png: no column .* planned: why"):
        draw_ledger(tmp_path / "memory.png", empty)


def test_a_thinned_course_keeps_its_peak() -> None:
    first = MemorySample(
        operator="mm",
        module="",
        phase="forward",
        model=1,
        optimizer=0,
        forward=0,
        backward=0,
        other=0,
    )
    samples = [replace(first, forward=number % 97) for number in range(1000)]
    few = thin(samples, 100)
    assert len(few) == 100
    assert max(sample.total for sample in few) == max(sample.total for sample in samples) == 97
