"""`tools/status.py` on run folders in every state, without torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.format import Manifest
from megatron.checkpoint.store import save_checkpoint
from megatron.checkpoint.verify import verify_folder
from megatron.config import resolve
from megatron.fault_tolerance.heartbeat import FOLDER, Heartbeat
from megatron.fault_tolerance.run_lock import LOCK, RunLock
from megatron.run_dir import keep_config
from megatron.status import Status, write_status
from tests.config.helpers import read
from tests.limits import LIMIT
from tools.status import MEANINGS, main

GONE = 2**22 - 3  # no process has it: beyond what this kernel hands out, or long gone


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "a run"
    folder.mkdir()
    (folder / "config.yaml").write_text("model: {}\n")
    for step in (2, 4):
        save_checkpoint(
            folder / "checkpoints", step=step, tensors={"param/x": torch.ones(3)}, state={}
        )
    (folder / "metrics.jsonl").write_text('{"iteration": 4, "lm_loss": 1.0}\n{"iteration": 5,')
    return folder


def told(run: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main([str(run), "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def same_command(run: Path) -> str:
    return f"CONFIG='{run}/config.yaml' RUN_DIR='{run}' RANKS_PER_NODE=1 scripts/launch.sh"


def test_a_run_that_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_status(run, Status(state="running", attempt="a"))
    lock = RunLock.take(run, job={}, log=print)
    assert lock is not None
    beat = Heartbeat(run / FOLDER, rank=1, attempt="a")
    beat.at("forward", 7)
    try:
        found = told(run, capsys)
    finally:
        beat.close()
        lock.release()
    assert found["state"] == "running" and found["last_step"] == 7
    assert found["checkpoint_step"] == 4 and 0 <= found["heartbeat_age"] < 60
    assert found["next_command"] == f"tail -f '{run}/log.txt'"


def test_a_job_that_runs_tells_its_progress(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Loss, times and restarts come from files that may be torn or missing."""
    lines = [{"iteration": n, "lm_loss": 4 - n / 8, "step_seconds": n / 4.0} for n in range(1, 8)]
    text = "".join(json.dumps(line) + "\n" for line in (*lines, {"iteration": 4, "valid_loss": 9}))
    (run / "metrics.jsonl").write_text(f'{{"torn\n{text}{{"iteration": 8,')
    (run / "log.txt").write_text(" iteration        7/      20 | \x00\n iteration  ")
    (run / "logs").mkdir()
    (run / "logs" / "starts-4711").write_text("0\n2\n4\n")
    (run / "logs" / "end-4711").write_text(f"{time.time() + 600:.0f}\n")
    write_status(run, Status(state="running", attempt="a", job_id="4711"))
    lock = RunLock.take(run, job={}, log=print)
    assert lock is not None
    try:
        found = told(run, capsys)
        assert (found["last_step"], found["total_steps"], found["loss"]) == (7, 20, 3.125)
        assert (found["step_seconds"], found["seconds_left"], found["restarts"]) == (1.0, 13.0, 2)
        assert 500 < found["job_seconds_left"] <= 601
        # The settings are those of this start, and may ask for fewer steps than the last one.
        (run / "config.yaml").write_text("training:\n  train_iters: 10\n")
        assert main([str(run)]) == 0
        words = capsys.readouterr().out
        for line in (
            "last step  7 of 10",
            "loss       3.1250",
            "step time  1.00 s",
            "restarts   2",
        ):
            assert f"{line}\n" in words
        assert "time left  3s at this step time\n" in words and "job ends   in " in words
        for path in (*(run / "logs").iterdir(), run / "log.txt", run / "metrics.jsonl"):
            path.write_bytes(b"\xff\x00")
        (run / "config.yaml").write_bytes(b"\xff")
        found = told(run, capsys)
        assert (found["total_steps"], found["loss"], found["job_seconds_left"]) == (None,) * 3
    finally:
        lock.release()


def test_a_run_whose_processes_are_gone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_status(run, Status(state="running", attempt="a", pid=GONE))
    beat = Heartbeat(run / FOLDER, rank=0, attempt="a")
    beat.at("reduce", 6)
    found = told(run, capsys)
    assert found["state"] == "lost"
    assert "rank 0 had made the least progress: step 6, reduce" in found["why"]
    assert found["last_step"] == 6 and found["next_command"] == same_command(run)
    assert json.loads((run / "status.json").read_text())["state"] == "running"  # only looked at


