"""Tests of the combination study: declared memory, resumable runs, and the page that follows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.config import parse, resolve, to_yaml
from megatron.errors import ConfigError
from megatron.optimizer.build import learning_rate
from megatron.run_dir import CONFIG
from megatron.status import Status, write_status
from megatron.tasks.vision_config import VisionConfig
from pretrain_gpt import GRADIENT_PATHS
from samo.options import SamoConfig
from samo.schedule import RewiringSchedule, until_of
from tools.bench.combination import run as tool
from tools.bench.combination.memory import comparable, nearest, paper_memory, planned_memory
from tools.bench.combination.page import accuracies, write
from tools.bench.combination.settings import (
    DC,
    MODELS,
    NONZEROS,
    WRN,
    MemorySetting,
    figures,
    printed,
    settings,
    smaller,
    wrn,
)
from tools.bench.combination.training import STEPS, TrainedRun, baselines, runs, train, trained
from tools.bench.common.page_files import MARK, PAGE, RESULTS, read_results
from tools.bench.common.rows import read_rows
from tools.planner.paper_accounting import DICTIONARIES, MB, TABLE_3, TABLE_4
from tools.profile_memory import counted_network

FOLDER = tool.FOLDER
FIGURES = figures()
RUNS = runs()


# ------------------------------------------------------------------------------ declarations


def test_the_figures_have_the_points_of_the_report() -> None:
    def points(title: str, *parts: str) -> set[tuple[Any, ...]]:
        return {tuple(getattr(each, part) for part in parts) for each in FIGURES[title]}

    assert points("Fig. 6", "nonzeros", "bits") == {(n, b) for n in NONZEROS for b in (16, 32)}
    assert points("Fig. 4", "microbatch", "bits") == {(m, 32) for m in (100, 10, 4, 2)}
    assert len(points("Fig. 7", "nonzeros", "microbatch")) == 28
    dense = {size for size, nonzeros in points("Fig. 8", "size", "nonzeros") if nonzeros == 100}
    assert dense == {(each["num_layers"], each["width_factor"]) for each in WRN["networks"]}
    dense = {size for size, nonzeros in points("Fig. 10", "size", "nonzeros") if nonzeros == 100}
    assert dense == {(each["decoder_layers"], each["embed_dim"]) for each in DC["networks"]}
    assert set(FIGURES["Fig. 3"]) < set(FIGURES["Fig. 6"])
    assert len(settings()) == len({each for group in FIGURES.values() for each in group})


@pytest.mark.parametrize("row", TABLE_3, ids=lambda row: f"{row.printed_mb}")
def test_memory_of_table_3_is_what_the_report_prints(row: Any) -> None:
    total = paper_memory(printed(row, "wrn")).total
    assert total is not None
    assert abs(total / MB - row.printed_mb) <= 0.07


@pytest.mark.parametrize("row", TABLE_4, ids=lambda row: f"{row.printed_mb}")
def test_memory_of_table_4_is_what_the_report_prints(row: Any) -> None:
    counted = paper_memory(printed(row, "dc"))
    assert counted.total is not None and counted.fitted
    # The report rounds to whole MB.
    assert abs(counted.total / MB - row.printed_mb) <= 0.5


def test_sizes_have_the_parameters_of_the_report() -> None:
    for size, listed in zip(FIGURES["Fig. 10"][-6:], DC["networks"][1:], strict=True):
        assert counted_network(size.config)[1].parameters == listed["parameters"]
    for setting in FIGURES["Fig. 8"]:
        listed = next(
            each
            for each in WRN["networks"]
            if (each["num_layers"], each["width_factor"]) == setting.size
        )
        assert counted_network(setting.config)[1].parameters == listed["parameters"]


def test_flags_say_what_a_setting_declares() -> None:
    for setting in settings().values():
        config = setting.config
        width = {"fp16": "float16", "bf16": "bfloat16"}[MODELS[setting.model].sixteen]
        assert config.precision.param_dtype == (width if setting.bits == 16 else "float32")
        assert config.optimizer.main_params_dtype == (
            MODELS[setting.model].sixteen if setting.bits == 16 else "fp32"
        )
        assert (config.gradient.grad_path == "samo") == (setting.nonzeros < 100)
        assert (config.recompute.recompute_granularity is None) == (setting.strategy.name == "none")


def test_16_bits_halve_all_states_that_are_planned() -> None:
    """No fp32 copy, no fp32 sum of gradients: only norms, vectors' moments and scales stay."""
    for model, group in (("wrn", "Fig. 6"), ("dc", "Fig. 9"), ("gpt", "GPT")):
        dense = [each for each in FIGURES[group] if each.nonzeros == 100]
        wide = next(each for each in dense if each.bits == 32)
        narrow = next(
            each
            for each in dense
            if each.bits == 16
            and (each.microbatch, each.strategy) == (wide.microbatch, wide.strategy)
        )
        states = [sum(list(planned_memory(each).kinds.values())[:2]) for each in (wide, narrow)]
        assert 0.5 <= states[1] / states[0] < 0.51, model


