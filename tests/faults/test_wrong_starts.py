"""Starts that cannot work end in a line or a few, with their exit code, and without a traceback."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.fault_tolerance import failures as module_of_failures
from megatron.fault_tolerance.failures import Failures
from megatron.fault_tolerance.heartbeat import FOLDER
from megatron.fault_tolerance.run_lock import RunFolderInUse
from megatron.launch import Launch, detect_launch
from megatron.status import State, Status, read_status, write_status
from tests import program
from tests.faults.starting import FLAGS, LONG_TIMEOUT, REPO, SCRIPT, environment, start_ranks
from tests.limits import LIMIT
from tools import doctor_host, faults_table


def started(*command: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environment(**more), capture_output=True, text=True, timeout=LIMIT, cwd="/"
    )


@pytest.mark.waits
@pytest.mark.push
def test_no_arguments_show_the_usage_in_four_lines() -> None:
    done = started(sys.executable, SCRIPT)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: pretrain_gpt.py") and done.stderr.count("\n") == 4


@pytest.mark.waits
@pytest.mark.push
@pytest.mark.parametrize("threads", ["abc", "0", "-1", "1.5", "2,", "99999999", "٣"])
def test_threads_that_are_no_number_are_refused(threads: str) -> None:
    """OpenMP's libraries would wait without end, or ignore it."""
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS=.*whole number"):
        detect_launch({"OMP_NUM_THREADS": threads})
    launcher = str(REPO / "scripts" / "launch.sh")
    done = started(launcher, OMP_NUM_THREADS=threads, PYTHON=sys.executable)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"OMP_NUM_THREADS={threads}: " in done.stderr


def test_threads_may_be_nested_or_unset() -> None:
    for environ in ({}, {"OMP_NUM_THREADS": ""}, {"OMP_NUM_THREADS": "4,2"}):
        assert detect_launch(environ).world_size == 1


@pytest.mark.waits
@pytest.mark.push
def test_a_run_folder_in_a_loop_of_links_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    run_dir = str(tmp_path / "a" / "run")
    argv = [*FLAGS.split(), "--train-iters", "1", "--run-dir", run_dir]
    done = program.run(SCRIPT, argv, env=environment(), cwd="/")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1 and "symbolic links" in done.stderr


def test_what_reports_a_failure_needs_no_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    failures = Failures(argv=["--run-dir", str(tmp_path / "run")])
    monkeypatch.setattr(Path, "is_dir", refuse)
    monkeypatch.setattr(Path, "exists", refuse)
    assert failures.report(ConfigError("lr: too odd")) == 2
    assert capsys.readouterr().err == "lr: too odd\n"
    found = list(doctor_host.disk(tmp_path / "x", 1))
    assert [(area, wrong) for area, _, wrong in found] == [("disk", True)]
    assert "Permission denied" in found[0][1]


