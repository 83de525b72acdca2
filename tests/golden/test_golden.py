"""Tiny runs of every mechanism have the losses that were recorded."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from pytest import approx

from tools import golden
from tools.golden_cases import CASES, GRIDS, PATHS, GoldenCase

pytestmark = pytest.mark.push

STORED: dict[str, list[float]] = json.loads(golden.LOSSES.read_text(encoding="utf-8"))
BY_NAME = {case.name: case for case in CASES}
OTHER_ON_TP = {"topk", "powersgd", "lowrank+sparse", "demo"}
"""Paths that compress each tensor-parallel shard by itself, and so compute something else."""
OTHER_ON_DP = {"topk", "lowrank+sparse", "demo", "diloco"}
"""Paths whose mean of several ranks' gradients is not what one rank would send."""
SAME = [
    *((path, "PP 2") for path in PATHS),
    *((path, "TP 2") for path in PATHS if path not in OTHER_ON_TP),
    *((path, "DP 2") for path in PATHS if path not in OTHER_ON_DP),
]
ON_ALL = {f"{path}, TP 2" for path in OTHER_ON_TP}
"""Cases that only `--all` runs."""
CLIP = "CLIP_EPSILON = 1e-6"
RUNS_WITH_PORT = """
import sys
sys.path.insert(0, {repo!r})
from tools import golden_runs
golden_runs.free_port = lambda: {port}
sys.exit(golden_runs.main(sys.argv[1:]))
"""


class Found:
    """The results of all cases by name; each is waited for by the test that asks for it."""

    def __init__(self, cases: Sequence[GoldenCase]) -> None:
        self._coming = golden.results(golden.REPO, cases)
        self._here: dict[str, golden.Result] = {}

    def __getitem__(self, name: str) -> golden.Result:
        while name not in self._here:
            result = next(self._coming, None) or next(golden.results(golden.REPO, [BY_NAME[name]]))
            self._here[result["name"]] = result
        return self._here[name]

    def close(self) -> None:
        """End the runs that nobody asked for."""
        self._coming.close()


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Iterator[Found]:
    everything = request.config.getoption("--all")
    made = Found([case for case in CASES if everything or case.name not in ON_ALL])
    yield made
    made.close()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.full] * (case.name in ON_ALL))
        for case in CASES
    ],
)
def test_losses_are_those_recorded(case: GoldenCase, found: Found) -> None:
    result = found[case.name]
    assert "error" not in result, result["error"]
    assert result["losses"] == approx(STORED[case.name], rel=1e-4)


@pytest.mark.parametrize(("path", "grid"), SAME)
def test_a_grid_trains_as_one_rank(path: str, grid: str, found: Found) -> None:
    """Gradients, masks and selections of a grid are those of one rank, up to rounding."""
    assert grid in GRIDS
    assert found[f"{path}, {grid}"]["losses"] == approx(found[f"{path}, 1"]["losses"], abs=1e-5)


@pytest.mark.parametrize("name", ["resumed", "killed"])
def test_an_interrupted_run_is_the_whole_run(name: str, found: Found) -> None:
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


def test_ranks_are_ended_when_one_of_them_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        runs = tmp_path / "golden_runs.py"
        runs.write_text(RUNS_WITH_PORT.format(repo=str(golden.REPO), port=port), encoding="utf-8")
        monkeypatch.setattr(golden, "RUNS", runs)
        (result,) = golden.results(golden.REPO, [BY_NAME["dense, DP 2"]])
    assert f"MASTER_PORT={port}: in use" in result["error"]
    assert "exit codes by rank: {0: 2, 1: -9}" in result["error"]


def test_a_commit_that_git_does_not_know_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert golden.main(["compare", "no-such-commit"]) == 2
    assert "no-such-commit" in capsys.readouterr().err
