"""The report: what it contains, that nothing in it is live, and that it survives odd folders."""

from __future__ import annotations

import json
import math
import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.report import read_run, write_report
from megatron.report.charts import comparison_charts
from megatron.report.comparison import write_comparison
from megatron.report.drawing import MOST_VALUES
from megatron.report.facts import tiles
from megatron.status import Status, write_status
from tests.metrics.helpers import evaluated, make_metrics, record

pytestmark = pytest.mark.push

CANARY = "<script>alert('canary')</script>\"'&<img src=x onerror=alert(1)>"


def make_run(folder: Path, losses: list[float], *, skipped: tuple[int, ...] = ()) -> Path:
    """A run folder with one step for each loss and some evaluations."""
    metrics, _ = make_metrics(folder, log_interval=10, train_iters=len(losses))
    metrics.evaluation(evaluated(0, "valid", 11.0))
    for i, loss in enumerate(losses, start=1):
        metrics.step(
            record(
                i,
                train_iters=len(losses),
                lm_loss=loss,
                skipped=i in skipped,
                grad_norm=None if i in skipped else 1.0,
                wait_seconds=0.1,
            )
        )
    metrics.evaluation(evaluated(len(losses), "valid", 2.0))
    metrics.evaluation(evaluated(len(losses), "test", 3.0))
    metrics.close()
    return folder


