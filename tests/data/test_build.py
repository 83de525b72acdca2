"""Configuration to data sets: sizes, blends, warnings, refusals."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

import numpy as np
import pytest

from megatron.data import build_datasets
from megatron.data.blended_dataset import BlendedDataset, SampleSource
from megatron.data.build import Datasets, MockDataset
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.sidecar import write_sidecar
from megatron.errors import DataError
from tests.data.pairs import Options, write_pair


class BuildNotes(list[str]):
    """Collects log lines."""

    def __call__(self, line: str) -> None:
        self.append(line)


def _build(options: Options, samples=(40, 10, 5), *, vocab_size: int = 60, **more):
    told = BuildNotes()
    built = build_datasets(
        options, seq_length=8, seed=7, samples=samples, vocab_size=vocab_size, log=told, **more
    )
    return built, told


def _all(source: SampleSource | None) -> np.ndarray:
    assert source is not None
    return np.stack([source[index] for index in range(len(source))])


def _same(first: Datasets, second: Datasets) -> bool:
    return all(
        (_all(getattr(first, split)) == _all(getattr(second, split))).all()
        for split in ("train", "valid", "test")
    )


@pytest.fixture
def pairs(tmp_path: Path) -> list[str]:
    return [
        write_pair(tmp_path / "a", [30] * 40),
        write_pair(tmp_path / "b", [90] * 25),
        write_pair(tmp_path / "c", [25] * 30),
    ]


def test_one_prefix_is_split_and_told(pairs: list[str]) -> None:
    built, told = _build(Options(data_path=(pairs[0],), split="8,1,1"))
    for source, asked in zip((built.train, built.valid, built.test), (40, 10, 5), strict=True):
        assert isinstance(source, GPTDataset) and len(source) >= asked
    assert isinstance(built.train, GPTDataset) and isinstance(built.test, GPTDataset)
    assert built.train.documents == range(32) and built.test.documents == range(36, 40)
    cache = Path(pairs[0]).parent / "cache"
    assert told[0] == f"index cache: made {cache} (elsewhere: --data-cache-path)"
    assert told[1] == f"data: train: {pairs[0]}: 32 documents, 960 tokens, 40 samples, 0.33 epochs"
    assert len(told) == 4


def test_what_is_not_asked_for_or_has_no_share_is_none(pairs: list[str]) -> None:
    built, _ = _build(Options(data_path=(pairs[0],), split="1,0,1"), samples=(40, 10, 0))
    assert built.train is not None and built.valid is None and built.test is None
    built, _ = _build(Options(train_data_path=(pairs[0],)))
    assert built.train is not None and built.valid is None and built.test is None


def test_the_same_call_gives_the_same_samples(pairs: list[str], tmp_path: Path) -> None:
    paths = ("2", pairs[0], "1", pairs[1])
    first, _ = _build(Options(data_path=paths, split="6,2,2"))
    again, _ = _build(Options(data_path=paths, split="6,2,2"))
    assert (tmp_path / "cache" / "BlendedDataset_indices").is_dir()
    folder = tmp_path / "elsewhere"
    options = Options(
        data_path=paths, split="6,2,2", data_cache_path=str(folder), no_mmap_bin_files=True
    )
    moved, _ = _build(options)
    assert len(list(folder.glob("*-description.txt"))) == 9
    assert _same(first, again) and _same(first, moved)


def test_a_blend_holds_its_shares(pairs: list[str]) -> None:
    built, told = _build(Options(data_path=("3", pairs[0], "1", pairs[1])), samples=(200, 0, 0))
    train = built.train
    assert isinstance(train, BlendedDataset) and len(train) == 200
    assert np.bincount(train.dataset_index).tolist() == [150, 50]
    data = [line for line in told if line.startswith("data: ")]
    assert [line.split(", ")[-2] for line in data] == ["150 samples", "50 samples"]
    _all(train)


@pytest.mark.parametrize(
    "weights", [("1e-9", "1"), ("1", "1e-9"), ("1e-3", "1"), ("1", "1e6"), ("0", "1")]
)
@pytest.mark.parametrize("asked", [1, 3, 333])
def test_extreme_weights_never_run_out(
    pairs: list[str], weights: tuple[str, str], asked: int
) -> None:
    paths = (weights[0], pairs[0], weights[1], pairs[1], "1e-5", pairs[2])
    built, _ = _build(Options(train_data_path=paths), samples=(asked, 0, 0))
    assert len(_all(built.train)) >= asked


def test_prefixes_without_weights_are_drawn_by_size(pairs: list[str]) -> None:
    # One epoch: 149 samples of the first, 281 of the second.
    options = Options(train_data_path=(pairs[0], pairs[1]))
    built, told = _build(options, samples=(430, 0, 0))
    train = built.train
    assert isinstance(train, BlendedDataset) and len(train) == 430
    assert np.bincount(train.dataset_index).tolist() == [149, 281]
    built, told = _build(options, samples=(1000, 0, 0))
    assert len(_all(built.train)) >= 1000
    assert all("2.3" in line.rsplit(", ", 1)[1] for line in told), told


@pytest.mark.parametrize("room", [1, 4, 7, 10, 16, 28])
def test_a_blend_of_more_files_than_may_be_open_is_told(pairs: list[str], room: int) -> None:
    """Wherever the limit is met: at an index, at the tokens, or at an entry of the cache."""
    options = Options(data_path=tuple(pairs), split="8,1,1")
    _build(options)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Listing them opens one more, and closes it.
    most = len(os.listdir("/proc/self/fd")) - 1 + room
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        with pytest.raises(DataError, match=r"too many open files; raise the limit \(ulimit -n\)"):
            _build(options)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_sharing_a_file_is_warned_of(pairs: list[str]) -> None:
    _, told = _build(Options(data_path=("1", pairs[0], "1", pairs[0]), split="6,2,2"))
    assert sum("named 2 times in one blend" in line for line in told) == 1
    _, told = _build(Options(train_data_path=(pairs[0],), valid_data_path=(pairs[0],)))
    assert any("read by train and valid" in line for line in told)
    _, told = _build(Options(train_data_path=(pairs[0],), valid_data_path=(pairs[1],)))
    assert not any(line.startswith("warning") for line in told)


def test_a_share_without_documents_makes_no_set_and_shows_the_arithmetic(pairs: list[str]) -> None:
    sets, said = _build(Options(data_path=(pairs[0],)))
    assert sets.train is not None and sets.valid is not None and sets.test is None
    arithmetic = r"test: .*round\(0.999 x 40\) = 40 to round\(1 x 40\) = 40.*split 969,31,0$"
    assert re.search(arithmetic, "\n".join(said), re.MULTILINE)
    assert "data: there is no test set" in said
    with pytest.raises(DataError, match=r"train: .*round\(0 x 40\) = 0 to .* = 0: none"):
        _build(Options(data_path=(pairs[0],), split="0.001,999,0"))


def test_a_blend_leaves_out_a_file_whose_share_is_empty(tmp_path: Path) -> None:
    """A hundredth of 40 documents is none, of 400 it is 4; the weights of the rest sum to 1."""
    few = [write_pair(tmp_path / name, [9] * 40) for name in "ab"]
    many = [write_pair(tmp_path / name, [9] * 400) for name in "cd"]
    blend = ("1", few[0], "3", many[0], "2", few[1], "1", many[1])
    sets, _ = _build(Options(data_path=blend, split="989,1,10"))
    assert sets.valid is None and sets.test is not None
    assert isinstance(sets.test, BlendedDataset)
    assert np.bincount(sets.test.dataset_index[:4]).tolist() == [3, 1]


@pytest.mark.parametrize("ends", [True, False])
def test_data_without_marks_are_told_to_a_run_that_keeps_documents_apart(
    tmp_path: Path, ends: bool
) -> None:
    prefix = write_pair(tmp_path / "p", [9] * 40)
    last = int(IndexedDataset(prefix)[0][-1])
    _, said = _build(Options(train_data_path=(prefix,)), mark=last if ends else 49)
    assert any("no document ends with the mark" in text for text in said) == (not ends)
    assert not any("the mark" in text for text in _build(Options(train_data_path=(prefix,)))[1])


def test_a_split_shorter_than_a_sample_is_refused(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "p", [4] * 10)
    with pytest.raises(DataError, match="valid: a sample .* needs 9 tokens, had 4 in 1 documents"):
        _build(Options(data_path=(prefix,), split="8,1,1"))
    other = write_pair(tmp_path / "q", [400] * 10)
    with pytest.raises(DataError, match="p: valid: a sample .* needs 9 tokens"):
        _build(Options(data_path=(prefix, other), split="8,1,1"))


def test_a_vocabulary_that_the_dtype_cannot_hold(pairs: list[str]) -> None:
    with pytest.raises(DataError, match="uint16 ids up to 65535.*100000 entries"):
        _build(Options(data_path=(pairs[0],)), vocab_size=100_000)
    assert _build(Options(train_data_path=(pairs[0],)), vocab_size=65_536)[0].train is not None


def test_the_sidecar_must_name_this_tokenizer(pairs: list[str]) -> None:
    options = Options(train_data_path=(pairs[0],))
    write_sidecar(pairs[0], {"type": "x", "vocab_size": 50, "fingerprint": "aaaa"})
    assert _build(options)[0].train is not None
    assert _build(options, tokenizer_fingerprint="aaaa")[0].train is not None
    # A table may have more rows than the data's dtype has ids.
    assert _build(options, tokenizer_fingerprint="aaaa", vocab_size=100_000)[0].train is not None
    with pytest.raises(DataError, match="aaaa.*bbbb"):
        _build(options, tokenizer_fingerprint="bbbb")
    with pytest.raises(DataError, match="50 entries, this run's has 40"):
        _build(options, vocab_size=40)


def test_mock_data_needs_no_files() -> None:
    built, told = _build(Options(mock_data=True), samples=(10, 0, 3))
    assert isinstance(built.train, MockDataset) and built.valid is None
    assert len(built.train) == 10 and len(_all(built.test)) == 3 and told == []
    assert _all(built.train).max() < 60
