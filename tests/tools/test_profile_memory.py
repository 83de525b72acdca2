"""tools/profile_memory.py: both accountings, as text, JSON and pictures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tools import profile_memory

pytestmark = pytest.mark.push

REPO = Path(__file__).resolve().parents[2]
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data "
    "--vocab-size 101 --micro-batch-size 2 --train-iters 5 --lr 1e-3"
)
STILL = ["--hidden-dropout", "0", "--attention-dropout", "0"]
PAPER = ["--accounting", "paper"]


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
    written = json.loads((tmp_path / "ledger.json").read_text())
    samples = written.pop("samples")
    assert written == found
    peak = found["peak_at"]["total"]
    kinds = ("model", "optimizer", "forward", "backward", "other")
    assert max(sum(each[kind] for kind in kinds) for each in samples) == peak
    assert (tmp_path / "memory.png").stat().st_size > 10_000


def test_without_matplotlib_all_but_the_picture_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for arguments in ([*TINY.split(), "--no-measured"], [*TINY.split(), *STILL, *PAPER]):
        out = tmp_path / str(len(arguments))
        out.mkdir()
        assert profile_memory.main([*arguments, "--json", "--out", str(out)]) == 2
        said = capsys.readouterr()
        assert said.err.count("\n") == 1 and "matplotlib" in said.err
        data = json.loads((out / "ledger.json").read_text())
        data.pop("samples", None)
        assert data == json.loads(said.out.splitlines()[-1])
        assert not (out / "memory.png").exists()


WRN = str(REPO / "configs" / "wrn28_2_cifar10.yaml")
VISION = [WRN, "--task", "vision"]
TRANSLATION = [str(REPO / "configs" / "dc_transformer_de_en.yaml"), "--task", "translation"]


def test_the_reports_accounting_of_wrn_28_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = last_line(capsys, *VISION, *PAPER)
    assert f"{base['total'] / 1e6:.1f}" == "404.8"
    best = last_line(
        capsys, *VISION, *PAPER, "--fp16", "--micro-batch-size", "10", "--global-batch-size", "100",
        "--strategy", "residual-star-2", "--nonzero", "0.3", "--out", str(tmp_path),
    )  # fmt: skip
    assert best["total"] / 1e6 == pytest.approx(6.7, abs=0.07)
    assert best["recomputed_flops"] / best["training_flops"] == pytest.approx(0.311, abs=5e-4)
    assert (tmp_path / "memory.png").stat().st_size > 10_000


def test_the_reports_accounting_of_other_models(capsys: pytest.CaptureFixture[str]) -> None:
    found = last_line(capsys, *TRANSLATION, *PAPER)
    assert (found["model"] + found["optimizer"]) / 1e6 == pytest.approx(619.0, abs=0.05)
    none, residual = (
        last_line(capsys, *TINY.split(), *STILL, *PAPER, "--strategy", name)
        for name in ("none", "residual-1")
    )
    # Adam: a gradient and two moments of each parameter.
    assert none["optimizer"] == 3 * none["model"] == 3 * 4 * none["parameters"]
    assert residual["activations"] < none["activations"]
    assert 0 < residual["recomputed_flops"] < residual["training_flops"] / 3


def test_the_reports_accounting_takes_the_optimizer_of_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    vision = "--task vision --mock-data --num-layers 10 --train-iters 5 --lr 1e-2"
    vision += " --micro-batch-size 1"
    for task in ([*TINY.split(), *STILL], vision.split(), TRANSLATION):
        sgd, adam = (
            last_line(capsys, *task, *PAPER, "--optimizer", name) for name in ("sgd", "adam")
        )
        assert sgd["model"] == adam["model"] == 4 * sgd["parameters"]
        # A gradient and one or two moments of each parameter.
        assert sgd["optimizer"] == 2 * sgd["model"]
        assert adam["optimizer"] == 3 * adam["model"]
        assert sgd["title"].endswith("32 bit, sgd") and adam["title"].endswith("32 bit, adam")


def test_the_reports_accounting_pads_the_vocabulary_as_the_trainer_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    counts = [
        last_line(
            capsys, *TINY.split(), *STILL, *PAPER, "--make-vocab-size-divisible-by", str(multiple)
        )
        for multiple in (1, 64)
    ]
    bare, padded = (each["parameters"] for each in counts)
    tracked = last_line(
        capsys, *TINY.split(), *STILL, "--make-vocab-size-divisible-by", "64", "--no-measured"
    )
    assert padded - bare == (128 - 101) * 32
    assert 4 * padded == tracked["tracked"]["model"]
    # Logits cost as many products as the padded table has rows.
    bare, padded = (each["training_flops"] for each in counts)
    assert padded - bare == 3 * 2 * 2 * 16 * 32 * (128 - 101)


@pytest.mark.parametrize(
    ("flags", "setting"),
    [
        ("--swiglu", "swiglu true"),
        ("--normalization RMSNorm", "normalization RMSNorm"),
        ("--qk-layernorm", "qk_layernorm true"),
        ("--position-embedding-type rope", "position_embedding_type rope"),
        ("--group-query-attention --num-query-groups 2", "num_query_groups 2"),
        ("--kv-channels 16", "kv_channels 16"),
        ("--hidden-dropout 0.1", "hidden_dropout 0.1"),
        ("--attention-dropout 0.1", "attention_dropout 0.1"),
        ("--tensor-model-parallel-size 2", "tensor_model_parallel_size 2"),
        ("--pipeline-model-parallel-size 2", "pipeline_model_parallel_size 2"),
        ("--world-size 2", "world_size 2"),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel",
            "tensor_model_parallel_size 2",
        ),
        ("--recompute-granularity full", "recompute_granularity full"),
        ("--grad-path topk", "grad_path topk"),
        ("--fp16 --main-params-dtype fp16", "main_params_dtype fp16"),
        ("--exp-avg-dtype bf16", "exp_avg_dtype bf16"),
        ("--exp-avg-sq-dtype int8", "exp_avg_sq_dtype int8"),
    ],
)
def test_settings_that_the_report_does_not_cover_are_refused(
    flags: str, setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile_memory.main([*TINY.split(), *STILL, *PAPER, *flags.split()]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and told.startswith(f"error: {setting}: the report's accounting")


def test_other_image_networks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--task vision --mock-data --vision-backbone-type vgg19 --train-iters 5 --lr 1e-2"
    flags += " --micro-batch-size 1"
    assert profile_memory.main([*flags.split(), *PAPER]) == 2
    assert "vision_backbone_type vgg19" in capsys.readouterr().err


def test_the_task_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert profile_memory.main([WRN, *PAPER]) == 2
    assert "vision_backbone_type: no such key" in capsys.readouterr().err
    assert profile_memory.main([WRN, "--task", "images", *PAPER]) == 2
    assert "--task" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--strategy", "residual-0"], "residual-0"),
        (["--strategy", "residual-1"], "--strategy: belongs to --accounting paper"),
        (["--nonzero", "0.5"], "--nonzero: belongs to --accounting paper"),
        ([*PAPER, "--no-measured"], "--no-measured: belongs to --accounting actual"),
        ([*PAPER, "--rank", "1"], "--rank: belongs to --accounting actual"),
        (["--nonzero", "0"], "--nonzero"),
        (["--world-size", "0"], "--world-size"),
        (["--rank", "1"], "rank"),
        (["--out", "/nowhere/at/all"], "--out"),
        (["--out", "/proc"], "--out /proc: "),
        (["--accounting", "ours"], "--accounting"),
    ],
)
def test_wrong_settings_are_one_line(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile_memory.main([*TINY.split(), *arguments]) == 2
    found = capsys.readouterr()
    assert found.out == "" and found.err.count("\n") == 1 and word in found.err


@pytest.mark.parametrize("name", ["ledger.json", "memory.png"])
def test_a_file_that_cannot_be_written_is_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).mkdir()
    arguments = [*TINY.split(), *STILL, *PAPER, "--out", str(tmp_path)]
    assert profile_memory.main(arguments) == 2
    assert capsys.readouterr().err == f"error: --out {tmp_path / name}: Is a directory\n"


def test_a_gpu_that_is_not_there_leaves_two_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert profile_memory.main([*TINY.split(), "--device", "cuda"]) == 0
    lines = capsys.readouterr().out.splitlines()
    reason = "device cuda: this machine has none; give --no-measured"
    assert any(line.startswith(f"measured is missing: {reason}") for line in lines)
    assert profile_memory.TRACKED_ON_CPU in lines
    assert profile_memory.main([*TINY.split(), "--no-measured"]) == 0
    assert profile_memory.TRACKED_ON_CPU not in capsys.readouterr().out.splitlines()
