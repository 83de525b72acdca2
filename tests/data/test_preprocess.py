from __future__ import annotations

import bz2
import codecs
import errno
import gzip
import json
import lzma
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pytest

from megatron.data import preprocess as preprocess_module
from megatron.data import raw_tokens
from megatron.data.gpt_dataset import IndexCache
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.raw_text import Oversized, read_batches, read_dataset
from megatron.data.sidecar import read_sidecar
from megatron.data.tokenizer import tokenizer_from_sidecar
from tests.limits import LIMIT
from tools.preprocess_data import main
from tools.train_tokenizer import main as train_main
from tools.train_tokenizer import read_texts

REPO = Path(__file__).resolve().parents[2]
SCRIPT = REPO / "tools" / "preprocess_data.py"
BYTES = ["--tokenizer-type", "ByteTokenizer", "--append-eod"]


def texts(count: int, seed: int = 1) -> list[str]:
    """Documents of one line each, none of them blank, that differ in length and script."""
    draw = random.Random(seed)
    words = ["the", "cat", "naïve", "中文", "👩‍👩‍👧", "x=1", "<|endoftext|>", "\\n", '"quoted"']
    return [" ".join(draw.choices(words, k=draw.randrange(1, 30))) for _ in range(count)]


def write_jsonl(path: Path, documents: list[str]) -> Path:
    lines = [json.dumps({"id": n, "text": text}) for n, text in enumerate(documents)]
    path.write_text("\n".join(lines) + "\n")
    return path


def run(*arguments: object, workers: int = 1) -> int:
    return main([str(argument) for argument in (*arguments, "--workers", workers)])


def outputs(prefix: Path, key: str = "text") -> tuple[bytes, bytes]:
    name = f"{prefix}_{key}_document"
    return Path(f"{name}.bin").read_bytes(), Path(f"{name}.idx").read_bytes()


def documents(prefix: Path, key: str = "text") -> list[list[int]]:
    data = IndexedDataset(f"{prefix}_{key}_document")
    marks = data.document_indices
    return [
        [int(id) for at in range(marks[n], marks[n + 1]) for id in data[at]]
        for n in range(len(marks) - 1)
    ]


def encoded(text: str) -> list[int]:
    return [*text.encode(), 256] if text else []


def test_pair_holds_every_document_in_order(tmp_path: Path) -> None:
    raw = ["", *texts(40), "", "last"]
    source = write_jsonl(tmp_path / "a.jsonl", raw)
    assert run("--input", source, "--output-prefix", tmp_path / "o", *BYTES) == 0
    assert documents(tmp_path / "o") == [encoded(text) for text in raw]
    data = IndexedDataset(tmp_path / "o_text_document")
    assert data.dtype == np.uint16
    # The end mark counts in the length; an empty text has neither sequence nor end mark.
    assert list(data.sequence_lengths) == [len(encoded(text)) for text in raw if text]
    assert list(data.document_indices[:3]) == [0, 0, 1]
    info = read_sidecar(tmp_path / "o_text_document")
    assert info is not None and (info["type"], info["eod"]) == ("ByteTokenizer", 256)
    assert tokenizer_from_sidecar(info).vocab_size == 257
    assert sorted(path.suffix for path in tmp_path.glob("o_*")) == [".bin", ".idx", ".json"]


def test_without_append_eod_documents_are_bare(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["ab", "c"])
    tokenizer = ["--tokenizer-type", "ByteTokenizer"]
    assert run("--input", source, "--output-prefix", tmp_path / "o", *tokenizer) == 0
    assert documents(tmp_path / "o") == [[97, 98], [99]]


@pytest.mark.push
def test_any_number_of_workers_gives_the_same_bytes(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(4500))
    bad = source.read_bytes().split(b"\n")
    bad[1234] = b"{"
    source.write_bytes(b"\n".join(bad))
    arguments = ("--input", source, "--max-bad-lines", 1, *BYTES)
    assert run(*arguments, "--output-prefix", tmp_path / "one") == 0
    assert run(*arguments, "--output-prefix", tmp_path / "two", workers=2) == 0
    assert outputs(tmp_path / "one") == outputs(tmp_path / "two")
    assert len(documents(tmp_path / "one")) == 4499


