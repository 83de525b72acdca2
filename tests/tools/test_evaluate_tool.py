"""Tests of `tools/evaluate.py`: figures against hand-made ones, and invalid lines."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.model.gpt import GPT
from megatron.model.likelihood import Continuation, likelihoods
from tests.model.models import VOCAB, sharpen, small_model
from tests.tools.runs import make_model_run
from tools.evaluate import main
from tools.evaluation.bits_per_byte import windows
from tools.evaluation.figures import mean_of
from tools.evaluation.readers import blimp, lambada
from tools.evaluation.task import read_examples

EOD = 256


def lines(path: Path, documents: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_model_run(tmp_path / "run", "--tokenizer-type ByteTokenizer", vocab_size=257)
    return tmp_path / "run"


@pytest.fixture
def model(tmp_path: Path) -> GPT:
    """Return a model with the same weights as the run."""
    return make_model_run(tmp_path / "same", "--tokenizer-type ByteTokenizer", vocab_size=257)


def by_hand(model: GPT, context: list[int], ending: str) -> tuple[float, bool]:
    """Return the log-likelihood of an ending, with a separate forward for each token."""
    tokens, total, greedy = list(context), 0.0, True
    room = 16 + 1 - len(ending.encode())
    start = max(0, len(tokens) - room)
    with torch.no_grad():
        for token in ending.encode():
            logits = model(torch.tensor([tokens[start:]]))[0, -1, :257].double()
            total += float(logits.log_softmax(0)[token])
            greedy = greedy and int(logits.argmax()) == token
            tokens.append(token)
    return total, greedy


def figures(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_last_word(
    run: Path, model: GPT, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [("the cat", " sat"), ("a", " b"), ("many words before this\n", "last"), ("", "x")]
    documents = [{"text": c + w + " \n"} for c, w in texts[:2]]
    documents += [{"context": "many words before this\n", "continuation": "last"}]
    documents += [{"context": "", "continuation": "x"}]
    found = [by_hand(model, list(c.encode()) or [EOD], w) for c, w in texts]
    file = lines(tmp_path / "words.jsonl", documents)
    for batch in (1, 3):
        scored = figures(capsys, run, "--task", "lambada", file, "--batch-size", batch)
        assert scored["examples"] == 4 and scored["cut_on_the_left"] == 1
        assert scored["accuracy"] == sum(greedy for _, greedy in found) / 4
        mean = sum(log for log, _ in found) / 4
        assert scored["perplexity"] == pytest.approx(math.exp(-mean), rel=1e-5)
    packed = tmp_path / "words.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    first = figures(capsys, run, "--task", "lambada", packed, "--limit", 1)
    assert first["perplexity"] == pytest.approx(math.exp(-found[0][0]), rel=1e-5)


def test_the_last_word_follows_the_last_space() -> None:
    """Seven of LAMBADA's words begin with another word and a line break, as in the harness."""
    (ending,) = lambada({"text": "on the  mat\n\nPower \n"}, "").endings
    assert (ending.context, ending.text) == ("on the", "  mat\n\nPower")


def test_standard_errors_are_those_of_means() -> None:
    three = mean_of([1.0, 0.0, 0.0])
    assert three.stderr == pytest.approx(math.sqrt((4 / 9 + 1 / 9 + 1 / 9) / 2 / 3))
    assert mean_of([2.0]).stderr is None


