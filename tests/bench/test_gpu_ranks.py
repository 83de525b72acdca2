"""The check of ranks on GPUs beside ranks on CPUs notices a run that fails, hangs or is wrong."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
from pathlib import Path

import pytest

from pretrain_gpt import GRADIENT_PATHS
from tools.bench.gpu import launching
from tools.bench.gpu import ranks as gpu_ranks
from tools.bench.gpu.ranks import CASES, RanksCase, judge, main, run


@pytest.mark.full
def test_two_ranks_learn_as_on_cpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over gloo on both sides, where every last bit is the same."""
    assert main(["tensors", "--smoke", "--out", str(tmp_path)]) == 0
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert line.startswith("tensors") and "as on CPUs: at most 0 apart" in line
    found = json.loads((tmp_path / "ranks.json").read_text())["tensors"]
    assert found["right"] and found["largest difference"] == 0.0 and found["ms"] > 0


def test_differences_and_losses_that_are_no_numbers_are_wrong() -> None:
    assert judge([5.0, 4.0], [5.0, 4.001], 2e-3)["right"]
    for other in (4.003, math.nan, math.inf):
        found = judge([5.0, 4.0], [5.0, other], 2e-3)
        assert not found["right"] and found["verdict"].startswith("DIFFERENT")
    assert not judge([math.nan, 4.0], [math.nan, 4.0], 2e-3)["right"]


@pytest.mark.push
def test_a_run_that_fails_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(RanksCase(1, "--num-layers 0"), tmp_path / "run", smoke=True)
    assert not found["right"] and found["verdict"] == "gpu: exit codes [2]"
    assert "--num-layers" in capsys.readouterr().err


@pytest.mark.push
def test_a_run_that_stands_still_is_ended(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    started: list[subprocess.Popen[bytes]],
) -> None:
    monkeypatch.setattr(gpu_ranks, "SECONDS", 0.2)
    found = run(RanksCase(2), tmp_path / "run", smoke=True)
    assert found["verdict"] == "gpu: no step in 0.2 s"
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 4


@pytest.mark.push
def test_a_program_that_is_not_there_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = run(RanksCase(2, by_mpi=True), tmp_path / "run", smoke=True)
    assert not found["right"] and "cannot start" in found["verdict"]
    assert "mpiexec" in found["verdict"]


def test_wrong_names_and_no_gpu_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["dens"])
    assert ended.value.code == 2 and "no such case: dens; one of dense" in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([]) == 2 and "no CUDA device" in capsys.readouterr().err


def test_ranks_that_share_gpus_claim_hosts_of_their_own() -> None:
    shared = [launching._variables(rank, 4, ["2", "5"]) for rank in range(4)]
    assert [one["NCCL_HOSTID"] for one in shared] == ["host0", "host1", "host2", "host3"]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in shared] == ["2", "5", "2", "5"]
    assert {one["LOCAL_RANK"] + one["LOCAL_WORLD_SIZE"] for one in shared} == {"01"}
    apart = [launching._variables(rank, 2, []) for rank in range(2)]
    assert [one["LOCAL_RANK"] for one in apart] == ["0", "1"]
    assert not any("NCCL_HOSTID" in one for one in apart)


@pytest.mark.push
def test_a_shell_gives_the_ranks_of_mpiexec_hosts_and_gpus() -> None:
    told = subprocess.run(
        ["sh", "-c", launching._as_a_host(["2", "5"]), "sh", "env"],
        env={"PATH": os.environ["PATH"], "PMI_RANK": "3"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert "NCCL_HOSTID=host3" in told and "CUDA_VISIBLE_DEVICES=5" in told


def test_every_gradient_path_is_a_case() -> None:
    flags = "".join(f" {case.flags} " for case in CASES.values())
    tested = {name for name in GRADIENT_PATHS if f"--grad-path {name} " in flags}
    assert tested | {"dense"} == set(GRADIENT_PATHS), "dense is the default"
