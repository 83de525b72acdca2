"""The file is one small, regular, plain YAML document, and errors name the line."""

from __future__ import annotations

import os
import random
from itertools import product
from pathlib import Path

import pytest

from megatron.config import brief_settings, parse, resolve
from megatron.config.parsing import SIZE_LIMIT
from megatron.errors import ConfigError
from tests.calls import count_calls
from tests.config.helpers import PATHS, SMALL, read, read_yaml, refusal, refused_yaml, yaml_text

NESTED = """\
# a comment
model:
  num_layers: 2
  hidden_size: 64
  num_attention_heads: 4
  seq_length: 32
training: {micro_batch_size: 2, train_iters: 10}
optimizer:
  lr: 1e-3
logging:
"""


def test_sections_and_flat_keys_are_the_same(tmp_path: Path) -> None:
    nested = read_yaml(tmp_path / "n.yaml", NESTED)
    assert nested == read_yaml(tmp_path / "f.yaml", yaml_text()) == read()
    assert (nested.name, read().name) == ("n", "gpt")


def test_unknown_keys(tmp_path: Path) -> None:
    def given(text: str) -> str:
        return refused_yaml(tmp_path / "a.yaml", yaml_text() + text)

    assert given("leraning_rate: 1\n") == ("a.yaml:8: leraning_rate: no such key; did you mean lr?")
    assert (
        given("hiden_size: 1\n") == "a.yaml:8: hiden_size: no such key; did you mean hidden_size?"
    )
    assert given("log-interval: 1\n").endswith("did you mean log_interval?")
    assert given("model: 3\n") == (
        "a.yaml:8: model is a section; write its keys below it, further right"
    )
    assert given("logging:\n\tlog_interval: 1\n").endswith("; use spaces")
    assert given("qqqq: 1\n") == "a.yaml:8: qqqq: no such key"
    assert given("logging:\n  lgo_interval: 1\n").startswith("a.yaml:9: lgo_interval: no such key")
    assert given("loging:\n  log_interval: 1\n") == (
        "a.yaml:9: loging: no such section; did you mean logging?"
    )
    assert given("layernorm_epsilon: 1e-5\n") == (
        "a.yaml:8: layernorm_epsilon: no such key; as a flag it is read as --norm-epsilon"
    )
    assert (
        given("data:\n  seed: 1\n") == "a.yaml:9: seed stands under data; it belongs under training"
    )
    assert given("'a\\nb': 1\n").startswith("a.yaml:8: ")


def test_duplicate_keys_name_both_lines(tmp_path: Path) -> None:
    def given(text: str) -> str:
        return refused_yaml(tmp_path / "a.yaml", text)

    assert given(yaml_text() + "lr: 0.1\n") == (
        "a.yaml:8: lr is given twice, first in line 7; remove one"
    )
    assert given("model:\n  num_layers: 1\nmodel:\n  seq_length: 2\n") == (
        "a.yaml:3: model is given twice, first in line 1; remove one"
    )
    assert given(NESTED + "  log_interval: 1\nlr: 0.1\n") == (
        "a.yaml:12: lr is given twice, first in line 9; remove one"
    )


def test_optimizer_is_a_section_and_a_field(tmp_path: Path) -> None:
    config = read_yaml(tmp_path / "a.yaml", yaml_text() + "optimizer: sgd\n")
    assert config.optimizer.optimizer == "sgd"
    text = NESTED.replace("  lr: 1e-3", "  lr: 1e-3\n  optimizer: sgd")
    assert read_yaml(tmp_path / "a.yaml", text).optimizer.optimizer == "sgd"


def test_tags_anchors_and_documents_are_refused(tmp_path: Path) -> None:
    def given(text: str) -> str:
        return refused_yaml(tmp_path / "a.yaml", yaml_text() + text)

    canary = tmp_path / "canary"
    message = given(f"seed: !!python/object/apply:os.mkdir ['{canary}']\n")
    assert message.startswith("a.yaml:8: tag 'tag:yaml.org,2002:python/object/apply:os.mkdir'")
    assert not canary.exists()
    assert given("seed: !!int 1\n").startswith("a.yaml:8: tag ")
    assert given("seed: !foo 1\n").startswith("a.yaml:8: tag '!foo' is not read")
    assert given("seed: &x 1\n").startswith("a.yaml:8: anchors and aliases")
    assert given("seed: *x\n").startswith("a.yaml:8: anchors and aliases")
    assert given("--- \nseed: 1\n").startswith("a.yaml:8: a second document")
    assert given("seed: {a: 1}\n").startswith("a.yaml:8: seed: no such section")
    assert given("model:\n  seed:\n    a: 1\n") == (
        "a.yaml:10: seed: a mapping; must be a value or a list"
    )
    assert given("[a, b]: 1\n").startswith("a.yaml:8: a key is a list or a mapping")
    assert given("? {a: b}\n: 1\n").startswith("a.yaml:8: a key is a list or a mapping")


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", "---\n"])
def test_empty_files(tmp_path: Path, text: str) -> None:
    message = refused_yaml(tmp_path / "a.yaml", text)
    assert message == "a.yaml: empty; give at least the required fields"


