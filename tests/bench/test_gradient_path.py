"""The arithmetic behind the gradient-path tables, and that the tool runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from tests.bench.path_results import DENSE_BYTES, SIZES, SLOW, SPARSE_BYTES, result
from tools.bench.common.alpha_beta import (
    AlphaBetaLink,
    AlphaBetaMessage,
    AlphaBetaTimeline,
    fit,
    greedy_buckets,
    predict,
)
from tools.bench.common.methods import DEFAULT, SAMO, WIRE, method
from tools.bench.common.netlab import InterfaceCounters, Network
from tools.bench.common.phases import CPU_TIME, KEEP, PLACE, REDUCE
from tools.bench.gradient_path import run as gradient_path
from tools.bench.gradient_path.cost import DENSE, SPARSE, radius_targets
from tools.bench.gradient_path.cost_rank import RESAMPLE, STEP
from tools.bench.gradient_path.messages import counted_share, messages, sent_share
from tools.bench.gradient_path.report import as_markdown, memory_as_markdown, plot, read, write
from tools.bench.gradient_path.rows import GradientPathTable, table
from tools.bench.gradient_path.targets import targets

pytestmark = pytest.mark.push


def test_ring_collectives_cost_what_equations_3_and_4_say() -> None:
    link = AlphaBetaLink(alpha=0.5, beta=2.0, ranks=4)
    assert link.all_reduce(8.0) == 2 * 0.5 * 3 + 2 * 8.0 * 2.0 * 3 / 4
    together = 4 * 8.0  # D of Eq. 4
    assert link.all_gather(8.0) == 0.5 * 4 + together * 2.0 * 3 / 4
    # Two ranks exchange as many bytes either way.
    assert SLOW.all_reduce(1e6) == pytest.approx(SLOW.all_gather(1e6))


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_fit_finds_the_link_again(ranks: int) -> None:
    link = AlphaBetaLink(alpha=3e-4, beta=1.1e-8, ranks=ranks)
    sizes = (500_000, 8_000_000)
    small, large = ((size, link.all_reduce(size)) for size in sizes)
    found = fit(ranks, small=small, large=large)
    assert found.alpha == pytest.approx(link.alpha) and found.beta == pytest.approx(link.beta)


def test_fit_takes_no_latency_below_zero() -> None:
    assert fit(2, small=(100, 0.001), large=(1000, 0.1)).alpha == 0.0


def test_only_what_backward_does_not_hide_makes_a_step_longer() -> None:
    timeline = AlphaBetaTimeline(ready={"b": 2.0, "a": 3.0}, backward=3.0, step=3.5)
    hidden = [AlphaBetaMessage(seconds=0.5, names=["b"])]
    assert predict(timeline, []) == predict(timeline, hidden) == 3.5
    assert predict(timeline, hidden, overlap=False) == 4.0
    # b is under way until 4, then a until 5: two seconds after backward.
    both = [AlphaBetaMessage(seconds=2.0, names=["b"]), AlphaBetaMessage(seconds=1.0, names=["a"])]
    assert predict(timeline, both) == 5.5
    assert predict(timeline, both, overlap=False) == 6.5
    # One that needs both waits for the later, one that names none for the end of backward.
    assert predict(timeline, [AlphaBetaMessage(seconds=1.0, names=["b", "a"])]) == 4.5
    assert predict(timeline, [AlphaBetaMessage(seconds=1.0)]) == 4.5


def test_emulated_dense_step_is_predicted_as_the_protocol_did() -> None:
    """perf.md, A1: 8 buckets of 5.73 MB over 300 ms of backward at 95 MB/s: 681 ms with overlap,
    944 without; the sparse step at d = 0.4 494 ms."""
    ready = {str(i): 0.150 + 0.0375 * (i + 1) for i in range(8)}
    timeline = AlphaBetaTimeline(ready=ready, backward=0.450, step=0.4625)
    link = AlphaBetaLink(alpha=0.0, beta=1 / 95e6, ranks=2)

    def step(density: float, *, overlap: bool = True) -> float:
        seconds = link.all_reduce(density * 4 * 11.47e6 / 8)
        sent = [AlphaBetaMessage(seconds=seconds, names=[name]) for name in ready]
        return predict(timeline, sent, overlap=overlap)

    assert step(1.0) == pytest.approx(0.681, rel=0.02)
    assert step(1.0, overlap=False) == pytest.approx(0.944, rel=0.02)
    assert step(0.4) == pytest.approx(0.494, rel=0.02)


def test_ddp_buckets_close_when_they_reach_their_cap() -> None:
    sizes = [("a", 2), ("b", 1), ("c", 1), ("d", 5), ("e", 1)]
    assert greedy_buckets(sizes, caps=[1, 4]) == [("a",), ("b", "c", "d"), ("e",)]
    assert greedy_buckets(sizes, caps=[100]) == [("a", "b", "c", "d", "e")]
    assert greedy_buckets([], caps=[1]) == []


def _seconds(name: str) -> list[float]:
    kind = method(name, interval=10)
    return [message.seconds for message in messages(kind, SIZES, SLOW, interval=10)]


def test_messages_are_the_bytes_each_method_sends() -> None:
    matrix, vector = 4 * 250_000, 4 * 500
    vote = SLOW.all_reduce(32)
    whole = [SLOW.all_reduce(size) for size in (matrix, vector, matrix)]
    assert _seconds("compute") == []
    assert _seconds("dense") == [*whole, vote]
    some = SLOW.all_reduce(0.4 * matrix)
    assert _seconds("radius-0.4") == pytest.approx([some, whole[1], some, vote])
    rolling = SLOW.all_reduce((0.4 + 0.6 / 10) * matrix)
    assert _seconds("radius-0.4-rolling")[0] == pytest.approx(rolling)
    pairs = SLOW.all_gather(0.01 * 2 * matrix)  # a position beside each value
    assert _seconds("topk-0.01") == pytest.approx([pairs, whole[1], pairs, vote])
    p, q = [1000, 500], [250, 500]
    first, second = ([SLOW.all_reduce(4 * 4 * n) for n in sides] for sides in (p, q))
    wanted = [first[0], whole[1], first[1], vote, *second]
    assert _seconds("powersgd-4") == pytest.approx(wanted)
    assert _seconds("lowrank-4+sparse-0.01") == pytest.approx([*wanted, pairs, pairs])
    eighth = SLOW.all_reduce(matrix / 8)
    assert _seconds("roundrobin-8") == pytest.approx([eighth, whole[1], eighth, vote])
    # 64 chunks of at most 64 x 64 in both matrices, fp32 values and 16-bit positions.
    chunks = SLOW.all_gather(64 * 32 * (4 + 2))
    assert _seconds("demo-32") == pytest.approx([chunks, whole[1], chunks, vote])
    hook = [SLOW.all_reduce(n) for n in (vector, 4 * 4 * 1500, 4 * 4 * 750)]
    assert _seconds("ddp-powersgd-4") == pytest.approx(hook)
    assert _seconds("ddp-4mb") == [SLOW.all_reduce(2 * matrix + vector)]
    # DDP's first bucket is closed by a MiB: the first two parameters to arrive leave room.
    assert _seconds("ddp-fp16") == pytest.approx([SLOW.all_reduce(matrix + vector / 2)])


@pytest.mark.parametrize("ranks", [2, 4])
def test_share_of_a_sparse_step_is_told_from_its_bytes(ranks: int) -> None:
    kind = method("radius-0.4")
    wanted = sent_share(kind, SIZES, interval=4)
    assert wanted == 0.4
    ring = 2 * (ranks - 1) / ranks
    sent = ring * 4 * (wanted * 500_000 + 512)  # 500, aligned
    assert counted_share(SIZES, ranks, sent) == pytest.approx(wanted)


@pytest.mark.parametrize("name", [*DEFAULT, *SAMO, *WIRE])
def test_every_row_has_a_method(name: str) -> None:
    assert method(name).name == name


def test_variants_become_flags() -> None:
    flags = method("radius-0.1-rolling-seeded-no-overlap", interval=7).flags
    assert flags == (
        *("--grad-path", "radius", "--radius-density", "0.1", "--radius-start-iter", "1"),
        *("--radius-interval", "7", "--radius-schedule", "rolling"),
        *("--radius-select", "seeded", "--overlap-grad-reduce", "false"),
    )
    both = ("--lowrank-rank", "4", "--lowrank-density", "0.01")
    assert method("lowrank-4+sparse-0.01").flags == ("--grad-path", "lowrank+sparse", *both)
    turns = ("--grad-path", "roundrobin", "--roundrobin-interval", "8")
    assert method("roundrobin-8").flags == turns
    mean = ("--grad-path", "demo", "--demo-k", "32", "--demo-sign", "false")
    assert method("demo-32").flags == mean
    assert not method("dense-no-overlap").overlap
    assert method("radius-0.4-wire-bf16").flags[-2:] == ("--grad-wire", "bf16")
    widths = {"": 4, "-bf16": 2, "-wire-bf16": 2, "-wire-int8": 1 + 2 / 128, "-wire-int4": 66 / 128}
    assert {end: method(f"dense{end}").entry_bytes for end in widths} == widths


@pytest.mark.parametrize("name", ["radius", "radius-", "ddp", "ddp-powersgd", "dens", "topk-x"])
def test_unknown_methods_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--methods {name}: no such method"):
        method(name)


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("dense-rolling", "radius and samo.radius"),
        ("samo-0.9-rolling", "radius and samo.radius"),
        ("topk-0.1-bf16", "compute and dense and radius"),
        ("dense-fp32", "samo and samo.radius"),
        ("topk-0.1-wire-int8", "dense and radius and samo and samo.radius"),
    ],
)
def test_variants_go_with_their_paths_alone(name: str, others: str) -> None:
    with pytest.raises(ConfigError, match=f"goes with {others} alone"):
        method(name)


@pytest.mark.parametrize("name", ["radius-7", "nonsense"])
def test_what_the_trainer_refuses_is_refused_at_once(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gradient_path.main(["--methods", name, "--rates", "none"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("flag", ["--rounds", "--worlds", "--interval"])
def test_numbers_too_small_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert gradient_path.main([flag, "1", "--rates", "none"]) == 2
    assert f"{flag} 1: must be at least 2" in capsys.readouterr().err


def _table(
    *, sparse: float = 0.32, sent: float = SPARSE_BYTES, topk: float = 0.5
) -> GradientPathTable:
    steps = {
        "compute": [(0.30, 0.0, 1.0)] * 4,
        "dense": [(seconds, DENSE_BYTES, 1.0) for seconds in (0.50, 0.55, 0.50, 0.50)],
        "radius-0.4": [
            (sparse, sent, 0.4),
            (0.9, DENSE_BYTES, 1.0),
            (sparse + 0.01, sent, 0.4),
            (sparse - 0.01, sent, 0.4),
        ],
        "topk-0.1": [(topk, 1e6, 0.1)] * 4,
    }
    return table(result("emulated", steps), Network(ranks=2, rate="800mbit"))


def test_rows_keep_resamples_apart() -> None:
    row = _table()["radius-0.4"]
    assert (row.median, row.least, row.resample) == (0.32, pytest.approx(0.31), 0.9)
    assert row.spread == pytest.approx((199 * 0.32 + 0.9) / 200)
    assert row.bytes_sent == SPARSE_BYTES and row.counted == pytest.approx(1.01 * SPARSE_BYTES)
    # The last bucket's 400 kB are all that is sent after backward.
    late = SLOW.all_reduce(0.4 * 1e6) + SLOW.all_reduce(32)
    assert row.predicted == pytest.approx(0.30 + late, abs=5e-3)
    assert _table()["dense"].resample is None


def test_ratios_are_of_steps_of_the_same_round() -> None:
    steps = {
        "compute": [(0.1, 0.0, 1.0)] * 3,
        "dense": [(0.2, 1.0, 1.0), (2.0, 1.0, 1.0), (9.0, 1.0, 1.0)],  # the machine gets busy
        "radius-0.4": [(0.1, 1.0, 0.4), (1.0, 1.0, 0.4), (0.1, 1.0, 1.0)],
    }
    found = table(result("real", steps), Network(ranks=2))
    assert found.ratio("radius-0.4", "dense") == 0.5


def test_targets_are_met_and_missed() -> None:
    good = {target.text: target.met for target in targets([_table()])}
    assert len(good) == 5 and all(good.values())
    bad = targets([_table(sparse=0.45, sent=1.02 * SPARSE_BYTES, topk=0.4)])
    missed = [str(target) for target in bad if not target.met]
    assert [text.count("MISSED") for text in missed] == [1] * 4
    for text, said in zip(
        missed,
        [
            "radius-0.4 / dense 0.900",
            "sends 0.4",
            "off its prediction",
            "radius-0.4 / topk-0.1",
        ],
        strict=True,
    ):
        assert said in text


@pytest.mark.parametrize(
    ("rate", "limits"), [("800mbit", [True]), ("200mbit", [False]), ("1gbit", [])]
)
def test_radius_is_held_against_dense_of_its_width(rate: str, limits: list[bool]) -> None:
    steps = {
        "compute": [(0.30, 0.0, 1.0)] * 3,
        "compute-bf16": [(0.20, 0.0, 1.0)] * 3,
        "dense": [(0.90, DENSE_BYTES, 1.0)] * 3,
        "dense-bf16": [(0.50, DENSE_BYTES / 2, 1.0)] * 3,
        "radius-0.4-bf16": [(0.40, SPARSE_BYTES / 2, 0.4)] * 3,
    }
    found = table(result("emulated", steps), Network(ranks=4, rate=rate))
    assert [t.met for t in targets([found]) if "radius-0.4-bf16 / dense-bf16 0.800" in t.text] == (
        limits
    )
    lines = as_markdown(found).splitlines()
    assert any(
        line.startswith("| method | step, ms | least | / dense | / dense-bf16 |") for line in lines
    )
    assert any(line.startswith("| dense | 900.0 | 900.0 | 1.00 | 1.80 |") for line in lines)
    assert "/ dense-bf16" not in as_markdown(_table())


def test_topk_is_met_at_equal_density_and_on_every_network() -> None:
    def against(slow: float) -> dict[str, bool]:
        tables = [
            table(
                result(
                    "real",
                    {
                        "compute": [(0.1, 0.0, 1.0)] * 3,
                        "radius-0.01": [(step, 1.0, 0.01)] * 3,
                        "topk-0.01": [(0.5, 2.0, 0.01)] * 3,
                    },
                ),
                Network(ranks=2, rate=rate),
            )
            for rate, step in (("1gbit", 0.2), ("200mbit", slow))
        ]
        return {t.text: t.met for t in targets(tables) if "topk" in t.text}

    (met,) = against(slow=0.4).items()
    assert "radius-0.01 / topk-0.01, at worst" in met[0] and "200mbit) 0.800" in met[0] and met[1]
    assert list(against(slow=0.6).values()) == [False]


def test_tables_and_plot_show_what_was_found(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    text = as_markdown(_table())
    assert "### emulated computing, 2 ranks, 800mbit" in text
    assert "alpha 1.00 ms, 1 / beta 100.0 MB/s" in text
    (line,) = (line for line in text.splitlines() if line.startswith("| radius-0.4 "))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1:4] == ["320.0", "310.0", "0.64"] and cells[-2:] == ["900.0", "322.9"]
    plot(tmp_path / "plot.png", [_table()])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    shown = memory_as_markdown({"parameters": 1e6, "dense": 16e6})
    assert "| dense | 16.0 | 16.00 |" in shown


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tables, memory, facts = [_table()], {"parameters": 1e6, "dense": 16e6}, {"cores": 2}
    write(tmp_path, tables, memory, facts)
    again = read(tmp_path)
    written = (tmp_path / "README.md").read_text(encoding="utf-8")
    write(tmp_path, *again)
    assert again[1:] == (memory, facts) and written.count("###") == 3
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == written
    with pytest.raises(ConfigError, match=r"other/results\.json: no such file"):
        read(tmp_path / "other")


def test_again_measures_what_the_report_s_other_tables_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    write(tmp_path, [_table()], None, {"cores": 2})
    flags = ["--rates", "none", "--again", str(tmp_path)]
    for methods in (["dense"], [*_table().turns, "topk-0.01"]):
        assert gradient_path.main([*flags, "--methods", *methods]) == 2
        assert "--again: the report has other methods" in capsys.readouterr().err
    assert gradient_path.main([*flags, "--smoke", "--methods", *_table().turns]) == 2
    assert "--again with --smoke" in capsys.readouterr().err


def test_packets_headers_are_no_payload() -> None:
    assert (
        InterfaceCounters(bytes=5000, packets=12).payload_since(
            InterfaceCounters(bytes=1000, packets=2)
        )
        == 3340
    )


def test_cost_is_judged_by_dense_steps() -> None:
    found = {
        DENSE: {STEP: 2.0, REDUCE: 0.01, PLACE: 0.03, KEEP: 0.0, CPU_TIME: 0.2},
        SPARSE: {STEP: 1.9, REDUCE: 0.04, PLACE: 0.05, KEEP: 0.02, CPU_TIME: 0.23},
        RESAMPLE: {STEP: 3.9, REDUCE: 0.1, PLACE: 0.1, KEEP: 1.0, CPU_TIME: 1.2},
    }
    assert [target.met for target in radius_targets(found, "bf16")] == [True, True, True]
    own, whole, resample = radius_targets(found, "fp32")
    assert not own.met and "(0.0550 in all; " in own.text and "one's 0.0150) 0.0350" in own.text
    assert whole.met and "0.9500" in whole.text
    assert resample.met and "0.0050" in resample.text


@pytest.mark.full
def test_the_tool_measures_prints_and_writes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    names = ["dense", "radius-0.4", "ddp-fp16"]
    flags = ["--smoke", "--rates", "none", "--worlds", "2", "--rounds", "3", "--methods", *names]
    assert gradient_path.main([*flags, "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "results.json").read_text())
    assert [t["protocol"] for t in report["tables"]] == ["emulated", "real"]
    for found in report["tables"]:
        rows = {row["method"]: row for row in found["rows"]}
        assert list(rows) == ["compute", *names]
        assert rows["compute"]["bytes_sent"] == 0 < rows["radius-0.4"]["bytes_sent"]
        assert rows["radius-0.4"]["bytes_sent"] < rows["dense"]["bytes_sent"]
        assert rows["radius-0.4"]["resample"] is not None
        counted, wanted = found["shares"]["radius-0.4"]
        assert counted == pytest.approx(wanted, rel=0.01)
    assert report["memory"]["dense"] > 0
    assert "### Targets" in (tmp_path / "README.md").read_text()
    assert (tmp_path / "figure.png").is_file()
    assert "real computing, 2 ranks, no limit" in capfd.readouterr().out


@pytest.mark.full
def test_the_cost_of_a_sparse_step_is_measured(tmp_path: Path) -> None:
    flags = ["--cost", "--smoke", "--dtype", "bf16", "--rounds", "3", "--out", str(tmp_path)]
    assert gradient_path.main(flags) == 0
    found = json.loads((tmp_path / "cost.json").read_text())["bf16"]["seconds"]
    for phase in (REDUCE, PLACE, KEEP, CPU_TIME):
        assert 0 < found[SPARSE][phase] < found[SPARSE][STEP]
    phases = [found[SPARSE][phase] for phase in found[SPARSE] if phase not in (STEP, CPU_TIME)]
    assert sum(phases) == pytest.approx(found[SPARSE][STEP], rel=0.5)
