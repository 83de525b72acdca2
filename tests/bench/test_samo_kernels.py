"""The bench of SAMO's kernels runs on a CPU, at a size that measures nothing."""

from __future__ import annotations

import json
from pathlib import Path

from tools.bench.gpu.samo_kernels import BENCH, PASSES


def test_smoke_writes_a_row_for_each_pass(tmp_path: Path) -> None:
    assert BENCH.main(["--smoke", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "samo.json").read_text())
    assert [row["pass"] for row in report["rows"]] == [one.name for one in PASSES] * 2
    assert all(row["seconds"] > 0 and row["of_copy"] > 0 for row in report["rows"])
    table = (tmp_path / "samo.md").read_text()
    assert all(one.peer in table for one in PASSES)


def test_bytes_counted_are_those_of_whole_sectors() -> None:
    counted = {one.name: one.bytes_for_entry(1.0) for one in PASSES}
    assert counted["compress to bf16"] == 2 + 2 + 1 / 8  # all there is, the result, a bit
    # Sixteen entries to a sector, of which one at least exists.
    read = PASSES[0].bytes_for_entry(0.1) - 4 * 0.1 - 1 / 8
    assert abs(read - 2 * (1 - 0.9**16)) < 1e-12
