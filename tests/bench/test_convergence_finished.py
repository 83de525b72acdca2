"""Tests that a study reuses the runs that another study finished, and no other runs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.config import parse, resolve, to_yaml
from megatron.errors import ConfigError
from megatron.run_dir import CONFIG
from megatron.status import Status, write_status
from pretrain_gpt import GRADIENT_PATHS
from tests.bench.test_convergence import PLAN, Fake, line_of, run_some
from tools.bench.convergence.finished import is_finished
from tools.bench.convergence.rows import read_rows
from tools.bench.convergence.study import StudyPlan, StudyRun, flags_of, fork_steps
from tools.bench.pruning.study import study

DENSE = StudyRun(variant="dense", seed=1)


def finish(run: StudyRun, runs_dir: Path, *, last: int = PLAN.steps) -> Path:
    """Write the folder of a run that has done all its steps, or the steps up to `last`."""
    folder = runs_dir / run.name
    flags = flags_of(run, PLAN, data=Path("elsewhere"), runs_dir=Path("before"))
    for step in [step for step in fork_steps(PLAN) if step <= last]:
        (folder / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    (folder / CONFIG).write_text(to_yaml(resolve(parse(flags, paths=GRADIENT_PATHS), 1)))
    done = last == PLAN.steps
    status = Status(state="done", exit_code=0, iteration=last)
    write_status(folder, status if done else replace(status, state="left", left="SIGTERM"))
    lines = [line_of(i, density=1.0) for i in range(1, last + 1)]
    lines += [{"iteration": last, "valid_loss": 4.5}] if done else []
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def finished(folder: Path, run: StudyRun = DENSE, plan: StudyPlan = PLAN) -> bool:
    """Return whether the folder holds the finished run."""
    flags = flags_of(run, plan, data=folder.parents[1] / "data", runs_dir=folder.parent)
    return is_finished(folder, flags, run.ranks)


def test_dense_runs_of_another_study_get_their_rows_without_a_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = [run for run in study() if run.is_dense and run.optimizer == "adam"]
    for run in dense:
        finish(run, tmp_path / "work" / "runs")
    fake = Fake()
    forked = [run for run in study() if run.start is not None and run.optimizer == "adam"]
    assert run_some([*dense, *forked], tmp_path, fake) == []
    assert sorted(fake.started) == sorted(run.name for run in forked)
    rows = {row["name"]: row for row in read_rows(tmp_path / "results.jsonl", PLAN)}
    assert [rows[run.name]["valid_loss"] for run in dense] == [4.5, 4.5, 4.5]
    assert len(rows) == len(dense) + len(forked)
    assert capsys.readouterr().out.count("was finished before") == 3


def test_what_is_not_finished_is_started(tmp_path: Path) -> None:
    runs_dir = tmp_path / "work" / "runs"
    assert not finished(runs_dir / DENSE.name)
    folder = finish(DENSE, runs_dir, last=60)
    assert not finished(folder)
    fake = Fake()
    assert run_some([DENSE], tmp_path, fake) == [] and fake.started == [DENSE.name]
    shutil.rmtree(folder)
    assert finished(finish(DENSE, runs_dir))
    (folder / CONFIG).unlink()
    assert not finished(folder)


def test_a_folder_of_other_settings_is_no_substitute(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finish(DENSE, tmp_path / "work" / "runs")
    with pytest.raises(ConfigError, match="other settings: optimizer"):
        finished(folder, replace(DENSE, beta2=0.95))
    with pytest.raises(ConfigError, match="training"):
        finished(folder, plan=replace(PLAN, tokens=128, valid_tokens=128))
    (folder / CONFIG).write_text((folder / CONFIG).read_text().replace("lr: 0.001", "lr: 0.002"))
    fake = Fake()
    assert run_some([DENSE], tmp_path, fake) == [DENSE.name]
    assert fake.started == [] and "another --work" in capsys.readouterr().out
