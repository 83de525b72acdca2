"""Every study of the repository declares legal runs, and its page follows from its rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.bench.common.page_files import PAGE, RESULTS
from tools.studies.commands import Commands
from tools.studies.declaration import read_study
from tools.studies.page import report_of, write_report
from tools.studies.rows import read_rows

pytestmark = pytest.mark.push

REPO = Path(__file__).resolve().parents[2]
EXAMPLE = REPO / "docs" / "examples" / "study.yaml"
STUDIES = [*sorted(REPO.glob("tools/bench/**/*.yaml")), EXAMPLE]
WITH_ROWS = [path for path in STUDIES if path.with_name("results.jsonl").is_file()]


def name_of(path: Path) -> str:
    return path.parent.name


@pytest.mark.parametrize("path", STUDIES, ids=name_of)
def test_every_run_is_accepted(path: Path) -> None:
    study = read_study(path)
    commands = Commands(study, Path("runs"), Path("data"))
    commands.check_losses()
    assert all(commands.steps(run) > 0 for run in study.runs)


def test_the_page_shows_the_example() -> None:
    page = (REPO / "docs" / "studies.md").read_text(encoding="utf-8")
    assert EXAMPLE.read_text(encoding="utf-8") in page


def test_results_are_committed() -> None:
    found = {name_of(path) for path in WITH_ROWS}
    assert found >= {"convergence", "loss_by_bytes", "pruning", "pruning_rates"}
    assert found >= {"rolling", "state_precision"}


@pytest.mark.parametrize("path", WITH_ROWS, ids=name_of)
def test_committed_rows_keep_their_lines(path: Path) -> None:
    text = path.with_name("results.jsonl").read_text(encoding="utf-8")
    assert [row.line for row in read_rows(path.with_name("results.jsonl"))] == text.splitlines()


def test_settings_of_radius_are_compared_at_equal_bytes() -> None:
    study = read_study(REPO / "tools" / "bench" / "rolling" / "study.yaml")
    for run in study.runs:
        if run.fork is not None:
            density, interval = (
                float(str(run.flags[f"radius-{k}"])) for k in ("density", "interval")
            )
            width = 0.5 if "grad-wire" in run.flags else 1.0
            assert (density + (1 - density) / interval) * width == pytest.approx(0.19, rel=1e-3)


@pytest.mark.parametrize("path", WITH_ROWS, ids=name_of)
def test_the_committed_page_follows_from_the_rows(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    study, folder = read_study(path), path.parent
    rows = read_rows(folder / "results.jsonl")
    commands = Commands(study, Path("runs"), Path("data"))
    declared = {run.name: commands.digest(run) for run in study.runs}
    assert {row.name: row.settings for row in rows}.items() <= declared.items()
    (tmp_path / PAGE).write_text((folder / PAGE).read_text(encoding="utf-8"), encoding="utf-8")
    again = folder / "remade.jsonl"
    write_report(report_of(study, rows, again if again.is_file() else None), tmp_path)
    for name in (PAGE, RESULTS):
        assert (tmp_path / name).read_text("utf-8") == (folder / name).read_text("utf-8"), name
