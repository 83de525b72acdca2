from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from megatron.data.tokenizer import build_tokenizer
from megatron.errors import DataError
from tools.stdlib_corpus import main, make_corpus

pytest.importorskip("tokenizers")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small library with everything that is taken and everything that is left out."""
    folder = tmp_path / "lib"
    body = '"""Adds numbers."""\n\n\ndef add(first, second):\n    return first + second\n'
    taken = {f"module_{n}.py": body + f"\n\nVALUE = {n}\n" for n in range(20)}
    taken["package/__init__.py"] = '"""A package of numbers and names."""\r\n'
    left_out = {name: body for name in ("test/x.py", "site-packages/y.py", "package/tests/z.py")}
    left_out["empty.py"] = " \n"
    topics = "topics = {'if': 'The if statement is for choices.\\n', 'for': 'A loop.'}\n"
    for name, text in {**taken, **left_out, "pydoc_data/topics.py": topics}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())
    (folder / "latin.py").write_bytes(b"# \xe9\n")
    return folder


def read(path: Path) -> dict[str, str]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["name"]: line["text"] for line in lines}


def test_corpus_holds_modules_and_topics(library: Path, tmp_path: Path) -> None:
    made = make_corpus(tmp_path / "out", vocab_size=280, library=library)
    found = read(made.text)
    modules = {f"module_{n}.py" for n in range(20)} | {"package/__init__.py"}
    assert set(found) == modules | {"topic if", "topic for"}
    assert found["topic if"] == "The if statement is for choices.\n"
    assert found["package/__init__.py"].endswith('names."""\n')
    assert (made.documents, made.reused) == (23, False)
    assert made.text_bytes == sum(len(text) for text in found.values())
    tokenizer = build_tokenizer("HuggingFaceTokenizer", model=str(made.tokenizer))
    assert tokenizer.vocab_size == made.vocab_size == 280
    for text in found.values():
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_same_library_gives_the_same_files(library: Path, tmp_path: Path) -> None:
    first = make_corpus(tmp_path / "a", vocab_size=280, library=library)
    second = make_corpus(tmp_path / "b", vocab_size=280, library=library)
    assert first.text.read_bytes() == second.text.read_bytes()
    assert first.tokenizer.read_bytes() == second.tokenizer.read_bytes()
    # Not by path: a split's tail is to look like the rest.
    assert list(read(first.text)) != sorted(read(first.text))


def test_what_is_there_is_kept_until_something_changes(library: Path, tmp_path: Path) -> None:
    def make(vocab_size: int = 280):
        return make_corpus(tmp_path / "out", vocab_size=vocab_size, library=library)

    first = make()
    before = first.tokenizer.stat().st_mtime_ns
    again = make()
    assert again.reused and again.vocab_size == 280
    assert first.tokenizer.stat().st_mtime_ns == before
    assert not make(270).reused
    assert make(270).reused
    (library / "module_3.py").write_text("x = 1\n")
    assert not make(270).reused
    first.tokenizer.write_text("{}")
    assert not make(270).reused
    first.text.unlink()
    assert not make(270).reused and first.text.exists()
    (tmp_path / "out" / "stdlib.json").write_text("[")
    assert not make(270).reused


def test_max_bytes_bounds_the_text(library: Path, tmp_path: Path) -> None:
    made = make_corpus(tmp_path / "out", vocab_size=260, max_bytes=400, library=library)
    assert 0 < made.text_bytes <= 400 and made.documents < 23


def test_a_corpus_that_cannot_be_looked_at_is_one_line(
    library: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--output", str(tmp_path / "out"), "--library", str(library), "--vocab-size", "300"]
    assert main(flags) == 0
    hidden, real = str(tmp_path / "out" / "corpus.jsonl"), os.stat

    def stat(path, *arguments, **named):
        if str(path) == hidden:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, *arguments, **named)

    monkeypatch.setattr(os, "stat", stat)
    assert main(flags) == 3
    error = capsys.readouterr().err
    assert "corpus.jsonl: cannot be looked at" in error and error.count("\n") == 1


def test_no_source_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lib").mkdir()
    with pytest.raises(DataError, match="no Python source"):
        make_corpus(tmp_path / "out", library=tmp_path / "lib")
    flags = ["--output", str(tmp_path / "out")]
    assert main([*flags, "--library", str(tmp_path / "lib")]) == 3
    assert main([*flags, "--max-bytes", "0"]) == 2
    assert main([*flags, "--vocab-size", "100"]) == 2
    assert capsys.readouterr().err.count("error: ") == 3
    assert not (tmp_path / "out" / "corpus.jsonl").exists()


def test_this_interpreter_has_a_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--output", str(tmp_path), "--max-bytes", "1000000", "--vocab-size", "1000"]
    assert main(flags) == 0
    assert capsys.readouterr().out.startswith("wrote ")
    found = read(tmp_path / "corpus.jsonl")
    assert sum(map(len, found.values())) > 500_000
    assert not any(name.startswith(("test/", "site-packages/")) for name in found)
    assert main(flags) == 0
    assert capsys.readouterr().out.startswith("kept ")
