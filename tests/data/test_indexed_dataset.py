"""Pairs come back as written, byte for byte, and appear whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter, merge, optimal_dtype
from megatron.data.sidecar import (
    check_sizes,
    read_file_records,
    read_sidecar,
    sidecar_path,
    write_sidecar,
)
from megatron.errors import DataError
from tests.data.pairs import write_pair


def _copy(source: IndexedDataset, prefix: Path) -> None:
    marks = source.document_indices
    with IndexedDatasetWriter(prefix, source.dtype) as writer:
        for document in range(source.num_documents):
            for sequence in range(marks[document], marks[document + 1]):
                writer.add_sequence(source[sequence])
            writer.end_document()


def _same_bytes(first: str | Path, second: str | Path) -> bool:
    return all(
        Path(f"{first}{suffix}").read_bytes() == Path(f"{second}{suffix}").read_bytes()
        for suffix in (".bin", ".idx")
    )


def test_a_pair_of_megatron_is_rewritten_byte_for_byte(shared_data: Path, tmp_path: Path) -> None:
    prefix = shared_data / "megatron-indexed" / "meg-gpt2-openwebtext_text_document"
    source = IndexedDataset(prefix)
    assert (len(source), source.num_documents, source.num_tokens) == (1000, 1000, 1_361_845)
    assert source.dtype == np.uint16
    _copy(source, tmp_path / "copy")
    assert _same_bytes(prefix, tmp_path / "copy")
    merge(tmp_path / "merged", [prefix])
    assert _same_bytes(prefix, tmp_path / "merged")


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "i8", "u2"])
@pytest.mark.parametrize("mmap", [True, False])
def test_what_is_written_is_read(tmp_path: Path, dtype: str, mmap: bool) -> None:
    documents = [[[1, 2, 3], [4]], [], [[], [5, 127]], []]
    with IndexedDatasetWriter(tmp_path / "p", dtype) as writer:
        for sequences in documents:
            writer.add_document(sum(sequences, []), [len(sequence) for sequence in sequences])
    data = IndexedDataset(tmp_path / "p", mmap=mmap)
    assert data.dtype == np.dtype(dtype)
    assert [data[i].tolist() for i in range(len(data))] == [[1, 2, 3], [4], [], [5, 127]]
    assert data.document_indices.tolist() == [0, 2, 2, 4, 4]
    assert data.get(0, 1).tolist() == [2, 3]
    assert data.get(3, 0, 1).tolist() == [5]
    assert data.read(2, 3).tolist() == [3, 4, 5]


def test_merging_parts_equals_writing_the_whole(tmp_path: Path) -> None:
    lengths = [[3, 0, 7], [5], [0, 2]]
    write_pair(tmp_path / "whole", sum(lengths, []), vocab_size=1000)
    tokens, parts = 0, []
    for number, part in enumerate(lengths):
        prefix = tmp_path / f"part{number}"
        with IndexedDatasetWriter(prefix, "u2") as writer:
            for length in part:
                writer.add_document(np.arange(tokens, tokens + length), [length])
                tokens += length
        parts.append(prefix)
    merge(tmp_path / "merged", parts, tokenizer={"type": "x"})
    assert _same_bytes(tmp_path / "whole", tmp_path / "merged")
    assert read_sidecar(tmp_path / "merged") == {"type": "x"}


def test_pairs_of_different_dtype_are_not_joined(tmp_path: Path) -> None:
    parts = [write_pair(tmp_path / "a", [4]), write_pair(tmp_path / "b", [4], dtype="i4")]
    with pytest.raises(DataError, match="int32.*uint16"):
        merge(tmp_path / "merged", parts)
    assert not list(tmp_path.glob("merged*"))


@pytest.mark.parametrize(("dtype", "bad"), [("u2", 70_000), ("u2", -1), ("i4", 2**31)])
def test_an_id_outside_the_dtype_is_refused_not_wrapped(
    tmp_path: Path, dtype: str, bad: int
) -> None:
    with pytest.raises(DataError, match=f"token id {bad} "):
        with IndexedDatasetWriter(tmp_path / "p", dtype) as writer:
            writer.add_document([1, bad, 2], [3])
    assert not list(tmp_path.iterdir())


def test_nothing_appears_before_close_and_nothing_stays_after_an_error(tmp_path: Path) -> None:
    writer = IndexedDatasetWriter(tmp_path / "p", "u2")
    writer.add_document([1, 2], [2])
    assert not (tmp_path / "p.bin").exists() and not (tmp_path / "p.idx").exists()
    writer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.bin", "p.idx"]
    with pytest.raises(KeyError), IndexedDatasetWriter(tmp_path / "q", "u2") as other:
        other.add_document([1], [1])
        raise KeyError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.bin", "p.idx"]


def test_idx_is_renamed_last_and_an_old_one_is_gone_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pair(tmp_path / "p", [5])
    write_sidecar(tmp_path / "p", {"type": "old"})
    seen: list[tuple[str, bool]] = []
    real = os.replace

    def spy(source: Path, target: Path) -> None:
        seen.append((Path(target).name, (tmp_path / "p.idx").exists()))
        real(source, target)

    monkeypatch.setattr(os, "replace", spy)
    with IndexedDatasetWriter(tmp_path / "p", "u2") as writer:
        writer.add_document([1, 2], [2])
        writer.close(tokenizer={"type": "new"})
    assert seen == [("p.bin", False), ("p.json", False), ("p.idx", False)]
    assert read_sidecar(tmp_path / "p") == {"type": "new"}


def test_a_new_pair_does_not_inherit_the_sidecar_of_the_old(tmp_path: Path) -> None:
    write_sidecar(tmp_path / "p", {"type": "old"})
    write_pair(tmp_path / "p", [5])
    assert read_sidecar(tmp_path / "p") is None


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[]", b'{"format": 2, "tokenizer": {}}', b"[" * 100_000]
)
def test_a_damaged_sidecar_is_a_data_error(tmp_path: Path, content: bytes) -> None:
    sidecar_path(tmp_path / "p").write_bytes(content)
    with pytest.raises(DataError, match="p.json"):
        read_sidecar(tmp_path / "p")


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"vocab_size": 10**30},
        {"vocab_size": 0},
        {"vocab_size": True},
        {"vocab_size": "9"},
        {"eod": -1},
        {"eod": 10**30},
        {"eod": [1]},
    ],
)
def test_a_sidecar_with_impossible_ids_is_refused(tmp_path: Path, tokenizer: dict) -> None:
    write_sidecar(tmp_path / "p", tokenizer)
    with pytest.raises(DataError, match="p.json: .*wanted a whole number"):
        read_sidecar(tmp_path / "p")


def test_the_sidecar_records_size_and_hash_of_both_files(tmp_path: Path) -> None:
    pair = write_pair(tmp_path / "a", [5, 0, 7])
    assert read_file_records(pair) is None
    merge(tmp_path / "p", [pair], tokenizer={"type": "x"})
    records = read_file_records(tmp_path / "p")
    assert records is not None
    for suffix in (".bin", ".idx"):
        content = (tmp_path / f"p{suffix}").read_bytes()
        assert records[suffix].bytes == len(content)
        assert records[suffix].sha256 == hashlib.sha256(content).hexdigest()
    write_sidecar(tmp_path / "p", {"type": "x"})  # as versions before this record wrote it
    assert read_file_records(tmp_path / "p") is None
    check_sizes(tmp_path / "p")


@pytest.mark.parametrize(
    "files", [[], {}, {".bin": {}, ".idx": {}}, {".bin": {"bytes": "1", "sha256": ""}, ".idx": 1}]
)
def test_damaged_file_records_are_refused(tmp_path: Path, files: object) -> None:
    content = {"format": 1, "tokenizer": {}, "files": files}
    sidecar_path(tmp_path / "p").write_text(json.dumps(content))
    with pytest.raises(DataError, match="p.json: 'files' wants bytes and sha256"):
        read_file_records(tmp_path / "p")


def test_a_file_of_another_size_than_recorded_is_refused(tmp_path: Path) -> None:
    pair = write_pair(tmp_path / "a", [5])
    merge(tmp_path / "p", [pair], tokenizer={"type": "x"})
    check_sizes(tmp_path / "p")
    other = write_pair(tmp_path / "b", [6])
    for suffix in (".bin", ".idx"):
        (tmp_path / f"p{suffix}").write_bytes(Path(f"{other}{suffix}").read_bytes())
    with pytest.raises(DataError, match=r"p.bin: 12 bytes, but .*p.json recorded 10"):
        check_sizes(tmp_path / "p")


def test_an_unwritable_place_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be written"):
        IndexedDatasetWriter(tmp_path / "absent" / "p", "u2")


def test_a_file_that_shrank_is_noticed(tmp_path: Path) -> None:
    data = IndexedDataset(write_pair(tmp_path / "p", [500]), mmap=False)
    data.check_unchanged()
    os.truncate(tmp_path / "p.bin", 100)
    with pytest.raises(DataError, match="1000 bytes at the start and is now 100"):
        data.check_unchanged()
    with pytest.raises(DataError, match="changed while it was in use"):
        data[0]


def test_token_type_follows_the_vocabulary() -> None:
    assert optimal_dtype(65_499) == np.uint16
    assert optimal_dtype(65_500) == np.int32
    assert optimal_dtype(None) == np.int32
