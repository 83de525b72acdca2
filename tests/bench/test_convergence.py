"""Tests of the convergence study: its runs parse, finished ones are skipped, its page follows."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.config import parse, resolve
from megatron.errors import ConfigError
from pretrain_gpt import GRADIENT_PATHS
from tools.bench.convergence.groups import groups_of
from tools.bench.convergence.measure import measure, study_seconds
from tools.bench.convergence.radius import MOST_RUNS, radius, rolling, study
from tools.bench.convergence.rows import read_rows
from tools.bench.convergence.run import Processes, run_all
from tools.bench.convergence.study import (
    EARLY,
    START,
    StudyPlan,
    StudyRun,
    dense_of,
    flags_of,
    fork_steps,
    stages,
)
from tools.studies.text_data import prepare

PLAN = StudyPlan(steps=200, tokens=64, sequence=16, valid_tokens=64)
STUDY = study()


# ------------------------------------------------------------------------------ declarations


def test_study_is_small_enough_and_each_fork_follows_its_dense_run() -> None:
    names = [run.name for run in STUDY]
    assert len(names) == len(set(names)) <= MOST_RUNS
    for place, run in enumerate(STUDY):
        assert run.is_dense or dense_of(run).name in names[:place]


def test_study_holds_the_comparisons_it_is_for() -> None:
    seeds: dict[str, set[int]] = {}
    for run in STUDY:
        seeds.setdefault(run.group, set()).add(run.seed)
    three = {name for name, found in seeds.items() if found == {1, 2, 3}}
    assert three >= {"dense", "radius_0.1", "radius_0.4"}
    assert three >= {f"rolling_{d}-{s}" for d in ("0.1", "0.4") for s in ("update", "seeded")}
    assert {run.path for run in STUDY} == set(GRADIENT_PATHS) - {"samo", "samo+radius"}


@pytest.mark.parametrize("run", STUDY, ids=lambda run: run.name)
@pytest.mark.parametrize("steps", [1000, 2000])
def test_command_line_is_accepted(run: StudyRun, steps: int) -> None:
    if run.path not in GRADIENT_PATHS:
        pytest.skip(f"{run.path} is not part of this version")
    plan = StudyPlan(steps=steps)
    flags = flags_of(run, plan, data=Path("data"), runs_dir=Path("runs"))
    config = resolve(parse(flags, paths=GRADIENT_PATHS), run.ranks)
    assert config.total_iterations() == steps
    assert config.training.global_batch_size == 16
    assert config.evaluation.eval_iters * plan.tokens == plan.valid_tokens


@pytest.mark.parametrize("steps", [200, 1000, 2000])
def test_paths_select_at_the_first_step_after_the_fork(steps: int) -> None:
    plan = StudyPlan(steps=steps)
    for run in STUDY:
        if run.interval is not None:
            assert run.start is not None
            start = plan.start_step(run.start)
            assert start % plan.scaled(run.interval) == 0, run.name
            assert start - 1 in fork_steps(plan)


def test_runs_differ_in_what_their_names_say_alone() -> None:
    def flags(run: StudyRun) -> dict[str, str]:
        found = flags_of(run, PLAN, data=Path("data"), runs_dir=Path("runs"))[:-1]
        return dict(zip(found[::2], found[1::2], strict=True))

    plain, other = flags(radius(0.1, seed=2)), flags(rolling(0.1, "seeded", seed=2))
    assert dict(other.items() - plain.items()) == {
        "--radius-schedule": "rolling",
        "--radius-select": "seeded",
        "--run-dir": "runs/rolling_0.1-seeded-seed2",
    }
    assert plain["--load"] == "runs/dense-seed2" and plain["--ckpt-step"] == "39"
    assert plain["--radius-start-iter"] == "40" and plain["--radius-interval"] == "5"


@pytest.mark.parametrize(
    "wrong", [{"steps": 500}, {"steps": 0}, {"tokens": 100}, {"valid_tokens": 1000}]
)
def test_plan_refuses_what_does_not_divide(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        replace(PLAN, **wrong)


def test_a_dense_run_stops_at_each_fork_and_is_not_stopped_twice(tmp_path: Path) -> None:
    dense = StudyRun(variant="dense", seed=1)
    found = list(stages(dense, PLAN, data=Path("data"), runs_dir=tmp_path))
    assert [flags[-2:] for flags in found[:2]] == [
        ["--exit-interval", str(step)] for step in (round(EARLY * 200) - 1, round(START * 200) - 1)
    ]
    assert "--exit-interval" not in found[2] and len(found) == 3
    (tmp_path / dense.name / "checkpoints" / "step_00000009").mkdir(parents=True)
    assert len(list(stages(dense, PLAN, data=Path("data"), runs_dir=tmp_path))) == 2
    assert len(list(stages(radius(0.1), PLAN, data=Path("data"), runs_dir=tmp_path))) == 1


def test_forks_cost_what_they_do_not_share() -> None:
    runs = [StudyRun(variant="dense", seed=1), radius(0.1), radius(0.1, start=EARLY)]
    seconds = study_seconds(runs, PLAN, step=1.0, rest=10.0)
    assert seconds == pytest.approx(200 + 160 + 190 + 30)


def test_measuring_tells_a_step_and_the_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measure(STUDY, PLAN, data=tmp_path, work=tmp_path, jobs=2, runner=Fake())
    told = capsys.readouterr().out
    assert "a step 0.100 s" in told and "2 at once" in told
    assert [line.split()[0] for line in told.splitlines()[-5:]] == [
        "200", "600", "1000", "1400", "2000"
    ]  # fmt: skip


# ----------------------------------------------------------------------------------- running


class Fake:
    """Writes what `pretrain_gpt.py` would leave; `codes` are the exit codes of runs by name."""

    def __init__(self, codes: dict[str, int] | None = None) -> None:
        self.codes = codes or {}
        self.started: list[str] = []
        self.ranks: list[int] = []
        self.most_ranks = 0
        self._lock = threading.Lock()

    def __call__(self, flags: Sequence[str], ranks: int, console: Path) -> int:
        given = dict(zip(flags, flags[1:], strict=False))
        folder = Path(given["--run-dir"])
        with self._lock:
            self.started.append(folder.name)
            self.ranks.append(ranks)
            self.most_ranks = max(self.most_ranks, sum(self.ranks))
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        done = len(path.read_text().splitlines()) if path.exists() else 0
        first = max(done, int(given.get("--ckpt-step", 0))) + 1
        code = self.codes.pop(folder.name, 0)
        last = int(given.get("--exit-interval", given["--train-iters"]))
        with open(path, "a") as stream:
            for i in range(first, (last if code == 0 else first + 1) + 1):
                stream.write(json.dumps(line_of(i)) + "\n")
            if code == 0 and "--exit-interval" not in given:
                stream.write(json.dumps({"iteration": last, "valid_loss": 5.0}) + "\n")
        (folder / "checkpoints" / f"step_{last:08d}").mkdir(parents=True, exist_ok=True)
        with self._lock:
            self.ranks.remove(ranks)
        return code


def line_of(iteration: int, **more: Any) -> dict[str, Any]:
    """A step as metrics.jsonl has it."""
    loss = 6.0 - iteration / 100
    values = {"iteration": iteration, "lm_loss": loss, "grad_norm": 0.5, "density": 0.25}
    return {**values, "bytes_sent": 10, "step_seconds": 0.1, **more}


def run_some(runs: Sequence[StudyRun], folder: Path, fake: Fake, *, jobs: int = 2) -> list[str]:
    """`run_all` in a folder."""
    return run_all(
        runs,
        PLAN,
        data=folder / "data",
        work=folder / "work",
        results=folder / "results.jsonl",
        jobs=jobs,
        runner=fake,
    )


def names_in(folder: Path) -> list[str]:
    """Runs that have a row."""
    return [row["name"] for row in read_rows(folder / "results.jsonl", PLAN)]


def test_whole_study_runs_once(tmp_path: Path) -> None:
    fake = Fake()
    assert run_some(STUDY, tmp_path, fake) == []
    assert sorted(names_in(tmp_path)) == sorted(run.name for run in STUDY)
    dense = sum(run.is_dense for run in STUDY)
    assert len(fake.started) == len(STUDY) + 2 * dense
    again = Fake()
    assert run_some(STUDY, tmp_path, again) == [] and again.started == []


def test_an_interrupted_run_goes_on_and_its_forks_wait_for_it(tmp_path: Path) -> None:
    runs = [StudyRun(variant="dense", seed=1), radius(0.1)]
    assert run_some(runs, tmp_path, Fake({"dense-seed1": 75})) == [
        "dense-seed1",
        "radius_0.1-seed1",
    ]
    assert names_in(tmp_path) == []
    fake = Fake({"radius_0.1-seed1": 75})
    assert run_some(runs, tmp_path, fake) == ["radius_0.1-seed1"]
    assert names_in(tmp_path) == ["dense-seed1"]
    fake = Fake()
    assert run_some(runs, tmp_path, fake) == [] and fake.started == ["radius_0.1-seed1"]
    lines = (tmp_path / "work/runs/radius_0.1-seed1/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["iteration"] == 40  # the fork's own steps, none twice


def test_a_runner_that_stops_is_given_no_other_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stopping(Fake):
        stopping = False

        def __call__(self, flags: Sequence[str], ranks: int, console: Path) -> int:
            super().__call__(flags, ranks, console)
            self.stopping = True
            return 75

    fake = Stopping()
    assert sorted(run_some(STUDY, tmp_path, fake, jobs=1)) == sorted(run.name for run in STUDY)
    assert fake.started == [STUDY[0].name] and names_in(tmp_path) == []
    told = capsys.readouterr().out
    assert told.count("starts") == 1 and f"{len(STUDY) - 1} runs are left" in told


def test_a_run_whose_numbers_went_wrong_has_a_row(tmp_path: Path) -> None:
    runs = [StudyRun(variant="dense", seed=1), radius(0.1)]
    assert run_some(runs, tmp_path, Fake({"radius_0.1-seed1": 5})) == []
    row = read_rows(tmp_path / "results.jsonl", PLAN)[1]
    assert (row["exit_code"], row["valid_loss"], row["last_step"]) == (5, None, 41)
    assert groups_of(read_rows(tmp_path / "results.jsonl"))[1].failed == 1


def test_a_run_of_several_ranks_has_the_machine_to_itself(tmp_path: Path) -> None:
    runs = [run for run in STUDY if run.seed == 1 and (run.is_dense or run.ranks > 1)]
    fake = Fake()
    assert run_some(runs, tmp_path, fake) == []
    assert fake.most_ranks == 4


def test_a_dense_run_that_forks_lack_is_of_its_own_ranks(tmp_path: Path) -> None:
    dense = StudyRun(variant="dense", seed=1)
    (four,) = [run for run in STUDY if run.name == "powersgd_4-seed1"]
    assert run_some([dense], tmp_path, Fake()) == []
    shutil.rmtree(tmp_path / "work" / "runs" / dense.name)  # the row comes from another machine

    class Noting(Fake):
        def __call__(self, flags: Sequence[str], ranks: int, console: Path) -> int:
            code = super().__call__(flags, ranks, console)
            pairs.append((self.started[-1], ranks))
            return code

    pairs: list[tuple[str, int]] = []
    assert run_some([dense, four], tmp_path, Noting()) == []
    assert pairs[-1] == (four.name, 4) and pairs[:-1]
    assert all(pair == (dense.name, 1) for pair in pairs[:-1])


def test_processes_tell_exit_codes_and_keep_what_was_said(tmp_path: Path) -> None:
    processes, console = Processes(threads=1), tmp_path / "console.txt"
    assert processes(["--no-such-flag"], 1, console) == 2
    assert "no such flag" in console.read_text()
    processes.stop()
    assert processes(["--help"], 1, console) == 130


def test_preparing_names_the_text_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(ConfigError, match="valid"):
        prepare(tmp_path, tmp_path / "data", vocabulary=300)
