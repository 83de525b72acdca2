"""The page of exchanges: all ways deliver the same rows, and ratios are of the same round."""

from __future__ import annotations

import pytest

from tools.bench.exchange import run
from tools.bench.exchange.rank import BROADCASTS, GATHER, GLOO_GATHER, GLOO_TO_ALL, TO_ALL


def test_ways_are_checked_and_timed_on_ranks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "ROWS", {"none": 100})
    monkeypatch.setattr(run, "WORLDS", (4,))
    assert run.main(["--rates", "none", "--rounds", "1"]) == 0
    line = next(line for line in capfd.readouterr().out.splitlines() if "| 4 ranks" in line)
    assert all(float(cell) > 0 for cell in line.strip("| ").split(" | ")[1:])


def test_ratios_are_medians_over_rounds() -> None:
    seconds = {GATHER: [0.1, 0.2, 0.4], BROADCASTS: [0.2, 0.6, 0.4], GLOO_GATHER: [0.1, 0.2, 0.4]}
    seconds |= {TO_ALL: [0.1, 0.1, 0.1], GLOO_TO_ALL: [0.3, 0.1, 0.2]}
    page = run.as_markdown({"4 ranks, 1gbit": seconds}, load="0.5")
    assert "| 4 ranks, 1gbit | 200.0 | 2.00 | 1.00 | 100.0 | 2.00 |" in page
    assert "load was 0.5" in page.replace("\n", " ")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rounds", "0"], "--rounds 0: must be at least 1"),
        (["--rates", "9mbit"], "--rates 9mbit: must be one of none, 1gbit"),
    ],
)
def test_wrong_usage_is_refused(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"exchange: {words}")
