"""Tiny runs of every mechanism have the losses that were recorded."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest
from pytest import approx

from tools import golden
from tools.golden_cases import CASES, GoldenCase

STORED: dict[str, list[float]] = json.loads(golden.LOSSES.read_text(encoding="utf-8"))
BY_NAME = {case.name: case for case in CASES}
CLIP = "CLIP_EPSILON = 1e-6"


@pytest.fixture(scope="module")
def found() -> dict[str, golden.Result]:
    return {result["name"]: result for result in golden.results(golden.REPO, CASES)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_losses_are_those_recorded(case: GoldenCase, found: dict[str, golden.Result]) -> None:
    result = found[case.name]
    assert "error" not in result, result["error"]
    assert result["losses"] == approx(STORED[case.name], rel=1e-4)


@pytest.mark.parametrize("name", ["resumed", "killed"])
def test_an_interrupted_run_is_the_whole_run(name: str, found: dict[str, golden.Result]) -> None:
    whole, interrupted = found["radius, DP 2"], found[name]
    assert golden.difference(whole, interrupted) == ""


def test_a_change_of_a_rounding_error_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("megatron", "radius", "samo"):
        shutil.copytree(golden.REPO / name, tmp_path / name)
    shutil.copy(golden.REPO / "pretrain_gpt.py", tmp_path)
    engine = tmp_path / "megatron" / "data_parallel" / "engine.py"
    text = engine.read_text(encoding="utf-8")
    assert text.count(CLIP) == 1
    # Clipped gradients change by a few units of their last place.
    engine.write_text(text.replace(CLIP, "CLIP_EPSILON = 2e-6"), encoding="utf-8")
    cases = [BY_NAME["dense, 1"]]
    assert golden.compare(golden.REPO, tmp_path, cases) == 1
    assert "tensors, the first rank_00000.safetensors" in capsys.readouterr().out
    assert golden.compare(golden.REPO, golden.REPO, cases) == 0
    assert capsys.readouterr().out.endswith("all 1 equal\n")


def test_ranks_are_ended_when_one_of_them_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(golden, "free_port", lambda: port)
        (result,) = golden.results(golden.REPO, [BY_NAME["dense, DP 2"]])
    assert f"MASTER_PORT={port}: in use" in result["error"]
    assert "exit codes by rank: {0: 2, 1: -9}" in result["error"]


def test_a_commit_that_git_does_not_know_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert golden.main(["compare", "no-such-commit"]) == 2
    assert "no-such-commit" in capsys.readouterr().err
