"""The memory section of a report: from a ledger in the run folder, also a torn one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.report import write_report
from megatron.report.drawing import AreaChart, PieChart
from megatron.report.memory import KINDS, MOST_SAMPLES, memory_charts, memory_table
from tools import profile_memory

from .test_report import make_run

TRACKED = {
    "model": 1_000_000, "optimizer": 3_000_000, "stored": 1_500_000, "layers": {"head": 1_500_000},
    "forward": 3_000_000, "backward": 2_000_000, "other": 1_000_000, "total": 10_000_000,
}  # fmt: skip
MEASURED = TRACKED | {"forward": None, "backward": None, "other": None, "total": 12_345_678}


def _sample(phase: str, forward: int) -> dict[str, Any]:
    others = {"operator": "mm", "module": "", "model": 5, "optimizer": 7, "backward": 0, "other": 1}
    return {"phase": phase, "forward": forward, **others}


LEDGER = {
    "accounting": "actual",
    "title": "a model",
    "tracked": TRACKED,
    "measured": MEASURED,
    "missing": {"planned": "no formula <i>"},
    "peak_at": {"operator": "addmm", "module": "layers.1", "phase": "backward", "total": 1},
    "samples": [_sample("forward", i) for i in range(900)] + [_sample("backward", 3)] * 100,
}


def test_the_table_has_every_total_and_the_operator_of_the_peak() -> None:
    assert memory_table(LEDGER) == [
        ("MB", "tracked", "measured"),
        ("model", "1.000", "1.000"),
        ("optimizer", "3.000", "3.000"),
        ("stored by a microbatch", "1.500", "1.500"),
        ("forward, at the peak", "3.000", "-"),
        ("backward, at the peak", "2.000", "-"),
        ("other, at the peak", "1.000", "-"),
        ("peak", "10.000", "12.346"),
        ("peak at", "addmm of backward, in layers.1"),
        ("planned is missing", "no formula <i>"),
    ]


def test_the_charts_are_a_pie_of_the_peak_and_a_thinned_timeline() -> None:
    pie, timeline = memory_charts(LEDGER)
    assert isinstance(pie, PieChart) and isinstance(timeline, AreaChart)
    assert pie.title == "Memory at the peak, tracked"
    assert pie.shares == {kind: TRACKED[kind] for kind in KINDS}
    assert list(timeline.layers) == list(KINDS) and len(timeline.x) <= MOST_SAMPLES
    assert max(timeline.layers["forward"]) == 899
    # Neighbours that begin in one phase and end in the next belong to the larger sample.
    assert timeline.phases == sorted(timeline.phases, reverse=True)
    assert len(memory_charts({**LEDGER, "samples": []})) == 1


def test_the_page_shows_the_section_of_a_run_with_a_ledger_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path, [3.0, 2.0])
    assert "Memory of a training step" not in write_report(run).read_text()
    (run / "ledger.json").write_text(json.dumps(LEDGER))
    page = write_report(run).read_text()
    assert "<h2>Memory of a training step</h2>" in page and "no formula &lt;i&gt;" in page
    assert '<td>peak</td><td class="number">10.000</td><td class="number">12.346</td>' in page
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    titles = re.findall(r'aria-label="([^"]*)"', page)
    assert titles[-2:] == ["Memory at the peak, tracked", "Memory over a step, tracked"]
    pie, timeline = page.split("<svg")[-2:]
    assert [kind for kind in KINDS if re.search(rf">{kind} \d+\.0%<", pie)] == list(KINDS)
    assert ">optimizer 30.0%<" in pie
    assert "> forward<" in timeline and "> backward<" in timeline


SAYING_NOTHING = [
    "", "[1]", "{", "{}", '{"tracked": 3, "samples": 4, "missing": [], "peak_at": null}',
    '{"tracked": {"model": "x", "total": NaN}, "samples": [1, {"model": 2}]}',
    '{"measured": {"model": 0, "forward": 0}}',
]  # fmt: skip


@pytest.mark.push
def test_a_ledger_that_says_nothing_has_no_picture(tmp_path: Path) -> None:
    run = make_run(tmp_path, [3.0, 2.0])
    before = write_report(run).read_text().count("<svg")
    for text in SAYING_NOTHING:
        (run / "ledger.json").write_text(text)
        assert write_report(run).read_text().count("<svg") == before, text


@pytest.mark.push
def test_ledgers_of_the_tool_are_understood(tmp_path: Path) -> None:
    config = Path(__file__).resolve().parents[2] / "configs" / "wrn28_2_cifar10.yaml"
    arguments = [str(config), "--task", "vision", "--accounting", "paper", "--out", str(tmp_path)]
    assert profile_memory.main(arguments) == 0
    paper = json.loads((tmp_path / "ledger.json").read_text())
    heading, *rows = memory_table(paper)
    assert heading == ("MB", "paper")
    assert rows[-2:] == [("peak", f"{paper['total'] / 1e6:,.3f}"), ("peak at", paper["peak_at"])]
    (pie,) = memory_charts(paper)
    assert isinstance(pie, PieChart) and sum(pie.shares.values()) == paper["total"]

    tiny = "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data "
    tiny += "--vocab-size 101 --micro-batch-size 2 --train-iters 5 --lr 1e-3 --no-measured"
    assert profile_memory.main([*tiny.split(), "--out", str(tmp_path)]) == 0
    actual = json.loads((tmp_path / "ledger.json").read_text())
    heading, *table = memory_table(actual)
    assert heading == ("MB", "planned", "tracked")
    assert [row[0] for row in table][:7] == [
        "model", "optimizer", "stored by a microbatch", "forward, at the peak",
        "backward, at the peak", "other, at the peak", "peak",
    ]  # fmt: skip
    pie = memory_charts(actual)[0]
    assert isinstance(pie, PieChart) and pie.title == "Memory at the peak, tracked"
