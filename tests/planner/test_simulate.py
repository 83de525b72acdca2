"""Tests of the simulation: known answers, and the runs of the papers."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.pipeline.schedule import Kind, Operation
from tests.planner.grids import planned
from tests.test_repo import SITES
from tools.planner import course
from tools.planner.course import Links, Setting, course_of, jittered, with_links
from tools.planner.replay import axonn, network, page, radius, samo, samo_images
from tools.planner.replay.machines import Machine
from tools.planner.replay.rows import FITTED, PREDICTED, ReplayRow, ReplayTable
from tools.planner.seconds import PassSeconds, step_seconds
from tools.planner.simulation import SimulatedStep, mean_seconds, simulate
from tools.planner.site import Link, read_site
from tools.simulate import main

pytestmark = pytest.mark.push

FREE = Link(0.0, 1e30)
MODEL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --mock-data "
    "--vocab-size 500 --micro-batch-size 1 --train-iters 100 --lr 1e-3 --bf16"
)
DRIVEN = "--pipeline-schedule message-driven"
SITE = read_site(SITES[0].parent, "perlmutter")


def setting_of(flags: str, world: int) -> Setting:
    grid = planned(f"{MODEL} {flags}", world, vocabulary=500)
    return Setting.of(grid, SITE, [grid.rank(stage) for stage in range(grid.dims.pp)])


def pipeline(
    stages: int,
    microbatches: int,
    more: str = "",
    *,
    copies: int = 1,
    whole: PassSeconds | None = None,
    links: Links | None = None,
) -> SimulatedStep:
    """Simulate a pipeline of `stages` stages that share a model's passes evenly."""
    whole = whole or PassSeconds(1.0, 2.0, 0.0)
    batch = f"--global-batch-size {microbatches * copies} --micro-batch-size 1 "
    setting = setting_of(f"{batch} --pipeline-model-parallel-size {stages} {more}", stages * copies)
    each = PassSeconds(whole.forward / stages, whole.backward / stages, 0.0)
    passes = Setting(
        setting.grid,
        setting.site,
        setting.ranks,
        [each] * stages,
        links or Links(FREE, FREE),
    )
    return simulate(passes)[0]


def over(step: SimulatedStep) -> float:
    """Return the time at which all stages have finished backward."""
    return step.phases.compute + step.phases.messages + step.phases.bubble


# ---- one and the same cost model ----------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(
    path=st.sampled_from(
        [
            "--grad-path dense",
            "--grad-path radius --radius-density 0.3 --radius-interval 5 --radius-start-iter 20",
            "--grad-path samo --samo-sparsity 0.8",
            "--grad-path powersgd",
            "--grad-path topk",
            "--grad-path lowrank+sparse",
            "--grad-path roundrobin",
            "--grad-path demo --optimizer sgd --sgd-momentum 0 --clip-grad 0",
            "--use-distributed-optimizer",
            "--use-distributed-optimizer --overlap-param-gather",
            "--optimizer-cpu-offload --offload-bucket-size 2048 --clip-grad 0",
            "--optimizer-cpu-offload --offload-bucket-size 512 --clip-grad 0 --optimizer sgd",
            "--optimizer-cpu-offload --offload-bucket-size 2048 --clip-grad 1 --grad-path samo",
        ]
    ),
    overlap=st.booleans(),
    cap=st.sampled_from([2000, 20000, 10**6]),
    ranks=st.sampled_from([1, 2, 8]),
    microbatches=st.integers(1, 5),
)
def test_one_stage_takes_what_the_planner_says(
    path: str, overlap: bool, cap: int, ranks: int, microbatches: int
) -> None:
    # With offloaded states, k x bsize is the size of a bucket.
    cut = "" if "offload" in path else f"--ddp-bucket-size {cap}"
    flags = (
        f"{path} --overlap-grad-reduce {str(overlap).lower()} {cut} "
        f"--global-batch-size {microbatches * ranks}"
    )
    setting = setting_of(flags, ranks)
    planner = step_seconds(setting.grid, SITE, setting.ranks)
    steps = simulate(setting)
    assert mean_seconds(steps) == pytest.approx(planner.total, rel=1e-9)
    for step in steps:
        assert step.phases.compute == pytest.approx(planner.compute)
        assert step.phases.optimizer == pytest.approx(planner.optimizer)


