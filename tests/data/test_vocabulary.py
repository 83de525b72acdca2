"""Where a run's vocabulary comes from, and what is told first when its data is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config import DataConfig
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


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_either_file_names_the_pair(tmp_path: Path, suffix: str) -> None:
    prefix = write_pair(tmp_path / "p", [3])
    options = DataConfig(data_path=("1", prefix + suffix))
    assert data_prefixes(options) == [prefix]
