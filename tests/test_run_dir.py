"""Tests of what a run records about itself before it begins."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron import launch, run_dir
from megatron.config import parse, resolve, to_yaml
from megatron.errors import ConfigError
from megatron.launch import job_environment
from megatron.low_memory.checkpoint_interval import describe_interval
from megatron.run_dir import announce, environment, keep_config, lock_run_dir
from megatron.status import Status, read_status, write_status
from pretrain_gpt import GRADIENT_PATHS
from tests.config.helpers import read


@pytest.mark.push
def test_the_commit_is_dirty_if_a_program_differs_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setattr(run_dir, "__file__", str(tmp_path / "megatron" / "run_dir.py"))
    assert run_dir._commit() is None, "no repository yet"
    program, rows = tmp_path / "megatron" / "run_dir.py", tmp_path / "rows.jsonl"
    program.parent.mkdir()
    for file in (program, rows):
        file.write_text("1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "files")
    commit = git("rev-parse", "--short", "HEAD")
    rows.write_text("2\n")
    (tmp_path / "notes.md").touch()
    assert run_dir._commit() == commit
    program.write_text("2\n")
    assert run_dir._commit() == f"{commit}-dirty"
    git("checkout", "-q", "megatron")
    (tmp_path / "path.py").touch()
    assert run_dir._commit() == f"{commit}-dirty", "a program that nobody can check out"


def announced(flags: str, *, stages: int, device: str = "cpu") -> list[str]:
    """Return the log lines of a run on `stages` ranks, each of which is a stage."""
    config = resolve(read(*flags.split(), "--pipeline-model-parallel-size", str(stages)), stages)
    said: list[str] = []
    parts: list[Any] = [
        SimpleNamespace(log=lambda text, brief=None: said.append(text)),
        SimpleNamespace(
            launch=SimpleNamespace(launcher="test"), device=SimpleNamespace(type=device), backend=""
        ),
        SimpleNamespace(dims=SimpleNamespace(pp=stages)),
    ]
    announce(cast(Any, parts[0]), config, *parts[1:])
    return said


@pytest.mark.parametrize(
    ("flags", "schedule"),
    [
        ("", "0-1, 2-3; 1F1B"),
        ("--num-layers-per-virtual-pipeline-stage 1 --global-batch-size 8", "interleaved 1F1B"),
        ("--pipeline-schedule message-driven", "message-driven over MPI, 2 microbatches at most"),
        ("--pipeline-schedule message-driven --pipeline-limit 5", "5 microbatches at most"),
    ],
)
def test_the_schedule_is_named(flags: str, schedule: str) -> None:
    (line,) = [s for s in announced(f"--num-layers 4 {flags}", stages=2) if "pipeline:" in s[:9]]
    assert line.endswith(schedule)


def test_recomputation_is_told_where_layers_are_recomputed_in_runs() -> None:
    full = "--num-layers 6 --recompute-granularity full --recompute-method"
    told = f"recomputation: {describe_interval(6, 6, 2)}"
    assert told in announced(f"{full} sqrt", stages=1)
    assert told in announced(f"{full} uniform --recompute-num-layers 2", stages=1)
    quiet = announced("--num-layers 6", stages=1) + announced(f"{full} block", stages=1)
    assert not [line for line in quiet if line.startswith("recomputation")]


def test_the_choice_to_compile_is_told_in_one_line() -> None:
    for device, flags, told in (
        ("cpu", "", "compile: off, the default on a CPU"),
        ("cuda", "--compile", "compile: on, as --compile true asks"),
        ("cuda", "--compile false", "compile: off, as --compile false asks"),
    ):
        (line,) = [s for s in announced(flags, stages=1, device=device) if s.startswith("compile:")]
        assert line.startswith(told)


def test_what_keeps_fast_attention_away_is_told_on_cuda_alone() -> None:
    told = "note: head size 188 is not a multiple of 8: on CUDA"
    for device in ("cpu", "cuda"):
        lines = announced("--bf16 --kv-channels 188", stages=1, device=device)
        assert any(line.startswith(told) for line in lines) == (device == "cuda")


def test_variables_of_cuda_are_told_and_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    told = "environment: CUDA_DEVICE_MAX_CONNECTIONS=1, CUDA_MODULE_LOADING=EAGER"
    lines = announced("--num-layers 4", stages=2, device="cuda")
    assert told in lines
    assert any(line.startswith("note: CUDA_DEVICE_MAX_CONNECTIONS=1 is kept") for line in lines)
    assert not [line for line in announced("--num-layers 4", stages=2) if "CUDA_" in line]
    assert environment()["job"] == job_environment()
    assert job_environment()["CUDA_MODULE_LOADING"] == "EAGER"


def test_gpus_that_a_run_does_not_use_are_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for gpus in ([], [Path("/dev/nvidia0")]):
        monkeypatch.setattr(launch, "gpu_devices", gpus.copy)
        lines = [line for line in announced("", stages=1) if line.startswith("warning: this mach")]
        assert len(lines) == len(gpus)
    # Nobody who asks for the CPU wonders about it.
    assert not any("NVIDIA" in line for line in announced("--device cpu", stages=1))


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_no_part_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is recorded in status.json, in the blocks that the file already has."""
    config = resolve(read(), 1)
    write_status(tmp_path, Status(state="running", attempt="a"))
    monkeypatch.setattr(os, "fsync", _full)
    with pytest.raises(ConfigError, match="No space left on device; free some space or choose"):
        keep_config(config, tmp_path, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["status.json"]
    failed = Status(state="failed", exit_code=2, reason="no space", attempt="a")
    assert write_status(tmp_path, failed) and read_status(tmp_path) == failed
    (tmp_path / "config.yaml").write_text("of an earlier start")
    with pytest.raises(ConfigError):
        keep_config(config, tmp_path, {})
    assert (tmp_path / "config.yaml").read_text() == "of an earlier start"
    monkeypatch.undo()
    keep_config(config, tmp_path, {})
    assert (tmp_path / "config.yaml").read_text() == to_yaml(config)


def test_the_configuration_names_a_step_of_another_run_alone(tmp_path: Path) -> None:
    """A step of the run's own checkpoints is not the newest any more when the run resumes."""
    (tmp_path / "checkpoints").mkdir()
    for flags, kept in (("", None), (f"--load {tmp_path}", None), ("--load other", 3)):
        keep_config(resolve(read("--ckpt-step", "3", *flags.split()), 1), tmp_path, {})
        written = parse(["--config", str(tmp_path / "config.yaml")], paths=GRADIENT_PATHS)
        assert written.checkpoint.ckpt_step == kept


def test_a_run_folder_in_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(ConfigError, match="symbolic links; choose a folder"):
        lock_run_dir(tmp_path / "a" / "run", log=print)