@pytest.mark.parametrize("more", ["", DRIVEN, "--num-layers-per-virtual-pipeline-stage 1"])
def test_a_pipeline_is_never_slower_than_the_planner_says(more: str) -> None:
    """The stages reduce as they finish; the planner waits for all of them first."""
    setting = setting_of(f"--pipeline-model-parallel-size 4 --global-batch-size 64 {more}", 16)
    planner = step_seconds(setting.grid, SITE, setting.ranks)
    (step,) = simulate(setting)
    assert step.phases.compute + step.phases.bubble == pytest.approx(
        planner.compute + planner.bubble, rel=1e-6
    )
    assert over(step) < step.length <= planner.total + 1e-12


def test_what_is_left_out_of_a_long_pipeline_is_what_was_played(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocking messages make message-driven stages change their order for some rounds."""
    links = Links(FREE, Link(2e-5, 3e8), blocking=True)
    flags = f"--pipeline-model-parallel-size 4 --global-batch-size 203 {DRIVEN}"
    setting = with_links(setting_of(flags, 4), links)
    short = course_of(setting, setting.lasts[0])
    monkeypatch.setattr(course, "ROUNDS", 10**6)
    full = course_of(setting, setting.lasts[0])
    assert short.skipped > 0 and full.skipped == 0
    length = float(short.timeline.length) + short.skipped
    assert length == pytest.approx(float(full.timeline.length), rel=1e-12)


# ---- bubbles ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("microbatches", [8, 16, 56])
@pytest.mark.parametrize("more", ["", DRIVEN])
def test_bubble_of_narayanan_and_of_samo(stages: int, microbatches: int, more: str) -> None:
    """The bubble is (p - 1) / m of the passes; in SAMO, (t_f + t_b) (1 - 1 / G_inter), Eq. 6, 7."""
    found = pipeline(stages, microbatches, more).phases
    assert found.bubble == pytest.approx((stages - 1) / microbatches * found.compute)
    assert found.bubble == pytest.approx(3.0 * (1 - 1 / stages))


@pytest.mark.parametrize("chunks", [2, 4])
def test_chunks_divide_the_bubble(chunks: int) -> None:
    size = 8 // 2 // chunks
    found = pipeline(2, 8, f"--num-layers-per-virtual-pipeline-stage {size}").phases
    assert found.bubble == pytest.approx(found.compute / (chunks * 8))


@settings(max_examples=8, deadline=None)
@given(stages=st.sampled_from([2, 4]), forward=st.floats(0.1, 3), backward=st.floats(0.1, 5))
def test_bubble_grows_with_the_stages(stages: int, forward: float, backward: float) -> None:
    """SAMO, Eq. 8: the derivative (t_f + t_b) / G_inter^2 is positive, and falls.

    This holds for 1F1B; message-driven stages take backward first and wait longer where forward
    takes longer.
    """
    whole = PassSeconds(forward, backward, 0.0)
    sizes = (stages // 2, stages, 2 * stages)
    one, two, four = (pipeline(p, 16, whole=whole).phases for p in sizes)
    assert two.bubble - one.bubble == pytest.approx(whole.total / stages)
    assert 0 < four.bubble - two.bubble < two.bubble - one.bubble + 1e-9


# ---- communication of a pipeline ----------------------------------------------------------------


@settings(max_examples=5, deadline=None)
@given(gpus=st.sampled_from([16, 32]), seconds=st.floats(1e-4, 0.05))
def test_messages_of_a_gpu_grow_with_the_stages(gpus: int, seconds: float) -> None:
    """Lemmas 5.1 and 5.2 and theorem 5.3 of AxoNN; Eq. 9 to 11 of SAMO: with the same batch and
    GPUs, messages of an inner stage take 4 B / mbs G_inter / G times as long as one, computing
    does not change, and their ratio goes as 1 / G_inter."""
    links, batch = Links(FREE, Link(seconds, 1e30), blocking=True), 64
    found = {
        stages: pipeline(stages, batch * stages // gpus, copies=gpus // stages, links=links).phases
        for stages in (4, 8)
    }
    for stages, phases in found.items():
        assert phases.messages == pytest.approx(4 * batch * stages / gpus * seconds, rel=1e-6)
        assert phases.compute == pytest.approx(3.0 * batch / gpus)
    ratio = {stages: phases.compute / phases.messages for stages, phases in found.items()}
    assert ratio[4] / ratio[8] == pytest.approx(2.0, rel=1e-6)


def test_ends_of_a_pipeline_send_half() -> None:
    links = Links(FREE, Link(0.01, 1e30), blocking=True)
    assert pipeline(2, 8, links=links).phases.messages == pytest.approx(8 * 2 * 0.01, rel=1e-6)


def test_messages_that_do_not_block_are_hidden_where_the_schedule_is_full() -> None:
    hidden, kept = (
        pipeline(4, 64, DRIVEN, links=Links(FREE, Link(0.01, 1e30), blocking=blocking))
        for blocking in (False, True)
    )
    assert hidden.phases.messages == 0 and over(hidden) < over(kept)


# ---- collectives and optimizer ------------------------------------------------------------------


def test_collectives_of_a_network_do_not_overlap_each_other() -> None:
    flags = "--pipeline-model-parallel-size 2 --global-batch-size 16 --ddp-bucket-size 3000"
    (step,) = simulate(setting_of(flags, 8))
    for stage in range(2):
        lane = [e for e in step.events if e.stage == stage and e.lane == "reduce"]
        assert len(lane) > 2
        assert all(a.stop <= b.start + 1e-15 for a, b in zip(lane, lane[1:], strict=False))
        first_update = min(e.start for e in step.events if e.lane == "optimizer")
        assert max(e.stop for e in lane) <= first_update


def test_an_offloaded_optimizer_without_clipping_follows_the_buckets() -> None:
    """AxoNN, V-C; the other paths need the norm first."""
    flags = (
        "--global-batch-size 8 --optimizer-cpu-offload --offload-bucket-size 2048 "
        "--overlap-grad-reduce false --clip-grad"
    )
    follows, waits = (simulate(setting_of(f"{flags} {clip}", 8))[0] for clip in (0, 1))
    assert follows.length < waits.length
    assert follows.phases.reduce == pytest.approx(waits.phases.reduce)
    looks, sums, updates = (
        [e for e in step.events if e.lane == lane]
        for step, lane in ((waits, "norm"), (follows, "reduce"), (follows, "optimizer"))
    )
    # With clipping, only the passes of the norm run beside the reductions.
    assert looks and looks[0].start < max(e.stop for e in waits.events if e.lane == "reduce")
    first = min(e.start for e in waits.events if e.lane == "optimizer")
    assert first == max(e.stop for e in looks)
    # The table exceeds k x bsize: its beginning is updated while its end is reduced.
    assert len(updates) == len(sums) > len(setting_of(f"{flags} 0", 8).ranks[0].buckets)
    assert all(u.start >= s.stop for u, s in zip(updates, sums, strict=True))
    assert updates[0].start < sums[-1].start


def test_a_slow_stage_and_unsteady_passes_cost_what_they_should() -> None:
    setting = setting_of(f"--pipeline-model-parallel-size 2 --global-batch-size 32 {DRIVEN}", 4)

    def factor(rank: int, operation: Operation) -> float:
        return 2.0 if rank == 1 and operation.kind is Kind.FORWARD else 1.0

    passes, links = [PassSeconds(1.0, 2.0, 0.0)] * 2, Links(FREE, FREE)
    steady, slower = (
        simulate(Setting(setting.grid, SITE, setting.ranks, passes, links, lasts))[0]
        for lasts in (setting.lasts, (setting.lasts[0], jittered(factor)))
    )
    assert over(steady) == pytest.approx(17 * 3)
    assert over(slower) == pytest.approx(17 * 3 + 16)


# ---- the papers ---------------------------------------------------------------------------------


@cache
def found(source: str) -> list[ReplayTable]:
    return page.tables(source)


def mean(errors: list[float]) -> float:
    return sum(map(abs, errors)) / len(errors)


def worst(errors: list[float]) -> float:
    return max(map(abs, errors))


def the(source: str, words: str) -> ReplayTable:
    (table,) = [table for table in found(source) if words in table.name]
    return table


def row(table: ReplayTable, words: str) -> ReplayRow:
    return next(row for row in table.rows if words in row.what)


@pytest.mark.full
def test_at_most_two_constants_are_fitted_to_a_machine() -> None:
    every = [table for source in page.SOURCES for table in found(source)]
    machines: dict[str, set[str]] = {}
    for table in every:
        machines.setdefault(table.machine, set()).update(table.constants)
        assert bool(table.constants) == any(row.kind == FITTED for row in table.rows)
    assert max(map(len, machines.values())) == 2
    assert {name for name, constants in machines.items() if constants} == {
        "Perlmutter, as Radius ran it",
        "Summit, as AxoNN ran it",
        "Summit, as SAMO ran it",
    }


def test_fitted_numbers_are_met() -> None:
    for source in page.SOURCES:
        for table in found(source):
            for each in table.rows:
                if each.kind == FITTED:
                    assert abs(each.error) < 0.05, (table.name, each)


def test_radius_table_3_and_7() -> None:
    three, seven = the("radius", "table 3"), the("radius", "table 7")
    steps = [each.error for each in three.rows if each.what.endswith("step")]
    assert worst(steps) < 5
    sums = [each.error for each in three.rows if "all-reduce" in each.what]
    assert mean(sums) < 12 and worst(sums) < 27
    errors = seven.errors()
    assert len(errors) == 20 and mean(errors) < 2 and worst(errors) < 4.5
    assert worst([each.error for each in seven.rows if "dense" in each.what]) < 1.5
    for ranks in radius.RANKS[1:]:
        order = [each.simulated for each in seven.rows if f", {ranks} GPUs" in each.what]
        assert order[1:] == sorted(order[1:]), "the sparser, the better it scales"
        # At 0.9 it does not hold: the number of messages costs more than a tenth of the bytes
        # saves.
        if ranks >= 64:
            assert order[1] < order[0]
    assert worst(the("radius", "days").errors()) < 6


def test_each_of_radius_matrices_goes_by_itself() -> None:
    setting = radius.PERLMUTTER.setting(f"--config {radius.REPO}/configs/gpt_2.0b.yaml", 64)
    (rank,) = setting.ranks
    apart = radius.by_matrix(rank)
    matrices = [bucket for bucket in apart.buckets if bucket.kind.matrix]
    assert len(matrices) == radius.MATRICES and all(len(b.slices) == 1 for b in matrices)
    total = sum(bucket.numel for bucket in rank.buckets)
    assert sum(bucket.numel for bucket in apart.buckets) == total


def test_axonn_seconds_come_from_two_constants() -> None:
    table = the("axonn", "figures 5 and 6")
    assert abs(row(table, "all-reduce, 6 x 8").error) < 1
    assert abs(row(table, "pipeline, 24 x 2").error) < 1.5
    assert abs(row(table, "saved").error) < 3
    assert axonn.SUMMIT.facts.network_efficiency == 0.39  # according to the site file


def test_axonn_weak_scaling() -> None:
    table = the("axonn", "percent of peak")
    assert abs(row(table, "worst share over best").error) < 5
    shares = [each for each in table.rows if each.unit == "%" and " ahead " not in each.what]
    errors = [each.error for each in shares]
    assert len(shares) == 12 and mean(errors) < 4 and worst(errors) < 8
    assert abs(row(table, "Megatron-LM over AxoNN").error) < 12
    assert all(abs(each.error) < 11 for each in table.rows if " ahead " in each.what)
    off = [each.what for each in table.rows if not each.holds]
    # The page has to say so (`page.what_is_off`).
    assert off == ["DeepSpeed over AxoNN, step of 100B"]


def test_what_does_not_come_out_is_told_first() -> None:
    text = "\n".join(page.lines(found("axonn")))
    told = text.partition("### What does not come out")[2].partition("\n### ")[0]
    assert "DeepSpeed over AxoNN, step of 100B: 1.18 ratio" in told
    assert told.count("the claim does NOT hold") == 1
    off = [each for table in found("axonn") for each in table.rows if each.is_off]
    assert told.count("\n- ") == len(off) > 1
    assert "FITTED".lower() in text and "| paper | simulated | error |" in text


def test_samo_table_ii() -> None:
    table = found("samo")[0]
    assert len(table.constants) == 2, "with its own"
    saved = [each for each in table.rows if "saved" in each.what and each.kind == PREDICTED]
    assert len(saved) == 3 and worst([each.error for each in saved]) < 3
    assert mean(table.errors()) < 2
    speedups = [each for each in the("samo", "figures 6 and 7").rows]
    assert worst([each.error for each in speedups[1::2]]) < 6, "at the most GPUs"
    figure = [each.error for each in the("samo", "figure 8").rows if "computing" not in each.what]
    assert mean(figure) < 5


def test_stages_of_samo_are_those_that_its_measured_memory_needs() -> None:
    stages = {name: (m.stages(False), m.stages(True)) for name, m in samo.MODELS.items()}
    assert stages == {"XL": (4, 1), "2.7B": (8, 2), "6.7B": (16, 4), "13B": (32, 8)}


def test_samo_figure_5_has_the_papers_order_and_not_its_size() -> None:
    table = the("samo", "figure 5")
    assert not table.constants and all(each.kind == PREDICTED for each in table.rows)
    savings = {each.what: each.simulated for each in table.rows if each.unit == "%"}
    vgg, wide = (
        [savings[f"{name}, {gpus} GPUs"] for gpus in samo_images.GPUS]
        for name in ("VGG-19", "WideResnet-101")
    )
    assert len(savings) == len(vgg) + len(wide)
    assert vgg == sorted(vgg) and wide == sorted(wide), "savings grow with the number of GPUs"
    assert all(v > w for v, w in zip(vgg, wide, strict=True))
    assert all(each.holds for each in table.rows)
    assert all(each.is_off for each in table.rows), "the page says that none is inside"
    assert table.notes[0].startswith("0 of the eight")


def test_a_batch_of_figure_5_is_its_formula() -> None:
    run = samo_images.runs(samo.fitted(), image=0.010, compression=1e-11, hidden=0.5)["vgg19"]
    nic = run.site.nics_per_node * run.site.nic_rate * run.site.network_efficiency
    # 32 GPUs, 4 images each: 143,667,240 parameters, of which 14,379,958 exist at p = 0.9.
    latency = 2 * 31 * run.site.nic_latency
    dense, pruned = (2 * 31 / 32 * 2 * n / nic + latency for n in (143_667_240, 14_379_958))
    assert run.sending(32, pruned=False) == pytest.approx(dense, rel=1e-12)
    assert run.step(32, pruned=False) == pytest.approx(0.040 + dense - 0.020, rel=1e-12)
    assert pruned < 0.020, "hidden"
    assert run.step(32, pruned=True) == pytest.approx(0.040 + 0.00143667240, rel=1e-12)
    wide = samo_images.runs(samo.fitted(), image=0.010)["wide_resnet101"]
    assert wide.computing(128) == pytest.approx(0.015)


@pytest.mark.parametrize("name", ["vgg19", "wide_resnet101"])
def test_computing_that_a_saving_needs_gives_that_saving(name: str) -> None:
    machine = samo.fitted()
    run = samo_images.runs(machine)[name]
    needed = run.needed(64, 25.0)
    slower = replace(run, image=needed / 2)
    assert slower.computing(64) == pytest.approx(needed)
    assert slower.saved(64) == pytest.approx(25.0)


def test_figure_8_makes_compression_dearer_than_its_bytes() -> None:
    machine = samo.fitted()
    by_bytes = samo.COMPRESSION / machine.facts.memory_rate
    assert 10 * by_bytes < samo_images.figure_8_compression(machine) < 20 * by_bytes


def test_our_own_network_is_predicted() -> None:
    for table in network.tables():
        errors = table.errors()
        if "2 ranks" in table.name:
            assert worst(errors) < 6, table.name
        elif "4 ranks" in table.name:
            assert mean(errors) < 6 and worst(errors) < 12, table.name
            assert sum(abs(error) > 10 for error in errors) <= 1
        else:
            plain = [each.error for each in table.rows if "1 chunks" in each.what]
            assert worst(plain) < 3 and worst(errors) < 16


def test_the_page_is_what_the_tool_makes() -> None:
    """The page equals the committed one, but for the last digits, which depend on libm."""
    folder = network.BENCHES.parent / "planner" / "replay"
    committed = json.loads((folder / "results.json").read_text())["tables"]
    made = [table.data for source in ("network", "radius", "axonn") for table in found(source)]
    made += [table.data for table in found("samo")]
    assert [each["name"] for each in committed] == [each["name"] for each in made]
    for before, after in zip(committed, made, strict=True):
        for old, new in zip(before["rows"], after["rows"], strict=True):
            assert old["simulated"] == pytest.approx(new["simulated"], rel=1e-4), new["what"]


# ---- the tool -----------------------------------------------------------------------------------

LARGER = MODEL.replace("--hidden-size 64", "--hidden-size 1024").replace("length 32", "length 1024")
LINE = f"{LARGER} --global-batch-size 16 --site perlmutter --world-size 8"


def say(capsys: pytest.CaptureFixture[str], line: str) -> str:
    assert main(line.split()) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_it_draws_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    out = say(capsys, f"{LINE} --pipeline-model-parallel-size 4 --width 60")
    rows = [line.split()[2] for line in out.splitlines() if line.startswith("stage ")]
    assert len(rows) == 4 and all(len(line) == 60 for line in rows)
    assert all("A" in line and "a" in line for line in rows)
    assert rows[0].index("A") < rows[3].index("A")
    drawn, _, legend = out.partition("A B C ... forward and a b c ... backward")
    assert "=" in drawn and "#" in drawn
    for mark, what in (("=", "gradients"), ("+", "parameters"), ("~", "norm"), ("#", "optimizer")):
        assert f"{mark} {what}" in legend


def test_as_data_it_has_every_pass(capsys: pytest.CaptureFixture[str]) -> None:
    data: Any = json.loads(say(capsys, f"{LINE} --pipeline-model-parallel-size 4 --json"))
    (step,) = data["steps"]
    assert len(step["passes"]) == 4 * 2 * 8
    phases = step["phases"]
    assert sum(phases.values()) - phases["reduce"] == pytest.approx(step["seconds"])
    assert max(each["stop"] for each in step["events"]) == pytest.approx(step["seconds"])


def test_what_slows_a_stage_slows_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    def seconds(more: str) -> float:
        line = f"{LINE} --pipeline-model-parallel-size 4 --json {more}"
        return json.loads(say(capsys, line))["mean_seconds"]

    plain = seconds("")
    assert seconds("--slow 1:2") > 1.3 * plain
    assert seconds("--blocking-messages") > plain
    one, two = (seconds(f"--jitter 0.4 --copies {count}") for count in (1, 2))
    assert one <= two and one != plain
    assert seconds("--jitter 0.4 --seed 3") != one


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"{LINE} --slow 3", "STAGE:TIMES"),
        (f"{LINE} --width 1000000000", "from 1 to 100,000"),
        (f"{LINE} --world-size 100001", "from 1 to 100,000"),
        (f"{LINE} --vocab-size 1 --tensor-model-parallel-size 2", "vocab_size 1 is less than"),
        (f"{LINE} --slow 3:2", "there is no stage 3 of 1"),
        (f"{LINE} --jitter -1", "0 to 10"),
        (f"{LINE} --out x", "--paper"),
        (f"{LINE} --copies 2", "without --jitter"),
        (f"{LINE} --seed 2", "without --jitter"),
        (f"{LINE} --jitter 0.1 --seed -2", "0 or more"),
        (f"{LINE} --jitter 0.1 --copies 9", "no more than 8 pipelines"),
        ("--paper radius --slow 1:2", "'--slow' belongs to no paper"),
        ("--paper radius --site summit", "'--site' belongs to no paper"),
        ("--paper network --out /dev/null/x", "give a folder"),
        ("--paper radius --lr 1", "belongs to no paper"),
        ("--paper nobody", "invalid choice"),
    ],
)
def test_wrong_options_are_refused_in_a_line(
    line: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and err.startswith("error: ") and err.count("\n") == 1


def test_tables_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    say(capsys, f"--paper network --out {tmp_path}")
    text = (tmp_path / "README.md").read_text()
    assert text.count("### ") == len(network.tables()) + 1 and "predicted" in text
    assert json.loads((tmp_path / "results.json").read_text())["tables"]


def test_a_machine_is_its_site_but_for_two_numbers() -> None:
    facts = Machine("summit", None, efficiency=0.3, reached=0.2).facts
    assert (facts.efficiency, facts.network_efficiency, facts.gpus_per_node) == (0.3, 0.2, 6)
