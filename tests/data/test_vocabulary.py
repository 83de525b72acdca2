"""Tests of where a run's vocabulary comes from, and of the first error when data is missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.config import DataConfig
from megatron.data.sidecar import write_sidecar
from megatron.data.vocabulary import data_prefixes, find_vocabulary
from megatron.errors import ConfigError, DataError
from tests.data.pairs import write_pair


def _find(path: Path | str) -> int:
    options = DataConfig(data_path=(str(path),))
    return find_vocabulary(options, data_prefixes(options)).size


def test_a_missing_pair_is_named_before_its_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere: nowhere.bin and nowhere.idx not found"):
        _find(tmp_path / "nowhere")
    with pytest.raises(DataError, match="is a folder; name the pair in it"):
        _find(tmp_path)
    with pytest.raises(ConfigError, match="give --tokenizer-type or --vocab-size"):
        _find(write_pair(tmp_path / "p", [3]))


def test_an_empty_index_is_blamed_before_the_vocabulary(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "p", [3])
    Path(f"{prefix}.idx").write_bytes(b"")
    with pytest.raises(DataError, match="p.idx: truncated"):
        _find(prefix)


@pytest.mark.parametrize("field", ["vocab_file", "merge_file", "tokenizer_model"])
def test_files_of_a_tokenizer_without_its_type_are_refused(tmp_path: Path, field: str) -> None:
    prefix = write_pair(tmp_path / "p", [3])
    write_sidecar(prefix, {"type": "ByteTokenizer", "vocab_size": 257})
    assert _find(prefix) == 257
    kind = "HuggingFaceTokenizer" if field == "tokenizer_model" else "GPT2BPETokenizer"
    with pytest.raises(
        ConfigError, match=f"--{field.replace('_', '-')}: .*--tokenizer-type {kind}"
    ):
        find_vocabulary(replace(DataConfig(data_path=(prefix,)), **{field: "x"}), [prefix])


def test_a_table_may_have_more_rows_than_the_tokenizer_has_entries() -> None:
    bytes_alone = DataConfig(tokenizer_type="ByteTokenizer")
    plain = find_vocabulary(bytes_alone, [])
    padded = find_vocabulary(replace(bytes_alone, vocab_size=384), [])
    assert (plain.size, padded.size) == (257, 384)
    assert (padded.eod, padded.fingerprint) == (plain.eod, plain.fingerprint)
    with pytest.raises(ConfigError, match="--vocab-size: 256, but ByteTokenizer has 257 entries"):
        find_vocabulary(replace(bytes_alone, vocab_size=256), [])
    numbers = DataConfig(tokenizer_type="NullTokenizer", vocab_size=100)
    assert find_vocabulary(numbers, []).size == 101


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_either_file_names_the_pair(tmp_path: Path, suffix: str) -> None:
    prefix = write_pair(tmp_path / "p", [3])
    options = DataConfig(data_path=("1", prefix + suffix))
    assert data_prefixes(options) == [prefix]
