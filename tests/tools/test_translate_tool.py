"""`tools/translate.py`: a small run learns to translate."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.checkpoint.find import ENVIRONMENT, SAVE
from megatron.checkpoint.store import save_checkpoint
from megatron.data.preprocess_pairs import PairPaths
from tests.data.translation_data import ENGLISH, GERMAN, write_data
from tests.ranks import Ranks
from tests.training.harness import train
from tools.average_checkpoints import main as average
from tools.run_model import CONFIG, PARAM
from tools.translate import Translator, find_translator, main

pytestmark = pytest.mark.push

FLAGS = (
    "--encoder-layers 1 --decoder-layers 1 --embed-dim 32 --attention-heads 2 --dropout 0 "
    "--attention-dropout 0 --weight-dropout 0 --micro-batch-size 1 --max-tokens 300 --lr 5e-3 "
    "--lr-decay-style inverse-square-root --lr-warmup-iters 20 --adam-beta2 0.98 --clip-grad 0 "
    "--eval-interval 100 --full-validation --log-interval 50 --device cpu"
)


@pytest.fixture(scope="module")
def trained(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[PairPaths, Path]:
    """Train on sentences that translate word for word; the run has checkpoints of three steps."""
    from pretrain_translation import TRANSLATION_TASK

    folder = tmp_path_factory.mktemp("translator")
    paths = write_data(folder, pairs=1500, merges=100)
    flags = f"{FLAGS} --data-path {paths.prefix} --train-iters 240 --save-interval 80"
    ranks.run(1, train, flags, folder / "run", TRANSLATION_TASK)
    from megatron.config import parse, resolve, to_yaml
    from megatron.tasks.translation_config import TranslationConfig
    from pretrain_gpt import GRADIENT_PATHS

    config = parse(flags.split(), paths=GRADIENT_PATHS, task=TranslationConfig)
    (folder / "run" / CONFIG).write_text(to_yaml(resolve(config, 1)))
    return paths, folder / "run"


def test_sentences_are_translated_line_by_line(
    trained: tuple[PairPaths, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = [1, 3, 4, 7, 5]
    german, english = (" ".join(side[word] for word in words) for side in (GERMAN, ENGLISH))
    (tmp_path / "lines").write_text(f"{german}!\n\n  {german}!  \n")
    assert main([str(trained[1]), "--input", str(tmp_path / "lines")]) == 0
    assert capsys.readouterr().out == f"{english}.\n\n{english}.\n"
    stdin = SimpleNamespace(buffer=io.BytesIO(f"{german.upper()}!".encode()))
    monkeypatch.setattr("sys.stdin", stdin)
    assert main([str(trained[1]), "--beam", "1"]) == 0
    assert capsys.readouterr().out == f"{english}.\n"


def test_the_checkpoints_of_a_run_are_where_it_saved_them(
    trained: tuple[PairPaths, Path], tmp_path: Path
) -> None:
    run, saved = tmp_path / "run", tmp_path / "saved"
    run.mkdir()
    shutil.copy(trained[1] / CONFIG, run)
    shutil.copytree(trained[1] / "checkpoints", saved)
    (run / ENVIRONMENT).write_text(json.dumps({SAVE: str(saved)}))
    found = find_translator(run, step=80, data_path=None)
    assert found.step == saved / "step_00000080"


def score(capsys: pytest.CaptureFixture[str], run: Path, *flags: str) -> dict[str, Any]:
    assert main([str(run), "--bleu", "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_bleu_rises_with_training(
    trained: tuple[PairPaths, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("sacrebleu")
    run = trained[1]
    early = score(capsys, run, "--checkpoint-step", "80", "--limit", "60")
    late = score(capsys, run, "--limit", "60")
    assert late["bleu"] > 80 and early["bleu"] < 0.9 * late["bleu"] and late["pairs"] == 60
    assert "case:lc" in late["signature"] and late["checkpoint"].endswith("step_00000240")
    assert score(capsys, run, "--split", "valid")["split"] == "valid"
    assert average([str(run), "--last", "2", "--output", str(tmp_path / "mean")]) == 0
    capsys.readouterr()
    assert score(capsys, tmp_path / "mean", "--limit", "60")["bleu"] > early["bleu"]


def test_bleu_is_that_of_sacrebleu_on_the_printed_lines(
    trained: tuple[PairPaths, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    paths, run = trained
    source = paths.text("test", "de")
    assert main([str(run), "--checkpoint-step", "80", "--input", str(source)]) == 0
    lines = capsys.readouterr().out.splitlines()
    references = paths.text("test", "en").read_text().splitlines()
    wanted = sacrebleu.corpus_bleu(lines, [references], lowercase=True).score
    found = score(capsys, run, "--checkpoint-step", "80")
    assert found["bleu"] == pytest.approx(wanted) and found["pairs"] == len(lines)


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--beam", "0"], 2, "--beam: 0"),
        (["--bleu", "--limit", "0"], 2, "--limit: 0"),
        (["--limit", "5"], 2, "--limit: without --bleu"),
        (["--split", "test"], 2, "--split: without --bleu"),
        (["--tokenize", "13a"], 2, "--tokenize: without --bleu"),
        (["--json"], 2, "--json: without --bleu"),
        (["--bleu", "--input", "x"], 2, "--input: not read with --bleu"),
        (["--checkpoint-step", "7"], 4, "has no step 7"),
        (["--data-path", "nowhere"], 3, "nowhere.de.dict.txt"),
        (["--input", "nowhere.txt"], 3, "nowhere.txt: no such file"),
    ],
)
def test_mistakes_are_one_line(
    trained: tuple[PairPaths, Path],
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    code: int,
    words: str,
) -> None:
    assert main([str(trained[1]), *flags]) == code
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1 and words in told


@pytest.mark.parametrize(("content", "printed"), [("", ""), ("\n", "\n"), (" \n\t", "\n\n")])
def test_input_without_words_needs_no_model(
    trained: tuple[PairPaths, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    content: str,
    printed: str,
) -> None:
    def load(self: Translator) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(Translator, "load", load)
    (tmp_path / "lines").write_text(content)
    assert main([str(trained[1]), "--input", str(tmp_path / "lines")]) == 0
    assert capsys.readouterr().out == printed
    stdin = SimpleNamespace(buffer=io.BytesIO(content.encode()))
    monkeypatch.setattr("sys.stdin", stdin)
    assert main([str(trained[1])]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    "state", [{}, {"identity": {}}, {"identity": {"data.data_path": "x"}}], ids=str
)
def test_a_checkpoint_that_names_no_vocabulary_is_refused(
    trained: tuple[PairPaths, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    state: dict[str, Any],
) -> None:
    (tmp_path / CONFIG).write_text((trained[1] / CONFIG).read_text())
    weights = {f"{PARAM}a": torch.zeros(2)}
    save_checkpoint(tmp_path / "checkpoints", step=1, tensors=weights, state=state)
    capsys.readouterr()
    assert main([str(tmp_path), "--bleu"]) == 4
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1
    assert "step_00000001: state.identity: has no data.vocabulary" in told


def test_data_of_another_run_are_refused(
    trained: tuple[PairPaths, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_data(tmp_path, pairs=100)
    capsys.readouterr()
    assert main([str(trained[1]), "--data-path", other.prefix, "--bleu"]) == 3
    assert "not the BPE and dictionaries" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 2
    assert "no config.yaml there" in capsys.readouterr().err
