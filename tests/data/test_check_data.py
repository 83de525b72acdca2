"""The checker's exit status and what it prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.data.indexed_dataset import IndexedDatasetWriter, merge
from megatron.data.sidecar import write_sidecar
from tests.data.pairs import write_pair
from tools.check_data import main


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    with IndexedDatasetWriter(tmp_path / "p", "u2") as writer:
        writer.add_document([1, 2, 3, 9], [2, 2])
        writer.add_document([], [])
        writer.add_document([4, 9], [2])
        writer.add_document([5], [1])
    return str(tmp_path / "p")


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_a_good_pair_is_described(
    prefix: str, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([prefix + suffix, "--eod", "9", "--full", "--vocab-size", "10", "--sha256"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["prefix"] == prefix
    assert (lines["documents"], lines["sequences"], lines["tokens"]) == ("4", "4", "7")
    assert lines["lengths"] == "min 1, mean 1.8, max 2 tokens per sequence"
    assert lines["eod"] == "2 of 3 documents end with 9 (66.7 %); 1 are empty"
    assert lines["ids"] == "min 1, max 9"
    assert lines["tokenizer"] == "unknown (no sidecar)"


def test_the_sidecar_fills_in_what_was_not_given(
    prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sidecar(prefix, {"type": "ByteTokenizer", "vocab_size": 9, "eod": 9})
    assert main([prefix]) == 0
    out = capsys.readouterr().out
    assert "ByteTokenizer" in out and "end with 9" in out
    assert main([prefix, "--full"]) == 3
    assert main([prefix, "--eod", "9"]) == 3
    error, *again = capsys.readouterr().err.splitlines()
    assert again == [error]
    assert "token id 9 in document 0 (sequence 1) at offset 1" in error


def test_bad_pairs_exit_3_with_one_line(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([prefix, "--vocab-size", "5"]) == 3
    assert main([prefix, "--vocab-size", "100000"]) == 3
    os.truncate(f"{prefix}.idx", 50)
    assert main([prefix]) == 3
    assert main([f"{prefix}-absent"]) == 3
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 4 and all(line.startswith("error: ") for line in errors)


def test_every_changed_byte_is_found(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    merge(f"{prefix}-new", [prefix], tokenizer={"type": "x", "vocab_size": 10, "eod": 9})
    assert main([f"{prefix}-new", "--full"]) == 0
    assert "recorded    size and sha256 of both files" in capsys.readouterr().out
    for suffix in (".bin", ".idx"):
        path = Path(f"{prefix}-new{suffix}")
        good = path.read_bytes()
        for place in range(len(good)):
            path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
            assert main([f"{prefix}-new"]) == 3, (suffix, place)
        path.write_bytes(good)
    errors = capsys.readouterr().err.splitlines()
    assert all(line.startswith("error: ") for line in errors)
    assert sum("recorded" in line for line in errors) >= 14  # each of .bin's bytes
    assert main([f"{prefix}-new"]) == 0


@pytest.mark.parametrize(
    "arguments", [[], ["p", "--vocab-size", "0"], ["p", "--eod", "x"], ["p", "--eod", "-5"]]
)
def test_a_wrong_command_line_exits_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_it_runs_as_a_script_from_anywhere(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "tools" / "check_data.py"
    prefix = write_pair(tmp_path / "p", [3])
    command = [sys.executable, str(script), prefix]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "tokens      3" in done.stdout
