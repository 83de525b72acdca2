"""The bench of Radius' kernels runs on a CPU, at a size that measures nothing."""

from __future__ import annotations

import json
from pathlib import Path

from tools.bench.gpu.kernel_passes import MODELS, bucket_lengths
from tools.bench.gpu.radius_kernels import BENCH, PASSES


def test_smoke_writes_a_row_for_each_pass(tmp_path: Path) -> None:
    assert BENCH.main(["--smoke", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "radius.json").read_text())
    assert [row["pass"] for row in report["rows"]] == [one.name for one in PASSES] * 2
    assert all(row["seconds"] > 0 and row["of_copy"] > 0 for row in report["rows"])
    table = (tmp_path / "radius.md").read_text()
    assert "MISSED" in table or "met" in table
    assert all(one.peer in table for one in PASSES)


def test_models_have_the_size_of_their_name() -> None:
    assert 0.34e9 < sum(bucket_lengths(*MODELS["355m"])) < 0.36e9
    assert 1.95e9 < sum(bucket_lengths(*MODELS["2b"])) < 2.05e9
