"""Rows of a convergence study, and the table and plots made from them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron.errors import ConfigError, DataError
from tests.bench.test_convergence import PLAN, STUDY, line_of
from tools.bench.common.page_files import MARK
from tools.bench.convergence.groups import groups_of
from tools.bench.convergence.model import parameters
from tools.bench.convergence.plot import mean_difference
from tools.bench.convergence.radius import baseline, radius
from tools.bench.convergence.radius_page import RADIUS, goals_of
from tools.bench.convergence.report import write_report
from tools.bench.convergence.rows import WINDOWS, append_row, curve, read_rows, row_of
from tools.bench.convergence.study import START, StudyPlan, StudyRun

# -------------------------------------------------------------------------------------- rows


def test_row_holds_what_a_run_left(tmp_path: Path) -> None:
    run = radius(0.4)
    lines = [line_of(i, density=1.0 if i == 40 else 0.4, index_kept=0.9) for i in range(40, 201)]
    lines[10]["grad_norm"] = 2.0
    folder = tmp_path / run.name
    folder.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    with pytest.raises(DataError, match="no evaluation of step 200"):
        row_of(run, PLAN, folder, exit_code=0)
    (folder / "metrics.jsonl").write_text(text + '{"iteration": 200, "valid_loss": 4.5}\n')
    row = row_of(run, PLAN, folder, exit_code=0)
    assert row["valid_loss"] == 4.5 and row["interval"] == 5
    assert row["payload"] == {"mean": pytest.approx((1 + 160 * 0.4) / 161, abs=1e-6), "most": 1.0}
    assert row["clipped"] == pytest.approx(1 / 161, abs=1e-4) and row["largest_norm"] == 2.0
    assert row["curve"][0] == (42, pytest.approx(6.0 - 0.415))
    assert row["index_kept"][:2] == [[40, 0.9], [44, 0.9]]
    assert str(tmp_path) not in json.dumps(row)


def test_payload_of_several_ranks_is_in_dense_bytes(tmp_path: Path) -> None:
    run = baseline("topk", "topk", [])
    dense = 2 * 3 / 4 * 4 * parameters(PLAN.sequence)
    lines = [line_of(i, bytes_sent=dense / 2) for i in range(40, 201)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"iteration": 200, "valid_loss": 4.5}\n')
    assert row_of(run, PLAN, tmp_path, exit_code=0)["payload"] == {"mean": 0.5, "most": 0.5}


def test_curve_has_whole_windows_only() -> None:
    points = curve({i: float(i) for i in range(40, 201)}, PLAN)
    assert points[0] == (42, 41.5) and points[-1] == (200, 199.5)
    assert len(curve({i: 1.0 for i in range(1, 201)}, PLAN)) == WINDOWS


def test_rows_of_another_size_are_refused_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append_row(path, synthetic("dense", 1, 5.0))
    with open(path, "a") as stream:
        stream.write('{"name": "torn')
    assert len(read_rows(path, PLAN)) == 1
    append_row(path, synthetic("dense", 2, 5.0))
    assert [row["seed"] for row in read_rows(path, PLAN)] == [1, 2]
    with pytest.raises(ConfigError, match="another --results"):
        read_rows(path, StudyPlan())


# ------------------------------------------------------------------------------------ report


def synthetic(variant: str, seed: int, loss: float | None, *, start: float | None = None) -> dict:
    """A row."""
    run = StudyRun(variant=variant, seed=seed, start=start)
    points = [(step, (loss or 0.0) + 100 / step) for step in range(42, 201, 2)]
    return {
        "name": run.name, "group": run.group, "variant": variant, "seed": seed, "beta2": 0.999,
        "start": start, "path": "radius", "interval": 5, "ranks": 1, "plan": asdict(PLAN),
        "exit_code": 0, "last_step": 200, "valid_loss": loss, "train_loss": loss,
        "payload": {"mean": 0.118, "most": 1.0}, "clipped": 0.1, "largest_norm": 2.0,
        "seconds": 9.0, "curve": points,
    }  # fmt: skip


ROWS = [
    *(synthetic("dense", seed, 5.0 + seed) for seed in (1, 2, 3)),
    *(
        synthetic("radius_0.1", seed, 5.0 + seed + gap, start=START)
        for seed, gap in ((1, 0.1), (2, 0.2), (3, 0.3))
    ),
    *(
        synthetic("rolling_0.1-update", seed, 5.0 + seed + gap, start=START)
        for seed, gap in ((1, 0.03), (2, 0.07), (3, 0.11))
    ),
    synthetic("radius_0.5", 1, 6.02, start=START),
]


def test_gaps_are_paired_by_seed_and_have_a_standard_error() -> None:
    found = {group.name: group for group in groups_of(ROWS)}
    plain = found["radius_0.1"]
    assert plain.gap == pytest.approx(0.2) and plain.error == pytest.approx(0.1 / 3**0.5)
    assert found["dense"].gap is None and len(found["dense"].losses) == 3
    alone = found["radius_0.5"]
    assert alone.gap == pytest.approx(0.02) and not alone.error_is_own
    assert alone.error == pytest.approx(((0.1**2 + 0.04**2) / 2) ** 0.5)


def test_goal_is_half_the_gap_beyond_twice_the_error() -> None:
    (goal,) = goals_of(groups_of(ROWS))
    assert goal.ratio == pytest.approx(0.35)
    assert goal.margin == pytest.approx(0.03)  # of 0.02, 0.03, 0.04
    assert goal.error == pytest.approx(0.01 / 3**0.5) and goal.met
    worse = [
        {**row, "valid_loss": row["valid_loss"] + 0.02} if "rolling" in row["name"] else row
        for row in ROWS
    ]
    (goal,) = goals_of(groups_of(worse))
    assert goal.margin == pytest.approx(0.01) and not goal.met


def test_curves_are_differences_to_the_dense_run_of_the_seed() -> None:
    points = mean_difference("rolling_0.1-update", ROWS)
    assert [step for step, _ in points] == list(range(42, 201, 2))
    assert all(value == pytest.approx(0.07) for _, value in points)


def test_report_is_written_and_keeps_what_was_read_into_it(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results, said = tmp_path / "results.jsonl", []
    with pytest.raises(ConfigError, match="no finished run"):
        write_report(results, tmp_path, RADIUS, log=said.append)
    for row in ROWS:
        append_row(results, row)
    write_report(results, tmp_path / "out", RADIUS, log=said.append)
    page = tmp_path / "out" / "README.md"
    text = page.read_text()
    assert "| radius 0.1 | 1, 2, 3 | 5 | 0.118 | 1.000 | 10% | 7.2000 | +0.2000 | 0.0577 |" in text
    assert "| radius 0.5 | 1 | 5 | 0.118 | 1.000 | 10% | 6.0200 | +0.0200 | ~0.0762 |" in text
    assert "beyond twice the error" in text
    assert text.index("| dense |") < text.index("| radius 0.1 |") < text.index("| radius 0.5 |")
    page.write_text(head := f"# Losses\n\nIt holds.\n\n{MARK}\n")
    write_report(results, tmp_path / "out", RADIUS, log=said.append)
    assert page.read_text() == f"{head}\n{text}"
    values = json.loads((tmp_path / "out" / "results.json").read_text())
    assert values["goals"][0]["met"] and values["plan"] == asdict(PLAN)
    assert (tmp_path / "out" / "figure.png").stat().st_size > 10_000
    assert said == [f"{page}: 10 of {len(STUDY)} runs"] * 2