@pytest.mark.parametrize("argv", [["--run-dir="], ["--run-dir"], ["--run-dir", ""]])
def test_an_empty_run_folder_is_not_the_current_folder(
    argv: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Failures(argv=argv).report(ConfigError("run_dir: empty")) == 2
    assert capsys.readouterr().err == "run_dir: empty\n"
    assert list(tmp_path.iterdir()) == []


def test_what_one_node_lacks_is_told_by_its_first_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 of another node has the file, and tells nothing of it."""
    monkeypatch.setattr(module_of_failures, "SECONDS_TO_SPEAK", 0.0)
    for local_rank, told in ((0, "rank 4: valid: absent\n"), (1, "")):
        rank = 4 + local_rank
        launch = Launch(
            launcher="torchrun", rank=rank, world_size=8, local_rank=local_rank, local_world_size=4
        )
        assert Failures(argv=[], launch=launch).report(ConfigError("valid: absent")) == 2
        assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("--debug", True),
        ("--debug --lr 1", True),
        ("--debug=true --lr 1", True),
        ("--debug true", True),
        ("--debug false", False),
        ("--debug=maybe", False),
        ("", False),
    ],
)
def test_a_command_line_that_cannot_be_read_asks_for_tracebacks_too(
    words: str, shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Failures(argv=words.split()).report(ConfigError("lr: too odd")) == 2
    assert ("ConfigError: lr: too odd" in capsys.readouterr().err) == shown


@pytest.mark.parametrize("state", ["running", "failed", "left", "done"])
@pytest.mark.parametrize("dry", [True, False])
def test_a_refused_start_leaves_the_status_of_a_run_that_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: State, dry: bool
) -> None:
    before = Status(state=state, exit_code=0, attempt="first")
    write_status(tmp_path, before)
    argv = ["--run-dir", str(tmp_path), *(["--dry-run"] if dry else [])]
    assert Failures(argv=argv).report(ConfigError("lr: too odd")) == 2
    assert capsys.readouterr().err == "lr: too odd\n"
    status = read_status(tmp_path)
    assert status is not None
    assert (status == before) == (dry or state in ("left", "done"))
    assert status == before or (status.state, status.reason) == ("failed", "lr: too odd")


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return the content of every file below a folder, and when it was written."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    facts = ((path.read_bytes(), path.stat().st_mtime_ns) for path in files)
    return dict(zip((str(path.relative_to(folder)) for path in files), facts, strict=True))


REFUSED = {
    "seed": ("--seed 7", 4, "training.seed: 1234 there, 7 here"),
    "model": ("--hidden-size 64", 4, "model.hidden_size: 32 there, 64 here"),
    "path": ("--grad-path topk", 4, "gradient.grad_path: 'dense' there, 'topk' here"),
    "data": ("--mock-data false --data-path missing", 3, "missing.bin"),
    "flag": ("--sead 7", 2, "--sead: no such flag"),
}


@pytest.mark.waits
@pytest.mark.push
def test_a_refused_start_changes_no_file_of_a_finished_run(tmp_path: Path) -> None:
    flags, run = "--train-iters 4", tmp_path / "run"
    assert start_ranks(2, run, flags).finish().codes == [0, 0]
    before = tree(run)
    for name, (more, code, reason) in REFUSED.items():
        ended = start_ranks(2, run, f"{flags} {more}").finish()
        assert ended.codes == [code, code] and reason in ended.all_stderr, (name, ended)
        assert tree(run) == before, name
        # The same before anything starts, as launch.sh asks.
        argv = [*FLAGS.split(), *flags.split(), *more.split(), "--run-dir", str(run), "--dry-run"]
        done = program.run(SCRIPT, argv, env=environment(RANK="0", WORLD_SIZE="2"), cwd="/")
        assert done.returncode == code and reason in done.stderr, (name, done)
        assert tree(run) == before, name
    assert start_ranks(2, run, "--train-iters 5").finish().codes == [0, 0]
    assert tree(run)["log.txt"][0].startswith(before["log.txt"][0]) and tree(run) != before


def is_caught(number: signal.Signals, pid: int) -> bool:
    """Return whether a process has a handler for a signal."""
    (mask,) = re.findall(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.waits
@pytest.mark.push
def test_sigterm_to_ranks_that_start_leaves_to_be_started_again(tmp_path: Path) -> None:
    """Rank 0 waits for a rank that is not there."""
    flags = f"--train-iters 4 {LONG_TIMEOUT}"
    waiting = start_ranks(2, tmp_path / "run", flags, ranks=range(1))
    deadline = time.monotonic() + LIMIT
    while not is_caught(signal.SIGTERM, waiting.processes[0].pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    waiting.processes[0].send_signal(signal.SIGTERM)
    ended = waiting.finish()
    assert ended.codes == [75] and not (tmp_path / "run").exists(), ended


def test_ranks_leave_a_folder_in_use_after_rank_0_has_said_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher would end rank 0 as soon as another one has ended."""
    naps: list[float] = []
    monkeypatch.setattr(module_of_failures.time, "sleep", naps.append)
    launch = Launch(launcher="torchrun", rank=1, world_size=2, local_rank=1, local_world_size=2)
    assert Failures(argv=[], launch=launch).report(RunFolderInUse("in use by process 7")) == 2
    assert capsys.readouterr().err == "" and naps == [module_of_failures.SECONDS_TO_SPEAK]


def test_a_refused_start_leaves_the_records_of_the_run_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / FOLDER).mkdir()
    launch = Launch(launcher="torchrun", rank=0, world_size=2, local_rank=0, local_world_size=2)
    failures = Failures(argv=[], launch=launch, run_dir=tmp_path, attempt="second")
    assert failures.report(RunFolderInUse("in use by process 7")) == 2
    assert capsys.readouterr().err == "in use by process 7\n"
    assert list(tmp_path.iterdir()) == [tmp_path / FOLDER]
    assert list((tmp_path / FOLDER).iterdir()) == []


@pytest.mark.waits
@pytest.mark.push
def test_tools_of_the_tests_say_how_they_are_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        faults_table.main(["--help"])
    assert left.value.code == 0 and "RESULTS.xml" in capsys.readouterr().out
    (tmp_path / "odd.xml").write_text("no xml")
    for name, code in (("odd.xml", 3), ("missing.xml", 2)):
        assert faults_table.main([str(tmp_path / name)]) == code
        assert capsys.readouterr().err.count("\n") == 1
    done = program.run(REPO / "tools" / "parity_rank.py", [], env=environment(), cwd="/")
    assert done.returncode == 2 and "tools/parity.py starts this" in done.stderr
    assert "Traceback" not in done.stderr
