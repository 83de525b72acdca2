"""Tests that the samples of a global batch do not depend on the ranks that read them."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.data.build import MockDataset
from megatron.data.sampler import CollateOptions, MicrobatchSampler, collate
from megatron.errors import ConfigError

DATA = MockDataset(200, sequence_length=6, vocab_size=100, seed=3)


class FixedDataset:
    """A data set of one given sample."""

    def __init__(self, *text: int) -> None:
        self.text = np.array(text, dtype=np.int64)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.text


def _global_batch(consumed: int, size: int, *, micro: int, ranks: int) -> np.ndarray:
    microbatches = []
    for rank in range(ranks):
        sampler = MicrobatchSampler(micro, rank, ranks)
        numbers = sampler.numbers(size)
        for number, samples in zip(numbers, sampler.indices(consumed, size), strict=True):
            microbatches.append(collate(DATA, samples, number))
    microbatches.sort(key=lambda batch: batch.index)
    assert [batch.index for batch in microbatches] == list(range(size // micro))
    return np.concatenate([batch.tokens for batch in microbatches])


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_global_batch_is_the_same_for_all_ranks_and_micro_batches(ranks: int, micro: int) -> None:
    expected = np.stack([DATA[index][:-1] for index in range(32, 48)])
    assert (_global_batch(32, 16, micro=micro, ranks=ranks) == expected).all()


def test_blocks_alternate_between_ranks() -> None:
    sampler = MicrobatchSampler(2, 1, 2)
    assert sampler.numbers(8) == [1, 3]
    assert sampler.indices(100, 8) == [range(102, 104), range(106, 108)]


def test_a_microbatch_without_options_has_only_tokens_and_labels() -> None:
    batch = collate(DATA, range(5, 8), 4)
    assert batch.tokens.shape == batch.labels.shape == (3, 6)
    assert batch.tokens.dtype == batch.labels.dtype == np.int64
    assert (batch.tokens[:, 1:] == batch.labels[:, :-1]).all()
    assert batch.labels[1, -1] == DATA[6][-1]
    assert (batch.loss_mask, batch.position_ids, batch.document_ids) == (None, None, None)
    assert batch.index == 4


def test_end_of_document_masks_resets_and_separates() -> None:
    options = CollateOptions(
        eod=0, eod_mask_loss=True, reset_position_ids=True, reset_attention_mask=True
    )
    batch = collate(FixedDataset(7, 8, 0, 9, 0, 0, 5, 6, 0), range(1), 0, options)
    assert batch.tokens.tolist() == [[7, 8, 0, 9, 0, 0, 5, 6]]
    assert batch.labels.tolist() == [[8, 0, 9, 0, 0, 5, 6, 0]]
    assert batch.loss_mask is not None and batch.loss_mask.dtype == np.float32
    assert batch.loss_mask.tolist() == [[1, 1, 0, 1, 0, 0, 1, 1]]
    assert batch.position_ids is not None and batch.document_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 0, 1]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, 2, 3, 3]]


@pytest.mark.parametrize("name", ["eod_mask_loss", "reset_position_ids", "reset_attention_mask"])
def test_options_need_an_end_of_document_id(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: "):
        CollateOptions(**{name: True})


def test_mock_samples_depend_on_seed_split_and_index_alone() -> None:
    again = MockDataset(500, sequence_length=6, vocab_size=100, seed=3)
    assert all((DATA[index] == again[index]).all() for index in range(0, 200, 13))
    other = MockDataset(200, sequence_length=6, vocab_size=100, seed=3, split=1)
    assert any((DATA[index] != other[index]).any() for index in range(20))
    text = DATA[11]
    assert text.dtype == np.int64 and text.shape == (7,)
    assert len(set((np.diff(text) % 100).tolist())) == 1
    with pytest.raises(IndexError):
        DATA[200]