def test_every_format_gives_the_same_bytes(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    raw = texts(700)
    plain = write_jsonl(tmp_path / "a.jsonl", raw).read_bytes()
    text = ("\n".join(raw) + "\n").encode()
    (tmp_path / "a.json").write_bytes(plain)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(plain[:5000]) + gzip.compress(plain[5000:]))
    (tmp_path / "a.jsonl.bz2").write_bytes(bz2.compress(plain))
    (tmp_path / "a.json.xz").write_bytes(lzma.compress(plain))
    (tmp_path / "windows.jsonl").write_bytes(b"\xef\xbb\xbf" + plain.replace(b"\n", b"\r\n"))
    (tmp_path / "blank.jsonl").write_bytes(plain.replace(b"\n", b"\n \n\n") + b"\n")
    (tmp_path / "unended.jsonl").write_bytes(plain.rstrip(b"\n"))
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + text))
    (tmp_path / "c.txt").write_bytes(text.replace(b"\n", b"\r\n\r\n"))
    parquet.write_table(pyarrow.table({"n": range(700), "text": raw}), tmp_path / "a.parquet")
    units = {"a.txt": "line", "b.txt.gz": "line", "c.txt": "paragraph"}
    for path in sorted(tmp_path.iterdir()):
        prefix = tmp_path / "out" / path.name
        unit = ("--text-unit", units.get(path.name, "file"))
        assert run("--input", path, "--output-prefix", prefix, *BYTES, *unit) == 0, path
        assert outputs(prefix) == outputs(tmp_path / "out" / "a.json"), path
    assert documents(tmp_path / "out" / "a.json") == [encoded(text) for text in raw]


def test_datasets_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    raw = texts(300)
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": raw})}).save_to_disk(
        str(tmp_path / "saved")
    )
    arguments = ("--dataset", tmp_path / "saved", "--output-prefix", tmp_path / "o", *BYTES)
    assert run(*arguments) == 0
    assert documents(tmp_path / "o") == [encoded(text) for text in raw]


def test_plain_text_units(tmp_path: Path) -> None:
    source = tmp_path / "book.txt"
    source.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n\r\n \r\nthree\n\n")
    wanted = {
        "file": ["one\ntwo\n\n \nthree\n\n"],
        "line": ["one", "two", "three"],
        "paragraph": ["one\ntwo", "three"],
        "o|t": ["one\ntwo\n\n \nthree"],
    }
    for unit, expected in wanted.items():
        prefix = tmp_path / unit
        assert run("--input", source, "--output-prefix", prefix, "--text-unit", unit, *BYTES) == 0
        assert documents(prefix) == [encoded(text) for text in expected]


def test_a_mark_inside_plain_text_ends_a_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, mark = tmp_path / "stories.txt", "<|endoftext|>"
    source.write_text(f"\n{mark}\none\n\nmore\n{mark}\ntwo{mark}three\n  \n\n{mark}\n")
    arguments = ("--input", source, "--output-prefix", tmp_path / "o", *BYTES)
    assert run(*arguments, "--text-unit", mark) == 0
    assert documents(tmp_path / "o") == [encoded(text) for text in ("one\n\nmore", "two", "three")]
    with pytest.raises(SystemExit) as ended:
        run(*arguments, "--text-unit", "paragraf")
    assert ended.value.code == 2
    assert "'paragraf' is neither file, line, paragraph nor a mark" in capsys.readouterr().err


