"""`tools/prune_checkpoint.py`: right masks, true counts, and commands that say how to go on."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.find import ENVIRONMENT, SAVE
from megatron.checkpoint.store import LocalShard, save_checkpoint, whole
from megatron.config import parse, to_yaml
from pretrain_gpt import GRADIENT_PATHS
from samo.mask import load_masks
from samo.pruning import magnitude
from tools.prune_checkpoint import main

TOOL = Path(__file__).resolve().parents[2] / "tools" / "prune_checkpoint.py"
SHAPES = {
    "embedding.word_embeddings.weight": (30, 4),
    "layers.0.mlp.up.weight": (8, 5),
    "layers.0.mlp.up.bias": (8,),
    "final_norm.weight": (4,),
}
MATRICES = [name for name, shape in SHAPES.items() if len(shape) > 1]


def weights(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    scales = {name: 0.1 if "embedding" in name else 1.0 for name in SHAPES}
    return {n: torch.randn(s, generator=generator) * scales[n] for n, s in SHAPES.items()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (2, 4):
        tensors = {f"param/{name}": tensor for name, tensor in weights(step).items()}
        tensors["exp_avg/layers.0.mlp.up.weight"] = torch.zeros(8, 5)
        save_checkpoint(tmp_path / "a run" / "checkpoints", step=step, tensors=tensors, state={})
    (tmp_path / "a run" / "config.yaml").write_text("{}\n")
    return tmp_path / "a run"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "masks.npz"


def assert_masks(path: Path, step: int, scope: str = "tensor", names: list[str] = MATRICES) -> None:
    found = load_masks(path)
    matrices = {name: weights(step)[name] for name in names}
    assert scope in ("tensor", "global")
    wanted = magnitude(matrices, Fraction("0.9"), scope="tensor" if scope == "tensor" else "global")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_masks_of_the_newest_step(
    run: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), "--sparsity", "0.9", "--output", str(output)]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert_masks(output, 4)
    rows = [line.split() for line in shown.out.splitlines()]
    assert ["embedding.word_embeddings.weight", "120", "12", "0.1000"] in rows
    assert ["layers.0.mlp.up.weight", "40", "4", "0.1000"] in rows
    assert "step_00000004: verifies; the smallest 0.9 of each tensor" in shown.out
    assert "pruned tensors: 16 of 160 entries stored, p = 0.900000\n" in shown.out
    assert "whole model: 28 of 172 entries stored, f = 0.162791\n" in shown.out
    assert f"wrote {output}\n" in shown.out


@pytest.mark.parametrize("where", ["checkpoints", "checkpoints/step_00000002"])
def test_an_older_step_over_all_tensors(
    run: Path, output: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--step", "2", "--scope", "global", "--sparsity", "0.9", "--output", str(output)]
    assert main([str(run / where), *flags]) == 0
    assert_masks(output, 2, "global")
    shown = capsys.readouterr().out
    assert "the smallest 0.9 of all pruned tensors together" in shown
    assert "pruned tensors: 16 of 160" in shown


def test_embeddings_can_be_kept(
    run: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), "--sparsity", ".9", "--keep-embeddings", "--output", str(output)]) == 0
    assert_masks(output, 4, names=["layers.0.mlp.up.weight"])
    shown = capsys.readouterr().out
    assert "pruned tensors: 4 of 40" in shown and "whole model: 136 of 172" in shown


def test_the_ways_to_go_on_are_commands(
    run: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, config, load in (
        (run, str(run / "config.yaml"), str(run)),
        (run / "checkpoints" / "step_00000004", str(run / "config.yaml"), str(run)),
    ):
        flags = ["--sparsity", "0.9", "--output", str(output), "--overwrite"]
        assert main([str(path), *flags]) == 0
        shown = capsys.readouterr().out.splitlines()
        initial, rewound = (shlex.split(line) for line in shown if "pretrain_gpt.py" in line)
        assert initial[:4] == ["python", "pretrain_gpt.py", "--config", config]
        samo = ["--grad-path", "samo", "--samo-pruning", "file", "--samo-mask-file", str(output)]
        assert initial[6:] == samo
        assert rewound == [*initial, "--load", load, "--ckpt-step", "K"]
        assert "train from the weights of step K, one of 2, 4:" in shown
    (run / "config.yaml").unlink()
    assert main([str(run), "--sparsity", "0.9", "--output", str(output), "--overwrite"]) == 0
    shown = capsys.readouterr().out
    assert "--config CONFIG_OF_THE_RUN" in shown
    assert f"--load {shlex.quote(str(run / 'checkpoints'))}" in shown


def test_a_run_is_pruned_where_it_saves(
    run: Path, output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "disk"
    tensors = {f"param/{name}": tensor for name, tensor in weights(6).items()}
    save_checkpoint(saved, step=6, tensors=tensors, state={})
    (run / ENVIRONMENT).write_text(json.dumps({SAVE: str(saved)}))
    assert main([str(run), "--sparsity", "0.9", "--output", str(output)]) == 0
    assert_masks(output, 6)
    shown = capsys.readouterr().out
    assert f"--config {shlex.quote(str(run / 'config.yaml'))} " in shown
    assert f"--load {saved} --ckpt-step K" in shown and "one of 6:" in shown


def test_the_commands_name_the_script_of_the_task(
    run: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "config.yaml").write_text("# All settings of a run of pretrain_vision.py; see there.\n")
    assert main([str(run), "--sparsity", "0.9", "--output", str(output)]) == 0
    assert capsys.readouterr().out.count("  python pretrain_vision.py --config") == 2


RADIUS = "--grad-path radius --radius-interval 5 --load OLD --ckpt-step 3 --finetune"
SAMO = "--grad-path samo --samo-scope global --samo-keep-embeddings --dsr-interval 2"
DENSE = "--load OLD --accept-new-data"
MODEL = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --train-iters 20"
MODEL += " --micro-batch-size 1 --global-batch-size 1 --lr 1e-3 --mock-data --dry-run --seed 77"


@pytest.mark.parametrize("flags", [RADIUS, SAMO, DENSE])
def test_a_run_of_any_path_from_anywhere_has_commands_that_need_no_hand(
    run: Path, output: Path, flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    was = parse([*MODEL.split(), *flags.split()], paths=GRADIENT_PATHS)
    text = to_yaml(was)
    (run / "config.yaml").write_text(text)
    identity = {"gradient.grad_path": was.gradient.grad_path}
    save_checkpoint(
        run / "checkpoints",
        step=6,
        tensors={f"param/{name}": tensor for name, tensor in weights(6).items()},
        state={"identity": identity},
    )
    asked = [str(run), "--sparsity", "0.9", "--output", str(output)]
    assert main(asked) == 0
    shown = capsys.readouterr().out.splitlines()
    initial, rewound = (shlex.split(line)[2:] for line in shown if "pretrain_gpt.py" in line)
    copy = output.with_name("masks.config.yaml")
    assert initial[:2] == ["--config", str(copy)] and rewound[:2] == initial[:2]
    found = parse(initial, paths=GRADIENT_PATHS)
    assert found.checkpoint.load is None and found.checkpoint.ckpt_step is None
    assert not found.checkpoint.finetune and not found.checkpoint.accept_new_data
    assert found.gradient.grad_path == "samo" and found.extensions.keys() == {"samo"}
    for section in ("model", "training", "optimizer", "data", "parallel"):
        assert getattr(found, section) == getattr(was, section)
    again = parse([arg if arg != "K" else "4" for arg in rewound], paths=GRADIENT_PATHS)
    assert (again.checkpoint.load, again.checkpoint.ckpt_step) == (str(run), 4)
    assert again.checkpoint.reset_grad_state == (was.gradient.grad_path != "dense")
    assert (run / "config.yaml").read_text() == text
    output.unlink()
    assert main(asked) == 2
    assert f"{copy} exists; choose another or add --overwrite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--sparsity", "1"], "--sparsity: 1; must be a number from 0 up to below 1"),
        (["--sparsity", "-0.1"], "--sparsity: -0.1"),
        (["--sparsity", "nan"], "--sparsity: nan"),
        (["--sparsity", "1/0"], "--sparsity: 1/0"),
        (["--sparsity", "0.9", "--output", "no/such/folder"], "no/such is no folder"),
        (["--sparsity", "0.9", "--output", "."], "--output: . exists"),
        (["--sparsity", "0.9", "--output", ".", "--overwrite"], ".: cannot be written"),
    ],
)
def test_wrong_use_is_exit_2_and_one_line(
    run: Path, output: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), "--output", str(output), *flags]) == 2
    error = capsys.readouterr().err
    assert words in error and error.startswith("error: ") and error.count("\n") == 1
    assert not output.exists()


def test_a_file_that_is_there_stays(
    run: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output.write_text("mine")
    assert main([str(run), "--sparsity", "0.9", "--output", str(output)]) == 2
    assert "exists; choose another or add --overwrite" in capsys.readouterr().err
    assert output.read_text() == "mine"


def test_checkpoints_that_will_not_do(
    run: Path, tmp_path: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--sparsity", "0.9", "--output", str(output)]
    assert main([str(run), "--step", "3", *flags]) == 4
    assert "has no step 3; steps found: 2, 4" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty"), *flags]) == 4
    assert "no checkpoint was committed there" in capsys.readouterr().err
    data = run / "checkpoints" / "step_00000004" / "rank_00000.safetensors"
    with open(data, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    assert main([str(run), "--step", "4", *flags]) == 4
    assert "rank_00000.safetensors" in capsys.readouterr().err
    assert not output.exists()
    # Without a step named, the newest that verifies serves, and that is said.
    assert main([str(run), *flags]) == 0
    assert "checkpoint not used" in capsys.readouterr().err
    assert_masks(output, 2)


@pytest.mark.parametrize(
    ("tensors", "code", "words"),
    [
        ({"param/bias": torch.zeros(3)}, 4, "has no weight matrix to prune"),
        ({"param/w": torch.full((2, 2), torch.inf)}, 5, "w: has entries that are not finite"),
    ],
)
def test_weights_that_will_not_do(
    tmp_path: Path,
    output: Path,
    tensors: dict[str, torch.Tensor],
    code: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_checkpoint(tmp_path / "checkpoints", step=1, tensors=tensors, state={})
    assert main([str(tmp_path), "--sparsity", "0.9", "--output", str(output)]) == code
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and not output.exists()


def test_a_pruned_network_can_be_pruned_further_only(
    tmp_path: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mask = torch.arange(20).view(4, 5) % 4 == 0
    kept = LocalShard("param/w", torch.arange(1.0, 6), (4, 5), (0, 0), (4, 5), mask="mask/w")
    shards = [kept, whole("mask/w", mask), whole("param/bias", torch.ones(4))]
    save_checkpoint(tmp_path / "checkpoints", step=1, tensors=shards, state={})
    assert main([str(tmp_path), "--sparsity", "0.7", "--output", str(output)]) == 2
    error = capsys.readouterr().err
    assert "is pruned already, and of w 1 entries that would be kept are not in it" in error
    assert not output.exists()
    for sparsity, count in (("0.75", 5), ("0.9", 2)):
        flags = ["--sparsity", sparsity, "--output", str(output), "--overwrite"]
        assert main([str(tmp_path), *flags]) == 0
        found = load_masks(output)["w"]
        assert found.sum() == count and not (found & ~mask).any()


@pytest.mark.push
def test_it_is_a_program(run: Path, output: Path) -> None:
    command = [sys.executable, str(TOOL), str(run), "--sparsity", "0.9", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=run)
    assert (done.returncode, done.stderr) == (0, "")
    assert_masks(output, 4)
