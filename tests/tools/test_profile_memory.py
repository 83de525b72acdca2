"""tools/profile_memory.py: both accountings, as text, JSON and pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import profile_memory

REPO = Path(__file__).resolve().parents[2]
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data "
    "--vocab-size 101 --micro-batch-size 2 --train-iters 5 --lr 1e-3"
)


def last_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert profile_memory.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_ledger_is_printed_drawn_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = last_line(capsys, *TINY.split(), "--out", str(tmp_path))
    assert found["accounting"] == "actual" and found["missing"] == {}
    for kind in ("model", "optimizer", "stored"):
        planned, tracked, measured = (
            found[name][kind] for name in ("planned", "tracked", "measured")
        )
        assert planned == pytest.approx(tracked, rel=0.01)
        assert tracked == pytest.approx(measured, rel=0.02)
    assert found["peak_at"]["operator"] and found["flops"]["recomputed"] == 0
    assert json.loads((tmp_path / "ledger.json").read_text()) == found
    assert (tmp_path / "memory.png").stat().st_size > 10_000


WRN = str(REPO / "configs" / "wrn28_2_cifar10.yaml")


def test_the_reports_accounting_of_wrn_28_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paper = ["--accounting", "paper"]
    base = last_line(capsys, WRN, *paper)
    assert f"{base['total'] / 1e6:.1f}" == "404.8"
    best = last_line(
        capsys, WRN, *paper, "--fp16", "--micro-batch-size", "10", "--global-batch-size", "100",
        "--strategy", "residual-star-2", "--nonzero", "0.3", "--out", str(tmp_path),
    )  # fmt: skip
    assert best["total"] / 1e6 == pytest.approx(6.7, abs=0.07)
    assert best["recomputed_flops"] / best["training_flops"] == pytest.approx(0.311, abs=5e-4)
    assert (tmp_path / "memory.png").stat().st_size > 10_000


def test_the_reports_accounting_of_other_models(capsys: pytest.CaptureFixture[str]) -> None:
    paper = ["--accounting", "paper"]
    translation = str(REPO / "configs" / "dc_transformer_de_en.yaml")
    found = last_line(capsys, translation, *paper)
    assert (found["model"] + found["optimizer"]) / 1e6 == pytest.approx(619.0, abs=0.05)
    none, residual = (
        last_line(capsys, *TINY.split(), *paper, "--strategy", name)
        for name in ("none", "residual-1")
    )
    # Adam: a gradient and two moments of each parameter.
    assert none["optimizer"] == 3 * none["model"] == 3 * 4 * none["parameters"]
    assert residual["activations"] < none["activations"]
    assert 0 < residual["recomputed_flops"] < residual["training_flops"] / 3


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--strategy", "residual-0"], "residual-0"),
        (["--nonzero", "0"], "--nonzero"),
        (["--world-size", "0"], "--world-size"),
        (["--rank", "1"], "rank"),
        (["--out", "/nowhere/at/all"], "--out"),
        (["--accounting", "ours"], "--accounting"),
    ],
)
def test_wrong_settings_are_one_line(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile_memory.main([*TINY.split(), *arguments]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and word in told