def test_what_is_not_yaml_names_the_line(tmp_path: Path) -> None:
    def given(text: str | bytes) -> str:
        return refused_yaml(tmp_path / "a.yaml", text)

    assert given("just text\n").startswith("a.yaml:1: not a mapping")
    assert given("- a\n- b\n").startswith("a.yaml:1: not a mapping")
    assert given("a: 1\n\tb: 2\n").startswith("a.yaml:2: not YAML: found character '\\t'")
    assert given("a: 1\nb: [1\nc: 2\n").startswith("a.yaml:3: not YAML: ")
    assert given("a: 1\nb: c: 2\n").startswith("a.yaml:2: not YAML: ")
    assert given(b"\x7fELF\x02\x01\x00\xff\xfe") == (
        "a.yaml: byte 7 is not UTF-8 text; --config wants a YAML file"
    )
    assert "not YAML" in given("a: \x00\n")
    assert "byte 0 is not UTF-8" in given("a: 1\n".encode("utf-16"))
    assert given("a: " + "[" * 100_000).startswith("a.yaml:1: a: a list holds values only")
    assert given("a: [" + "1, " * 100_000 + "]").startswith("a.yaml:1: more than 20000 keys")


def test_byte_order_mark_and_carriage_returns_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + yaml_text().replace("\n", "\r\n").encode())
    assert parse(["--config", str(path)], paths=PATHS) == read()


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal(["--config", "no.yaml"]) == (
        f"no.yaml: cannot read the configuration (No such file or directory); looked in {tmp_path}"
    )
    assert refusal(["--config", "."]) == ".: a directory; --config wants a YAML file"
    assert refusal(["--config", ""]).startswith("'': ")
    assert refusal(["--config", "a\x00"]).startswith(r"'a\x00': cannot read")
    assert refusal(["--config", "x" * 5000]).endswith(f"(File name too long); looked in {tmp_path}")
    os.mkfifo("fifo")
    assert refusal(["--config", "fifo"]).startswith("fifo: not a regular file")
    assert refusal(["--config", "/dev/zero"]).startswith("/dev/zero: not a regular file")
    Path("big.yaml").write_bytes(b"#" * (SIZE_LIMIT + 1))
    assert refusal(["--config", "big.yaml"]) == "big.yaml: 1048577 bytes; must be at most 1048576"
    Path("loop").symlink_to("loop")
    assert refusal(["--config", "loop"]).startswith("loop: cannot read the configuration")


def test_files_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", deny)
    (tmp_path / "a.yaml").write_text("a: 1")
    assert "a.yaml: cannot read the configuration (Permission denied); looked in " in refusal(
        ["--config", str(tmp_path / "a.yaml")]
    )


LARGE = SIZE_LIMIT // 4
"""Characters of a text that is read to its end in a second."""


@pytest.mark.push
def test_large_garbage_is_told_quickly(tmp_path: Path) -> None:
    """PyYAML's scanner calls up to five functions for a character."""
    path = tmp_path / "a.yaml"
    for text in ("k: 1\n", "[", "{", "- ", "a: b: ", "&a ", "# x\n", "x", "'", "!a "):
        with count_calls() as calls:
            message = refused_yaml(path, text * (LARGE // len(text)))
        assert calls() < 8 * LARGE, text
        assert message.startswith("a.yaml")


KINDS = 6


def _mutate(text: str, kind: int, rng: random.Random) -> bytes:
    """Damage a file in one of the kinds of ways, and up to three more times in any of them."""
    data = bytearray(text.encode())
    for damage in [kind, *(rng.randrange(KINDS) for _ in range(rng.randrange(4)))]:
        at = rng.randrange(len(data))
        if damage == 0:
            data[at] = rng.randrange(256)
        elif damage == 1:
            del data[at : at + rng.randint(1, 20)]
        elif damage == 2:
            data[at:at] = rng.choice(SNIPPETS)
        elif damage == 3:
            data[at:at] = data[at : at + rng.randint(1, 40)]
        elif damage == 4:
            lines = data.split(b"\n")
            rng.shuffle(lines)
            data = bytearray(b"\n".join(lines))
        else:
            digits = [i for i, byte in enumerate(data) if 48 <= byte <= 57] or [0]
            data[rng.choice(digits)] = rng.choice(b"0123456789-.e")
    return bytes(data) or b"#"


SNIPPETS = [
    b"\t", b"\r", b"\x00", b"\xff", b": ", b"- ", b"[", b"]", b"{", b"}", b"&a ", b"*a", b"!!x ",
    b"'", b'"', b"|\n", b">\n", b"? ", b"#", b"---\n", b"...\n", b"%YAML 9.9\n", b"null", b"1e999",
    b"99999999999999999999", b"-1", b".nan", b"\xef\xbb\xbf", b"\xc2\x85", b"\xe2\x80\xa8", b"\n\n",
    b"rampup_batch_size: [1, 1, 9]\n", b"fp16: true\n", b"run_dir: /\n", b"num_query_groups: 7\n",
]  # fmt: skip


def test_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    """A sound file takes 10,000 calls, and 25,000 when it is the first one."""
    rng = random.Random(20)
    path = tmp_path / "a.yaml"
    read_anyway = 0
    sources = (NESTED, yaml_text({**SMALL, "data_path": "[1, a]", "bf16": "true"}))
    for case in product(range(8), range(KINDS), range(len(sources))):
        path.write_bytes(_mutate(sources[case[2]], case[1], rng))
        with count_calls() as calls:
            try:
                resolve(parse(["--config", str(path)], paths=PATHS), 4)
                read_anyway += 1
            except ConfigError as error:
                assert str(error).isprintable(), (case, repr(str(error)))
        assert calls() < 200_000, case
    assert 5 < read_anyway < 91


def test_brief_settings_are_those_that_differ_from_defaults() -> None:
    lines = brief_settings(read("--lr", "0.5", "--data-path", "x" * 500)).splitlines()
    assert {line.split(":")[0] for line in lines if ":" in line} >= {"  model", "  optimizer"}
    assert max(map(len, lines)) <= 100 and len(lines) < 10
    text = " ".join(lines)
    assert "num_layers 2" in text and "lr 0.5" in text and "xxx..." in text
    assert "adam_beta1" not in text and "seed" not in text
