"""The page of overlapped gathers: rows are accepted, and ratios are of the same turn."""

from __future__ import annotations

import pytest

from megatron.config import parse, resolve
from pretrain_gpt import GRADIENT_PATHS
from tools.bench.param_gather.run import OVERLAPPED, PLAIN, RANKS, ROWS, as_markdown, main


@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_accepted(name: str) -> None:
    config = resolve(parse(list(ROWS[name]), paths=GRADIENT_PATHS), RANKS)
    assert config.parallel.overlap_param_gather == (name == OVERLAPPED)


def test_ratios_are_medians_over_turns() -> None:
    found = {
        PLAIN: [{"gather": 90.0, "step": 200.0}, {"gather": 110.0, "step": 400.0}],
        OVERLAPPED: [{"gather": 10.0, "step": 100.0}, {"gather": 30.0, "step": 300.0}],
    }
    page = as_markdown({"2 ranks, 1gbit": found}, load="0.5")
    assert "## 2 ranks, 1gbit" in page and "load was 0.5" in page.replace("\n", " ")
    assert f"| {PLAIN} | 100 | 300 | 1.00 |" in page
    assert f"| {OVERLAPPED} | 20 | 200 | {(0.5 + 0.75) / 2:.2f} |" in page


@pytest.mark.parametrize("flag", ["--steps", "--blocks"])
def test_wrong_usage_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([flag, "0"]) == 2
    assert capsys.readouterr().err == f"param_gather: {flag} 0: must be at least 1\n"
