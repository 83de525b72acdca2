"""The benchmark of pipeline schedules runs at a size that measures nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench.pipeline.run import main


@pytest.mark.full
def test_smoke_writes_what_each_schedule_takes(tmp_path: Path) -> None:
    flags = ["--smoke", "--stages", "2", "--chunks", "1", "2", "--microbatches", "2", "4"]
    assert main([*flags, "--rounds", "1", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    found = [(row["chunks"], row["microbatches"], row["paper"]) for row in rows]
    assert found == [(1, 2, 1 / 2), (1, 4, 1 / 4), (2, 2, 1 / 4), (2, 4, 1 / 8)]
    assert all(row["seconds"] > 0 and row["bubble"] > 0 for row in rows)
    assert "| 2 | 1 | 2 |" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("flags", [["--chunks", "2"], ["--microbatches", "3"]])
def test_what_cannot_be_compared_is_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(flags)
    assert left.value.code == 2
