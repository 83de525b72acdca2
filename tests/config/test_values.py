"""Types are strict, and equal for flags and file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.helpers import SMALL, read, read_yaml, refused, refused_yaml, yaml_text

NO_INTEGERS = ["1.5", "two", "True", "012", "1_000", "1e3", "0x10", "", "1 2", "٣", "+-1"]
NO_NUMBERS = ["x", "10%", "1,5", "nan", "inf", "-inf", ".nan", ".inf", "1e999", "1_0.5", "012.5"]
NO_BOOLEANS = ["yes", "no", "on", "off", "0", "1", "True", "FALSE", "y", ""]


@pytest.mark.parametrize("text", NO_INTEGERS)
def test_integers_are_decimal_digits(text: str) -> None:
    message = refused(f"--seed={text}")
    assert message.startswith("--seed: ") and "is not an integer" in message
    assert text.isascii() is False or text in message


@pytest.mark.parametrize("text", [t for t in NO_INTEGERS if t not in ("", "+-1")])
def test_integers_in_the_file(tmp_path: Path, text: str) -> None:
    message = refused_yaml(tmp_path / "a.yaml", yaml_text() + f"seed: {text}\n")
    assert message.startswith("a.yaml:8: seed: ") and "is not an integer" in message


def test_huge_integers_are_refused() -> None:
    assert "--train-iters: 9223372036854775808 is too large" in refused("--train-iters", str(2**63))
    assert "is too large" in refused("--train-iters", "9" * 5000)


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_numbers_are_finite_decimals(tmp_path: Path, text: str) -> None:
    message = refused(f"--clip-grad={text}")
    assert message.startswith(f"--clip-grad: {text} is ")
    message = refused_yaml(tmp_path / "a.yaml", yaml_text() + f"clip_grad: {text}\n")
    assert message.startswith(f"a.yaml:8: clip_grad: {text} is ")


@pytest.mark.parametrize("text", ["1e-4", "0.0001", "1.0e-04", "1E-4", ".0001", "+1e-4"])
def test_numbers_have_many_spellings(tmp_path: Path, text: str) -> None:
    fields = {**SMALL, "lr": text}
    assert read_yaml(tmp_path / "a.yaml", yaml_text(fields)).optimizer.lr == 1e-4
    assert read("--lr", text).optimizer.lr == 1e-4


def test_an_integer_is_a_number() -> None:
    assert read("--clip-grad", "2").optimizer.clip_grad == 2.0
    assert isinstance(read("--clip-grad", "2").optimizer.clip_grad, float)


@pytest.mark.parametrize("quote", ["'", '"'])
def test_quoted_numbers_are_text(tmp_path: Path, quote: str) -> None:
    fields = {**SMALL, "lr": f"{quote}1e-4{quote}"}
    message = refused_yaml(tmp_path / "a.yaml", yaml_text(fields))
    assert message == ("a.yaml:7: lr: '1e-4' is quoted text; must be a number; remove the quotes")
    fields = {**SMALL, "train_iters": f"{quote}5{quote}"}
    message = refused_yaml(tmp_path / "a.yaml", yaml_text(fields))
    assert message.startswith("a.yaml:6: train_iters: '5' is quoted text; must be an integer")


@pytest.mark.parametrize("text", NO_BOOLEANS)
def test_booleans_are_true_or_false(tmp_path: Path, text: str) -> None:
    message = refused(f"--bf16={text}")
    assert message.startswith("--bf16: ") and text in message
    assert "is neither true nor false" in message
    message = refused_yaml(tmp_path / "a.yaml", yaml_text() + f"bf16: {text}\n")
    assert message.startswith("a.yaml:8: bf16: ") and "is neither true nor false" in message


def test_flags_switch_on_and_off(tmp_path: Path) -> None:
    assert read("--bf16").precision.bf16
    assert read("--bf16", "true").precision.bf16
    assert read("--bf16=true").precision.bf16
    text = yaml_text() + "bf16: true\n"
    for undo in (["--bf16", "false"], ["--bf16=false"]):
        assert not read_yaml(tmp_path / "a.yaml", text, undo).precision.bf16


def test_text_is_text(tmp_path: Path) -> None:
    assert refused_yaml(tmp_path / "a.yaml", yaml_text() + "wandb_project: 2024\n") == (
        "a.yaml:8: wandb_project: 2024 is not text; put it in quotes"
    )
    config = read_yaml(tmp_path / "a.yaml", yaml_text() + "wandb_project: '2024'\n")
    assert config.logging.wandb_project == "2024"
    assert read("--wandb-project", "2024").logging.wandb_project == "2024"
    assert refused("--wandb-project", "").startswith("--wandb-project: '' is empty")
    for bad in ("a\nb", "a\x00", "a\x1b[2J", "a\u2028b", "\udc80"):
        message = refused("--wandb-project", bad)
        assert message.startswith("--wandb-project: ") and "control character" in message


def test_choices(tmp_path: Path) -> None:
    message = refused("--normalization", "RMSNrom")
    assert message == (
        "--normalization: RMSNrom is not known; must be one of LayerNorm, RMSNorm; did you mean "
        "RMSNorm?"
    )
    message = refused("--tokenizer-type", "TikTokenizer")
    assert "convert_tiktoken_to_fast" in message and "did you mean" not in message
    assert read("--tokenizer-type", "Llama2Tokenizer").data.tokenizer_type == "Llama2Tokenizer"
    message = refused_yaml(tmp_path / "a.yaml", yaml_text() + "normalization: no\n")
    assert message.startswith("a.yaml:8: normalization: no is not known; must be one of LayerNorm")
    assert "True" not in refused("--device", "tpu")


def test_lists(tmp_path: Path) -> None:
    assert read("--profile-ranks", "0", "3").logging.profile_ranks == (0, 3)
    config = read("--data-path", "0.3", "a", "0.7", "b")
    assert config.data.data_path == ("0.3", "a", "0.7", "b")
    text = yaml_text() + "data_path: [0.3, a, 0.7, 'b c']\nprofile_ranks: 2\n"
    config = read_yaml(tmp_path / "a.yaml", text)
    assert config.data.data_path == ("0.3", "a", "0.7", "b c")
    assert config.logging.profile_ranks == (2,)
    text = yaml_text() + "data_path:\n- a\n- b\n"
    assert read_yaml(tmp_path / "a.yaml", text).data.data_path == ("a", "b")


def test_lists_are_refused_where_they_do_not_fit(tmp_path: Path) -> None:
    def given(text: str) -> str:
        return refused_yaml(tmp_path / "a.yaml", yaml_text() + text)

    assert given("seed: [1, 2]\n") == "a.yaml:8: seed: a list; must be one value, an integer"
    assert given("profile_ranks: []\n").startswith("a.yaml:8: profile_ranks: 0 values given")
    assert given("profile_ranks: [0, x]\n").startswith("a.yaml:8: profile_ranks: x is not an")
    assert given("data_path: [a, null]\n").startswith("a.yaml:8: data_path: null is empty")
    assert given("profile_ranks: [[0]]\n") == "a.yaml:8: profile_ranks: a list holds values only"
    assert refused("--rampup-batch-size", "1", "2") == (
        "--rampup-batch-size: 2 values given; must be 3"
    )
    assert refused("--profile-ranks").startswith("--profile-ranks: expected at least one")


def test_none_unsets_optional_values(tmp_path: Path) -> None:
    text = yaml_text() + "load: old\nsplit: '1,1,1'\nprofile_ranks: [1]\nddp_bucket_size: null\n"
    config = read_yaml(
        tmp_path / "a.yaml", text, ["--load", "none", "--train-iters", "none", "--skip-train"]
    )
    assert config.checkpoint.load is None
    assert config.training.train_iters is None
    assert config.parallel.ddp_bucket_size is None
    assert refused("--seed", "none") == (
        "--seed: none is not an integer; write decimal digits alone, such as 1000"
    )
    assert read("--rampup-batch-size", "none").training.rampup_batch_size is None
    message = refused_yaml(tmp_path / "a.yaml", yaml_text({**SMALL, "num_layers": "null"}))
    assert message.startswith("a.yaml:1: num_layers: null is not an integer")


def test_negative_numbers_are_values() -> None:
    weighted = read("--data-path", "-1", "a", "-0.5", "b").data.data_path
    assert weighted == ("-1", "a", "-0.5", "b")
    assert refused("--lr", "-1e-3") == "--lr: -0.001 is out of range; must be more than 0"
    assert refused("--lr", "-.5").startswith("--lr: -0.5 is out of range")
    assert refused("--profile-ranks", "0", "-1") == (
        "--profile-ranks: -1 is out of range; must be at least 0"
    )
