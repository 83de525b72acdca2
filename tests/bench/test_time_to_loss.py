"""The page that puts losses of paths against those of dense runs of the same time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from tests.studies.files import row, write_study
from tools.bench.time_to_loss import run as time_to_loss
from tools.bench.time_to_loss.iso_time import DenseLosses, compare
from tools.bench.time_to_loss.run import (
    DENSE,
    DENSE_BF16,
    SHORTER,
    STUDY,
    WARM_UP,
    timed,
    timed_paths,
)
from tools.studies.declaration import read_study
from tools.studies.rows import StudyRow, read_rows, write_rows

LENGTHS = (80, 160, 240, 400)


def dense_rows() -> list[StudyRow]:
    """Return rows of dense runs: half the steps lose 0.1 more, and seed 2 0.01 more."""
    return [
        replace(
            row(DENSE if steps == 400 else f"{SHORTER}{steps}", seed, 5.0, settings="0"),
            steps=steps,
            valid_loss=5.0 + 0.1 * (400 / steps - 1) + 0.01 * (seed - 1),
        )
        for steps in LENGTHS
        for seed in (1, 2)
    ]


def dense() -> DenseLosses:
    return DenseLosses(dense_rows(), dense=DENSE, shorter=SHORTER)


def test_dense_runs_of_other_lengths_are_interpolated_in_the_logarithm() -> None:
    losses = dense()
    assert losses.lengths == list(LENGTHS) and losses.seeds == {1, 2}
    assert losses.at(400, 1) == 5.0 and losses.at(80, 2) == pytest.approx(5.41)
    between = losses.at((160 * 240) ** 0.5, 1)
    assert between == pytest.approx((losses.at(160, 1) + losses.at(240, 1)) / 2)


def test_a_path_is_compared_with_a_dense_run_of_its_time() -> None:
    # 80 dense steps and 320 that take a quarter: as long as 160 dense steps.
    losses = {1: 5.05, 2: 5.06, 3: 9.0}
    found = compare("a", losses, dense(), before=80, step=0.5, dense_step=2.0)
    assert (found.share, found.dense_steps, found.seeds) == (0.25, 160.0, (1, 2))
    assert found.dense_loss == pytest.approx(5.155) and found.loss == pytest.approx(5.055)
    assert found.difference == pytest.approx(-0.1) and found.error == pytest.approx(0, abs=1e-12)
    assert found.verdict == "pays"
    assert replace(found, error=0.01).verdict == "not shown", "two seeds need 12.71 errors"
    assert replace(found, difference=0.1).verdict == "does not pay"


def test_a_path_slower_than_dense_is_compared_with_the_whole_dense_run() -> None:
    found = compare("a", {1: 5.05}, dense(), before=80, step=3.0, dense_step=2.0)
    assert found.dense_steps == 400 and found.difference == pytest.approx(0.05)
    assert found.error is None and found.verdict == "not shown"


def test_a_missing_length_is_named() -> None:
    rows = [each for each in dense_rows() if each.name != f"{SHORTER}160-seed2"]
    with pytest.raises(ConfigError, match="no dense run of 160 steps and seed 2"):
        DenseLosses(rows, dense=DENSE, shorter=SHORTER)
    with pytest.raises(ConfigError, match="no finished run of dense"):
        DenseLosses([], dense=DENSE, shorter=SHORTER)


def test_a_period_without_a_step_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert time_to_loss.main(["--rates", "none", "--period", "0"]) == 2
    assert capsys.readouterr().err == "time_to_loss: --period 0: must be at least 1\n"


def test_every_timed_run_is_accepted_and_takes_its_path_at_once(tmp_path: Path) -> None:
    study, rows = read_study(STUDY / "study.yaml"), read_rows(STUDY / "results.jsonl")
    paths = timed_paths(study, rows)
    assert {DENSE, DENSE_BF16} < {path.group for path in paths}
    for path in paths:
        flags = timed(study, path, tmp_path, Path("data"), period=20)  # checks them
        steps = int(flags[flags.index("--train-iters") + 1])
        assert steps == (40 if path.group.startswith("rolling") else WARM_UP + 20)
        assert "--load" not in flags


def test_the_tool_measures_and_writes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = write_study(tmp_path, ("global-batch-size: 4", "global-batch-size: 4\n  bf16: true"))
    results = tmp_path / "rows.jsonl"
    paths = [row("dense_bf16", seed, 5.0 + seed / 100, settings="0") for seed in (1, 2)]
    write_rows(results, [*dense_rows(), *paths])
    flags = ["--rates", "none", "--period", "2", "--study", str(path), "--results", str(results)]
    assert time_to_loss.main([*flags, "--out", str(tmp_path)]) == 0
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert page in capfd.readouterr().out and "## 4 ranks, no limit" in page
    (found,) = json.loads((tmp_path / "results.json").read_text()).values()
    assert [each["group"] for each in found] == [DENSE, DENSE_BF16]
    assert all(each["step"] > 0 for each in found)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