def test_several_keys_make_a_pair_each(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    lines = [{"text": "a", "title": "A"}, {"text": "", "title": "B"}, {"text": "c"}]
    source.write_text("\n".join(map(json.dumps, lines)))
    keys = ("--json-keys", "text", "title", "--max-bad-lines", 1)
    assert run("--input", source, "--output-prefix", tmp_path / "o", *keys, *BYTES) == 0
    # The line without a title is left out of both, so that the pairs stay side by side.
    assert documents(tmp_path / "o") == [encoded("a"), []]
    assert documents(tmp_path / "o", "title") == [encoded("A"), encoded("B")]


def test_folders_and_globs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    write_jsonl(tmp_path / "in" / "b.jsonl", ["b"])
    write_jsonl(tmp_path / "in" / "a.jsonl", ["a"])
    (tmp_path / "in" / "deep" / "c.txt").write_text("c")
    (tmp_path / "in" / "picture.png").write_bytes(b"\x89PNG")
    prefix = tmp_path / "in" / "o"
    for again in ([], ["--overwrite"]):  # the second time the output's own .json lies there too
        assert run("--input", tmp_path / "in", "--output-prefix", prefix, *BYTES, *again) == 0
        assert documents(prefix) == [encoded("a"), encoded("b")]
        said = capsys.readouterr().err
        assert "are no raw text; left out" in said and "to read: 2 files of JSON lines\n" in said
        assert "1 files of plain text beside JSON lines or Parquet are left out" in said
    glob = tmp_path / "in" / "*.jsonl"
    assert run("--input", glob, "--output-prefix", tmp_path / "g", *BYTES) == 0
    assert documents(tmp_path / "g") == [encoded("a"), encoded("b")]


RECORDS = b'{"text": "a"}\n{"text": "b"}\n'
BY_CONTENT: dict[str, tuple[bytes, list[str] | str]] = {
    "part-00000": (RECORDS, ["a", "b"]),
    "part-00001": (b"\xef\xbb\xbf\n" + RECORDS, ["a", "b"]),
    "part-2.gz": (gzip.compress(RECORDS), ["a", "b"]),
    "long.dat": (b'{"text": "' + b"x" * (1 << 20) + b'"}\n' + RECORDS, ["x" * (1 << 20), "a", "b"]),
    "a.log": (b"{no record", ["{no record"]),
    "brace.txt": (b"{a} is a set", ["{a} is a set"]),
    "records.txt": (RECORDS.strip(), [RECORDS.decode().strip()]),
    "array": (b'[{"text": "a"},\n {"text": "b"}]', "a JSON array"),
    "array.json": (b'[\n  {"text": "a"}\n]\n', "a JSON array over several lines?"),
    "joined.json": (RECORDS + codecs.BOM_UTF8 + RECORDS, ["a", "b", "a", "b"]),
    "packed": (gzip.compress(RECORDS), "is compressed; give it a name ending in .gz"),
    "tokens.bin": (b"\1\0\2\0", "is binary"),
}


@pytest.mark.parametrize("name", BY_CONTENT)
def test_content_decides_about_a_file_of_an_unknown_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    source, (content, wanted) = tmp_path / name, BY_CONTENT[name]
    source.write_bytes(content)
    code = run("--input", source, "--output-prefix", tmp_path / "o", *BYTES)
    said = capsys.readouterr().err
    if isinstance(wanted, str):
        assert code == 3 and f"error: {source}" in said and wanted in said
    else:
        assert code == 0 and documents(tmp_path / "o") == [encoded(text) for text in wanted]
        kind = "plain text" if wanted[0].startswith("{") else "JSON lines"
        assert (f"to read: 1 file of {kind}" in said) == (source.suffix not in (".txt", ".json"))


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32"])
@pytest.mark.parametrize("header", [False, True])
def test_files_of_raw_tokens_are_split_at_the_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, header: bool
) -> None:
    """Documents may lie across the parts that are read at once."""
    monkeypatch.setattr(raw_tokens, "_CHUNK", 5)
    ids = [*b"one", 256, *b"a longer one", 256, 256, *b"cut"]
    words = np.zeros(256, "<i4")
    words[:3] = 20240520, 1, len(ids)
    source = tmp_path / "train.bin"
    start = words.tobytes() if header else b""
    source.write_bytes(start + np.array(ids, np.dtype(dtype).newbyteorder("<")).tobytes())
    flags = ("--input", source, "--output-prefix", tmp_path / "o", *BYTES[:2])
    assert run(*flags, "--token-dtype", dtype) == 0
    wanted = [[*b"one", 256], [*b"a longer one", 256], [256], [*b"cut"]]
    assert documents(tmp_path / "o") == wanted


