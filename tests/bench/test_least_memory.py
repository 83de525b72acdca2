"""Tests of the least-memory runs: settings, resuming, and the page of the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.config import parse, resolve
from megatron.errors import ConfigError
from pretrain_gpt import GRADIENT_PATHS
from tools.bench.common.page_files import PAGE, RESULTS
from tools.bench.common.rows import read_rows
from tools.bench.least_memory.run import (
    FOLDER,
    ROWS,
    RUNS,
    MemoryRun,
    flags_of,
    report,
    run_all,
)


class Fake:
    """Returns the numbers of a run that took no time; `fails` names a run that is interrupted."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.started = fails, list[str]()

    def __call__(self, run: MemoryRun, steps: int, data: Path) -> dict[str, Any]:
        if run.name == self.fails:
            raise KeyboardInterrupt
        self.started.append(run.name)
        size = 2000 if run.name == "plain" else 700
        column = {"model": size, "optimizer": 0, "stored": 10, "total": size + 10}
        return {
            "before": 200,
            "peak": 200 + size,
            "step_cpu_seconds": 2.0,
            "step_seconds": 4.0,
            "train_loss": 9.0,
            "valid_loss": 9.5,
            "curve": [],
            "ledger": {"planned": column},
        }


@pytest.mark.parametrize("run", RUNS, ids=lambda each: each.name)
def test_command_line_is_accepted(run: MemoryRun) -> None:
    config = resolve(parse(flags_of(run, 20, Path("data")), paths=GRADIENT_PATHS), 1)
    assert (config.model.num_layers, config.model.hidden_size) == (12, 768)
    assert config.precision.param_dtype == "bfloat16"
    assert (config.training.global_batch_size, config.model.seq_length) == (4, 128)
    plain = run.name == "plain"
    assert (config.optimizer.main_params_dtype == "fp32") == plain
    assert config.training.micro_batch_size == (4 if plain else 1)
    assert (config.recompute.recompute_granularity is None) == plain
    assert (config.gradient.grad_path == "samo") == (run.name == "least-samo")


def test_an_interrupted_start_goes_on_without_repeating_a_row(tmp_path: Path) -> None:
    results = tmp_path / ROWS
    with pytest.raises(KeyboardInterrupt):
        run_all(20, Path("data"), results, Fake(fails="least"))
    assert [row["name"] for row in read_rows(results)] == ["plain"]
    with pytest.raises(ConfigError, match="--steps 30: .* 20 steps"):
        run_all(30, Path("data"), results, Fake())
    again = Fake()
    run_all(20, Path("data"), results, again)
    assert again.started == ["least", "least-samo"]
    report(results, tmp_path)
    text = (tmp_path / PAGE).read_text(encoding="utf-8")
    # 700 of 2000 bytes without torch's 200; 2 s of CPU time and 4 s for a step of 512 tokens.
    assert "| least | 0 | 0.41 | 0 | 0.35 | 128.0 | 3.9 | 1.00 | 9.000 | 9.500 |" in text


def test_the_committed_page_follows_from_the_results(tmp_path: Path) -> None:
    (tmp_path / PAGE).write_text((FOLDER / PAGE).read_text(encoding="utf-8"), encoding="utf-8")
    report(FOLDER / ROWS, tmp_path)
    for name in (PAGE, RESULTS):
        assert (tmp_path / name).read_text("utf-8") == (FOLDER / name).read_text("utf-8"), name
