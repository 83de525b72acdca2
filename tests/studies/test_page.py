"""The report of a study: its tables, its pictures, and the pages that it does not replace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from tests.studies.files import row, write_study
from tools.studies.declaration import read_study
from tools.studies.page import StudyReport, report_of, write_report

ROWS = [
    row("dense", 1, 5.0),
    row("dense", 2, 5.2),
    row("dense_bf16", 1, 5.01, sent=50),
    row("dense_bf16", 2, 5.21, sent=50),
    row("dense_int4", 1, None, sent=13),
]


def report(folder: Path, *changes: tuple[str, str]) -> StudyReport:
    changes = (("baseline: dense", "baseline: dense\nreference: dense_bf16"), *changes)
    return report_of(read_study(write_study(folder, *changes)), ROWS)


def test_tables_have_gaps_payloads_and_what_is_missing(tmp_path: Path) -> None:
    write_report(report(tmp_path), tmp_path / "out")
    page = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "| dense_bf16 | 2 | 2 | 50 B | 1.000 |" in page
    assert "| 5.1100 | +0.0100 | 0.0000 | none |" in page
    assert "| dense_int4 | 2 | 0 (1 failed) | 13 B | 0.260 |" in page
    assert "/ reference: over the payload of dense_bf16." in page
    assert "Runs without a result: 1 (dense_int4-seed2)." in page


def test_a_column_without_values_is_left_out_and_old_rows_are_named(tmp_path: Path) -> None:
    changes = (
        ("    ranks: 2", "    ranks: 2\n    baseline: dense_bf16"),
        ("baseline: dense\n", "baseline: dense\nreference: dense_bf16\n"),
    )
    study = read_study(write_study(tmp_path, *changes))
    old = [replace(row, step_seconds=None, peak_memory=None) for row in ROWS]
    for rows, names in ((old, "all"), ([*ROWS[:3], *old[3:]], "2 (dense_bf16-seed2, dense_int4-")):
        write_report(report_of(study, rows), tmp_path / "out")
        page = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
        shown = "" if names == "all" else " step, ms | memory |"
        assert f"| run | ranks | seeds | payload | / reference |{shown} clipped |" in page
        assert ("Step: median" in page) == bool(shown)
        assert f"which held no step time, memory, commit and processor: {names}" in page
    assert "less that of dense (of dense_bf16 for dense_int4) of the same seed" in page


def test_a_reference_that_sends_nothing_relates_nothing(tmp_path: Path) -> None:
    found = report(tmp_path)
    groups = [replace(group, data_parallel=1) for group in found.groups]
    write_report(replace(found, groups=groups), tmp_path / "out")
    page = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "| dense_bf16 | 2 | 2 | 1.000 of all | 1000.0 |" in page
    assert "| payload | step, ms |" in page and "/ reference" not in page


def test_another_page_is_not_replaced(tmp_path: Path) -> None:
    found = report(tmp_path)
    (tmp_path / "README.md").write_text("# Mine\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="is no report of a study"):
        write_report(found, tmp_path)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == "# Mine\n"
    write_report(found, tmp_path / "out")
    write_report(found, tmp_path / "out")  # its own page it does


def test_pictures_need_matplotlib_and_two_groups(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = {path.name for path in write_report(report(tmp_path), tmp_path / "out")}
    assert files >= {"loss_by_bytes.png", "loss_by_time.png", "loss_by_memory.png", "gaps.png"}
    page = (tmp_path / "out" / "study.html").read_text(encoding="utf-8")
    assert page.count("<svg ") == 4 and "dense_bf16" in page