def test_the_planned_column_is_that_of_the_ledger() -> None:
    from megatron.low_memory.dry_run import DryTranslation
    from megatron.low_memory.ledger import memory_ledger
    from pretrain_vision import VISION_TASK

    dc = FIGURES["Fig. 9"][0]
    for setting in (wrn(nonzeros=30, bits=16, microbatch=4), dc):
        config = setting.config
        opened: Any = (
            VISION_TASK.open(config)
            if isinstance(config, VisionConfig)
            else DryTranslation(config, *DICTIONARIES)  # type: ignore[arg-type]
        )
        ledger = memory_ledger(opened, config, GRADIENT_PATHS, columns=("planned",), flops=False)
        assert ledger.columns["planned"] == planned_memory(setting)


def test_equal_bytes_mean_the_nearest_sizes() -> None:
    sparse = [
        each
        for each in trained()
        if each.nonzeros < 100 and each.bits == 16 and each.microbatch == 5
    ]
    found = baselines(sparse)
    assert {each for each in trained() if each.size != (16, 1)} == set(found)
    for setting in sparse:
        wanted = paper_memory(setting).total
        assert wanted is not None
        for sizes in smaller("small"):
            others = [_dense(setting, size) for size in sizes]
            distances = {
                each.size: abs((paper_memory(each).total or 0) - wanted) for each in others
            }
            best = nearest(setting, others)
            assert distances[best.size] == min(distances.values())
            assert best in found
    dc = FIGURES["Fig. 10"][0]
    assert comparable(dc) == paper_memory(dc).states, "no rule for activations of other sizes"


def _dense(setting: MemorySetting, size: tuple[int, float]) -> MemorySetting:
    return MemorySetting(
        model=setting.model,
        size=size,
        bits=setting.bits,
        microbatch=setting.microbatch,
        strategy=setting.strategy,
    )


# ------------------------------------------------------------------------------------- runs


def test_three_seeds_of_the_cross_and_of_smaller_networks() -> None:
    ends = {(s.nonzeros, s.bits, s.microbatch) for s in trained()[:6]}
    assert ends == {(n, b, m) for n in (100, 30, 10) for b, m in ((32, 50), (16, 5))}
    assert all({run.seed for run in RUNS if run.setting == s} == {1, 2, 3} for s in trained())
    assert {run.seed for run in RUNS} == {1, 2, 3}
    cross = {(s.nonzeros, s.bits, s.microbatch) for s in trained() if s.size == (16, 1)}
    assert cross == {(n, b, m) for n in (100, 30, 10) for b in (16, 32) for m in (50, 5)}
    sizes = {setting.size for setting in trained()} - {(16, 1)}
    assert any(layers < 16 for layers, _ in sizes) and any(width < 1 for _, width in sizes)
    assert len({run.name for run in RUNS}) == len(RUNS) == 3 * len(trained())