def test_minimal_pairs(
    run: Path, model: GPT, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [("binding", "Ann sat", "Ann sits"), ("binding", "It is.", "Is it!")]
    pairs += [("islands", "He ran", "Ran he"), ("islands", "same", "same")]
    pairs = [
        pair if by_hand_is_right(model, *pair[1:]) else (pair[0], *pair[:0:-1]) for pair in pairs
    ]
    good = [by_hand_is_right(model, good, bad) for _, good, bad in pairs]
    assert good == [True, True, True, False]  # of equals neither is right
    keys = [("phenomenon", "good", "bad", "paradigm")] * 2
    keys += [("linguistics_term", "sentence_good", "sentence_bad", "UID")] * 2
    documents = [
        dict(zip(k, (*pair, "p"), strict=True)) for k, pair in zip(keys, pairs, strict=True)
    ]
    # The first pair the wrong way round.
    documents[0] |= {"good": documents[0]["bad"], "bad": documents[0]["good"]}
    file = lines(tmp_path / "pairs.jsonl", documents)
    scored = figures(capsys, run, "--task", "blimp", file)
    assert scored["examples"] == 4 and scored["accuracy"] == 0.5
    assert scored["accuracy_stderr"] == pytest.approx(math.sqrt(1 / 3 / 4))
    parts = scored["by_phenomenon"]
    assert {name: part["accuracy"] for name, part in parts.items()} == {
        "binding": 0.5,
        "islands": 0.5,
    }
    assert [part["examples"] for part in parts.values()] == [2, 2]
    assert main([str(run), "--task", "blimp", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "\naccuracy: 0.5\n" in shown and "\n  binding:\n    accuracy: 0.5\n" in shown


def by_hand_is_right(model: GPT, good: str, bad: str) -> bool:
    return by_hand(model, [EOD], f" {good}")[0] > by_hand(model, [EOD], f" {bad}")[0]


def test_bits_per_byte(
    run: Path, model: GPT, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each token is predicted from at most the 16 tokens before it, once."""
    texts = ["the cat sat on the mat, and élan is a word", "short", "", "sixteen letters!"]
    nats = 0.0
    for text in texts:
        sequence = [EOD, *text.encode()]
        for begin in range(0, len(sequence) - 1, 16):
            end = min(begin + 16, len(sequence) - 1)
            inputs = torch.tensor([sequence[max(0, end - 16) : end]])
            with torch.no_grad():
                logs = model(inputs)[0, :, :257].double().log_softmax(-1)
            for place in range(begin, end):
                nats -= float(logs[place - max(0, end - 16), sequence[place + 1]])
    size = sum(len(text.encode()) for text in texts)
    file = lines(tmp_path / "texts.jsonl", [{"body": text} for text in texts])
    asked = (run, "--task", "bits-per-byte", file, "--json-keys", "body", "--batch-size", 3)
    scored = figures(capsys, *asked)
    assert (scored["documents"], scored["bytes"], scored["tokens"]) == (4, size, size)
    assert scored["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert scored["nats_per_token"] == pytest.approx(nats / size, rel=1e-5)
    (tmp_path / "plain.txt").write_text("\n\n".join(texts))
    plain = (run, "--task", "bits-per-byte", tmp_path / "plain.txt", "--text-unit", "paragraph")
    assert figures(capsys, *plain)["bits_per_byte"] == pytest.approx(scored["bits_per_byte"])


@pytest.mark.parametrize("count", [0, 1, 4, 5, 11])
def test_windows_predict_each_token_once(count: int) -> None:
    found = list(windows(range(count + 1), 4))
    assert [token for one in found for token in one.tokens] == list(range(1, count + 1))
    for one in found:
        assert one.context[-1] == one.tokens[0] - 1
        assert len(one.context) + len(one.tokens) - 1 <= 4
        assert one.context == tuple(range(one.context[0], one.context[-1] + 1))


def test_texts_that_will_not_do_are_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = lines(tmp_path / "bad.jsonl", [{"text": "good"}, {"content": "no text"}])
    assert main([str(run), "--task", "bits-per-byte", str(file)]) == 3
    error = capsys.readouterr().err
    assert "bad.jsonl:2" in error and "--json-keys content" in error and error.count("\n") == 1
    file.write_text('{"text": ""}\n')
    assert main([str(run), "--task", "bits-per-byte", str(file)]) == 3


def test_a_word_that_the_model_would_say_counts(
    run: Path, model: GPT, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def likeliest(context: str) -> int:
        return int(model(torch.tensor([list(context.encode())]))[0, -1, :257].argmax())

    printable = [c for c in map(chr, range(97, 123)) if 32 < likeliest(f"go {c}\n") < 127]
    context = f"go {printable[0]}\n"
    documents = [{"context": context, "continuation": chr(likeliest(context))}]
    file = lines(tmp_path / "likely.jsonl", documents)
    assert figures(capsys, run, "--task", "lambada", file)["accuracy"] == 1


def test_multiple_choice(
    run: Path, model: GPT, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    choices = ["ab", "long words", "zz z"]
    plain = [by_hand(model, list(b"Say:"), f" {choice}")[0] for choice in choices]
    shares = [log / len(choice) for log, choice in zip(plain, choices, strict=True)]
    best, best_share = plain.index(max(plain)), shares.index(max(shares))
    assert best != best_share  # a long ending is unlikely as a whole
    documents = [
        {"context": "Say: ", "choices": choices, "answer": best},
        {"context": "Say:", "choices": choices, "answer": best_share},
        {"context": "Say:", "choices": choices, "answer": best_share},
    ]
    file = lines(tmp_path / "choices.jsonl", documents)
    scored = figures(capsys, run, "--task", "multiple-choice", file)
    assert scored["accuracy"] == pytest.approx(1 / 3)
    assert scored["length_normalised_accuracy"] == pytest.approx(2 / 3)


def test_batches_and_lengths_change_nothing() -> None:
    model = sharpen(small_model()).eval()
    generator = torch.Generator().manual_seed(1)
    asked = []
    for number in range(11):
        ids = torch.randint(0, VOCAB, (3 + number,), generator=generator).tolist()
        cut = 1 + number % 3
        asked.append(Continuation(context=tuple(ids[:-cut]), tokens=tuple(ids[-cut:])))
    alone = [likelihoods(model, [one], batch_size=1)[0] for one in asked]
    together = likelihoods(model, asked, batch_size=4)
    for one, other in zip(alone, together, strict=True):
        assert one.log == pytest.approx(other.log, abs=1e-4) and one.greedy == other.greedy
    long = Continuation(context=tuple(range(20)), tokens=(1, 2))
    assert long.cut(16) == Continuation(context=tuple(range(5, 20)), tokens=(1, 2))
    assert long.cut(40) == long


@pytest.mark.parametrize(
    ("task", "document", "words"),
    [
        ("lambada", {"text": "one"}, "two or more words"),
        ("lambada", {"text": 3}, "text: must be a text"),
        ("lambada", {"context": "a", "continuation": " "}, "continuation: must be a text"),
        ("lambada", {"context": "a", "continuation": "b" * 17}, "18 tokens are to be predicted"),
        ("lambada", [1], "must be a JSON object"),
        ("blimp", {"good": "a", "bad": "b", "paradigm": "c"}, "phenomenon: must be a text"),
        ("multiple-choice", {"context": "a", "choices": ["b"], "answer": 0}, "choices"),
        ("multiple-choice", {"context": "a", "choices": ["b", ""], "answer": 0}, "not empty"),
        ("multiple-choice", {"context": "a", "choices": ["b", "c"], "answer": 2}, "from 0 to 1"),
    ],
)
def test_lines_that_will_not_do_are_named(
    run: Path,
    tmp_path: Path,
    task: str,
    document: dict[str, Any],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = lines(tmp_path / "bad.jsonl", [document])
    assert main([str(run), "--task", task, str(file)]) == 3
    error = capsys.readouterr().err
    assert words in error and "bad.jsonl:1" in error and error.count("\n") == 1


def test_mistakes_have_their_exit_code(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = lines(tmp_path / "one.jsonl", [{"text": "go on"}])
    assert main([str(tmp_path), "--task", "lambada", str(file)]) == 2
    assert main([str(run), "--task", "lambada", str(file), "--batch-size", "0"]) == 2
    assert main([str(run), "--task", "lambada", str(tmp_path / "none")]) == 3
    named = [str(run), "--task", "lambada", str(file), "--checkpoint-step", "9"]
    assert main(named) == 4
    assert capsys.readouterr().err.count("\n") == 4
    file.write_text("")
    assert main([str(run), "--task", "lambada", str(file)]) == 3
    file.write_text("{")
    assert main([str(run), "--task", "lambada", str(file)]) == 3
    assert "one.jsonl:1: not JSON" in capsys.readouterr().err
    packed = file.rename(tmp_path / "one.parquet")
    assert main([str(run), "--task", "lambada", str(packed)]) == 3
    assert "one.parquet: is Parquet; write it as JSON lines" in capsys.readouterr().err


@pytest.mark.parametrize("task", ["lambada", "copa", "bits-per-byte"])
def test_a_model_that_diverged_has_no_score(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--tokenizer-type ByteTokenizer"
    make_model_run(tmp_path / "run", flags, vocab_size=257, diverged=True)
    copa = {"premise": "It rained.", "choice1": "Wet.", "choice2": "Dry.", "question": "effect"}
    file = lines(tmp_path / "task.jsonl", [{"text": "two words", **copa, "label": 0}])
    assert main([str(tmp_path / "run"), "--task", task, str(file)]) == 4
    told = capsys.readouterr().err
    assert "step_00000001: the model computes NaN" in told and told.count("\n") == 1


def test_examples_that_were_cut_are_counted_not_their_endings(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    choices = {"context": "much longer than sixteen", "choices": ["a", "b"], "answer": 0}
    short = {"context": "c", "choices": ["a", "b"], "answer": 0}
    file = lines(tmp_path / "choices.jsonl", [choices, short])
    assert figures(capsys, run, "--task", "multiple-choice", file)["cut_on_the_left"] == 1


@pytest.mark.parametrize("flag", [["--json-keys", "body"], ["--text-unit", "line"]])
def test_flags_of_another_task_are_refused(
    flag: list[str], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = lines(tmp_path / "words.jsonl", [{"text": "two words"}])
    assert main([str(run), "--task", "lambada", str(file), *flag]) == 2
    assert capsys.readouterr().err == f"error: {flag[0]}: for --task bits-per-byte alone\n"


def test_errors_name_the_file_of_a_folder_and_the_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "parts").mkdir()
    lines(tmp_path / "parts" / "a.jsonl", [{"text": "two words"}])
    bad = lines(tmp_path / "parts" / "b.jsonl", [{"text": "go \ud800on"}])
    assert main([str(run), "--task", "lambada", str(tmp_path / "parts")]) == 3
    assert f"error: {bad}:1: " in capsys.readouterr().err


def test_the_real_task_is_read(
    run: Path, shared_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = shared_data / "eval" / "lambada_openai.jsonl"
    if not file.is_file():
        pytest.skip("no evaluation data beside the repository")
    scored = figures(capsys, run, "--task", "lambada", file, "--limit", 40)
    assert scored["examples"] == scored["cut_on_the_left"] == 40


def test_the_real_pairs_are_read(shared_data: Path) -> None:
    file = shared_data / "blimp" / "blimp-200.jsonl.bz2"
    if not file.is_file():
        pytest.skip("no minimal pairs beside the repository")
    examples = read_examples(file, blimp)
    assert len(examples) == 13400 and len({example.group for example in examples}) == 13
