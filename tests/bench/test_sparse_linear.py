"""The benchmark of pruned layers runs at a tiny size and reports missing kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tools.bench.sparse_linear.kernels import Kernel, Operands, check, kernels
from tools.bench.sparse_linear.report import PASSES, Absence, Report, SparseLinearRow
from tools.bench.sparse_linear.run import main

CPU = torch.device("cpu")
CONTENDERS = {
    "fp32": ["dense", "CSR", "CSR, features first"],
    "bf16": ["dense", "CSR in fp32", "CSR, features first in fp32"],
}


def test_smoke_writes_table_numbers_and_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["--smoke", "--device", "cpu", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "results.json").read_text())
    found = [(r["dtype"], r["size"], r["one_pass"], r["kernel"]) for r in report["rows"]]
    assert found == [
        (dtype, size, one_pass, kernel)
        for dtype, names in CONTENDERS.items()
        for size in (16, 48)
        for one_pass in PASSES
        for kernel in names
    ]
    assert all(r["seconds"] >= r["least_seconds"] > 0 and r["ratio"] > 0 for r in report["rows"])
    assert all(r["ratio"] == 1 for r in report["rows"] if r["kernel"] == "dense")
    text = (tmp_path / "README.md").read_text()
    assert "| forward, ms | dense | CSR | CSR, features first |" in text
    assert text.count("- 2:4, forward, is not there at 16, 48: ") == 2
    assert text.count("- CSR, backward, is not there at 16, 48: ") == 1, "not in bf16"
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_kernel_that_computes_something_else_is_not_measured() -> None:
    operands = Operands.draw(32, tokens=8, sparsity=0.9, dtype="fp32", device=CPU)
    assert 0.8 < (operands.weight == 0).float().mean() < 0.97
    for one_pass in PASSES:
        for kernel in kernels(operands, one_pass):
            assert kernel.missing or check(kernel, operands) == ""
    wrong = Kernel("wrong", lambda: 1.01 * operands.x @ operands.weight.t(), operands.weight)
    with pytest.raises(AssertionError, match=r"off by 1\.0e-02"):
        check(wrong, operands)

    def refuses() -> torch.Tensor:
        raise NotImplementedError("not on this device\nmore")

    assert check(Kernel("absent", refuses, operands.weight), operands) == "not on this device"


def test_two_of_four_keeps_two_of_four() -> None:
    operands = Operands.draw(64, tokens=8, sparsity=0.3, dtype="fp32", device=CPU)
    weight = list(kernels(operands, "forward"))[-1].weight
    assert int((weight.view(-1, 4) != 0).sum(1).max()) == 2
    kept = weight != 0
    assert torch.equal(weight[kept], operands.weight[kept])


def test_absences_are_told_once_with_their_sizes() -> None:
    report = Report(facts={})
    for size in (128, 256):
        row = SparseLinearRow(
            dtype="fp16",
            size=size,
            one_pass="forward",
            kernel="dense",
            seconds=1.0,
            least_seconds=1.0,
            ratio=1.0,
        )
        report.rows.append(row)
        report.absences.append(Absence("fp16", "backward", "CSR", size, "no such kernel"))
    text = report.as_markdown("fp16")
    assert text.count("no such kernel") == 1 and "CSR, backward, is not there at 128, 256" in text
