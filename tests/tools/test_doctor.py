"""`tools/doctor.sh` on this machine, and its checks on machines that have something wrong."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron import launch
from megatron.status import read_status
from tests.limits import LIMIT
from tools import doctor_host, doctor_ranks, doctor_settings

pytestmark = pytest.mark.push

DOCTOR = Path(__file__).resolve().parents[2] / "tools" / "doctor.sh"
CANARY = "canary-4711"


def doctor(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    ours = ("LAUNCHER", "NODES", "RANKS_PER_NODE", "CONFIG", "GRAD_PATH", "RUN_DIR", "SITE")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run(
        [DOCTOR, *arguments],
        env=env | {"PYTHON": sys.executable} | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def test_a_sound_machine_has_no_problem_and_keeps_its_secrets(tmp_path: Path) -> None:
    run = tmp_path / "a run"
    run.mkdir()
    (run / "status.json").write_text("{}")
    secrets = {"SLURM_JWT": CANARY, "HF_TOKEN": CANARY, "NCCL_DEBUG": "WARN"}
    done = doctor(run, RANKS_PER_NODE="2", **secrets)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "environment  NCCL_DEBUG=WARN" in lines and lines[-1] == "no problem found"
    for start in ("versions     torch ", "network ", "disk ", "clock ", "ranks        2, started"):
        assert any(line.startswith(start) for line in lines), start
    assert any("7 all-reduces over" in line and "GB/s" in line for line in lines)
    assert CANARY not in done.stdout + done.stderr
    assert [path.name for path in run.iterdir()] == ["status.json"]
    assert (run / "status.json").read_text() == "{}"


def test_wrong_usage_is_one_line(tmp_path: Path) -> None:
    for arguments in (["--jobs"], ["a", "b"]):
        done = doctor(*arguments)
        assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    helped = doctor("--help")
    assert helped.returncode == 0 and "RANKS_PER_NODE" in helped.stdout
    absent = doctor(tmp_path, PYTHON="nope")
    assert absent.returncode == 2 and "PROBLEM versions: PYTHON=nope: not found" in absent.stdout


def test_a_machine_whose_jobs_are_submitted_is_looked_at_in_an_allocation(tmp_path: Path) -> None:
    for settings in ({"SITE": "perlmutter"}, {"LAUNCHER": "sbatch"}):
        done = doctor(tmp_path, TORCH_NCCL_ASYNC_ERROR_HANDLING="0", **settings)
        assert done.returncode == 2 and "run this in an allocation" in done.stdout, done.stdout
        # Settings of a site's own, and of NCCL where the site has GPUs.
        for line in ("GLOO_SOCKET_IFNAME=hsn0: no such", "TORCH_NCCL_ASYNC_ERROR_HANDLING=0: no"):
            assert (f"PROBLEM settings: {line}" in done.stdout) == ("SITE" in settings), done.stdout


def test_a_machine_with_gpus_is_looked_at_as_one_without_a_site(tmp_path: Path) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    for gpus, is_problem in (("GPU 0: H100", True), ("No devices were found", False)):
        tool.write_text(f"#!/bin/sh\necho '{gpus}'\n")
        tool.chmod(0o755)
        # Ranks are not started: the settings are told before.
        done = doctor(
            tmp_path / "run",
            PATH=f"{tool.parent}:{os.environ['PATH']}",
            TORCH_NCCL_ASYNC_ERROR_HANDLING="0",
            LAUNCHER="sbatch",
        )
        line = "PROBLEM settings: TORCH_NCCL_ASYNC_ERROR_HANDLING=0: no"
        assert (line in done.stdout) == is_problem, done.stdout


@pytest.mark.parametrize(
    ("environ", "words", "is_problem"),
    [
        ({"NCCL_ASYNC_ERROR_HANDLING": "0"}, "a hang never ends", True),
        ({"TORCH_NCCL_BLOCKING_WAIT": "true"}, "ends all overlap", True),
        ({"TORCH_NCCL_ENABLE_MONITORING": "0"}, "no thread is left", True),
        ({"TORCH_FR_BUFFER_SIZE": "9", "TORCH_NCCL_TRACE_BUFFER_SIZE": "8"}, "disagree", True),
        ({"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}, "against", True),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}, "no hang is explained", False),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "wants 32", False),
        ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "5"}, "60 or more", True),
        ({"NCCL_SOCKET_IFNAME": "=nope0"}, "no such interface", True),
        ({"GLOO_SOCKET_IFNAME": "l"}, "no such interface", True),
        ({}, "GLOO_SOCKET_IFNAME is not set: gloo chooses among", False),
        ({}, "TORCH_FR_DUMP_TEMP_FILE: not set; a run", False),
    ],
)
def test_settings_that_matter_are_told(
    environ: dict[str, str], words: str, is_problem: bool
) -> None:
    found = list(doctor_settings.settings(environ, device="cuda", nodes=2))
    assert [wrong for text, wrong in found if words in text] == [is_problem], found
    assert sum(wrong for _, wrong in found) == is_problem
    quiet = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "^docker,l0"}
    assert not list(doctor_settings.settings(environ | quiet, device="cpu", nodes=2))


def test_a_torch_that_does_not_load_is_named(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.99: cannot open')\n")
    done = doctor(tmp_path / "run", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2 and "no problem" not in done.stdout
    assert "PROBLEM versions: import torch: ImportError: libcudart.so.99" in done.stdout


def problems(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("PROBLEM")]


def test_a_disk_that_will_not_do_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert doctor_host.main([str(tmp_path / "file" / "run")]) == 2
    (line,) = problems(capsys)
    assert line.startswith("PROBLEM disk: ") and "cannot be written" in line
    assert doctor_host.main([str(tmp_path / "new" / "run")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    nearly_full = shutil._ntuple_diskusage(100, 99, 1)
    monkeypatch.setattr(doctor_host.shutil, "disk_usage", lambda path: nearly_full)
    assert doctor_host.main([str(tmp_path)]) == 2
    assert problems(capsys) == [f"PROBLEM disk: {tmp_path}: 0.0 GiB free"]


def test_a_slow_disk_is_told_as_the_time_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter((0.0, 2.5))
    monkeypatch.setattr(doctor_host.time, "perf_counter", lambda: next(clock))
    lines = [text for _, text, _ in doctor_host.disk(tmp_path, 1)]
    told = "in 2.50 s, 6 MiB/s: a checkpoint of GPT-124M, 1.4 GiB, takes 3m 43s by one process"
    assert lines[1].endswith(told)


def test_what_several_nodes_cannot_share_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor_host, "_kind", lambda folder: "ext4")
    monkeypatch.setattr(doctor_host.socket, "gethostname", lambda: "localhost")
    assert doctor_host.main([str(tmp_path), "--nodes", "2"]) == 2
    network, disk = problems(capsys)
    assert network.startswith("PROBLEM network: ") and "other nodes cannot reach" in network
    assert disk.startswith("PROBLEM disk: ext4") and "2 nodes need a run folder" in disk
    monkeypatch.setattr(doctor_host, "_kind", lambda folder: "lustre")
    monkeypatch.setattr(doctor_host.socket, "gethostname", lambda: "nowhere.invalid")
    assert doctor_host.main([str(tmp_path), "--nodes", "2"]) == 2
    (network,) = problems(capsys)
    assert "nowhere.invalid does not resolve" in network
    assert doctor_host.main([str(tmp_path)]) == 0


def test_old_and_absent_packages_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor_host, "NEEDED", {"numpy": (99, 1), "no-such-package": (1,)})
    assert doctor_host.main([str(tmp_path)]) == 2
    old, absent = problems(capsys)
    assert "numpy is " in old and "needed is 99.1 or newer" in old
    assert "no-such-package is not installed" in absent


def test_ranks_that_cannot_join_say_what_they_were_doing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "nowhere.invalid")):
        monkeypatch.setenv(name, value)
    assert doctor_ranks.main(["--run-dir", str(tmp_path / "run")]) == 2
    status = read_status(tmp_path / "run")
    assert status is not None and status.exit_code == 2 and status.rank == 1
    assert status.reason.startswith("joining the ranks: MASTER_ADDR=nowhere.invalid")


def test_gpus_that_torch_does_not_see_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(launch, "gpu_devices", lambda: [Path("/dev/nvidia0")])
    assert doctor_ranks.main(["--run-dir", str(tmp_path / "run")]) == 2
    status = read_status(tmp_path / "run")
    assert status is not None and status.state == "failed"
    start = f"choosing the device: {socket.gethostname()}: this machine has NVIDIA GPUs, and torch"
    assert status.reason.startswith(start)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_grids_have_every_kind_of_group(world: int) -> None:
    found = list(doctor_ranks.grids(world))
    assert all(dims.world_size == world for dims in found)
    even = world % 2 == 0
    assert any(dims.tp == 2 for dims in found) == any(dims.pp == 2 for dims in found) == even
