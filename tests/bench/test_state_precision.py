"""Tests of the study of optimizer states: its runs parse, its table follows from the rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.config import parse, resolve
from pretrain_gpt import GRADIENT_PATHS
from tests.bench.test_convergence import Fake, run_some
from tools.bench.common.page_files import PAGE, RESULTS
from tools.bench.convergence.report import write_report
from tools.bench.convergence.rows import read_rows
from tools.bench.convergence.run import ROWS
from tools.bench.convergence.study import SEEDS, StudyRun, flags_of
from tools.bench.state_precision.page import (
    STATES,
    differences,
    differences_table,
    losses_of,
    planned_bytes,
)
from tools.bench.state_precision.study import (
    AT_LOW_RATES,
    FP32,
    IN_FP16,
    PLAN,
    SETTINGS,
    study,
)

STUDY = study()
FOLDER = Path(__file__).resolve().parents[2] / "tools" / "bench" / STATES.folder
BY_VARIANT = {setting.variant: setting for setting in (*SETTINGS, *IN_FP16, *AT_LOW_RATES)}
BYTES = {
    "fp32": 18,
    "main_nearest": 14,
    "main_stochastic": 14,
    "main_kahan": 16,
    "moments_bf16": 14,
    "moments_int8": 12,
    "main_stochastic-moments_int8-grads_bf16": 6,
    "main_kahan-moments_int8-grads_bf16": 8,
    "fp16": 18,
    "fp16-main_nearest": 14,
}


def test_every_setting_has_three_seeds_and_a_reference() -> None:
    assert len(STUDY) == len(BY_VARIANT) * len(SEEDS)
    for setting in BY_VARIANT.values():
        assert {run.seed for run in STUDY if run.variant == setting.variant} == set(SEEDS)
        reference = BY_VARIANT[setting.reference]
        assert reference.reference == reference.variant
        assert (reference.dtype, reference.rates) == (setting.dtype, setting.rates)
        assert set(reference.flags) <= set(setting.flags)


@pytest.mark.parametrize("run", STUDY, ids=lambda run: run.name)
def test_command_line_is_accepted(run: StudyRun) -> None:
    line = flags_of(run, PLAN, data=Path("data"), runs_dir=Path("runs"))
    config = resolve(parse(line, paths=GRADIENT_PATHS), 1)
    states = config.optimizer
    assert config.precision.fp16 == run.variant.startswith("fp16")
    assert (states.main_params_dtype == "fp32") == ("main" not in run.variant)
    assert (states.exp_avg_sq_dtype == "int8") == ("int8" in run.variant)
    assert (config.precision.grad_dtype == "float32") == ("grads" not in run.variant)
    assert states.lr == pytest.approx(3e-4 if "low_rate" in run.variant else 1e-3)


@pytest.mark.parametrize(("variant", "each"), BYTES.items(), ids=BYTES)
def test_planned_bytes_are_those_of_a_matrix_and_few_more(variant: str, each: int) -> None:
    """Norms and biases, 0.5 % of the parameters, and scales add less than 0.2 bytes."""
    assert each <= planned_bytes(BY_VARIANT[variant], PLAN) < each + 0.2


def test_a_finished_run_is_not_repeated(tmp_path: Path) -> None:
    assert run_some(STUDY[:2], tmp_path, Fake()) == []
    again = Fake()
    assert run_some(STUDY[:3], tmp_path, again) == []
    assert again.started == [STUDY[2].name]


def test_differences_are_paired_by_hand() -> None:
    rows = [
        {"variant": variant, "seed": seed, "valid_loss": loss}
        for variant, losses in {
            FP32: (5.0, 6.0, 7.0),
            "main_nearest": (5.1, 6.3, 7.2),
            "fp16": (5.5, 6.5, None),
            "fp16-main_nearest": (5.25, 6.25, 7.0),
        }.items()
        for seed, loss in zip(SEEDS, losses, strict=True)
    ]
    losses = losses_of(rows)
    assert differences(losses, BY_VARIANT[FP32]) == {}
    assert differences(losses, BY_VARIANT["fp16-main_nearest"]) == {1: -0.25, 2: -0.25}
    lines = differences_table(losses, (BY_VARIANT["main_nearest"],), PLAN)
    # Standard deviation of 0.1, 0.3 and 0.2 is 0.1, over the root of 3.
    cells = lines[2].split(" | ")
    assert cells[2:] == ["6.2000", "+0.2000", "0.0577", "+0.1000", "+0.3000", "+0.2000 |"]


def test_the_committed_page_follows_from_the_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / PAGE).write_text((FOLDER / PAGE).read_text(encoding="utf-8"), encoding="utf-8")
    write_report(FOLDER / ROWS, tmp_path, STATES, log=lambda _: None)
    for name in (PAGE, RESULTS):
        assert (tmp_path / name).read_text("utf-8") == (FOLDER / name).read_text("utf-8"), name
    declared = {run.name for run in STUDY}
    names = [row["name"] for row in read_rows(FOLDER / ROWS)]
    assert set(names) <= declared
    lines = (FOLDER / ROWS).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["name"] for line in lines] == names, "each run has one row"