@pytest.mark.parametrize("run", [run for run in RUNS if run.seed == 1], ids=lambda run: run.name)
def test_a_run_has_the_reports_settings_in_small(run: TrainedRun) -> None:
    config = _config(run, Path("runs"))
    setting, table = run.setting, WRN["sparse"][run.setting.nonzeros]
    assert (config.model.depth, config.model.width) == setting.size
    assert config.training.train_iters == STEPS
    assert config.training.micro_batch_size == setting.microbatch
    assert config.training.global_batch_size == 50
    assert config.evaluation.eval_iters * 50 == 2000
    rate = learning_rate(config)
    found = [rate.at(50 * step) / rate.at(0) for step in (0, 23, 24, 48, 64)]
    assert rate.at(0) == pytest.approx(0.1 * table["learning_rate"])
    assert found == pytest.approx([1, 1, 0.2, 0.4, 0.08])
    if setting.nonzeros < 100:
        options = config.extensions["samo"]
        assert isinstance(options, SamoConfig) and options.dsr_interval is not None
        assert options.dsr_fraction == pytest.approx(table["fraction"] * 0.01377866, rel=1e-6)
        schedule = RewiringSchedule(interval=options.dsr_interval, until=until_of(STEPS))
        assert sum(schedule.due(t) for t in range(1, STEPS + 1)) == 4


def _config(run: TrainedRun, runs_dir: Path) -> VisionConfig:
    flags = run.flags(data=Path("images"), runs_dir=runs_dir)
    return resolve(parse(flags, paths=GRADIENT_PATHS, task=VisionConfig), 1)


class Fake:
    """Writes what `pretrain_vision.py` leaves; `codes` are exit codes of runs by name."""

    def __init__(self, codes: dict[str, int] | None = None) -> None:
        self.codes = codes or {}
        self.started: list[str] = []

    def __call__(self, flags: Sequence[str], console: Path) -> int:
        folder = Path(dict(zip(flags, flags[1:], strict=False))["--run-dir"])
        self.started.append(folder.name)
        code = self.codes.get(folder.name, 0)
        finish(folder, flags, last=STEPS if code == 0 else 2)
        return code


