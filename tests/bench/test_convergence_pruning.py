"""Tests of the pruning study.

The declared runs parse, and the rows and the page follow from the files that the runs left.
"""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from megatron.config import ModelConfig, parse, resolve
from megatron.data_parallel.bucket_plan import ParamShape
from megatron.model.gpt import GPT
from pretrain_gpt import GRADIENT_PATHS
from samo.path import SamoPath
from tests.bench.test_convergence import PLAN, line_of, run_some
from tests.bench.test_convergence import Fake as FakeRunner
from tools.bench.common.page_files import MARK
from tools.bench.convergence.model import HEADS, LAYERS, VOCABULARY, parameters, shape_of, stored
from tools.bench.convergence.plot import mean_difference
from tools.bench.convergence.radius_page import RADIUS
from tools.bench.convergence.report import write_report
from tools.bench.convergence.rows import Row, append_row, row_of
from tools.bench.convergence.study import StudyPlan, StudyRun, dense_of, flags_of
from tools.bench.pruning.page import PRUNING, comparisons_of
from tools.bench.pruning.study import (
    MOST_RUNS,
    SMALL_SHAPE,
    SPARSITY,
    early_bird,
    from_scratch,
    pruned,
    small,
    study,
    with_radius,
)

STUDY = study()
DENSE, SGD = StudyRun(variant="dense", seed=1), StudyRun(variant="dense", seed=1, optimizer="sgd")


def flags(run: StudyRun, plan: StudyPlan = PLAN) -> dict[str, str]:
    """The command line by flag."""
    found = flags_of(run, plan, data=Path("data"), runs_dir=Path("runs"))[:-1]
    return dict(zip(found[::2], found[1::2], strict=True))


# ------------------------------------------------------------------------------ declarations


def test_study_holds_the_comparisons_it_is_for() -> None:
    names = [run.name for run in STUDY]
    assert len(names) == len(set(names)) <= MOST_RUNS
    for place, run in enumerate(STUDY):
        assert run.start is None or dense_of(run).name in names[:place]
    three = ("dense", "magnitude_0.9", "random_0.9", "early_bird_0.9-start_0.05")
    assert names[:12] == [f"{group}-seed{seed}" for group in three for seed in (1, 2, 3)]
    assert {run.path for run in STUDY} == {"dense", "samo", "samo+radius"}
    for p in ("0.7", "0.8", "0.9"):
        assert {f"dsr_{p}-from_scratch-seed1", f"random_{p}-from_scratch-seed1"} <= set(names)


def test_dense_runs_are_those_of_the_radius_study() -> None:
    shared = {run.name for run in STUDY} & {run.name for run in RADIUS.runs}
    assert shared == {f"dense-seed{seed}" for seed in (1, 2, 3)}
    assert {run for run in STUDY if run.name in shared} <= set(RADIUS.runs)


@pytest.mark.parametrize("run", STUDY, ids=lambda run: run.name)
@pytest.mark.parametrize("steps", [200, 1000])
def test_command_line_is_accepted(run: StudyRun, steps: int) -> None:
    line = flags_of(run, StudyPlan(steps=steps), data=Path("data"), runs_dir=Path("runs"))
    config = resolve(parse(line, paths=GRADIENT_PATHS), 1)
    assert config.total_iterations() == steps
    assert config.optimizer.optimizer == run.optimizer


def test_runs_differ_in_what_their_names_say_alone() -> None:
    magnitude, random = flags(pruned("magnitude", seed=2)), flags(pruned("random", seed=2))
    assert dict(random.items() - magnitude.items()) == {
        "--samo-pruning": "random",
        "--run-dir": "runs/random_0.9-seed2",
    }
    own = dict(magnitude.items() - flags(StudyRun(variant="dense", seed=2)).items())
    assert own == {
        "--grad-path": "samo",
        "--samo-sparsity": "0.9",
        "--samo-pruning": "magnitude",
        "--load": "runs/dense-seed2",
        "--ckpt-step": "39",
        "--run-dir": "runs/magnitude_0.9-seed2",
    }
    sgd = flags(pruned("magnitude", optimizer="sgd"))
    assert sgd["--load"] == "runs/dense-sgd-seed1" and sgd["--optimizer"] == "sgd"
    assert float(sgd["--lr"]) * float(sgd["--weight-decay"]) == pytest.approx(1e-3 * 0.1)


def test_intervals_shrink_with_the_run() -> None:
    plan = StudyPlan(steps=1000)
    bird = flags(early_bird(), plan)
    assert (bird["--ckpt-step"], bird["--samo-early-bird-interval"]) == ("49", "5")
    radius = flags(with_radius(), plan)
    assert (radius["--radius-interval"], radius["--radius-start-iter"]) == ("25", "200")
    rewired, static = (flags(from_scratch(SPARSITY, rewired=r), plan) for r in (True, False))
    assert rewired.keys() - static.keys() == {"--dsr-interval"} and "--load" not in rewired
    assert rewired["--dsr-interval"] == "25"
    kept = flags(from_scratch(SPARSITY, rewired=True, keep_moments=True), plan)
    assert kept.keys() - rewired.keys() == {"--dsr-reset-moments"}


