"""A study runs what has no row, bases before forks, and goes on after failures and stops."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.status import Status, write_status
from tests.limits import LIMIT
from tests.studies.files import NAMES, row, write_study
from tools import study as tool
from tools.studies import execution as execution_module
from tools.studies import rows as rows_module
from tools.studies.array import arrays_of, script_of, site_flags
from tools.studies.commands import Commands
from tools.studies.declaration import DeclaredRun, read_study
from tools.studies.execution import Execution, Launcher
from tools.studies.rows import StudyRow, read_rows

pytestmark = pytest.mark.push


class PretendedRuns(Launcher):
    """Writes what a run would, in place of starting it, and keeps the names of the starts.

    Runs in `failing` end with their exit code, those in `crashing` with an error that nothing
    expects. The launcher stops after the run `stop_after`. With `last`, runs leave after this step.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(read_study(path), jobs=2)
        self.starts: list[str] = []
        self.failing: dict[str, int] = {}
        self.crashing: tuple[str, ...] = ()
        self.stop_after = ""
        self.last = 0
        self._guard = threading.Lock()
        self.at_once, self.most_at_once = 0, 0

    def __call__(
        self, flags: Sequence[str], *, ranks: int, folder: Path, console: Path, lock: int
    ) -> int:
        if self.stopping:
            return 130
        os.fstat(lock)  # open for the run
        with self._guard:
            self.at_once += ranks
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return self._run(flags, folder)
        finally:
            with self._guard:
                self.at_once -= ranks

    def _run(self, flags: Sequence[str], folder: Path) -> int:
        value = dict(zip(flags, [*flags[1:], ""], strict=True)).get
        until = value("--exit-interval")
        self.starts.append(folder.name + (f" to {until}" if until else ""))
        if folder.name in self.crashing:
            raise ValueError("no such\nsuffix")
        if code := self.failing.get(folder.name, 0):
            return code
        if base := value("--load"):
            step = int(value("--ckpt-step", "0"))
            assert (Path(base) / "checkpoints" / f"step_{step:08d}").is_dir(), "as a run would"
        last = self.last or int(until or value("--train-iters", "0"))
        (folder / "checkpoints" / f"step_{last:08d}").mkdir(parents=True, exist_ok=True)
        common = {"step_seconds": 0.1, "bytes_sent": 8, "density": 1.0, "peak_memory_bytes": 9}
        lines: list[dict[str, float]] = [
            {"iteration": i, "lm_loss": 5.0, "grad_norm": 1.0, **common} for i in range(1, last + 1)
        ]
        lines.append({"iteration": last, "valid_loss": 4.0 + int(value("--seed", "0"))})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
        state = {"state": "left" if until or self.last else "done", "iteration": last}
        (folder / "status.json").write_text(json.dumps({**state, "exit_code": 0}), encoding="utf-8")
        if folder.name == self.stop_after:
            self.stop()
        return 0


def execute(
    path: Path, launcher: PretendedRuns, only: Sequence[str] = ()
) -> tuple[list[str], list[str], Execution]:
    """Run a study; return the failed runs, the log, and the execution."""
    study, lines = read_study(path), list[str]()
    execution = Execution(
        study, path.parent / "work", data=Path("data"), jobs=2, launcher=launcher, log=lines.append
    )
    wanted = [run for run in study.runs if not only or run.name in only]
    return execution.run_all(wanted, execution.done), lines, execution