def test_raw_tokens_of_another_type_or_tokenizer_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "train.bin"
    source.write_bytes(np.array([1, 2, 257], "<u2").tobytes())
    flags = ("--input", source, "--output-prefix", tmp_path / "o", *BYTES[:2], "--token-dtype")
    assert run(*flags, "uint16") == 3
    assert "id 257 among tokens 0 to 3; the tokenizer has ids up to 256" in capsys.readouterr().err
    assert run(*flags, "uint32") == 3
    assert "6 bytes are not a whole number of uint32 ids" in capsys.readouterr().err
    assert run(*flags, "uint16", "--append-eod") == 2
    assert not list(tmp_path.glob("o*"))


def test_zstandard_is_unpacked_and_what_was_read_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "a.jsonl.zst"
    lines = b'{"text": "a"}\n{"text": ""}\n{"text": "b"}\n'
    with pyarrow.output_stream(str(source), compression="zstd") as stream:
        stream.write(lines)
    assert run("--input", source, "--output-prefix", tmp_path / "o", *BYTES) == 0
    said = capsys.readouterr().err
    assert "1 of 3 documents have no token" in said and "--append-eod" not in said
    assert run("--input", source, "--output-prefix", tmp_path / "e", *BYTES[:2]) == 0
    assert "--append-eod writes marks" in capsys.readouterr().err


@pytest.mark.parametrize("call", [1, 3, 4])
def test_no_pair_of_several_keys_gets_its_names_before_all_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], call: int
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "a", "title": "A"}\n')
    real, calls = os.fsync, []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    keys = ("--json-keys", "text", "title")
    assert run("--input", source, "--output-prefix", tmp_path / "o", *keys, *BYTES) == 3
    assert "cannot be written: No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [source]


def test_a_folder_is_read_through_links_without_hidden_folders_and_index_caches(
    tmp_path: Path,
) -> None:
    folder, elsewhere = tmp_path / "in", tmp_path / "elsewhere"
    for made in (folder / ".ipynb_checkpoints", folder / "real", elsewhere / "deep"):
        made.mkdir(parents=True)
    (folder / "a.txt").write_text("a")
    (folder / ".ipynb_checkpoints" / "a.txt").write_text("hidden")
    (folder / "real" / "d.txt").write_text("d")
    (elsewhere / "deep" / "c.txt").write_text("c")
    (folder / "b").symlink_to(elsewhere)
    (elsewhere / "circle").symlink_to(folder)
    (folder / "again").symlink_to("real")
    indices = IndexCache(None, log=lambda text: None)
    cache = indices.folder(str(folder / "o"), "GPTDataset")
    indices.get(
        {"a": "description"}, folder=cache, kind="GPTDataset", split="train", layout={}, build=dict
    )
    assert len(list(cache.glob("*description.txt"))) == 1
    (folder / "real" / "a-description.txt").write_text("e")
    assert run("--input", folder, "--output-prefix", tmp_path / "o", *BYTES) == 0
    assert documents(tmp_path / "o") == [encoded(text) for text in "aced"]


