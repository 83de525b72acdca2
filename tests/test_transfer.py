"""Copies to a device leave from page-locked memory, and on a CPU there is none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.data.data_loader import DeviceMicrobatch
from megatron.data.sampler import Microbatch
from megatron.sparse.reference import WORDS, put
from megatron.transfer import to_device

REPO = Path(__file__).resolve().parent.parent
IN_STEPS = (
    "megatron/data_parallel",
    "megatron/optimizer",
    "megatron/pipeline",
    "megatron/sparse",
    "megatron/tensor_parallel",
    "megatron/training.py",
    "radius",
    "samo",
)
BOTH_ENDS_KNOWN = (
    "megatron/optimizer/cpu_offload.py",
    "megatron/pipeline/mpi_staging.py",
)
"""Modules that copy between a device and page-locked memory of their own."""
WAITS_ANYWAY = ("radius/agreement.py",)
"""Compares what the ranks chose, on the host."""
CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the tensors that were copied to page-locked memory."""
    sizes: list[int] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    return sizes


def test_a_device_copies_from_page_locked_memory(pinned: list[int]) -> None:
    assert to_device(torch.arange(5), ELSEWHERE).device == ELSEWHERE
    assert pinned == [5]


def test_nothing_is_copied_that_is_there(pinned: list[int]) -> None:
    here, there = torch.arange(5), torch.arange(5, device=ELSEWHERE)
    assert to_device(here, CPU) is here and to_device(there, ELSEWHERE) is there
    assert pinned == []


def test_seeded_choices_do(pinned: list[int]) -> None:
    words = torch.zeros(2, WORDS, dtype=torch.int32, device=ELSEWHERE)
    put(words, 32, torch.ones(64, dtype=torch.bool))
    assert pinned == [2]
    put(words, 5, torch.ones(64, dtype=torch.bool))
    assert pinned == [2, 3, 3]


def test_microbatches_do(pinned: list[int]) -> None:
    array = np.arange(6).reshape(2, 3)
    batch = Microbatch(
        tokens=array,
        labels=array,
        loss_mask=np.ones((2, 3), dtype=np.float32),
        position_ids=None,
        document_ids=None,
        index=0,
    )
    placed = DeviceMicrobatch.of(batch, ELSEWHERE)
    assert placed.tokens.device == ELSEWHERE and placed.counted == 6
    assert pinned == [6, 6, 6]


def _calls(*paths: str) -> Iterator[tuple[str, ast.Call]]:
    for path in paths:
        whole = REPO / path
        for file in sorted(whole.rglob("*.py")) if whole.is_dir() else [whole]:
            name = file.relative_to(REPO).as_posix()
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call):
                    yield name, node


def test_no_step_copies_from_other_memory() -> None:
    """The host would wait for the device. A copy of a list is one, too."""
    for name, call in _calls(*IN_STEPS):
        given = {keyword.arg for keyword in call.keywords}
        text = f"{name}: {ast.unparse(call)}"
        if name not in BOTH_ENDS_KNOWN:
            assert "non_blocking" not in given, text
        called = ast.unparse(call.func)
        if called in ("torch.tensor", "torch.as_tensor"):
            assert name in WAITS_ANYWAY or "device" not in given, text
        if called.endswith(".to") and any("device" in ast.unparse(each) for each in call.args):
            assert name in (*BOTH_ENDS_KNOWN, *WAITS_ANYWAY), text
        assert not called.endswith(".new_tensor"), text