def test_each_base_runs_up_to_its_fork_and_then_on(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    launcher = PretendedRuns(path)
    failed, lines, execution = execute(path, launcher)
    assert failed == [] and list(execution.done) == NAMES
    assert sorted(launcher.starts) == sorted([*NAMES, "dense-seed1 to 4", "dense-seed2 to 4"])
    assert launcher.starts.index("dense-seed1 to 4") < launcher.starts.index("dense_int4-seed1")
    assert launcher.most_at_once <= 2, "a run of two ranks has both places"
    assert "6 of 6" in lines[-1] and "left" in lines[-3]
    row = execution.done["dense_bf16-seed2"]
    assert (row.valid_loss, row.steps, row.bytes) == (6.0, 10, 8)
    assert (row.flags["lr"], row.flags["train-iters"], row.flags["ckpt-step"]) == (1e-3, 10, 4)
    assert row.flags["grad-wire"] == "bf16" and "run-dir" not in row.flags and row.cores > 0


def test_a_second_start_runs_nothing_and_a_changed_study_is_refused(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    execute(path, PretendedRuns(path))
    again = PretendedRuns(path)
    assert execute(path, again)[0] == [] and again.starts == []
    changed = write_study(tmp_path, ("lr: 1.0e-3", "lr: 2.0e-3"))
    with pytest.raises(ConfigError, match="dense-seed1 has a row of other settings"):
        execute(changed, again)


def test_a_failed_run_is_told_and_can_be_made_alone(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    launcher = PretendedRuns(path)
    launcher.failing = {"dense_bf16-seed1": 3}
    failed, lines, execution = execute(path, launcher)
    assert failed == ["dense_bf16-seed1"] and len(execution.done) == 5
    assert "5 of 6" in lines[-1] and not any("6 of 6" in line for line in lines)
    (told,) = [line for line in lines if "exit code" in line]
    assert told.startswith("dense_bf16-seed1: exit code 3; see ") and told.endswith("seed1.txt")
    launcher.failing, launcher.starts = {}, []
    assert execute(path, launcher, ["dense_bf16-seed1"])[0] == []
    assert launcher.starts == ["dense_bf16-seed1"] and list(execution.done) == NAMES


@pytest.mark.push
def test_each_finished_model_is_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    score = f"scores: {{b: {{task: blimp, file: '{tmp_path}/f', figure: accuracy}}}}\nruns:"
    path = write_study(tmp_path, ("runs:", score))
    tool = tmp_path / "evaluate.py"
    monkeypatch.setattr(execution_module, "EVALUATE", tool)
    only = ["dense-seed1"]
    with pytest.raises(ConfigError, match=r"scores.b.file: .*/f is no file"):
        execute(path, PretendedRuns(path), only)
    (tmp_path / "f").touch()
    digest = f"sha256: {{'{tmp_path}/f': {'a' * 64}}}\n{score}"
    other = write_study(tmp_path, ("runs:", digest))
    with pytest.raises(ConfigError, match=r"sha256.*/f: .*/f is another file"):
        execute(other, PretendedRuns(other), only)
    path = write_study(tmp_path, ("runs:", score))
    for text, problem in (
        ("import sys; sys.exit('error: bad line')", "scores.b: exit code 1; see "),
        ("print('{\"examples\": 3}')", "scores.b.figure: accuracy; must be one of examples"),
    ):
        tool.write_text(text, encoding="utf-8")
        failed, lines, _ = execute(path, PretendedRuns(path), only)
        assert failed == only and problem in lines[-1]
    assert "error: bad line" in (tmp_path / "work" / "console" / "dense-seed1.txt").read_text()
    told = "import json, sys; step = sys.argv[sys.argv.index('--checkpoint-step') + 1]\n"
    told += "print(json.dumps({'accuracy': 0.5 + int(step)}))"
    tool.write_text(told, encoding="utf-8")
    again = PretendedRuns(path)
    failed, _, execution = execute(path, again, only)
    # Trained once: what failed was the scoring.
    assert failed == [] and again.starts == []
    assert execution.done["dense-seed1"].scores == {"b": 10.5}, "of the last step, 10"
    assert read_rows(tmp_path / "work" / "rows" / "dense-seed1.json")[0].scores == {"b": 10.5}


def test_numbers_that_went_wrong_are_a_result(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    launcher = PretendedRuns(path)
    execute(path, launcher, ["dense-seed1"])
    launcher.failing = {"dense_int4-seed1": 5}
    execute(path, launcher, ["dense_int4-seed1"])  # has its settings now, and no metrics yet
    folders = tmp_path / "work" / "runs"
    (folders / "dense_int4-seed1").mkdir()
    metrics = (folders / "dense-seed1" / "metrics.jsonl").read_text()
    (folders / "dense_int4-seed1" / "metrics.jsonl").write_text(metrics)
    failed, _, execution = execute(path, launcher, ["dense_int4-seed1"])
    row = execution.done["dense_int4-seed1"]
    assert failed == [] and (row.exit_code, row.valid_loss) == (5, None)


def test_a_base_whose_numbers_went_wrong_is_no_result_of_its_fork(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    launcher = PretendedRuns(path)
    launcher.failing = {"dense-seed1": 5}
    failed, lines, _ = execute(path, launcher, ["dense_int4-seed1"])
    assert failed == ["dense_int4-seed1"]
    assert "no checkpoint of dense-seed1 after step 4: exit code 5" in lines[-1]


def test_a_run_that_left_early_has_no_row(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    launcher = PretendedRuns(path)
    execute(path, launcher, ["dense-seed1"])
    launcher.last = 6
    failed, lines, execution = execute(path, launcher, ["dense_int4-seed1"])
    assert failed == ["dense_int4-seed1"] and list(execution.done) == ["dense-seed1"]
    assert "left before its last step" in lines[-1]


def test_a_fork_from_a_step_that_the_base_has_passed_is_told(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    execute(path, PretendedRuns(path), ["dense-seed1"])
    launcher = PretendedRuns(path)
    launcher.last = 10  # as a run that goes on from its last checkpoint
    later = write_study(tmp_path, ("step: 4", "step: 3"))
    failed, lines, _ = execute(later, launcher, ["dense_int4-seed1"])
    assert failed == ["dense_int4-seed1"] and "after step 3: it is past this step" in lines[-1]


def test_a_run_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    execute(path, PretendedRuns(path))
    for file in (tmp_path / "work" / "rows").iterdir():
        file.unlink()
    changed = write_study(tmp_path, ("lr: 1.0e-3", "lr: 2.0e-3"))
    again = PretendedRuns(changed)
    failed, lines, execution = execute(changed, again)
    assert sorted(failed) == sorted(NAMES) and again.starts == [] and execution.done == {}
    assert all("holds a run of other settings" in line for line in lines if ": /" in line)


@pytest.mark.parametrize("content", ["", "another"])
def test_a_row_file_without_its_row_is_named(tmp_path: Path, content: str) -> None:
    path = write_study(tmp_path)
    execute(path, PretendedRuns(path), ["dense-seed1", "dense-seed2"])
    rows = tmp_path / "work" / "rows"
    text = (rows / "dense-seed2.json").read_text() if content else ""
    (rows / "dense-seed1.json").write_text(text)
    with pytest.raises(ConfigError, match=r"dense-seed1.json: must hold the row of dense-seed1"):
        execute(path, PretendedRuns(path), ["dense-seed1"])


def test_a_start_that_made_nothing_does_not_bind_a_corrected_study(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    launcher = PretendedRuns(path)
    launcher.failing = {name: 2 for name in NAMES}
    assert len(execute(path, launcher)[0]) == len(NAMES)
    assert not (tmp_path / "work" / "runs").exists()
    corrected = write_study(tmp_path, ("lr: 1.0e-3", "lr: 2.0e-3"))
    failed, _, execution = execute(corrected, PretendedRuns(corrected))
    assert failed == [] and list(execution.done) == NAMES


def test_a_fork_waits_for_its_checkpoint_and_not_for_the_end_of_its_base(tmp_path: Path) -> None:
    path = write_study(tmp_path, ("ranks: 2", "ranks: 1"))
    launcher = PretendedRuns(path)
    _, lines, execution = execute(path, launcher, ["dense-seed1"])
    checkpoint = tmp_path / "work" / "runs" / "dense-seed1" / "checkpoints" / "step_00000004"
    later = checkpoint.rename(tmp_path / "later")
    with open(tmp_path / "work" / "locks" / "dense-seed1", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as while the base goes on
        with ThreadPoolExecutor(1) as pool:
            made = pool.submit(execution.run_one, execution_run(path, "dense_int4-seed1"))
            try:
                while "dense-seed1: in use; waits" not in lines:
                    assert not made.done(), "there is no checkpoint"
                later.rename(checkpoint)
                row = made.result(timeout=LIMIT)
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)
        assert row.name == "dense_int4-seed1" and launcher.starts[-1] == row.name


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["local", "torchrun"]),
        ({"LAUNCHER": "sbatch"}, ["local", "torchrun"]),
        ({"LAUNCHER": "mpiexec"}, ["mpiexec", "mpiexec"]),
        ({"SLURM_JOB_ID": "1"}, ["srun", "srun"]),
    ],
)
def test_a_site_that_submits_does_not_submit_the_runs_of_a_study(
    tmp_path: Path,
    given: dict[str, str],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("LAUNCHER", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"SITE": "perlmutter", **given}.items():
        monkeypatch.setenv(name, value)
    found: list[str] = []

    def started(self: Launcher, command: object, **options: dict[str, str]) -> int:
        found.append(options["env"]["LAUNCHER"])
        return 0

    monkeypatch.setattr(Launcher, "wait_for", started)
    launcher = Launcher(read_study(write_study(tmp_path)), jobs=1)
    for ranks in (1, 2):
        launcher([], ranks=ranks, folder=tmp_path, console=tmp_path / "console.txt", lock=0)
    assert found == expected


def test_a_run_that_another_process_makes_is_waited_for(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    launcher = PretendedRuns(path)
    _, lines, execution = execute(path, launcher, ["dense-seed1"])
    finished = tmp_path / "work" / "rows" / "dense-seed1.json"
    row = finished.read_text()
    finished.unlink()
    launcher.starts = []
    with open(tmp_path / "work" / "locks" / "dense-seed1", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with ThreadPoolExecutor(1) as pool:
            made = pool.submit(execution.run_one, execution_run(path, "dense-seed1"))
            while "dense-seed1: in use; waits" not in lines:
                assert not made.done(), "the lock is held"
            finished.write_text(row)
            fcntl.flock(file, fcntl.LOCK_UN)
            assert made.result().line + "\n" == row and launcher.starts == []


def execution_run(path: Path, name: str) -> DeclaredRun:
    return read_study(path).run(name)


def test_a_full_disk_ends_one_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = execution_module.write_row

    def refused(path: Path, row: StudyRow) -> None:
        if row.group == "dense_int4":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, row)

    monkeypatch.setattr(execution_module, "write_row", refused)
    path = write_study(tmp_path)
    failed, lines, execution = execute(path, PretendedRuns(path))
    assert set(failed) == {"dense_int4-seed1", "dense_int4-seed2"} and len(execution.done) == 4
    assert sum("No space left" in line for line in lines) == 2


def test_an_error_that_nothing_expects_ends_one_run_alone(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    launcher = PretendedRuns(path)
    launcher.crashing = ("dense_int4-seed1",)
    failed, lines, execution = execute(path, launcher)
    assert failed == ["dense_int4-seed1"] and len(execution.done) == 5
    assert "dense_int4-seed1: ValueError: no such suffix" in lines


def test_the_estimate_counts_what_running_runs_have_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of eight equal runs, four at a time, are ahead when the first one ends."""
    text = write_study(tmp_path).read_text(encoding="utf-8")
    path = tmp_path / "study.yaml"
    alone = text.partition('  "dense_')[0].replace("[[dense_int4, dense_bf16]]", "[]")
    path.write_text(alone.replace("[1, 2]", "[1, 2, 3, 4, 5, 6, 7, 8]"), encoding="utf-8")
    study, now = read_study(path), [100.0]
    commands = Commands(study, tmp_path, tmp_path)
    monkeypatch.setattr(execution_module.time, "monotonic", lambda: now[0])
    progress = execution_module._Progress(commands, jobs=4, done=0, total=8)
    for run in study.runs[:4]:
        progress.began(run)
    first, *rest = study.runs
    told = []
    # The other three are behind by a second, and so have a second left.
    for run, seconds in ((first, 9.0), (study.runs[1], 1.0)):
        now[0] += seconds
        write_status(commands.folder(run), Status(state="done", iteration=commands.steps(run)))
        progress.ended(run)
        told.append(progress.after([other for other in rest if other is not run]))
    assert told == ["1 of 8, about 9s left", "2 of 8, about 10s left"]


def test_a_stop_leaves_the_rest_for_another_start(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    launcher = PretendedRuns(path)
    launcher.stop_after = "dense_bf16-seed1"
    failed, lines, execution = execute(path, launcher)
    assert set(failed) == set(NAMES) - set(execution.done) and len(failed) >= 3
    assert any(line.startswith("stopped: ") for line in lines)
    assert execute(path, PretendedRuns(path))[0] == [] and list(execution.done) == NAMES


def test_a_run_that_ended_without_its_row_is_not_made_again(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    execute(path, PretendedRuns(path))
    (tmp_path / "work" / "rows" / "dense_int4-seed2.json").unlink()
    again = PretendedRuns(path)
    failed, _, execution = execute(path, again)
    assert failed == [] and again.starts == [] and list(execution.done) == NAMES


def test_arrays_put_bases_first_and_one_number_of_ranks_together(tmp_path: Path) -> None:
    runs = read_study(write_study(tmp_path)).runs
    bases, forks = arrays_of(runs)
    assert [run.name for run in bases.runs] == ["dense-seed1", "dense-seed2"]
    assert (bases.ranks, forks.ranks, forks.after_bases) == (1, 2, True)
    script = script_of(forks, ["python", "study.py", "a b.yaml"], jobs=3)
    headers = "#SBATCH --array=0-3%3\n#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=2\n"
    assert headers in script
    assert "python study.py 'a b.yaml' --only \"${runs[SLURM_ARRAY_TASK_ID]}\"" in script
    assert f"runs=({' '.join(run.name for run in forks.runs)})" in script


def test_arrays_ask_for_what_the_site_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CPUS_PER_TASK", raising=False)
    monkeypatch.delenv("SITE", raising=False)
    assert site_flags() == []
    monkeypatch.setenv("SITE", "perlmutter")
    asked = ["--constraint=gpu", "--gpus-per-node=4"]
    assert site_flags() == [*asked, "--cpus-per-task=32"]
    monkeypatch.setenv("CPUS_PER_TASK", "8")
    assert site_flags() == [*asked, "--cpus-per-task=8"]
    monkeypatch.setenv("SITE", "perlmuter")
    with pytest.raises(ConfigError, match="SITE=perlmuter: no scripts/site/perlmuter.env"):
        site_flags()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--jobs", "0"], "--jobs 0: must be at least 1"),
        (["--only", "dense-seed3"], "--only dense-seed3: no such run; did you mean dense-seed"),
        (["--partition=big"], "--partition=big: no such flag; sbatch's flags need --slurm"),
        (["--report"], "no run has a result yet"),
        (["--slurm", "--output=log"], "--output=log: --slurm sets this flag of sbatch itself"),
        (["--slurm", "--depend=after:1"], "--depend=after:1: --slurm sets this flag"),
        (["--slurm", "-a", "0-0"], "-a: flags of sbatch are written --name=value"),
        (["--slurm", "--partition", "big"], "big: flags of sbatch are written --name=value"),
    ],
)
def test_wrong_usage_is_refused_in_one_line(
    tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_study(tmp_path)
    assert tool.main([str(path), "--work", str(tmp_path / "work"), *flags]) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1


@pytest.mark.parametrize("flags", [[], ["--list"]])
def test_a_file_of_results_that_cannot_be_used_is_refused_at_the_start(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_study(tmp_path)
    work = ["--work", str(tmp_path / "work")]
    assert tool.main([str(path), *work, "--results", str(tmp_path), *flags]) == 2
    told = capsys.readouterr()
    assert f"--results: {tmp_path} is no file that can be read" in told.err
    assert tool.main([str(path), *work, "--results", str(path / "rows.jsonl")]) == 2
    told = capsys.readouterr()
    assert "--results: " in told.err and "rows.jsonl: lies in a file" in told.err
    assert told.err.count("\n") == 1 and not (tmp_path / "work").exists()


def test_a_folder_of_results_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unwritable(path: Path, mode: int) -> bool:
        return not mode & os.W_OK

    monkeypatch.setattr(tool.os, "access", unwritable)
    assert tool.main([str(write_study(tmp_path)), "--work", str(tmp_path / "work")]) == 2
    told = capsys.readouterr().err
    assert f"--results: {tmp_path / 'work'} cannot be written" in told and told.count("\n") == 1


def test_only_a_start_that_makes_runs_writes_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_study(tmp_path)
    execute(path, PretendedRuns(path))
    results = tmp_path / "out" / "rows.jsonl"
    command = [str(path), "--work", str(tmp_path / "work"), "--results", str(results)]
    assert tool.main([*command, "--list"]) == 0
    assert capsys.readouterr().out.count("done") == len(NAMES)
    assert tool.main([*command, "--report", "--out", str(tmp_path / "page")]) == 0
    compared = ["--report", "--out", str(tmp_path / "page"), "--against", str(results)]
    for wrong, words in ((compared, "no such file"), (compared[-2:], "give --report")):
        assert tool.main([*command, *wrong]) == 2
        assert words in capsys.readouterr().err
    values = [*command[:-1], str(tmp_path / "page" / "results.json"), "--report", *compared[1:3]]
    assert tool.main(values) == 2, "the report would replace the rows"
    assert "results.json; give another folder" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    assert tool.main([*command, "--only", NAMES[0]]) == 0
    assert not results.parent.exists()
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID")
    assert tool.main([*command, "--only", NAMES[0]]) == 0
    assert [row.name for row in read_rows(results)] == NAMES
    assert tool.main([*command, *compared]) == 0
    page = (tmp_path / "page" / "README.md").read_text(encoding="utf-8")
    assert "The same runs in rows.jsonl" in page and "| +0.0000 |" in page
    html = (tmp_path / "page" / "study.html").read_text(encoding="utf-8")
    assert "Made again" in html and "differ at the level of 5 %" in html
    results.write_text("", encoding="utf-8")
    assert tool.main([*command, *compared]) == 2
    assert "has no row of the same runs and settings" in capsys.readouterr().err


def test_two_processes_that_add_rows_at_once_lose_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each makes half of the runs in a folder of its own; the slower one has read before."""
    path = write_study(tmp_path, ("ranks: 2", "ranks: 1"))
    results = tmp_path / "rows.jsonl"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        runs = [run for run in NAMES if run.endswith("1" if name == "a" else "2")]
        execute(path, PretendedRuns(path), runs)
        (tmp_path / "work").rename(tmp_path / name / "work")
    read = tool.read_rows

    def slowly(path: Path) -> list[StudyRow]:
        found = read(path)
        time.sleep(0.5)
        return found

    monkeypatch.setattr(tool, "read_rows", slowly)
    study = read_study(path)
    with ThreadPoolExecutor(2) as pool:
        for name in ("a", "b"):
            execution = Execution(
                study,
                tmp_path / name / "work",
                data=tmp_path,
                jobs=1,
                launcher=PretendedRuns(path),
                log=print,
            )
            pool.submit(tool._collect, execution, results, write=True)
    assert [row.name for row in read_rows(results)] == NAMES


def test_a_disk_without_locks_takes_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(rows_module.fcntl, "flock", refused)
    with rows_module.adding_to(tmp_path / "rows.jsonl"):
        rows_module.write_rows(tmp_path / "rows.jsonl", [row("dense", 1, 5.0)])
    assert len(read_rows(tmp_path / "rows.jsonl")) == 1


@pytest.mark.full
def test_a_real_study_is_made_in_two_starts_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = write_study(
        tmp_path,
        ("seeds: [1, 2]", "seeds: [1]"),
        ("[bf16, int4]", "[int4]"),
        ("pairs: [[dense_int4, dense_bf16]]\n", ""),
    )
    work = ["--work", str(tmp_path / "work")]
    assert tool.main([str(path), *work, "--only", "dense-seed1"]) == 0
    assert tool.main([str(path), *work]) == 0
    assert "dense-seed1: starts" in (told := capsys.readouterr().out) and "2 of 2" in told
    assert told.count("dense-seed1: starts") == 1
    rows = read_rows(tmp_path / "work" / "results.jsonl")
    assert [row.name for row in rows] == ["dense-seed1", "dense_int4-seed1"]
    assert rows[1].bytes > 0 and rows[1].curve[-1][0] == 10 and rows[0].valid_loss
    assert all(row.torch and row.processor for row in rows)
    assert tool.main([str(path), *work, "--list"]) == 0
    assert capsys.readouterr().out.split() == ["dense-seed1", "done", "dense_int4-seed1", "done"]
    assert tool.main([str(path), *work, "--report", "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "study.html").read_text(encoding="utf-8")
    assert "Does the width of values cost loss?" in page and "dense_int4" in page
    assert '<a href="../work/runs/dense-seed1/report.html">' in page
    readme = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert re.search(r"\| dense_int4 \| \d.* \| 1 \| 2 \|", readme)
