"""The page of the low-memory report's counts: it is what the tool writes, with all targets met."""

from __future__ import annotations

from pathlib import Path

from tools.bench.common.page_files import FIGURE, MARK, PAGE, read_results
from tools.bench.low_memory import run

FOLDER = Path(run.__file__).parent


def test_the_page_has_the_numbers_that_the_tool_counts(tmp_path: Path) -> None:
    assert run.main(["--out", str(tmp_path)]) == 0
    committed = (FOLDER / PAGE).read_text(encoding="utf-8").partition(f"{MARK}\n")[2]
    assert committed.strip() == (tmp_path / PAGE).read_text(encoding="utf-8").strip()
    assert read_results(FOLDER) == read_results(tmp_path)
    assert (tmp_path / FIGURE).stat().st_size > 10_000


def test_every_setting_of_tables_3_and_4_is_on_the_page() -> None:
    values = read_results(FOLDER)
    assert len(values["table 3"]) == 7 and len(values["table 4"]) == 8
    assert all(target["met"] for target in values["targets"])
