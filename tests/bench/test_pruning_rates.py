"""Tests of the study of learning rates: its runs parse, its tables follow from the rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.config import parse, resolve
from pretrain_gpt import GRADIENT_PATHS
from tests.bench.test_convergence import PLAN as SHORT
from tests.bench.test_convergence import Fake, run_some
from tools.bench.convergence.report import write_report
from tools.bench.convergence.rows import append_row
from tools.bench.convergence.study import StudyRun, dense_of, flags_of
from tools.bench.pruning_rates.page import (
    MOVING,
    RATES,
    STAYING,
    against,
    by_rate,
    loss_rises,
    losses_of,
)
from tools.bench.pruning_rates.study import FACTORS, PLAN, at_rate, base_and_factor, study, swept

STUDY = study()


def test_every_row_at_every_rate_and_three_seeds_of_dsr() -> None:
    found: dict[str, dict[int, set[int]]] = {}
    for run in STUDY:
        base, factor = base_and_factor(run.group)
        found.setdefault(base, {}).setdefault(factor, set()).add(run.seed)
    for group in swept():
        for run in group:
            assert found[run.group].keys() == set(FACTORS), run.name
    for base in (MOVING, STAYING):
        assert all(seeds == {1, 2, 3} for seeds in found[base].values())
    for place, run in enumerate(STUDY):
        assert run.start is None or dense_of(run) in STUDY[:place]


@pytest.mark.parametrize("run", STUDY, ids=lambda run: run.name)
def test_command_line_is_accepted(run: StudyRun) -> None:
    line = flags_of(run, PLAN, data=Path("data"), runs_dir=Path("runs"))
    config = resolve(parse(line, paths=GRADIENT_PATHS), 1)
    _, factor = base_and_factor(run.group)
    first = 0.1 if run.optimizer == "sgd" else 1e-3
    assert config.optimizer.lr == pytest.approx(factor * first)
    assert config.optimizer.min_lr == pytest.approx(factor * first / 10)
    assert at_rate(run, 1) is run


def test_a_fork_whose_dense_run_is_elsewhere_makes_its_trunk(tmp_path: Path) -> None:
    dense = next(run for run in STUDY if run.is_dense)
    fork = next(run for run in STUDY if run.start == 0.2)
    assert run_some([dense], tmp_path, Fake()) == []
    (tmp_path / "work").rename(tmp_path / "elsewhere")
    fake = Fake()
    assert run_some([fork], tmp_path, fake) == []
    assert fake.started == [dense.name, dense.name, fork.name]
    steps = sorted((tmp_path / "work" / "runs" / dense.name / "checkpoints").iterdir())
    assert [step.name for step in steps] == ["step_00000009", "step_00000039"]


def row(group: str, loss: float, seed: int = 1, **more: Any) -> dict[str, Any]:
    return {"name": f"{group}-seed{seed}", "group": group, "seed": seed, "valid_loss": loss, **more}


def at(base: str, factor: int) -> str:
    run = next(run for group in swept() for run in group if run.group == base)
    return at_rate(run, factor).group


def test_a_loss_rises_from_the_window_before_a_rewiring_to_the_first_one_after_it() -> None:
    curve = [[4, 8.0], [8, 7.0], [12, 7.5], [16, 9.0]]
    # Steps 9 to 12 hold the rewiring after step 10; the rewiring after step 16 has no later window.
    pruned = [[2, 1], [8, 5], [10, 5], [16, 5]]
    found = loss_rises({"plan": {"steps": 400}, "curve": curve, "dsr_pruned": pruned})
    assert found == {8: 0.5, 10: 2.0}


def test_tables_by_hand() -> None:
    losses = losses_of(
        [
            row(MOVING, 7.5),
            row(MOVING, 7.3, seed=2),
            row(MOVING, 7.0, seed=3),
            row(STAYING, 7.1),
            row(STAYING, 7.1, seed=2),
            row(at(MOVING, 4), 6.5),
            row(at(STAYING, 4), 6.75),
            row("dense", 6.0) | {"valid_loss": None},
        ]
    )
    assert by_rate(losses) == [
        "| run | x 1 | x 2 | x 4 | x 8 | best |",
        "|---|---:|---:|---:|---:|---:|",
        "| dsr 0.9, from scratch | 7.5000 |  | 6.5000 |  | x 4 |",
        "| random 0.9, from scratch | 7.1000 |  | 6.7500 |  | x 4 |",
    ]
    assert against(losses)[2:] == [
        "| x 1 | 1, 2 | +0.3000 | 0.1000 |",
        "| x 4 | 1 | -0.2500 |  |",
    ]


def test_the_page_names_what_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = [run for run in STUDY if run.seed == 1]
    assert run_some(done, tmp_path, Fake()) == []
    results = tmp_path / "results.jsonl"
    lines = results.read_text().splitlines()
    results.unlink()
    for line in lines:
        found = json.loads(line)
        if found["group"] == MOVING:
            found["dsr_pruned"] = [[10, 100], [20, 54_140], [40, 200]]
        append_row(results, found)
    write_report(results, tmp_path / "page", RATES, log=lambda _: None)
    text = (tmp_path / "page" / "README.md").read_text()
    assert f"{len(done)} of {len(STUDY)} runs are in" in text
    missing = [run.name for run in STUDY if run not in done]
    assert f"Not run yet: {', '.join(missing)}." in text
    assert "| dsr 0.9, from scratch, seed 1 | 3 | 0.00 | 0.10 | 20 |" in text
    assert json.loads((tmp_path / "page" / "results.json").read_text())["missing"] == missing
    assert (tmp_path / "page" / "figure.png").stat().st_size > 10_000
    assert SHORT.steps == 200
