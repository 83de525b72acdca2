"""The benchmark of fp32 products at a size that measures nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tools.bench.common.page_files import read_results
from tools.bench.products.run import ONE_DNN, TORCH, main

needs_one_dnn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN"
)


@needs_one_dnn
def test_smoke_times_both_ways(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        assert main(["--smoke", "--out", str(tmp_path)]) == 0
    finally:
        torch.set_num_threads(threads)
    (row,) = read_results(tmp_path)["rows"]
    assert (row["inputs"], row["outputs"], row["chosen"]) == (16, 24, TORCH)
    assert set(row["seconds"]) == set(row["gflops"]) == {TORCH, ONE_DNN}
    assert all(seconds > 0 for seconds in row["seconds"].values()) and row["ratio"] > 0
    assert "| 16 to 24 |" in (tmp_path / "README.md").read_text()
