"""The report of a study: its tables, its pictures, and the pages that it does not replace."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.report.charts import PALETTE
from megatron.report.drawing import INK
from tests.studies.files import row, write_study
from tools.bench.common.page_files import MARK
from tools.studies.declaration import read_study
from tools.studies.page import StudyReport, caption, report_of, write_report
from tools.studies.pictures import ParetoPicture, curves_of, pictures_of
from tools.studies.statistics import training_seconds

pytestmark = pytest.mark.push

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
    found = report(tmp_path)
    write_report(found, tmp_path / "out")
    page = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {found.study.title}\n\nStudy: `study.yaml`.\n\n| run | loss | gap |")
    costs = "50 B | 1.000 | 1.000 | 1000.0 | 977 KiB | 50% | 2 | 2 | none |"
    assert f"| dense_bf16 | 5.1100 | +0.0100 | 0.0000 | {costs}" in page
    assert "| dense_int4 | none |  |  | 13 B | 0.260 |" in page and "| 0 (1 failed) | 2 |" in page
    assert "Runs without a result: 1 (dense_int4-seed2)." in page
    assert page.index("without a result") < page.index("Loss: validation loss at the end, nats")
    assert "/ reference: over the payload of dense_bf16." in page


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
        assert f"| payload | / reference | entries |{shown} clipped | seeds | ranks |" in page
        assert ("Step: median" in page) == bool(shown)
        assert f"which held no step time, memory, commit and processor: {names}" in page
    assert "less that of dense (of dense_bf16 for dense_int4) of the same seed" in page


def test_a_reference_that_sends_nothing_relates_nothing(tmp_path: Path) -> None:
    found = report(tmp_path)
    groups = [replace(group, data_parallel=1) for group in found.groups]
    write_report(replace(found, groups=groups), tmp_path / "out")
    page = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "| dense_bf16 | 5.1100 | +0.0100 | 0.0000 | 1.000 | 1000.0 |" in page
    assert "| error | entries | step, ms |" in page and "/ reference" not in page


def test_another_page_is_not_replaced(tmp_path: Path) -> None:
    found = report(tmp_path)
    (tmp_path / "README.md").write_text("# Mine\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="is no report of a study"):
        write_report(found, tmp_path)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == "# Mine\n"
    write_report(found, tmp_path / "out")
    write_report(found, tmp_path / "out")  # its own page it does, also without a title
    page = tmp_path / "out" / "README.md"
    page.write_text("Study: `study.yaml`. Loss: ...\n", encoding="utf-8")
    write_report(found, tmp_path / "out")
    # The head of a page that has one is its title.
    page.write_text(f"# Mine\n\n{MARK}\n", encoding="utf-8")
    write_report(found, tmp_path / "out")
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("# ")] == ["# Mine"]


def test_pictures_name_what_they_leave_out(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    study = read_study(write_study(tmp_path))
    alone = [replace(row, ranks=1, data_parallel=1, bytes=0) for row in ROWS[:2]]
    also = [row("dense_int4", seed, 5.1, sent=13) for seed in (1, 2)]
    unknown = [replace(row, step_seconds=None) for row in also]
    write_report(report_of(study, [*alone, *ROWS[2:4], *unknown]), tmp_path / "out")
    page = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    html = (tmp_path / "out" / "study.html").read_text(encoding="utf-8")
    for text in (
        "Left out, since they send nothing: 1 (dense).",
        "The runs may have shared the machine. Left out, since their rows have no step time: "
        "1 (dense_int4).",
    ):
        assert f"{text}\n" in page and f"{text}</p>" in html
    assert page.index("loss_by_bytes.png") < page.index("send nothing") < page.index("loss_by_time")


def test_all_names_are_below_a_picture_of_the_page(tmp_path: Path) -> None:
    picture = pictures_of(
        [
            replace(group, name=f"{group.name}{number}", data_parallel=1 + number // 7)
            for group in report(tmp_path).groups[:1]
            for number in range(9)
        ],
        {f"dense{number}": "dense" for number in range(9)},
        {},
    )["loss_by_bytes"]
    names = ", ".join(f"dense{number}" for number in range(7))
    assert caption(picture, ", ".join).endswith(f"7 ({names}).")


def test_shorter_runs_take_less_time_at_the_same_step(tmp_path: Path) -> None:
    whole = [row("dense", seed, 5.0) for seed in (1, 2)]
    # The median step is longer, as if it shared the machine, and the run has half the steps.
    short = [replace(row("dense_int4", seed, 5.1, seconds=1.5), steps=5) for seed in (1, 2)]
    fork = [replace(row("dense_bf16", seed, 4.9), seconds=2.0) for seed in (1, 2)]
    failed = [replace(row("dense_int4", 3, None), steps=1)]
    rows, study = [*whole, *fork, *short, *failed], read_study(write_study(tmp_path))
    seconds = training_seconds(rows)
    assert seconds == {"dense": 10.0, "dense_bf16": 10.0, "dense_int4": 7.5}
    pictures = pictures_of(report_of(study, rows).groups, study.baselines, seconds)
    time = pictures["loss_by_time"]
    assert isinstance(time, ParetoPicture)
    assert [group.name for group in time.fronts()[0]] == ["dense_int4", "dense_bf16"]
    assert "may have shared the machine" in caption(time, ", ".join)


def test_charts_of_the_page_have_one_size_and_the_front_a_name_and_no_runs_colour(
    tmp_path: Path,
) -> None:
    pytest.importorskip("matplotlib")
    write_report(report(tmp_path), tmp_path / "out")
    page = (tmp_path / "out" / "study.html").read_text(encoding="utf-8")
    charts = re.findall("<svg .*?</svg>", page, re.DOTALL)
    assert {re.findall(r'width="([^"]*)"', chart)[0] for chart in charts} == {"360pt"}
    titles = re.findall(r'"font-weight: 700; font-size: ([^;]*);[^>]*>([^<]*)<', "".join(charts))
    assert len(titles) == len(charts) and {size for size, _ in titles} == {"11px"}
    assert [chart.count(">Pareto front<") for chart in charts] == [1, 1, 1, 0, 0]
    assert all(color != INK for color in PALETTE)
    assert ">peak memory of a rank (MiB)<" in charts[2] and "977 KiB" in page
    assert "<title>dense_bf16: +0.0100 at 50 B</title>" in charts[0]


def test_a_seed_that_ended_early_is_not_in_the_curve_of_its_group(tmp_path: Path) -> None:
    found = report(tmp_path)
    early = replace(found.rows[1], curve=[(4, 9.0), (8, 9.0)])
    (chart,) = curves_of(found.groups, [found.rows[0], early, *found.rows[2:]])
    dense = chart.series[0]
    assert (dense.label, list(dense.x), list(dense.y)) == ("dense", [5, 10], [6.0, 5.0])


def test_the_page_has_curves_and_links_to_reports_that_exist(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = tmp_path / "work" / "runs"
    (runs / "dense-seed1").mkdir(parents=True)
    (runs / "dense-seed1" / "report.html").touch()
    write_report(report(tmp_path), tmp_path / "out", runs)
    page = (tmp_path / "out" / "study.html").read_text(encoding="utf-8")
    link = '<a href="../work/runs/dense-seed1/report.html">dense-seed1</a>'
    assert page.count("<a ") == 1 and link in page
    assert 'aria-label="Training loss"' in page
    figures, definitions = page.index("<h2>Runs</h2>"), page.index("What the columns mean")
    assert figures < page.index("<svg ") < definitions < page.index("Loss: validation loss")


def test_pictures_need_matplotlib_and_two_groups(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = {path.name for path in write_report(report(tmp_path), tmp_path / "out")}
    assert files >= {"loss_by_bytes.png", "loss_by_time.png", "loss_by_memory.png", "gaps.png"}
    page = (tmp_path / "out" / "study.html").read_text(encoding="utf-8")
    assert page.count("<svg ") == 5 and "dense_bf16" in page
