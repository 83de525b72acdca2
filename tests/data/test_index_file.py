"""Tests that every kind of index damage is found on opening and reported in one line."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed_dataset import HEADER, IndexedDataset
from megatron.errors import DataError
from tests.calls import count_calls
from tests.data.pairs import write_pair

LENGTHS = [3, 0, 5, 2]
POINTERS = HEADER.size + 4 * len(LENGTHS)
MARKS = POINTERS + 8 * len(LENGTHS)
MOST_CALLS = 2000
"""Functions that opening an index may call; 360 are usual."""


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_pair(tmp_path / "p", LENGTHS)


def _refused(prefix: str, match: str) -> None:
    with pytest.raises(DataError, match=match) as caught:
        IndexedDataset(prefix)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 3


def _patch(prefix: str, place: int, form: str, value: int) -> None:
    path = Path(f"{prefix}.idx")
    content = bytearray(path.read_bytes())
    struct.pack_into(form, content, place, value)
    path.write_bytes(content)


@pytest.mark.parametrize("gone", [(".bin",), (".idx",), (".bin", ".idx")])
def test_missing_files_are_named(prefix: str, gone: tuple[str, ...]) -> None:
    for suffix in gone:
        os.remove(f"{prefix}{suffix}")
    _refused(prefix, " and ".join(f"p{suffix}" for suffix in gone) + " not found")


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("kind", ["folder", "fifo", "socket", "device"])
def test_only_regular_files_are_opened(
    prefix: str, suffix: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{prefix}{suffix}"
    os.remove(path)
    if kind == "folder":
        os.mkdir(path)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            monkeypatch.chdir(Path(path).parent)  # The name of a socket has at most 107 bytes.
            listener.bind(Path(path).name)
    else:
        os.symlink("/dev/zero", path)
    _refused(prefix, "not a regular file")


@pytest.mark.parametrize(
    ("place", "form", "value", "match"),
    [
        (0, "<B", 0, "byte 0"),
        (9, "<Q", 9, "version 9 at byte 9"),
        (17, "<B", 99, "dtype code 99 at byte 17"),
        (17, "<B", 6, "dtype code 6"),
        (17, "<B", 4, "sequence 1 starts at byte 6, wanted 12"),
        (17, "<B", 1, "starts at byte 6, wanted 3"),
        (18, "<Q", 2**64 - 1, "truncated"),
        (26, "<Q", 2**63, "truncated"),
        (18, "<Q", 0, "bytes too many"),
        (26, "<Q", 4, "8 bytes too many"),
        (HEADER.size + 8, "<i", -5, "sequence 2 has length -5"),
        (HEADER.size + 12, "<i", 3, "shorter than its .idx says: wanted 22 bytes, had 20"),
        (HEADER.size + 12, "<i", 1, "longer"),
        (POINTERS + 16, "<q", -8, "sequence 2 starts at byte -8, wanted 6"),
        (POINTERS + 16, "<q", 2**63 - 1, "sequence 2 starts at"),
        (POINTERS, "<q", 2, "sequence 0 starts at byte 2, wanted 0"),
        (MARKS, "<q", 1, "first document starts at sequence 1"),
        (MARKS + 8, "<q", 9, "document 1 runs from sequence 9 to 2"),
        (MARKS + 32, "<q", 5, "last document ends at sequence 5"),
    ],
)
def test_damage_is_found_and_placed(
    prefix: str, place: int, form: str, value: int, match: str
) -> None:
    _patch(prefix, place, form, value)
    _refused(prefix, match)


def test_truncation_at_every_byte_says_wanted_and_had(prefix: str) -> None:
    path = Path(f"{prefix}.idx")
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        wanted = HEADER.size if size < HEADER.size else len(whole)
        _refused(prefix, rf"want(s)? {wanted} bytes, had {size}")


def test_a_longer_index_is_refused(prefix: str) -> None:
    path = Path(f"{prefix}.idx")
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0")
    _refused(prefix, "1 bytes too many")
    path.write_bytes(whole + bytes(len(LENGTHS)))
    _refused(prefix, "multimodal")


@pytest.mark.parametrize(("size", "relation"), [(0, "shorter"), (19, "shorter"), (21, "longer")])
def test_bin_must_be_as_long_as_the_index_says(prefix: str, size: int, relation: str) -> None:
    os.truncate(f"{prefix}.bin", size)
    _refused(prefix, f"p.bin: {relation} than its .idx says: wanted 20 bytes, had {size}")


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_no_documents_or_no_tokens(tmp_path: Path, lengths: list[int]) -> None:
    _refused(write_pair(tmp_path / "p", lengths), "0 documents|0 tokens")


def test_a_million_sequences_open_fast(tmp_path: Path) -> None:
    """The number of calls does not depend on the number of sequences."""
    lengths = np.ones(1_000_000, dtype=np.int32)
    pointers = np.arange(len(lengths), dtype=np.int64)
    marks = np.arange(len(lengths) + 1, dtype=np.int64)
    header = HEADER.pack(b"MMIDIDX\0\0", 1, 1, len(lengths), len(marks))
    tables = b"".join(table.tobytes() for table in (lengths, pointers, marks))
    (tmp_path / "p.idx").write_bytes(header + tables)
    (tmp_path / "p.bin").write_bytes(bytes(len(lengths)))
    with count_calls() as calls:
        assert IndexedDataset(tmp_path / "p").num_tokens == len(lengths)
    assert calls() < MOST_CALLS


def _rewrite(path: Path, content: bytearray) -> None:
    """Rewrite a file in place: truncating a file just mapped takes milliseconds on some systems."""
    with open(path, "r+b") as file:
        file.write(content)
        file.truncate()


def test_mutations_are_refused_or_read_but_nothing_else(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "p", [3, 0, 5, 2, 9])
    path = Path(f"{prefix}.idx")
    whole = path.read_bytes()
    rng = np.random.default_rng(5)
    extremes = [0, 1, 0x7F, 0x80, 0xFF]
    refused = 0
    for _ in range(3000):
        content = bytearray(whole)
        for _ in range(int(rng.integers(1, 4))):
            place = int(rng.integers(len(content)))
            action = rng.integers(4)
            if action == 0:
                content[place] = int(rng.integers(256))
            elif action == 1:
                content[place : place + 8] = bytes([extremes[rng.integers(5)]] * 8)
            elif action == 2:
                del content[place : place + int(rng.integers(1, 16))]
            else:
                content[place:place] = rng.bytes(int(rng.integers(1, 16)))
            if not content:
                break
        _rewrite(path, content)
        with count_calls() as calls:
            try:
                data = IndexedDataset(prefix)
            except DataError:
                data = None
        assert calls() < MOST_CALLS
        if data is None:
            refused += 1
        else:
            assert sum(len(data[i]) for i in range(len(data))) == data.num_tokens
    assert refused > 2000