def test_a_run_on_another_host_is_lost_once_it_is_silent(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_status(run, Status(state="running", attempt="a", host="elsewhere", pid=1))
    (run / LOCK).write_text("{}")
    assert told(run, capsys)["state"] == "running"
    os.utime(run / LOCK, (time.time() - 500, time.time() - 500))
    found = told(run, capsys)
    assert found["state"] == "lost" and found["heartbeat_age"] > 400
    assert "no sign of life for more than 120 s" in found["why"]


def test_a_step_that_the_run_removes_while_it_is_read_is_not_damaged(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older steps go once a newer one is saved, as with --keep-last 1."""
    folder = run / "checkpoints"

    def verify(step: Path, *, hashes: bool) -> Manifest:
        if step.name == "step_00000004":
            save_checkpoint(folder, step=6, tensors={"param/x": torch.ones(3)}, state={})
            for name in ("step_00000002", "step_00000004"):
                shutil.rmtree(folder / name)
        return verify_folder(step, hashes=hashes)

    monkeypatch.setattr("tools.status.verify_folder", verify)
    found = told(run, capsys)
    assert found["checkpoint_step"] == 6 and not found["damaged"]


@pytest.mark.parametrize(
    ("status", "why", "following"),
    [
        (Status(state="done", exit_code=0, iteration=9), "", "python tools/report.py"),
        (Status(state="left", left="exit-interval", exit_code=0), "exit-interval", "launch.sh"),
        (Status(state="left", left="SIGUSR1", exit_code=75), "SIGUSR1", "launch.sh"),
        (
            Status(state="failed", exit_code=4, reason="no space\nat all"),
            "rank 0: no space at all",
            "verify_checkpoint.py",
        ),
        (
            Status(state="failed", exit_code=6, reason="gone", rank=3, iteration=8, phase="save"),
            "rank 3, step 8, save: gone",
            "launch.sh",
        ),
        (
            Status(state="failed", exit_code=5, reason="NaN", next_command="do this"),
            "NaN",
            "launch",
        ),
    ],
    ids=lambda value: value.state if isinstance(value, Status) else "",
)
def test_a_run_that_ended(
    run: Path, status: Status, why: str, following: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_status(run, status)
    found = told(run, capsys)
    assert found["state"] == status.state and why in found["why"]
    assert following in found["next_command"]
    assert found["meaning"] == MEANINGS[status.exit_code or 0]
    assert found["last_step"] == (status.iteration or 4)
    assert main([str(run)]) == 0
    words = capsys.readouterr().out
    assert f"exit code  {status.exit_code}: " in words and "step_00000004" in words


def test_a_job_goes_on_by_being_submitted_again(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_status(run, Status(state="left", left="SIGUSR1", exit_code=75, job_id="4711"))
    found = told(run, capsys)
    assert found["next_command"].startswith("squeue -j 4711;")
    assert "launch.sh" not in found["next_command"]


def test_a_run_that_saves_elsewhere_goes_on_from_there(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saves = run.with_name("its saves")
    (run / "checkpoints").rename(saves)
    keep_config(resolve(read("--save", str(saves)), 1), run, {})
    write_status(run, Status(state="left", left="STOP", exit_code=75))
    found = told(run, capsys)
    assert found["next_command"] == f"{same_command(run)} -- --save '{saves}'"
    assert found["checkpoint_step"] == 4
    write_status(run, Status(state="failed", exit_code=4, reason="damaged"))
    verify = f"python tools/verify_checkpoint.py '{saves}'"
    assert told(run, capsys)["next_command"] == verify
    keep_config(resolve(read("--save", str(run / "checkpoints")), 1), run, {})
    assert "save" not in json.loads((run / "environment.json").read_text())


def test_messages_need_an_mpi_launcher(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "config.yaml").write_text("parallel:\n  pipeline_schedule: message-driven\n")
    write_status(run, Status(state="left", left="STOP", exit_code=75))
    assert " LAUNCHER=mpiexec " in told(run, capsys)["next_command"]
    (run / "config.yaml").write_text("run:\n  run_dir: runs/message-driven\n")
    assert "LAUNCHER" not in told(run, capsys)["next_command"]


def test_damaged_checkpoints_are_passed_over(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_status(run, Status(state="left", left="STOP", exit_code=75))
    file = run / "checkpoints" / "step_00000004" / "rank_00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert told(run, capsys)["checkpoint_step"] == 4
    found = told(run, capsys, "--verify")
    assert found["checkpoint_step"] == 2 and "SHA-256" in found["damaged"][0]
    file.write_bytes(data[:-1])
    assert told(run, capsys)["checkpoint_step"] == 2


def test_odd_folders(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert main([str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("give the folder of a run") == 2
    (run / "status.json").write_bytes(b"\xff")
    found = told(run, capsys)
    assert found["state"] == "unknown" and found["checkpoint_step"] == 4


def test_it_needs_no_torch(run: Path, tmp_path: Path) -> None:
    write_status(run, Status(state="done", exit_code=0))
    tool = Path(__file__).resolve().parents[2] / "tools" / "status.py"
    program = (
        "import runpy, sys; sys.modules['torch'] = sys.modules['numpy'] = None; "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", program, str(tool), str(run)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert "state      done" in done.stdout


def test_what_files_say_cannot_move_the_cursor(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_status(
        run, Status(state="failed", exit_code=1, reason="\x1b[2Jred\x07\r\u202e", host="\x9b")
    )
    assert main([str(run)]) == 0
    shown = capsys.readouterr().out
    assert r"\x1b[2Jred\x07" in shown and r"\x9b" in shown
    assert all(mark.isprintable() for mark in shown.replace("\n", ""))


def test_values_of_wrong_types_are_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ({"exit_code": [1]}, {"iteration": "x"}, {"reason": 7}, {"attempt": {}}):
        (run / "status.json").write_text(json.dumps({"state": "left", **wrong}))
        found = told(run, capsys)
        assert (found["state"], found["why"]) == ("unknown", "status.json is missing or damaged")
        assert main([str(run)]) == 0 and "unknown" in capsys.readouterr().out


def test_a_save_without_space_says_what_to_free(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "x: no space: need 5 bytes, have 1; free some space"
    write_status(run, Status(state="failed", exit_code=4, reason=why))
    following = told(run, capsys)["next_command"]
    assert following.startswith("free some space (df -h ")
    assert following.endswith("scripts/launch.sh")