BAD_LINES = {
    b'{"text": "a",}': "not JSON",
    b"{'text': 'a'}": "not JSON",
    b'{"text": "a"': "not JSON",
    b'{"text": "\xff"}': "not UTF-8 at byte 11",
    b'{"text": "a\x00"}': "NUL byte",
    b'{"text": "a\\u0000"}': "has a NUL character",
    b'{"text": "\\ud800"}': "unpaired surrogate",
    b'{"body": "a"}': "no key 'text'; it has 'body'; give --json-keys body",
    b'{"text": "a': "not JSON: Unterminated string starting at column 10",
    b'{"text": null}': "'text' is null; wanted a string",
    b'{"text": 5}': "'text' is int; wanted a string",
    b'{"text": ["a"]}': "'text' is list; wanted a string",
    b'["a"]': "a JSON list; wanted one object a line",
    b'"a"': "a JSON str; wanted one object a line",
    b"[" * 100_000: "not JSON",
    b"9" * 5000: "not JSON",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=[f"{n:02d}" for n in range(len(BAD_LINES))])
def test_bad_line_ends_the_run_with_its_number(
    line: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "a"}\n\n' + line + b'\n{"text": "b"}\n')
    arguments = ("--input", source, "--output-prefix", tmp_path / "o", *BYTES)
    assert run(*arguments) == 3
    error = capsys.readouterr().err
    assert f"{source}:3: " in error and BAD_LINES[line] in error and error.count("\n") == 1
    assert "--max-bad-lines allows 0" in error
    assert list(tmp_path.iterdir()) == [source]
    assert run(*arguments, "--max-bad-lines", 1) == 0
    assert f"left out {source}:3: " in capsys.readouterr().err
    assert documents(tmp_path / "o") == [encoded("a"), encoded("b")]


def test_allowance_is_for_the_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text('{}\n{"text": "a"}\n{}\n')
    second.write_text('{"text": "b"}\n{}\n')
    arguments = ("--input", first, second, "--output-prefix", tmp_path / "o", *BYTES)
    assert run(*arguments, "--max-bad-lines", 2) == 3
    error = capsys.readouterr().err
    assert f"{first}:1" in error and f"{first}:3" in error and f"{second}:2" in error
    assert not list(tmp_path.glob("o_*"))
    assert run(*arguments, "--max-bad-lines", 3) == 0


def test_overlong_lines_are_passed_over_without_being_held(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_bytes(b"a" * 10 + b"\n" + b"b" * 11 + b"\n" + b"c" * 5000 + b"\nd\n\n\ne")
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(source.read_bytes()))
    for path in (source, tmp_path / "packed.txt.gz"):
        batches = read_batches([path], keys=["text"], text_unit="line", max_bytes=10)
        records = [record for batch in batches for record in batch.records]
        assert [number for number, _ in records] == [1, 2, 3, 4, 7]
        assert [type(payload) for _, payload in records] == [
            bytes,
            Oversized,
            Oversized,
            bytes,
            bytes,
        ]
    for unit in ("paragraph", "file"):
        (batch,) = read_batches([source], keys=["text"], text_unit=unit, max_bytes=4000)
        assert isinstance(batch.records[0][1], Oversized)


@pytest.mark.parametrize("beyond", [0, 1, 90])
def test_a_file_with_a_bom_is_not_cut(tmp_path: Path, beyond: int) -> None:
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + b"a" * (10 + beyond))
    (batch,) = read_batches([tmp_path / "a.txt"], keys=["text"], text_unit="file", max_bytes=10)
    ((_, record),) = batch.records
    assert isinstance(record, Oversized) if beyond else record == b"a" * 10


