"""The benchmark of states in host memory runs at a size that measures nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tools.bench.offload.run import main

pytestmark = pytest.mark.push


@pytest.mark.full
def test_smoke_writes_both_tables(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    flags = ["--smoke", "--rounds", "2", "--coarsening", "1", "4", "--out", str(tmp_path)]
    try:
        assert main(flags) == 0
    finally:
        torch.set_num_threads(threads)
    found = json.loads((tmp_path / "results.json").read_text())
    resident, offloaded = found["states"]["rows"]
    assert offloaded["host"] > 0 == resident["host"]
    assert offloaded["buffers"] <= 16 * 1024 < resident["buffers"]
    assert found["states"]["ratios"]["device bytes"] > 2
    assert [row["k"] for row in found["coarsening"]] == ["apart", "1", "4"]
    assert all(row["seconds"] > 0 for row in found["coarsening"])
    assert "| 4 |" in (tmp_path / "README.md").read_text()
