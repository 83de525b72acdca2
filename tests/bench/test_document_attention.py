"""The benchmark of attention inside documents runs, at a size that measures nothing."""

from __future__ import annotations

import json
from pathlib import Path

from tools.bench.document_attention.run import CAUSAL, DOCUMENTS, MASKED, main


def test_smoke_compares_both_ways(tmp_path: Path) -> None:
    assert main(["--smoke", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["length"] for row in rows] == [48, 48, 64, 64]
    assert [row["documents"] > 1 for row in rows] == [False, True, False, True]
    for row in rows:
        assert row["seconds"].keys() == row["peak"].keys() == {MASKED, DOCUMENTS, CAUSAL}
        assert 0 < row["pairs"] <= 1 and row["ratio"] > 0
        context, statistics = 4 * row["length"] * 12 * 64, 4 * row["length"] * 12
        # The kernel keeps the mask as fp32 numbers; documents keep a copy of the context instead.
        assert row["peak"][MASKED] >= row["peak"][CAUSAL] + 4 * row["length"] ** 2
        assert row["peak"][DOCUMENTS] <= row["peak"][CAUSAL] + context + statistics