def finish(folder: Path, flags: Sequence[str], *, last: int = STEPS) -> None:
    """Write the folder of a run that made the steps up to `last`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = resolve(parse(flags, paths=GRADIENT_PATHS, task=VisionConfig), 1)
    (folder / CONFIG).write_text(to_yaml(config))
    state = "done" if last == STEPS else "failed"
    write_status(folder, Status(state=state, exit_code=0, iteration=last))
    lines: list[dict[str, Any]] = [
        {"iteration": i, "loss": 2.0, "accuracy": 0.2, "step_seconds": 0.5, "images": 50}
        for i in range(1, last + 1)
    ]
    if last == STEPS:
        lines.append({"iteration": last, "valid_loss": 1.75, "valid_accuracy": 0.325})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def study(wanted: Sequence[TrainedRun], folder: Path, fake: Fake) -> tuple[list[str], list[str]]:
    """Run `train` in a folder; return the runs that failed, and what was said."""
    said: list[str] = []
    failed = train(
        wanted,
        data=Path("images"),
        work=folder / "work",
        results=folder / "results.jsonl",
        runner=fake,
        log=said.append,
    )
    return failed, said


def names_in(folder: Path) -> list[str]:
    return [row["name"] for row in read_rows(folder / "results.jsonl")]


def test_no_row_is_made_twice(tmp_path: Path) -> None:
    wanted = RUNS[:3]
    assert study(wanted[:2], tmp_path, Fake())[0] == []
    again = Fake()
    assert study(wanted, tmp_path, again)[0] == []
    assert again.started == [wanted[2].name]
    assert names_in(tmp_path) == [run.name for run in wanted]
    row = read_rows(tmp_path / "results.jsonl")[0]
    assert (row["valid_accuracy"], row["valid_loss"], row["seconds"]) == (0.325, 1.75, STEPS / 2)


def test_a_study_killed_before_it_wrote_a_row_writes_it_without_a_start(tmp_path: Path) -> None:
    (run,) = RUNS[:1]
    runs_dir = tmp_path / "work" / "runs"
    finish(runs_dir / run.name, run.flags(data=Path("elsewhere"), runs_dir=runs_dir))
    fake = Fake()
    assert study([run], tmp_path, fake)[0] == []
    assert fake.started == [] and names_in(tmp_path) == [run.name]


def test_a_failed_run_is_told_and_made_again_alone(tmp_path: Path) -> None:
    wanted = RUNS[:3]
    failed, said = study(wanted, tmp_path, Fake({wanted[1].name: 3}))
    assert failed == [wanted[1].name]
    assert said[1].startswith(f"{wanted[1].name}: exit code 3; see ")
    assert names_in(tmp_path) == [wanted[0].name, wanted[2].name]
    fake = Fake()
    assert study(wanted, tmp_path, fake)[0] == [] and fake.started == [wanted[1].name]


def test_a_folder_of_other_settings_is_not_taken(tmp_path: Path) -> None:
    run, other = RUNS[:2]
    runs_dir = tmp_path / "work" / "runs"
    finish(runs_dir / run.name, other.flags(data=Path("images"), runs_dir=runs_dir))
    fake = Fake()
    failed, said = study([run], tmp_path, fake)
    assert failed == [run.name] and fake.started == [] and "other settings" in said[0]


def test_a_runner_that_stops_is_given_no_other_run(tmp_path: Path) -> None:
    class Stopping(Fake):
        stopping = False

        def __call__(self, flags: Sequence[str], console: Path) -> int:
            super().__call__(flags, console)
            self.stopping = True
            return 75

    fake = Stopping()
    failed, _ = study(RUNS[:3], tmp_path, fake)
    assert failed == [run.name for run in RUNS[:3]] and fake.started == [RUNS[0].name]
    assert names_in(tmp_path) == []


def test_an_unknown_run_and_missing_images_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--only", "wrn-1", "--report"]) == ConfigError.exit_code
    assert "--only: wrn-1: no such run" in capsys.readouterr().err
    assert tool.main([]) == ConfigError.exit_code
    assert "--data" in capsys.readouterr().err


def test_the_list_marks_what_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study(RUNS[:1], tmp_path, Fake())
    assert tool.main(["--list", "--results", str(tmp_path / "results.jsonl")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.endswith("done")] == [RUNS[0].name]


# ------------------------------------------------------------------------------------- page


def row(run: TrainedRun, accuracy: float) -> dict[str, Any]:
    return {"name": run.name, "seed": run.seed, "valid_accuracy": accuracy}


def test_means_errors_and_gaps_by_hand(tmp_path: Path) -> None:
    width = len(trained())
    dense, sparse = (
        [TrainedRun(setting=trained()[place], seed=seed) for seed in (1, 2, 3)] for place in (0, 1)
    )
    rows = [row(run, accuracy) for run, accuracy in zip(dense, (0.3, 0.32, 0.34), strict=True)]
    rows += [row(run, accuracy) for run, accuracy in zip(sparse[:2], (0.29, 0.33), strict=True)]
    one, two = accuracies(rows)
    assert (one.mean, two.mean) == (pytest.approx(32), pytest.approx(31))
    assert one.error == pytest.approx(2 / 3**0.5) and two.error == pytest.approx(2)
    assert list(two.gaps) == pytest.approx([-1, 1])
    write(tmp_path, rows)
    text = (tmp_path / PAGE).read_text()
    assert f"5 of {3 * width} runs are in" in text
    assert "| WRN-16-1, 30, 32, 50 | 17.804 | 25.410 | 1, 2 | 31.00 | 2.00 | -0.00 | 1.00 |" in text
    assert "| 30 % nonzeros, not 100 | 1 | 2 | -0.00 | 1.00 |" in text
    assert f"Not run yet: {sparse[2].name}" not in text and sparse[2].name in text


def test_the_committed_page_follows_from_the_committed_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert tool.main(["--report", "--out", str(tmp_path)]) == 0
    committed = (FOLDER / PAGE).read_text(encoding="utf-8").partition(f"{MARK}\n")[2]
    assert committed.strip() == (tmp_path / PAGE).read_text(encoding="utf-8").strip()
    assert read_results(FOLDER) == read_results(tmp_path)
    assert (tmp_path / RESULTS).is_file() and (tmp_path / "figure.png").stat().st_size > 10_000
    assert {r["name"] for r in read_rows(FOLDER / "results.jsonl")} <= {run.name for run in RUNS}
    assert all(r["steps"] == STEPS for r in read_rows(FOLDER / "results.jsonl"))
