"""The rows of a pruned network in the gradient-path tables, and that its benchmarks run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.path_results import (
    DENSE_BYTES,
    SAMO_BYTES,
    SAMO_RADIUS_BYTES,
    SLOW,
    result,
)
from tools.bench.common.methods import method, with_computing
from tools.bench.common.netlab import Network
from tools.bench.common.phases import GATHER, SCATTER
from tools.bench.gradient_path import run as gradient_path
from tools.bench.gradient_path.cost import samo_targets
from tools.bench.gradient_path.cost_rank import STEP
from tools.bench.gradient_path.report import as_markdown
from tools.bench.gradient_path.rows import GradientPathTable, table
from tools.bench.gradient_path.targets import targets
from tools.bench.samo_memory import run as samo_memory

pytestmark = pytest.mark.push


def test_pruned_rows_are_in_16_bit_unless_they_say_so() -> None:
    samo = method("samo-0.9+radius-0.4", interval=7)
    assert samo.flags == (
        *("--grad-path", "samo+radius", "--samo-sparsity", "0.9", "--samo-pruning", "random"),
        *("--bf16", "--grad-reduce-in-bf16", "--radius-density", "0.4"),
        *("--radius-start-iter", "1", "--radius-interval", "7"),
    )
    assert (samo.dtype, samo.entry_bytes, samo.resamples) == ("bfloat16", 2, True)
    plain = method("samo-0.9-fp32")
    assert (plain.dtype, plain.entry_bytes, plain.resamples) == ("float32", 4, False)
    assert plain.flags == samo.flags[:1] + ("samo",) + samo.flags[2:6]
    # What computes in 16 bit is predicted from what computes in 16 bit.
    assert with_computing(["dense", "samo-0.9"])[:3] == ["compute", "compute-bf16", "dense"]
    assert with_computing(["dense", "samo-0.9-fp32"])[:2] == ["compute", "dense"]


def _samo_table(*, samo: float = 0.35, sent: float = SAMO_BYTES) -> GradientPathTable:
    steps = {
        "compute": [(0.30, 0.0, 1.0)] * 3,
        "compute-bf16": [(0.20, 0.0, 1.0)] * 3,
        "dense": [(0.60, DENSE_BYTES, 1.0)] * 3,
        "samo-0.9": [(samo, sent, 1.0)] * 3,
        "samo-0.9+radius-0.4": [(0.33, SAMO_RADIUS_BYTES, 0.4)] * 3,
        "ddp-4mb": [(0.50, float("nan"), 1.0)] * 3,
        "ddp-25mb": [(0.55, float("nan"), 1.0)] * 3,
    }
    return table(result("emulated", steps), Network(ranks=2, rate="800mbit"))


def test_a_pruned_network_is_judged_by_the_best_ddp_and_by_f() -> None:
    good = _samo_table()
    share = 75_500 / 500_500
    assert good.stored["samo-0.9"] == share
    # All but the first bucket is sent after a backward in 16 bit.
    late = sum(map(SLOW.all_reduce, (2 * 500, 2 * 25_000, 32)))
    assert good["samo-0.9"].predicted == pytest.approx(0.20 + late)
    found = targets([good])
    assert [target.met for target in found] == [True] * 4
    assert "samo-0.9 / ddp-4mb 0.700 (at most 0.72)" in found[0].text
    assert "samo-0.9+radius-0.4 sends 0.0600 of dense matrices, off 0.0600" in found[1].text
    assert "samo-0.9 sends 0.1509 of dense's bytes at equal width" in found[3].text
    assert f"f, stored entries over all: samo-0.9 {share:.4f}" in as_markdown(good)
    missed = [t.met for t in targets([_samo_table(samo=0.37, sent=1.02 * SAMO_BYTES)])]
    assert missed == [False, True, True, False]


def test_cost_of_a_pruned_step_is_told_beside_the_copy_it_replaces() -> None:
    found = {
        "dense": {STEP: 2.0, GATHER: 0.05, SCATTER: 0.0},
        "samo-0.9-fp32": {STEP: 1.9, GATHER: 0.02, SCATTER: 0.01},
    }
    told = samo_targets(found, "fp32")
    assert [target.met for target in told] == [True, True]
    texts = [target.text for target in told]
    assert "(0.0150 in all) -0.0100" in texts[0] and "0.9500" in texts[1]
    found["samo-0.9-fp32"] = {STEP: 2.1, GATHER: 0.1, SCATTER: 0.01}
    assert [target.met for target in samo_targets(found, "fp32")] == [False] * 2


@pytest.mark.full
def test_pruned_rows_are_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    names = ["dense", "samo-0.9", "samo-0.9+radius-0.4-fp32"]
    flags = ["--set", "samo", "--smoke", "--no-memory", "--rates", "none", "--worlds", "2"]
    flags += ["--rounds", "3", "--out", str(tmp_path), "--methods", *names]
    assert gradient_path.main(flags) == 0
    report = json.loads((tmp_path / "results.json").read_text())
    assert (tmp_path / "figure.png").is_file()
    for found in report["tables"]:
        rows = {row["method"]: row for row in found["rows"]}
        assert list(rows) == ["compute", "compute-bf16", *names]
        assert 0.1 < found["stored"]["samo-0.9"] < 0.15
        # A tiny model's slices are mostly gaps.
        assert rows["samo-0.9"]["bytes_sent"] < 0.2 * rows["dense"]["bytes_sent"] / 2
        assert rows[names[2]]["resample"] is not None
        counted, wanted = found["shares"][names[2]]
        assert counted == pytest.approx(wanted, rel=0.01)
        assert wanted == pytest.approx(0.04, rel=0.02)


@pytest.mark.full
def test_the_cost_of_a_pruned_step_is_measured(tmp_path: Path) -> None:
    flags = ["--set", "samo", "--cost", "--smoke", "--rounds", "2", "--out", str(tmp_path)]
    assert gradient_path.main(flags) == 0
    report = json.loads((tmp_path / "cost.json").read_text())
    assert list(report["bf16"]["seconds"]) == ["samo-0.9", "dense-bf16", "samo-0.9-fp32", "dense"]
    for dtype, targets_of_dtype in (("bf16", 4), ("fp32", 2)):
        assert len(report[dtype]["targets"]) == targets_of_dtype
        found = report[dtype]["seconds"]["samo-0.9-fp32"]
        assert 0 < found[GATHER] < found[STEP] and 0 < found[SCATTER] < found[STEP]


@pytest.mark.full
def test_model_state_and_peaks_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert samo_memory.main(["--smoke", "--rss", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "results.json").read_text())
    rows = {(row["sparsity"], row["grad_bytes"]): row for row in report["rows"]}
    assert len(rows) == 14
    assert {row["gradients"] for row in rows.values()} == {1}
    for grad_bytes in (2, 4):
        assert rows["0", grad_bytes]["state"] == rows["dense", grad_bytes]["state"]
        kinds = [
            rows[p, grad_bytes]["state"]["bytes"] for p in ("0.25", "0.5", "0.8", "0.9", "0.95")
        ]
        for kind in ("gradients", "master", "moments", "index"):
            sizes = [of_row[kind] for of_row in kinds]
            assert sizes == sorted(sizes, reverse=True)
    assert [(row["network"], row["method"]) for row in report["images"]] == [
        (network, row)
        for network in ("VGG-19", "WideResnet-101")
        for row in ("dense-bf16", "samo-0.9")
    ]
    assert len(report["peaks"]) == 4 and all(peak > 0 for peak in report["peaks"].values())
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "Peak resident memory" in shown and "20 f + 2" in shown