def test_batches_of_rows_are_limited_in_bytes(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    datasets = pytest.importorskip("datasets")
    import pyarrow.parquet as parquet

    columns = {"text": ["é" * 200_000, *["a" * 400_000] * 8, "b"], "title": ["t"] * 10}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / "saved"))
    keys = ["text", "title"]
    path, size = tmp_path / "a.parquet", (tmp_path / "a.parquet").stat().st_size
    of_file = list(read_batches([path], keys=keys, text_unit="line"))
    of_set = list(read_dataset(str(tmp_path / "saved"), split="train", keys=keys))
    rows = [3, 6, 9, 10]
    for batches, ends in ((of_file, [size * row // 10 for row in rows]), (of_set, rows)):
        assert [len(batch.records) for batch in batches] == [3, 3, 3, 1]
        assert [batch.position for batch in batches] == ends
        records = [record for batch in batches for record in batch.records]
        assert [number for number, _ in records] == list(range(1, 11))
        assert [row for _, row in records] == list(zip(*columns.values(), strict=True))
    (batch,) = read_batches([path], keys=keys, text_unit="line", max_bytes=399_999)
    assert [row for _, row in batch.records] == [Oversized(400_000)] * 9 + [("b", "t")]


def test_null_tokenizer_refuses_other_text_by_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["1 70000", "2 x"])
    tokenizer = ("--tokenizer-type", "NullTokenizer", "--vocab-size", 70001)
    arguments = ("--input", source, "--output-prefix", tmp_path / "o", *tokenizer)
    assert run(*arguments) == 3
    assert f"{source}:2: text: 'x' is not a token id" in capsys.readouterr().err
    assert run(*arguments, "--max-bad-lines", 1) == 0
    assert documents(tmp_path / "o") == [[1, 70000]]
    assert IndexedDataset(tmp_path / "o_text_document").dtype == np.int32


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--input", "gone.jsonl"], 3, "gone.jsonl: no such file"),
        (["--input", "*.nothing"], 3, "*.nothing: no file to read"),
        (["--input", "pipe"], 3, "pipe: is a pipe"),
        (["--input", "empty_folder"], 3, "empty_folder: no file to read"),
        (["--input", "empty.jsonl"], 3, "--input: holds no documents; nothing was written"),
        (["--input", "blank.jsonl"], 3, "1 documents, but no text under 'text'"),
        (["--input", "cut.jsonl.gz"], 3, "cut.jsonl.gz: cannot be read to its end"),
        (["--input", "false.jsonl.gz"], 3, "false.jsonl.gz: cannot be read to its end"),
        (["--input", "false.jsonl.bz2"], 3, "false.jsonl.bz2: cannot be read to its end"),
        (["--input", "false.jsonl.xz"], 3, "false.jsonl.xz: cannot be read to its end"),
        (["--input", "false.parquet"], 3, "false.parquet: not a readable Parquet file"),
        (["--input", "a.jsonl.lz4"], 3, ".lz4 is not read; unpack it"),
        (["--input", "false.jsonl.zst"], 3, "false.jsonl.zst: cannot be read to its end"),
        (["--input", ""], 2, "'' is empty"),
        (["--input", "a.jsonl", "--json-keys", "a/b"], 2, "--json-keys: 'a/b'"),
        (["--input", "a.jsonl", "--json-keys", "text", "text"], 2, "a key is given twice"),
        (["--input", "a.txt", "--json-keys", "text"], 2, "is plain text, which has no keys"),
        (["--input", "a.txt", "a.jsonl", "--json-keys", "text", "b"], 2, "which has one"),
        (["--input", "a.jsonl", "--dataset", "x"], 2, "either --input or --dataset"),
        ([], 2, "either --input or --dataset"),
        (["--input", "a.jsonl", "--max-bad-lines", "-1"], 2, "--max-bad-lines: -1"),
        (["--input", "a.jsonl", "--log-interval", "0"], 2, "--log-interval: 0"),
        (["--input", "a.jsonl", "--vocab-file", "v"], 2, "--vocab-file: given, but"),
        (["--input", "a.jsonl", "--tokenizer-type", "Byte"], 2, "did you mean ByteTokenizer"),
        (["--input", "a.jsonl", "--output-prefix", "out/"], 2, "ends in no name"),
        (["--input", "a.jsonl", "--output-prefix", "a.jsonl/x"], 3, "a.jsonl: "),
    ],
)
def test_refusals(
    flags: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", ["a"])
    (tmp_path / "a.txt").write_text("a")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty_folder").mkdir()
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (tmp_path / "blank.jsonl").write_text('{"text": ""}')
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 50)[:-10])
    for name in (
        "false.jsonl.gz",
        "false.jsonl.bz2",
        "false.jsonl.xz",
        "false.jsonl.zst",
        "false.parquet",
    ):
        (tmp_path / name).write_bytes(b'{"text": "a"}\n' * 10)
    (tmp_path / "a.jsonl.lz4").write_bytes(b"x")
    before = sorted(tmp_path.iterdir())
    assert run("--output-prefix", "o", *BYTES, *flags) == code
    error = capsys.readouterr().err
    (line,) = [line for line in error.splitlines() if not line.startswith("to read: ")]
    assert message in line
    assert sorted(tmp_path.iterdir()) == before


