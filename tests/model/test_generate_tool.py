"""`tools/generate.py` on a run folder made by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron.checkpoint.store import save_checkpoint
from megatron.checkpoint.verify import read_manifest
from megatron.config import parse, resolve, to_yaml
from megatron.data.tokenizer import ByteTokenizer, build_tokenizer
from megatron.model.gpt import GPT
from pretrain_gpt import GRADIENT_PATHS
from tests.data.test_tokenizer import train_sentencepiece
from tests.tools.runs import make_model_run
from tools import evaluate, export_hf, run_model
from tools.generate import continuation, main
from tools.run_model import find_model

FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --lr 1e-3 "
    "--micro-batch-size 1 --train-iters 1 --mock-data"
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", "--tokenizer-type ByteTokenizer")


def make_run(folder: Path, flags: str, *, vocab_size: int = 257) -> Path:
    torch.set_num_threads(1)
    config = resolve(parse(f"{FLAGS} {flags}".split(), paths=GRADIENT_PATHS), 1)
    model = GPT(config.model, vocab_size=vocab_size, seed=3, dtype=torch.float32, device="cpu")
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    for step in (1, 2):
        save_checkpoint(
            folder / "checkpoints",
            step=step,
            tensors={f"param/{k}": v.clone() * step for k, v in model.logical_values().items()},
            state={},
            rank=0,
            world=1,
            gather=lambda text: [text],
        )
    return folder


def texts(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments, "--max-new-tokens", "20"]) == 0
    return capsys.readouterr().out


def test_it_continues_the_prompt(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = texts(capsys, str(run), "--prompt", "Hello", "--top-k", "0")
    assert first.startswith("Hello") and len(first) > len("Hello\n")
    assert texts(capsys, str(run), "--prompt", "Hello", "--top-k", "0") == first
    assert texts(capsys, str(run), "--prompt", "Hello", "--top-k", "0", "--seed", "1") != first
    both = texts(capsys, str(run), "--prompt", "Hello", "--top-k", "0", "--num-samples", "2")
    assert both.startswith(first) and both != first
    older = texts(capsys, str(run), "--prompt", "Hello", "--top-k", "0", "--checkpoint-step", "1")
    assert older != first


def test_blanks_between_prompt_and_continuation_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = train_sentencepiece(tmp_path)
    tokenizer = build_tokenizer("GPTSentencePieceTokenizer", model=model)
    ids = tokenizer.encode("the cat sat")
    at = len(tokenizer.encode("the cat"))
    assert continuation(tokenizer, ids[:at], ids[at:]) == " sat"
    numbers = make_run(
        tmp_path / "numbers", "--tokenizer-type NullTokenizer --vocab-size 99", vocab_size=100
    )
    first, second, *drawn = texts(capsys, str(numbers), "--prompt", "1 2").split()
    assert (first, second) == ("1", "2") and len(drawn) == 20 and max(map(int, drawn)) < 99


def test_a_continuation_that_changes_the_prompt_is_decoded_alone() -> None:
    tokenizer = mock.Mock(decode=lambda ids: "".join(map(chr, ids)).replace(" .", "."))
    assert continuation(tokenizer, b"a ", b".b") == ".b"


def test_an_empty_prompt_starts_a_document(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert texts(capsys, str(run), "--greedy") == texts(capsys, str(run), "--greedy", "--seed", "7")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--temperature", "0"], 2, "--temperature"),
        (["--temperature", "1e-40"], 2, "--temperature: 1e-40; must be from 1e-06 to 1e+09"),
        (["--top-k", "-1"], 2, "--top-k"),
        (["--num-samples", "0"], 2, "--num-samples"),
        (["--num-samples", "100000000"], 2, "from 1 to 10000"),
        (["--max-new-tokens", "100000000000"], 2, "from 1 to 1000000"),
        (["--checkpoint-step", "9"], 4, "step 9"),
    ],
)
def test_mistakes_are_one_line(
    run: Path,
    arguments: list[str],
    code: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([str(run), *arguments]) == code
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_draws_at_the_bounds_of_the_temperature(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    greedy = texts(capsys, str(run), "--greedy")
    assert texts(capsys, str(run), "--temperature", "1e-6", "--top-k", "0") == greedy
    assert texts(capsys, str(run), "--temperature", "1e9", "--top-k", "0") != greedy


@pytest.mark.parametrize("flags", [[], ["--greedy"], ["--top-k", "0"]])
def test_a_model_that_diverged_is_one_line(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = "--tokenizer-type ByteTokenizer"
    make_model_run(tmp_path / "run", named, vocab_size=257, diverged=True)
    assert main([str(tmp_path / "run"), *flags]) == 4
    told = capsys.readouterr().err
    assert "step_00000001: the model computes NaN" in told and told.count("\n") == 1


def test_a_run_of_another_task_is_named_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(
        "# All settings of a run of pretrain_vision.py.\nmodel:\n  vision_backbone_type: vgg\n"
    )
    for tool, rest in ((main, []), (export_hf.main, [str(tmp_path / "there")])):
        assert tool([str(tmp_path), *rest]) == 2
        error = capsys.readouterr().err
        assert "is a run of pretrain_vision.py, and only runs of pretrain_gpt.py" in error


def test_the_tokenizer_must_be_the_one_of_the_data(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = [str(run), "--tokenizer-type", "ByteTokenizer"]
    (tmp_path / "task.jsonl").write_text('{"text": "go on"}\n')
    saved = find_model(run)
    manifest = read_manifest(saved.step)
    state = {**manifest.state, "identity": {"data.tokenizer": "another"}}
    with mock.patch.object(run_model, "read_manifest", lambda step: replace(manifest, state=state)):
        for tool, rest in (
            (main, []),
            (evaluate.main, ["--task", "lambada", str(tmp_path / "task.jsonl")]),
            (export_hf.main, [str(tmp_path / "there")]),
        ):
            assert tool([named[0], *rest, *named[1:]]) == 3
            error = capsys.readouterr().err
            assert "not the one that made the data" in error and error.count("\n") == 1
    assert not (tmp_path / "there").exists()


def test_a_model_with_more_ids_than_its_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its data says the tokenizer, its --vocab-size a rounder number."""
    described = {"format": 1, "tokenizer": ByteTokenizer().describe()}
    (tmp_path / "data.json").write_text(json.dumps(described))
    folder = make_run(tmp_path / "run", "--vocab-size 1024", vocab_size=1024)
    config = (folder / "config.yaml").read_text()
    config = config.replace("mock_data: true", "mock_data: false")
    config = config.replace("data_path: null", f"data_path: [{tmp_path}/data]", 1)
    (folder / "config.yaml").write_text(config)
    assert texts(capsys, str(folder), "--top-k", "0", "--prompt", "Hello").startswith("Hello")


