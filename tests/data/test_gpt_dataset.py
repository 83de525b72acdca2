"""Samples cover the right tokens, and a cache never serves entries of other data."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron.data.gpt_dataset import GPTDataset, IndexCache
from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron.errors import DataError
from tests.data.pairs import random_lengths, write_pair


def _dataset(
    prefix: str | Path, *, samples: int | None = None, seed: int = 1, **more
) -> GPTDataset:
    indexed = IndexedDataset(prefix)
    options = {"sequence_length": 8, "documents": range(len(indexed)), **more}
    return GPTDataset(indexed, num_samples=samples, seed=seed, **options)


def _all(dataset: GPTDataset) -> np.ndarray:
    return np.stack([dataset[index] for index in range(len(dataset))])


@pytest.mark.parametrize("samples", [None, 40, 150])
def test_samples_are_consecutive_cuts_of_the_shuffled_documents(
    tmp_path: Path, samples: int | None
) -> None:
    prefix = write_pair(tmp_path / "p", random_lengths(3, 30), vocab_size=60_000)
    data = _dataset(prefix, samples=samples)
    indexed = data.indexed
    places = data._document_index
    stream = np.concatenate([indexed[int(place)] for place in places])
    for index in range(len(data)):
        start = int(data._shuffle_index[index]) * 8
        assert data[index].dtype == np.int64
        assert data[index].tolist() == stream[start : start + 9].tolist()
    assert sorted(data._shuffle_index.tolist()) == list(range(len(data)))
    with pytest.raises(IndexError):
        data[len(data)]


def test_only_the_documents_of_the_split_are_read(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "p", [20] * 10, vocab_size=60_000)
    seen = _all(_dataset(prefix, documents=range(4, 7), samples=30))
    assert seen.min() >= 80 and seen.max() < 140


def test_too_few_tokens_for_one_sample(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "p", [5, 3])
    with pytest.raises(DataError, match="needs 9 tokens, had 8 in 2 documents"):
        _dataset(prefix)
    assert len(_dataset(prefix, sequence_length=7)) == 1


def test_an_id_outside_the_vocabulary_is_placed(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "p", "i4") as writer:
        writer.add_document([1] * 10, [10])
        writer.add_document([], [])
        writer.add_document([1, 2, 3, 4, 5, 1, 49, 50, 1, 2], [5, 5])
    _all(_dataset(tmp_path / "p", vocab_size=51))
    with pytest.raises(DataError) as caught:
        _all(_dataset(tmp_path / "p", vocab_size=50))
    assert "token id 50 in document 2 (sequence 2) at offset 2" in str(caught.value)
    assert "50 entries" in str(caught.value)


def test_a_negative_id_is_placed(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "p", "i4") as writer:
        writer.add_document([1, 1, -7, 1, 1, 1, 1, 1, 1, 1], [10])
    with pytest.raises(DataError, match="token id -7 in document 0 .* offset 2"):
        _all(_dataset(tmp_path / "p", vocab_size=50))


class DatasetNotes(list[str]):
    """Collects log lines."""

    def __call__(self, line: str) -> None:
        self.append(line)


def _cached(prefix: str | Path, folder: Path | None = None, **more) -> tuple[GPTDataset, list[str]]:
    told = DatasetNotes()
    return _dataset(prefix, cache=IndexCache(folder, log=told), samples=100, **more), told


def _built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts calls of build_order from here on."""
    import megatron.data.gpt_dataset as module

    calls: list[int] = []
    real = module.build_order

    def spy(*args, **keywords):
        calls.append(1)
        return real(*args, **keywords)

    monkeypatch.setattr(module, "build_order", spy)
    return calls


def test_the_second_start_maps_what_the_first_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_pair(tmp_path / "p", random_lengths(3, 30))
    calls = _built(monkeypatch)
    fresh = _all(_dataset(prefix, samples=100))
    first, _ = _cached(prefix)
    names = sorted(path.name for path in (tmp_path / "cache" / "GPTDataset_indices").iterdir())
    suffixes = ["description.txt", "document_index.npy", "sample_index.npy", "shuffle_index.npy"]
    stem = names[0].removesuffix("-description.txt")
    assert names == [f"{stem}-{suffix}" for suffix in suffixes]
    assert len(stem.split("-")[0]) == 32 and stem.endswith("-GPTDataset-train")
    second, told = _cached(prefix)
    assert len(calls) == 2 and told == []
    assert isinstance(second._sample_index.base, np.memmap)
    assert (_all(first) == fresh).all() and (_all(second) == fresh).all()
    stored = np.load(tmp_path / "cache" / "GPTDataset_indices" / names[2], allow_pickle=False)
    assert (stored == second._sample_index).all()


@pytest.mark.parametrize("change", [{"seed": 2}, {"sequence_length": 9}, {"split": "valid"}])
def test_another_question_is_another_entry(
    tmp_path: Path, change: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_pair(tmp_path / "p", random_lengths(3, 30))
    _cached(prefix)
    calls = _built(monkeypatch)
    data, _ = _cached(prefix, **change)
    assert len(calls) == 1
    assert (_all(data) == _all(_dataset(prefix, samples=100, **change))).all()


def test_changed_data_is_indexed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write_pair(tmp_path / "p", [30, 40, 50])
    _cached(prefix)
    calls = _built(monkeypatch)
    write_pair(tmp_path / "p", [50, 40, 30])  # as long as before
    data, _ = _cached(prefix)
    assert len(calls) == 1
    assert (_all(data) == _all(_dataset(prefix, samples=100))).all()


@pytest.mark.parametrize("name", ["description", "document_index", "sample_index", "shuffle_index"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "garbage", "gone", "longer"])
def test_a_damaged_entry_is_built_again_and_replaced(
    tmp_path: Path, name: str, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_pair(tmp_path / "p", random_lengths(3, 30))
    expected = _all(_cached(prefix, tmp_path / "c")[0])
    path = next((tmp_path / "c").glob(f"*-{name}.*"))
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        changed = {
            "truncated": whole[:-1],
            "empty": b"",
            "garbage": b"\x93NUMPY\x01\x00" + bytes(200),
            "longer": whole + b"\0",
        }
        path.write_bytes(changed[damage])
    calls = _built(monkeypatch)
    data, told = _cached(prefix, tmp_path / "c")
    assert len(calls) == 1 and told == []
    assert (_all(data) == expected).all()
    assert path.read_bytes() == whole
    assert not list((tmp_path / "c").glob("*.tmp"))


def test_an_unwritable_cache_is_said_once(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "p", random_lengths(3, 30))
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    told = DatasetNotes()
    cache = IndexCache(blocked / "cache", log=told)
    first = _dataset(prefix, samples=100, cache=cache)
    _dataset(prefix, samples=100, cache=cache, split="valid")
    assert len(told) == 1 and "cannot be written" in told[0]
    assert (_all(first) == _all(_dataset(prefix, samples=100))).all()


def test_a_file_replaced_during_the_run_is_named(tmp_path: Path) -> None:
    data = _dataset(write_pair(tmp_path / "p", [100] * 5), samples=10)
    other = write_pair(tmp_path / "q", [90] * 5)
    shutil.copy(f"{other}.bin", tmp_path / "new.bin")
    os.replace(tmp_path / "new.bin", tmp_path / "p.bin")  # the mapping keeps the old file alive
    with pytest.raises(DataError, match="p.bin: was 1000 bytes at the start and is now 900"):
        data[0]