def test_unknown_flag_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["--inputs", "a"])
    assert error.value.code == 2
    capsys.readouterr()


def test_existing_output_and_input_are_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["a"])
    arguments = ("--input", source, "--output-prefix", tmp_path / "o", *BYTES)
    assert run(*arguments) == 0
    write_jsonl(source, ["b"])
    assert run(*arguments) == 2
    assert "exists; choose another or add --overwrite" in capsys.readouterr().err
    assert documents(tmp_path / "o") == [encoded("a")]
    assert run(*arguments, "--overwrite") == 0
    assert documents(tmp_path / "o") == [encoded("b")]
    sidecar = write_jsonl(tmp_path / "p_text_document.json", ["c"])
    arguments = ("--input", sidecar, "--output-prefix", tmp_path / "p", "--overwrite", *BYTES)
    assert run(*arguments) == 2
    assert "is one of the inputs" in capsys.readouterr().err
    assert json.loads(sidecar.read_text())["text"] == "c"


def test_failing_tokenizer_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise IndexError("first\nsecond")

    monkeypatch.setattr(preprocess_module, "encode", fail)
    source = write_jsonl(tmp_path / "a.jsonl", ["a", "b"])
    assert run("--input", source, "--output-prefix", tmp_path / "o", *BYTES) == 3
    error = capsys.readouterr().err
    assert error == f"error: {source}:1-2: the tokenizer failed: IndexError: first\n"
    assert list(tmp_path.iterdir()) == [source]


def test_log_lines_come_by_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(2500))
    arguments = ("--input", source, "--output-prefix", tmp_path / "o", "--log-interval", 1000)
    notices = ("--partitions", 4, "--keep-sequential-samples")
    assert run(*arguments, *notices, *BYTES) == 0
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert [line.split(" doc")[0] for line in lines if " doc" in line and "MB/s" in line] == [
        "1000",
        "2000",
        "2500",
    ]
    assert "--partitions 4: ignored" in lines[0] and "--keep-sequential-samples" in lines[1]
    assert "2500 documents" in printed.out


# What follows needs a process of its own.


def _until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "gone"


