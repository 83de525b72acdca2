"""The check of ranks on GPUs beside ranks on CPUs notices a run that fails, hangs or is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench.gpu import launching
from tools.bench.gpu import ranks as gpu_ranks
from tools.bench.gpu.ranks import CASES, RanksCase, main, run


def test_two_ranks_learn_as_on_cpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over gloo on both sides, where every last bit is the same."""
    assert main(["tensors", "--smoke", "--out", str(tmp_path)]) == 0
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert line.startswith("tensors") and "as on CPUs: at most 0 apart" in line
    found = json.loads((tmp_path / "ranks.json").read_text())["tensors"]
    assert found["right"] and found["largest difference"] == 0.0 and found["ms"] > 0


def test_a_difference_counts_as_wrong(tmp_path: Path) -> None:
    found = run(RanksCase(1, "--train-iters 3", tolerance=0.0), tmp_path / "run", smoke=True)
    assert not found["right"] and str(found["verdict"]).startswith("DIFFERENT")


def test_a_run_that_fails_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(RanksCase(1, "--num-layers 0"), tmp_path / "run", smoke=True)
    assert not found["right"] and found["verdict"] == "gpu: exit codes [2]"
    assert "--num-layers" in capsys.readouterr().err


def test_a_run_that_stands_still_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_ranks, "SECONDS", 0.2)
    found = run(RanksCase(2), tmp_path / "run", smoke=True)
    assert found["verdict"] == "gpu: no step in 0.2 s"


def test_wrong_names_and_no_gpu_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["dens"])
    assert ended.value.code == 2 and "no such case: dens; one of dense" in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([]) == 2 and "no CUDA device" in capsys.readouterr().err


def test_ranks_that_share_a_gpu_claim_hosts_of_their_own() -> None:
    shared = [launching._variables(rank, 2, True) for rank in range(2)]
    assert [one["NCCL_HOSTID"] for one in shared] == ["host0", "host1"]
    assert {one["LOCAL_RANK"] + one["LOCAL_WORLD_SIZE"] for one in shared} == {"01"}
    apart = [launching._variables(rank, 2, False) for rank in range(2)]
    assert [one["LOCAL_RANK"] for one in apart] == ["0", "1"]
    assert not any("NCCL_HOSTID" in one for one in apart)


def test_every_gradient_path_is_a_case() -> None:
    from pretrain_gpt import GRADIENT_PATHS

    flags = " ".join(case.flags for case in CASES.values())
    assert {name for name in GRADIENT_PATHS if f"--grad-path {name}" in f"{flags} "} | {
        "dense"
    } == set(GRADIENT_PATHS)
