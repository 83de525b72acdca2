"""The benchmark of the dense path runs, at a size that measures nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tools.bench.common.side_by_side import ratio_of, write_report
from tools.bench.dense_step.run import SMOKE, one_process


def test_one_process_reports_ratios_and_phases(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    threads = torch.get_num_threads()
    try:
        found = one_process(SMOKE, dtype="fp32", rounds=2, folder=tmp_path)
    finally:
        torch.set_num_threads(threads)
    assert [t.name for t in found.timings] == ["ours", "Hugging Face GPT-2", "ours, metrics off"]
    assert all(t.tokens_per_second > 0 and t.last_loss < 6 for t in found.timings)
    assert found.phases["forward"] > 0 and found.phases["backward"] > 0
    write_report(tmp_path / "out", [found], {"cores": 2})
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    assert report["comparisons"][0]["ratios"][0]["target"] == 1.2
    assert "| forward |" in (tmp_path / "out" / "README.md").read_text()


def test_ratio_compares_turns_of_the_same_round() -> None:
    seconds = {"a": [1.0, 2.0, 10.0], "b": [2.0, 4.0, 20.0]}
    assert ratio_of(seconds, "a", "b", target=2.0).met
    assert ratio_of(seconds, "b", "a").ratio == 0.5
