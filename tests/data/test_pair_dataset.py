"""Packs: what they hold, their order, what a rank reads, and damaged files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.data.dictionary import EOS, PAD
from megatron.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron.data.pair_dataset import (
    Packs,
    PairDataset,
    PairVocabulary,
    check_longest,
    cut_by_tokens,
)
from megatron.data.pair_reader import PackReader
from megatron.data.preprocess_pairs import PairPaths
from megatron.data.sampler import MicrobatchSampler
from megatron.data.sidecar import read_sidecar
from megatron.errors import ConfigError, DataError
from tests.data.translation_data import write_data


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    return write_data(tmp_path_factory.mktemp("pairs"))


@pytest.fixture
def dataset(paths: PairPaths) -> PairDataset:
    return PairDataset(paths, "train", PairVocabulary.load(paths))


def reader(packs: Packs, *, rank: int = 0, ranks: int = 1, samples: int = 100, tokens=None):
    return PackReader(
        packs=packs,
        sampler=MicrobatchSampler(1, rank, ranks),
        samples=samples,
        microbatch_tokens=tokens,
        device=torch.device("cpu"),
    )


def test_runs_hold_at_most_the_limit() -> None:
    lengths = np.array([2, 2, 3, 3, 4, 4, 5, 7, 8])
    assert cut_by_tokens(lengths, 12).tolist() == [0, 4, 6, 7, 8, 9]
    assert cut_by_tokens(np.array([12]), 12).tolist() == [0, 1]


def test_an_epoch_holds_each_pair_once_in_packs_of_the_limit(dataset: PairDataset) -> None:
    packs = Packs(dataset, max_tokens=60, seed=3)
    for epoch in range(3):
        seen: list[int] = []
        for sample in range(packs.per_epoch):
            pairs = packs.pairs(epoch * packs.per_epoch + sample)
            assert len(pairs) * dataset.lengths[pairs].max() <= 60
            seen += pairs.tolist()
        assert sorted(seen) == list(range(len(dataset)))


def test_packs_waste_little(dataset: PairDataset) -> None:
    packs = Packs(dataset, max_tokens=60, seed=3)
    shapes = packs.shapes()
    padded = (shapes[:, 0] * shapes[:, 2]).sum()
    assert dataset.target_lengths.sum() > 0.9 * padded
    assert shapes[:, 0].sum() == len(dataset)


def test_the_order_depends_on_seed_and_epoch_alone(dataset: PairDataset, paths: PairPaths) -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        again = PairDataset(paths, "train", PairVocabulary.load(paths))
        packs = Packs(again, max_tokens=60, seed=seed)
        first = epoch * packs.per_epoch
        return [packs.pairs(first + n).tolist() for n in range(packs.per_epoch)]

    packs = Packs(dataset, max_tokens=60, seed=3)
    backwards = [packs.pairs(n).tolist() for n in reversed(range(3 * packs.per_epoch))][::-1]
    assert order(3, 0) + order(3, 1) + order(3, 2) == backwards
    assert order(3, 0) != order(3, 1) and order(3, 0) != order(4, 0)
    # Pairs of equal lengths move between packs, too.
    assert sorted(map(sorted, order(3, 0))) != sorted(map(sorted, order(3, 1)))


def test_tokens_are_padded_and_inputs_are_shifted(dataset: PairDataset) -> None:
    places = np.array([int(dataset.target_lengths.argmin()), int(dataset.target_lengths.argmax())])
    tokens = dataset.tokens(places)
    for row, pair in enumerate(places.tolist()):
        s, t = dataset.source_lengths[pair], dataset.target_lengths[pair]
        assert tokens.source[row, :s].tolist() == dataset.source(pair).tolist()
        assert (tokens.source[row, s:] == PAD).all() and tokens.source[row, s - 1] == EOS
        assert tokens.targets[row, :t].tolist() == dataset.target(pair).tolist()
        assert tokens.inputs[row, :t].tolist() == [EOS, *dataset.target(pair)[:-1].tolist()]
        assert (tokens.inputs[row, t:] == PAD).all() and (tokens.targets[row, t:] == PAD).all()
    assert tokens.counted == dataset.target_lengths[places].sum()


def test_ranks_read_disjoint_packs_that_one_rank_reads(dataset: PairDataset) -> None:
    packs = Packs(dataset, max_tokens=60, seed=3)
    alone = list(reader(packs).read(8, 4))
    assert [batch.index for batch in alone] == [0, 1, 2, 3]
    together = [b for rank in (0, 1) for b in reader(packs, rank=rank, ranks=2).read(8, 4)]
    together.sort(key=lambda batch: batch.index)
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.source, other.source) and torch.equal(one.targets, other.targets)
        assert one.index == other.index and one.counted == other.counted and one.uneven


def test_microbatches_cut_packs_of_the_same_pairs(dataset: PairDataset) -> None:
    packs = Packs(dataset, max_tokens=100, seed=3)
    whole = list(reader(packs).read(0, 2))
    parts = list(reader(packs, tokens=25).read(0, 2))
    assert len({batch.index for batch in parts}) == len(parts) > 4
    for batch in parts:
        longest = max(batch.source.shape[1], batch.targets.shape[1])
        assert len(batch.source) * longest <= 25
    second = list(reader(packs, rank=1, ranks=2, tokens=25).read(0, 2))
    assert [b.index for b in second] == [b.index for b in parts if b.index >= 100]

    def sentences(batches):
        return [
            r[r != PAD].tolist() for b in batches for side in (b.source, b.targets) for r in side
        ]

    assert sorted(sentences(whole)) == sorted(sentences(parts))
    assert sum(b.counted for b in whole) == sum(b.counted for b in parts)


def test_samples_past_the_end_do_not_count(dataset: PairDataset) -> None:
    packs = Packs(dataset, max_tokens=60, seed=3)
    source = reader(packs, samples=packs.per_epoch)
    batches = list(source.read(packs.per_epoch - 1, 3))
    assert [batch.counted > 0 for batch in batches] == [True, False, False]
    assert all(batch.targets.eq(PAD).all() for batch in batches[1:])
    total = sum(b.counted for n in range(packs.per_epoch) for b in source.read(n, 1))
    assert total == dataset.target_lengths.sum()


def test_fingerprints_tell_data_apart(dataset: PairDataset, paths: PairPaths) -> None:
    packs = Packs(dataset, max_tokens=60, seed=3)
    other = Packs(PairDataset(paths, "test", PairVocabulary.load(paths)), max_tokens=60, seed=3)
    assert reader(packs).fingerprint() == reader(packs, rank=1, ranks=2).fingerprint()
    assert reader(packs).fingerprint() != reader(other).fingerprint()


def test_a_pair_longer_than_a_pack_is_refused(dataset: PairDataset) -> None:
    longest = int(dataset.lengths.max())
    with pytest.raises(ConfigError, match=f"max_tokens: {longest - 1} is less than the {longest}"):
        Packs(dataset, max_tokens=longest - 1, seed=1)
    with pytest.raises(ConfigError, match="microbatch_tokens: 3 is less"):
        check_longest(dataset, 3, "microbatch_tokens")


def test_missing_and_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    paths = write_data(tmp_path)

    def refused(file: str, change, words: str) -> None:
        path = Path(f"{paths.prefix}.{file}")
        content = path.read_bytes()
        path.unlink() if change is None else path.write_bytes(change(content))
        with pytest.raises(DataError, match=words) as error:
            data = PairDataset(paths, "train", PairVocabulary.load(paths))
            for pair in range(len(data)):
                data.source(pair)
                data.target(pair)
        named = "train.en: made with" if "dict" in file and change else file.rpartition(".")[0]
        assert f"de-en.{named}" in str(error.value)
        path.write_bytes(content)

    for file in ("bpe.json", "de.dict.txt", "train.de.json", "train.en.bin", "train.de.idx"):
        refused(file, None, "no such file|not found")
    refused("train.en.bin", lambda b: b[:-2], "bytes")
    refused("train.en.idx", lambda b: b[:40], "bytes")
    refused("train.de.bin", lambda b: b"\xff\xff" + b[2:], "sentence 0 does not hold ids")
    refused("train.de.bin", lambda b: b[:-2] + b"\x05\x00", "does not hold ids")
    refused("en.dict.txt", lambda b: b + b"new 1\n", "dictionary")
    refused("train.de.json", lambda b: b[:20], "not JSON")


@pytest.mark.parametrize("language", ["de", "en"])
def test_an_empty_sentence_is_refused_by_number(tmp_path: Path, language: str) -> None:
    paths = write_data(tmp_path)
    prefix = paths.tokens("train", language)
    described = read_sidecar(prefix)
    assert described is not None
    data = IndexedDataset(prefix)
    sentences = [data[number] for number in range(len(data))]
    with IndexedDatasetWriter(prefix, data.dtype) as writer:
        for number, tokens in enumerate(sentences):
            left = tokens[:0] if number in (5, 9) else tokens
            writer.add_document(left, [len(left)])
        writer.close(tokenizer=described)
    with pytest.raises(DataError, match=f"train.{language}: sentence 5 is empty"):
        PairDataset(paths, "train", PairVocabulary.load(paths))


def test_data_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    paths = write_data(tmp_path)
    (tmp_path / "other").mkdir()
    other = write_data(tmp_path / "other", merges=20)
    with pytest.raises(DataError, match="another BPE or dictionary"):
        PairDataset(paths, "train", PairVocabulary.load(other))


def test_sides_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    paths = write_data(tmp_path)
    for suffix in ("bin", "idx", "json"):
        wrong = Path(f"{paths.tokens('valid', 'en')}.{suffix}")
        wrong.replace(f"{paths.tokens('train', 'en')}.{suffix}")
    with pytest.raises(DataError, match="sentences, but"):
        PairDataset(paths, "train", PairVocabulary.load(paths))