def test_as_many_entries_are_stored_as_a_model_has_left() -> None:
    layers, hidden, sequence, sparsity = 2, 8, 12, Fraction(17, 20)
    config = ModelConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=HEADS, seq_length=sequence
    )
    model = GPT(
        config, vocab_size=VOCABULARY, seed=1, dtype=torch.float32, device=torch.device("cpu")
    )
    shapes = [
        ParamShape(name=info.name, logical_shape=info.logical_shape, rows=info.logical_shape[0])
        for info in model.parameter_infos()
    ]
    line = flags_of(
        from_scratch(sparsity, rewired=False), PLAN, data=Path("data"), runs_dir=Path("runs")
    )
    left = SamoPath().stored(parse(line, paths=GRADIENT_PATHS), shapes)
    whole = {shape.name: shape.local_entries for shape in shapes}
    assert stored(sequence, sparsity, (layers, hidden)) == sum((whole | left).values())


def test_small_model_is_the_nearest_in_parameters() -> None:
    wanted, found = stored(128, SPARSITY), parameters(128, SMALL_SHAPE)
    assert abs(found / wanted - 1) < 0.002
    layers, hidden = shape_of(found - 1, 128)
    assert (layers, hidden) == SMALL_SHAPE == (5, 48)
    assert layers <= 2 * LAYERS and hidden % HEADS == 0
    assert flags(small())["--num-layers"] == "5" and flags(small())["--hidden-size"] == "48"


# -------------------------------------------------------------------------------------- rows


def left_by(
    run: StudyRun, folder: Path, loss: float = 5.0, distances: dict[int, float] | None = None
) -> Row:
    """Write the metrics of a run that sends every stored entry, and return the row of the run."""
    first = 1 if run.start is None else PLAN.start_step(run.start)
    lines = [line_of(i, density=1.0) for i in range(first, PLAN.steps + 1)]
    for step, distance in (distances or {}).items():
        lines[step - first]["mask_distance"] = distance
    lines.append({"iteration": PLAN.steps, "valid_loss": loss})
    folder = folder / run.name
    folder.mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    return row_of(run, PLAN, folder, exit_code=0)


def test_rows_tell_what_is_stored_and_since_when(tmp_path: Path) -> None:
    share = stored(PLAN.sequence, SPARSITY) / parameters(PLAN.sequence)
    row = left_by(pruned("magnitude"), tmp_path)
    assert (row["sparsity"], row["ticket"]) == (0.9, 39)
    assert row["stored"] == pytest.approx(share, abs=1e-6)
    assert row["payload"] == {"mean": row["stored"], "most": row["stored"]}
    assert left_by(from_scratch(SPARSITY, rewired=True), tmp_path)["ticket"] == 0
    least = left_by(small(), tmp_path)
    assert least["payload"]["mean"] == least["stored"] < 0.11 and "ticket" not in least
    assert left_by(SGD, tmp_path)["optimizer"] == "sgd"
    assert not {"optimizer", "stored", "ticket"} & left_by(DENSE, tmp_path).keys()


def test_an_early_bird_sends_all_until_its_ticket(tmp_path: Path) -> None:
    distances = {14: 0.4, 16: 0.2, 18: 0.05}
    row = left_by(early_bird(), tmp_path / "drawn", distances=distances)
    assert row["ticket"] == 18 and row["payload"]["most"] == 1.0
    dense, steps = 18 - 10 + 1, 200 - 10 + 1
    mean = (dense + (steps - dense) * row["stored"]) / steps
    assert row["payload"]["mean"] == pytest.approx(mean, abs=1e-5)
    row = left_by(early_bird(), tmp_path / "never", distances={200: 0.3})
    assert row["ticket"] is None and row["payload"]["mean"] == 1.0
    assert left_by(early_bird(), tmp_path / "no draw")["ticket"] is None


def test_study_runs_and_what_needs_no_dense_run_does_not_wait_for_one(tmp_path: Path) -> None:
    fake = FakeRunner()
    assert run_some(STUDY, tmp_path, fake) == []
    assert len(fake.started) == len(STUDY) + 2 * sum(run.is_dense for run in STUDY)
    alone = [small(), from_scratch(SPARSITY, rewired=False)]
    assert run_some(alone, tmp_path / "alone", FakeRunner()) == []
    assert run_some([pruned("random")], tmp_path / "left", FakeRunner()) == ["random_0.9-seed1"]


# ------------------------------------------------------------------------------------ report


