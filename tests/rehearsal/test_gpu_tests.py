"""Tests that the GPU tests pass in small sizes on the device that the CPU plays."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.rehearsal.findings import REPO
from tests.rehearsal.process import Rehearsal, needs_rehearsal
from tests.tiers import sampled

pytestmark = needs_rehearsal
FOLDER = REPO / "tests" / "gpu"
CUT = "Triton's interpreter casts to bf16 by cutting bits off, which a device rounds"
COMPILED = "torch.compile writes kernels that a CPU cannot run"
LEFT_OUT = {
    "test_compiled_layers_learn_as_others_do": COMPILED,
    "test_compiled_layers_repeat_the_dropout": COMPILED,
    "test_radius_on_cuda": "takes minutes; test_training.py has Radius take fewer steps",
    "test_bf16_learns_and_keeps_fp32_masters": "small models learn too little in so few steps",
    "test_layout_is_the_one_of_the_cpu": CUT,
    "test_pruned_states_in_host_memory_make_the_same_bits": CUT,
    "test_kernels_equal_plain_torch": "tests/radius, tests/samo and tests/sparse interpret them",
    "test_more_entries_than_32_bits_count": "takes 32 GiB of a GPU",
}
"""Modules and tests that a CPU cannot play, and why."""
CASES = [
    (file.stem, node.name)
    for file in sorted(FOLDER.glob("test_*.py"))
    for node in ast.parse(file.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


SLOW = [("test_radius_kernels", "test_index_is_the_one_of_the_cpu")]
"""Tests that interpret kernels for long, which `--all` runs."""


@pytest.mark.push
@pytest.mark.parametrize(
    ("module", "name"),
    sampled(CASES, [case for case in CASES if case not in SLOW]),
    ids=lambda part: part.removeprefix("test_"),
)
def test_it_passes(module: str, name: str, rehearsal: Rehearsal) -> None:
    for left_out in (module, name):
        if left_out in LEFT_OUT:
            pytest.skip(LEFT_OUT[left_out])
    assert rehearsal.call("tests.rehearsal.gpu_tests:run", module=module, name=name) == []


def test_what_is_left_out_is_there() -> None:
    assert set(LEFT_OUT) <= {part for case in CASES for part in case}


@pytest.mark.parametrize("file", sorted(FOLDER.glob("test_*.py")), ids=lambda file: file.stem)
def test_it_needs_no_pytest(file: Path) -> None:
    """`tools/bench/gpu/tests.py` runs the tests where pytest is not installed."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    names += [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    assert "pytest" not in names
