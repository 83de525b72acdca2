"""The page of the low-memory report's counts: it is what the tool writes, with all targets met."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.bench.common.page_files import FIGURE, MARK, PAGE, read_results
from tools.bench.low_memory import run, update_cost
from tools.planner.paper_accounting import TABLE_3

FOLDER = Path(run.__file__).parent


def test_the_page_has_the_numbers_that_the_tool_counts(tmp_path: Path) -> None:
    assert run.main(["--out", str(tmp_path)]) == 0
    committed = (FOLDER / PAGE).read_text(encoding="utf-8").partition(f"{MARK}\n")[2]
    assert committed.strip() == (tmp_path / PAGE).read_text(encoding="utf-8").strip()
    assert read_results(FOLDER) == read_results(tmp_path)
    assert (tmp_path / FIGURE).stat().st_size > 10_000


def test_every_setting_of_tables_3_and_4_is_on_the_page() -> None:
    values = read_results(FOLDER)
    assert len(values["table_3"]) == 7 and len(values["table_4"]) == 8
    assert len(values["targets"]) == 4 and all(target["met"] for target in values["targets"])


def test_a_fitted_number_is_named_as_such() -> None:
    values = read_results(FOLDER)
    for row in values["table_4"]:
        fitted = row["activations_fitted_mb"]
        assert fitted == 43.5 * row["bits"] / 32
        counted = (row["model"] + row["optimizer"]) / 1e6
        assert row["total_with_fitted_mb"] == pytest.approx(counted + fitted)
        assert "total" not in row and "activations" not in row
    assert [each["paper"] for each in values["counts"] if each["is_fitted"]] == [5.7]
    assert all(each["source"] for each in values["counts"])
    page = (FOLDER / PAGE).read_text(encoding="utf-8")
    assert "activations, fitted" in page and "3.27 (fitted)" in page


def test_the_stem_is_counted_where_it_would_be_stored() -> None:
    # 32 x 32 positions of 16 channels, 100 images, 2 bytes.
    assert run._stem_mb(TABLE_3[1]) == pytest.approx(3.2768)
    assert "45.8 MB instead of 42.6 MB" in (FOLDER / PAGE).read_text(encoding="utf-8")


def test_a_count_beside_the_printed_number_misses_its_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "REDUCTION", 5.7)
    monkeypatch.setattr(run, "MORE_FLOPS", 40)
    assert [target.met for target in run.targets()] == [True, True, False, False]


def test_the_cost_of_an_update_is_relative_to_fp32(capsys: pytest.CaptureFixture[str]) -> None:
    assert update_cost.main(["--entries", "512"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    rows = [line.strip("| ").split(" | ") for line in lines]
    assert [row[0] for row in rows] == list(update_cost.FORMATS)
    assert rows[0][2] == "1" and all(float(row[1]) > 0 for row in rows)
