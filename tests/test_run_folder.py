"""What a run says of itself before it begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron.low_memory.checkpoint_interval import describe_interval
from megatron.run_folder import announce
from tests.config.helpers import read


def announced(flags: str, *, stages: int) -> list[str]:
    """The lines of a run on so many ranks, all of them stages."""
    config = read(*flags.split(), "--pipeline-model-parallel-size", str(stages)).resolve(stages)
    said: list[str] = []
    parts: list[Any] = [
        SimpleNamespace(say=lambda text, brief=None: said.append(text)),
        SimpleNamespace(
            launch=SimpleNamespace(launcher="test"), device=SimpleNamespace(type="cpu"), backend=""
        ),
        SimpleNamespace(dims=SimpleNamespace(pp=stages)),
    ]
    announce(cast(Any, parts[0]), config, *parts[1:])
    return said


@pytest.mark.parametrize(
    ("flags", "schedule"),
    [
        ("", "0-1, 2-3; 1F1B"),
        ("--num-layers-per-virtual-pipeline-stage 1 --global-batch-size 8", "interleaved 1F1B"),
        ("--pipeline-schedule message-driven", "message-driven over MPI, 2 microbatches at most"),
        ("--pipeline-schedule message-driven --pipeline-limit 5", "5 microbatches at most"),
    ],
)
def test_the_schedule_is_named(flags: str, schedule: str) -> None:
    (line,) = [s for s in announced(f"--num-layers 4 {flags}", stages=2) if "pipeline:" in s[:9]]
    assert line.endswith(schedule)


def test_recomputation_is_told_where_layers_are_recomputed_in_runs() -> None:
    full = "--num-layers 6 --recompute-granularity full --recompute-method"
    told = f"recomputation: {describe_interval(6, 6, 2)}"
    assert told in announced(f"{full} sqrt", stages=1)
    assert told in announced(f"{full} uniform --recompute-num-layers 2", stages=1)
    quiet = announced("--num-layers 6", stages=1) + announced(f"{full} block", stages=1)
    assert not [line for line in quiet if line.startswith("recomputation")]