def test_a_run_that_anyone_may_write_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with mock.patch.object(run_model, "open_to_all", lambda folder: "belongs to user 7"):
        assert main([str(run)]) == 2
    assert f"{run}: belongs to user 7" in capsys.readouterr().err


def test_folders_that_will_not_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "config.yaml" in capsys.readouterr().err
    silent = make_run(tmp_path / "mock", "--vocab-size 257")
    assert main([str(silent)]) == 3
    assert "give --tokenizer-type and its files" in capsys.readouterr().err
    named = ["--tokenizer-type", "ByteTokenizer", "--prompt", "Hello"]
    assert texts(capsys, str(silent), *named).startswith("Hello")
    assert main([str(silent), "--vocab-file", "x"]) == 2
    assert "--vocab-file: given without --tokenizer-type" in capsys.readouterr().err
    config = (silent / "config.yaml").read_text()
    config = config.replace("mock_data: true", "mock_data: false")
    config = config.replace("data_path: null", "data_path: [data/p]", 1)
    (silent / "config.yaml").write_text(config)
    assert main([str(silent)]) == 3
    assert f"no data/p.json (looked from {Path.cwd()})" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    named = make_run(tmp_path / "named", "--tokenizer-type ByteTokenizer")
    (tmp_path / "empty" / "config.yaml").write_text((named / "config.yaml").read_text())
    assert main([str(tmp_path / "empty")]) == 4
    assert "no checkpoint" in capsys.readouterr().err