@pytest.fixture
def rows(tmp_path: Path) -> list[Row]:
    """Return the rows of a finished study with a fixed loss per group and small seed effects."""
    costs = {
        "magnitude_0.9": 0.2,
        "random_0.9": 0.5,
        "early_bird_0.9-start_0.05": 0.499,
        "magnitude_0.9-sgd": 0.7,
        "random_0.9-sgd": 0.6,
        "dense_5x48": 0.9,
        "dsr_0.8-from_scratch": 0.3,
        "random_0.8-from_scratch": 0.4,
    }
    found: list[Row] = []
    for run in STUDY:
        dense = 5.0 + run.seed + (run.optimizer == "sgd")
        loss = dense + (0.0 if run.is_dense else costs.get(run.group, 0.35))
        loss += 0.01 * (run.seed - 2) * (run.path == "samo" and run.ticket != "random")
        drawn = {18 + 2 * run.seed: 0.05} if run.ticket == "early-bird" else None
        found.append(left_by(run, tmp_path / "runs", loss, drawn))
    return found


def test_verdicts_are_paired_by_seed(rows: list[Row]) -> None:
    found = {(each.name, each.against): each for each in comparisons_of(rows)}
    assert len(found) == 8
    better = found["magnitude_0.9", "random_0.9"]
    assert better.difference == pytest.approx(0.3) and better.below
    assert better.error == pytest.approx(0.01 / 3**0.5) and better.seeds == (1, 2, 3)
    assert not found["magnitude_0.9-sgd", "random_0.9-sgd"].below
    within = found["early_bird_0.9-start_0.05", "random_0.9"]
    assert within.difference == pytest.approx(0.001) and not within.below
    single = found["magnitude_0.9", "dense_5x48"]
    assert single.seeds == (1,) and single.difference == pytest.approx(0.71)
    # Two groups of three seeds vary, and three do not: those of random masks.
    scatter = (2 * 0.01**2 / 5) ** 0.5
    assert single.error == pytest.approx(2**0.5 * scatter)
    (alone,) = comparisons_of([row for row in rows if row["group"] in ALONE])
    assert alone.error is None and not alone.below and "not known" in alone.line


ALONE = ("dense", "dsr_0.8-from_scratch", "random_0.8-from_scratch")


def test_gaps_are_to_the_dense_run_of_the_optimizer(rows: list[Row]) -> None:
    sgd = [row for row in rows if row["group"] == "magnitude_0.9-sgd"]
    assert sgd[0]["valid_loss"] == pytest.approx(7.69)
    points = mean_difference("magnitude_0.9-sgd", rows)
    assert points[0][0] == 42 and all(value == 0 for _, value in points)


def test_report_tells_how_each_was_pruned_and_what_it_cost(tmp_path: Path, rows: list[Row]) -> None:
    pytest.importorskip("matplotlib")
    results, said = tmp_path / "pruning.jsonl", []
    for row in rows:
        append_row(results, row)
    page = tmp_path / "README.md"
    page.write_text(f"# Pruning\n\nIt holds.\n\n{MARK}\nstale table\n")
    write_report(results, tmp_path, PRUNING, log=said.append)
    text = page.read_text()
    f = f"{stored(PLAN.sequence, SPARSITY) / parameters(PLAN.sequence):.4f}"
    for line in (
        f"| magnitude 0.9 | 1, 2, 3 | 0.9 | {f} | 7.2000 | +0.2000 | 0.0058 | {f} | 39 |",
        f"| early bird 0.9, start 0.05 | 1, 2, 3 | 0.9 | {f} | 7.4990 | +0.4990 | 0.0058 | 0.",
        "| dense, sgd | 1 |  | 1.0000 | 7.0000 |  |  | 1.0000 |  |",
        f"| magnitude 0.9, sgd | 1 | 0.9 | {f} | 7.6900 | +0.6900 | ~0.0063 | {f} | 39 |",
        "magnitude 0.9 below random 0.9: yes (difference +0.3000, error 0.0058; seeds 1, 2, 3)",
        "early bird 0.9, start 0.05 below random 0.9: no (difference +0.0010, error 0.0058;",
        "magnitude 0.9, sgd below random 0.9, sgd: no (difference -0.0900, error ~0.0089; seed 1)",
        "a dense model of 5 layers x 48",
    ):
        assert line in text
    assert " | 20, 22, 24 |" in text
    assert "tools.bench.pruning.run --text-folder" in text and "stale table" not in text
    assert text.startswith(f"# Pruning\n\nIt holds.\n\n{MARK}\n\n")
    values = json.loads((tmp_path / "results.json").read_text())
    assert values["pruning"]["early_bird_0.9-start_0.05"]["tickets"] == [20, 22, 24]
    assert values["comparisons"][0]["below"] and len(values["groups"]) == 16
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert said == [f"{page}: {len(STUDY)} of {len(STUDY)} runs"]
