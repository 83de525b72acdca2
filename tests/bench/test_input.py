"""The benchmark of reading batches runs, at a size that measures nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench.input import run
from tools.bench.input.run import OFF, ON, READING, main


def test_smoke_writes_the_phases_of_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "DEVICE_SECONDS", 0.02)
    assert main(["--smoke", "--rounds", "3", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert [each["where"] for each in found["comparisons"]] == ["cpu", "device"]
    for each in found["comparisons"]:
        assert each["same_losses"] and each["ratio"] > 0
        assert (each["on"]["name"], each["off"]["name"]) == (ON, OFF)
        for steps in (each["on"], each["off"]):
            # The median of a phase is at most that of a step; the sum of medians may be above it.
            assert READING in steps["phases"]
            assert all(0 < seconds <= steps["step"] for seconds in steps["phases"].values())
    asleep = found["comparisons"][1]["off"]
    assert asleep["phases"]["forward-compute"] >= 0.02
    assert f"| {READING} |" in (tmp_path / "README.md").read_text()