def _svgs(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_report_holds_all_series_and_figures(tmp_path: Path) -> None:
    losses = [10 / i for i in range(1, 201)]
    losses[19] = math.nan
    run = make_run(tmp_path / "gpt_tiny", losses, skipped=(20,))
    (run / "config.yaml").write_text("model:\n  num_layers: 12\ntraining:\n  seed: 7\n")
    (run / "environment.json").write_text(json.dumps({"commit": "abc123", "packages": {"x": "1"}}))
    (run / "checkpoints" / "step_00000200").mkdir(parents=True)
    (run / "metrics.jsonl.cut-1").write_text("")
    (run / "sample.txt").write_text("Once upon a time")
    write_status(run, Status(state="done", exit_code=0))
    said: list[str] = []
    page = write_report(run, log=said.append).read_text()
    charts = _svgs(page)
    titles = [chart.attrib["aria-label"] for chart in charts]
    assert titles == [
        "Loss",
        "Loss after iteration 40",
        "Learning rate",
        "Gradient norm",
        "Tokens per second",
        "Step time (ms)",
        "Bytes sent per step, one rank",
        "Peak memory, one rank (GiB)",
        "Skipped steps so far",
        "Waiting for gradients (% of the step)",
    ]
    for chart in charts:
        paths = [e for e in chart.iter() if e.tag.endswith("path")]
        assert paths and all("nan" not in path.attrib["d"] for path in paths)
    for text in ("abc123", "step_00000200", "Once upon a time", "num layers", ">12<", "20.09"):
        assert text in page, text
    assert 'class="state done"' in page and "<td>restarts</td><td>1</td>" in page
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert (run / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert said == []


def test_what_did_not_happen_has_no_chart_and_a_path_shows_its_settings(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [3.0, 2.0])
    (run / "config.yaml").write_text("radius:\n  radius_density: 0.4\n  radius_interval: 50\n")
    page = write_report(run).read_text()
    assert "Skipped steps so far" not in page
    assert "<td>radius density</td><td>0.4</td>" in page
    assert "<td>radius interval</td><td>50</td>" in page


def test_checkpoints_are_those_of_the_folder_to_which_the_run_saves(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [3.0, 2.0])
    (tmp_path / "saved" / "step_00000002").mkdir(parents=True)
    (run / "environment.json").write_text(json.dumps({"save": str(tmp_path / "saved")}))
    assert "step_00000002" in write_report(run).read_text()


def test_nothing_from_a_file_is_live(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a$b$ <i>", [3.0, 2.0])
    yaml = f"data:\n  data_path: {json.dumps(CANARY)}\n  tokenizer_type: {json.dumps(CANARY)}\n"
    (run / "config.yaml").write_text(yaml)
    (run / "environment.json").write_text(json.dumps({CANARY: CANARY, "y": {CANARY: CANARY}}))
    (run / "sample.txt").write_text(CANARY)
    write_status(run, Status(state="failed", reason=CANARY, left=CANARY, host=CANARY))
    page = write_report(run).read_text()
    assert "&lt;script&gt;alert(" in page
    assert "<script" not in page and "<img" not in page and "<i>" not in page
    assert page.count("'none'") == 1
    # The names of SVG and of references within it are all that looks like an address.
    addresses = set(re.findall(r"https?:[^\"]*", page))
    assert addresses == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert all(link.startswith("#") for link in re.findall('href="([^"]*)"', page))
    for svg in _svgs(page):
        assert all(not name.startswith("on") for e in svg.iter() for name in e.attrib)


@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_the_last_loss_is_shown_even_if_it_is_no_number(tmp_path: Path, lost: float) -> None:
    run = read_run(make_run(tmp_path / "run", [3.0, 2.0, lost]))
    assert tiles(run)[0] == ("training loss", str(lost), "iteration 3")
    page = write_comparison([run, run], tmp_path).read_text()
    cell = '<td class="number" data-head='
    assert f'{cell}"training loss">{lost}</td>' in page
    assert f'{cell}"validation loss">2.0000</td>' in page


@pytest.mark.parametrize(
    "losses", [[], [5.0], [math.nan], [math.nan] * 150, [5.0] * 150, [0.0, -1.0], [1e300, 1e-300]]
)
def test_odd_curves_are_drawn(tmp_path: Path, losses: list[float]) -> None:
    run = make_run(tmp_path, losses)
    page = write_report(run).read_text()
    assert bool(losses) == bool(_svgs(page))
    assert ("No step is recorded yet" in page) == (not losses)


def test_torn_and_foreign_files_are_told_of(tmp_path: Path) -> None:
    run = make_run(tmp_path, [3.0, 2.0])
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'not json\n{"iteration": 2, "lm_loss": "1.5"}\n[1]\n{"iteration": 3, "lm_')
    for name in ("config.yaml", "environment.json", "status.json", "sample.txt"):
        (run / name).write_bytes(b"\xff\x00 [{ : -\n\t- x")
    read = read_run(run)
    assert read.iterations == [1, 2] and read.steps["loss"] == [3.0, 1.5]
    assert math.isnan(read.steps["lr"][1])
    assert read.unreadable_lines == 3
    assert "unreadable metrics lines" in write_report(run).read_text()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no metrics.jsonl; give the folder of a run"):
        write_report(tmp_path)


def test_without_matplotlib_the_picture_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said: list[str] = []
    assert write_report(make_run(tmp_path, [3.0, 2.0]), log=said.append).exists()
    assert not (tmp_path / "loss.png").exists()
    page = (tmp_path / "report.html").read_text()
    assert "The charts are left out: matplotlib is not installed (pip install" in page
    assert "<svg" not in page and "<td>skipped steps</td>" in page
    assert len(said) == 1 and "matplotlib" in said[0] and "sparsetron[log]" in said[0]


def test_what_a_gradient_path_tells_is_drawn_where_it_tells_it(tmp_path: Path) -> None:
    metrics, _ = make_metrics(tmp_path / "run", log_interval=10, train_iters=4)
    for i in range(1, 5):
        metrics.step(record(i, train_iters=4, path={"index_kept": 0.8} if i % 2 else {}))
    metrics.close()
    run = read_run(tmp_path / "run")
    assert run.path == {"index_kept": [(1, 0.8), (3, 0.8)]}
    titles = [c.attrib["aria-label"] for c in _svgs(write_report(tmp_path / "run").read_text())]
    assert "Index kept" in titles


def test_step_time_is_told_by_phase_where_timers_were_read(tmp_path: Path) -> None:
    metrics, _ = make_metrics(tmp_path / "run", log_interval=2, train_iters=5, timing_log_level=1)
    for i in range(1, 6):
        timers = {"forward-backward": [0.4, 0.6], "optimizer": [0.2, 0.1]} if i % 2 == 0 else {}
        metrics.step(record(i, train_iters=5, timers=timers, axis_bytes={"bytes_tp": 2048}))
    metrics.log("loaded checkpoint a/b/step_00000003 of step 3")
    metrics.close()
    run = read_run(tmp_path / "run")
    # Two steps since they were read before; of the slower rank.
    assert run.phases == {
        "forward-backward": [(2, 0.3), (4, 0.3)],
        "optimizer": [(2, 0.1), (4, 0.1)],
    }
    assert run.loaded == [3] and list(run.path) == ["bytes_tp"]
    page = write_report(tmp_path / "run").read_text()
    titles = [c.attrib["aria-label"] for c in _svgs(page)]
    assert "Step time by phase (ms, slowest rank)" in titles
    assert "Bytes sent per step along TP, one rank" in titles
    assert (
        '<td>forward-backward</td><td class="number">300.00</td><td class="number">60.0 %</td>'
        in page
    )
    assert "<td>resumed from step</td><td>3</td>" in page


def test_a_comparison_shows_what_each_run_sent_only_where_that_differs(tmp_path: Path) -> None:
    for name, sent in (("first", 100), ("same", 100), ("other", 40)):
        metrics, _ = make_metrics(tmp_path / name, log_interval=10, train_iters=2)
        for i in (1, 2):
            metrics.step(record(i, train_iters=2, bytes_sent=sent))
        metrics.close()
    first, same, other = (read_run(tmp_path / name) for name in ("first", "same", "other"))
    of_equal = [chart.title for chart in comparison_charts([first, same], ["a", "b"])]
    by_time, difference = "Loss by training time (seconds)", "|loss - loss of a|"
    assert of_equal == ["Loss", by_time, "Step time (ms)", difference]
    charts = {chart.title: chart for chart in comparison_charts([first, other], ["a", "b"])}
    sent_chart = charts["Loss by bytes sent so far, one rank"]
    assert [curve.x for curve in sent_chart.series] == [[100, 200], [40, 80]]
    assert [curve.x for curve in charts[by_time].series] == [[0.5, 1.0], [0.5, 1.0]]
    assert [curve.y for curve in sent_chart.series] == [curve.y for curve in charts["Loss"].series]


def test_each_run_of_a_comparison_is_seen_beside_those_it_agrees_with(tmp_path: Path) -> None:
    losses = [10 / i for i in range(1, 201)]
    runs = [read_run(make_run(tmp_path / name, losses)) for name in "ab"]
    whole, end, by_time, *_ = comparison_charts(runs, ["a", "b"])
    for chart in (whole, end, by_time):
        faint, curves = chart.series[:2], chart.series[2:]
        assert all(curve.opacity < 0.5 and not curve.read for curve in faint)
        assert [c.label for c in curves if c.in_legend] == ["a", "b", "dashed: validation"]
        assert curves[0].width > curves[2].width
        for training, validation in (curves[:2], curves[2:4]):
            assert validation.dashed and validation.color == training.color
            assert validation.label == f"{training.label}, validation"
    # Without the first 40 of 200 steps of half a second; the evaluation before the first is among
    # them.
    assert end.series[2].x[0] == 41 and by_time.series[2].x[0] == 20.5
    assert list(by_time.series[3].x) == [100.0] and list(whole.series[3].x) == [0, 200]


def test_a_comparison_has_ratios_to_the_first_run_and_links_to_reports(tmp_path: Path) -> None:
    names = ("javascript:a&b", "second", "without")
    for name, sent in zip(names, (1000, 130, 1000), strict=True):
        metrics, _ = make_metrics(tmp_path / name, log_interval=10, train_iters=1)
        metrics.step(record(1, train_iters=1, bytes_sent=sent))
        metrics.close()
    for name in names[:2]:
        write_report(tmp_path / name)
    runs = [read_run(tmp_path / name) for name in names]
    page = write_comparison(runs, tmp_path / "second").read_text()
    links = re.findall('<a href="([^"]*)">([^<]*)</a>', page)
    first = ("../javascript%3Aa%26b/report.html", "javascript:a&amp;b")
    assert links == [first, ("report.html", "second")]
    cells = re.findall('data-head="sent">([^<]*)<', page)
    assert cells == ["1.00 kB", "130 B (x0.13)", "1.00 kB (x1.00)"]
    for head in ("median step", "peak memory"):
        assert len(re.findall(rf'data-head="{head}">[^<]* \(x1.00\)<', page)) == 2


def test_the_training_loss_is_that_of_the_last_line_of_the_log(tmp_path: Path) -> None:
    run = make_run(tmp_path, [float(i) for i in range(1, 25)], skipped=(22,))
    (run / "config.yaml").write_text("logging:\n  log_interval: 10\n")
    logged = re.findall(r"lm loss: (\S+)", (run / "log.txt").read_text())
    read = read_run(run)
    assert tiles(read)[0] == ("training loss", "22.6667", "mean of 4 steps, iteration 24")
    assert float(logged[-1]) == pytest.approx(22.6667, abs=1e-4)
    # A start that resumed begins another interval; one batch is no mean.
    resumed = replace(read, loaded=[10, 23])
    assert tiles(resumed)[0] == ("training loss", "24.0000", "iteration 24")


def test_a_constant_curve_has_no_mean_and_the_page_follows_the_colour_scheme(
    tmp_path: Path,
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    page = write_report(make_run(tmp_path / "run", [3.0 - i / 100 for i in range(100)])).read_text()
    charts = {svg.attrib["aria-label"]: svg for svg in _svgs(page)}
    sent = [text for text in charts["Bytes sent per step, one rank"].itertext() if "last" in text]
    assert sent == ["last 3.10 MB"]
    assert "mean of 3 steps 2.015" in "".join(charts["Loss"].itertext())
    values = [text for text in charts["Loss"].itertext() if text.startswith("mean of 3 steps, ")]
    assert len(values) == MOST_VALUES and values[-1] == "mean of 3 steps, 100: 2.015"
    assert "@media (prefers-color-scheme: dark)" in page
    drawn = page[page.index("<svg") :]
    assert (
        not re.search("(fill|stroke): #(1f2937|6b7280)", drawn) and "var(--muted, #6b7280)" in drawn
    )