def _workers(pid: int) -> list[int]:
    """Processes below `pid` that do tokenization (spawn also starts a resource tracker)."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        lines = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    except OSError:
        return []
    return [child for child, line in lines.items() if b"spawn_main" in line]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run with two workers, some seconds of work before it, caught once both are there."""
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        pytest.skip("finds worker processes through Linux's /proc")
    write_jsonl(tmp_path / "a.jsonl", ["word " * 2000] * 3000)
    command = [sys.executable, str(SCRIPT), "--input", "a.jsonl", "--output-prefix", "o"]
    process = subprocess.Popen(
        [*command, *BYTES, "--workers", "2"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    try:
        _until(lambda: len(_workers(process.pid)) == 2 or process.poll() is not None, "workers")
        assert process.poll() is None and list(tmp_path.glob("o_*.tmp"))
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.push
def test_killed_run_leaves_no_output_and_no_process(
    running: subprocess.Popen[str], tmp_path: Path
) -> None:
    workers = _workers(running.pid)
    running.kill()
    running.wait()
    left = sorted(path.name for path in tmp_path.glob("o_*"))
    assert left and all(name.endswith(".tmp") for name in left)
    _until(lambda: all(_state(pid) in ("gone", "Z") for pid in workers), "the workers' end")
    source = write_jsonl(tmp_path / "b.jsonl", ["b"])
    assert run("--input", source, "--output-prefix", tmp_path / "o", *BYTES) == 0
    assert not list(tmp_path.glob("*.tmp")) and documents(tmp_path / "o") == [encoded("b")]


@pytest.mark.push
def test_terminated_run_clears_up(running: subprocess.Popen[str], tmp_path: Path) -> None:
    running.send_signal(signal.SIGTERM)
    _, error = running.communicate(timeout=LIMIT)
    assert running.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in error and not list(tmp_path.glob("o_*"))


@pytest.mark.push
def test_dead_worker_ends_the_run(running: subprocess.Popen[str], tmp_path: Path) -> None:
    os.kill(_workers(running.pid)[0], signal.SIGKILL)
    _, error = running.communicate(timeout=LIMIT)
    assert running.returncode == 3
    assert "a worker process died" in error and "Traceback" not in error
    assert not list(tmp_path.glob("o_*"))


def test_imports_no_torch_and_runs_from_anywhere(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(20))
    trained = ("--input", tmp_path / "a.jsonl", "--output", tmp_path / "t.json")
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "t.json"]
    assert train_main([*map(str, trained), "--vocab-size", "270"]) == 0
    command = ["x", "--input", "a.jsonl", "--output-prefix", "o", *flags]
    code = (
        f"import runpy, sys; sys.argv = {command}"
        f"\ntry: runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
        "\nexcept SystemExit as end: assert not end.code, end.code"
        "\nheavy = {'torch', 'apex', 'triton', 'transformer_engine', 'transformers', 'mpi4py'}"
        "\nassert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    assert len(documents(tmp_path / "o")) == 20
    info = read_sidecar(tmp_path / "o_text_document")
    assert info is not None
    tokenizer = tokenizer_from_sidecar(info)
    assert [tokenizer.decode(ids) for ids in documents(tmp_path / "o")] == texts(20)


def test_an_over_long_name_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, name = write_jsonl(tmp_path / "a.jsonl", ["a"]), "x" * 5000
    assert run("--input", name, "--output-prefix", tmp_path / "o", *BYTES) == 3
    assert run("--input", source, "--output-prefix", tmp_path / name, *BYTES) == 3
    assert train_main(["--input", str(source), "--output", name]) == 3
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3 and all("cannot be looked at" in line for line in errors)
    assert max(map(len, errors)) < 500


def test_a_folder_that_cannot_be_listed_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hidden = tmp_path / "in" / "hidden"
    hidden.mkdir(parents=True)
    write_jsonl(tmp_path / "in" / "a.jsonl", ["a"])
    real = os.scandir

    def scandir(path):
        if str(path) == str(hidden):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert run("--input", tmp_path / "in", "--output-prefix", tmp_path / "o", *BYTES) == 3
    assert "hidden: cannot be listed: Permission denied" in capsys.readouterr().err


def test_train_tokenizer_counts_bytes(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["éé", "éé", "a"])
    batches = read_batches([source], keys=["text"], text_unit="line")
    assert list(read_texts(batches, ["text"], max_bytes=4)) == ["éé"]


def test_train_tokenizer_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "abab abab"}\n{"text": 1}\n')
    flags = ["--input", str(source), "--output", str(tmp_path / "t.json"), "--vocab-size", "258"]
    assert train_main(flags) == 3
    assert f"{source}:2: 'text' is int" in capsys.readouterr().err
    assert train_main([*flags, "--max-bytes", "5"]) == 0
    assert train_main(flags) == 2
    assert "exists; add --overwrite" in capsys.readouterr().err
