"""The vectorised indices equal a plain loop over documents, and Megatron's own."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from megatron.data import gpt_dataset
from megatron.data.gpt_dataset import EpochPlan, build_order, expected_arrays, plan_epochs


def _walk(
    lengths: np.ndarray, documents: np.ndarray, *, sequence_length: int, samples: int
) -> list[list[int]]:
    """Rows of the sample index by walking token by token through the documents."""
    rows = [[0, 0]]
    place, offset = 0, 0
    for _ in range(samples):
        left = sequence_length + 1
        while True:
            available = int(lengths[documents[place]]) - offset
            if available >= left:
                offset += left - 1
                break
            left -= available
            place, offset = place + 1, 0
        rows.append([place, offset])
    return rows


def _slow_epochs(tokens: int, sequence_length: int, samples: int) -> int:
    epochs = 1
    while epochs * tokens < samples * sequence_length + 1:
        epochs += 1
    return epochs


def _slow_order(
    lengths: np.ndarray, documents: range, plan: EpochPlan, seed: int
) -> tuple[list[int], list[list[int]], list[int]]:
    rng = np.random.RandomState(seed)
    one = list(documents)
    apart = plan.samples_before_last
    parts = [one * plan.epochs] if apart is None else [one * (plan.epochs - 1), one]
    order = []
    for part in parts:
        values = np.array(part, dtype=np.int32)
        rng.shuffle(values)
        order += values.tolist()
    rows = _walk(
        lengths, np.array(order), sequence_length=plan.sequence_length, samples=plan.samples
    )
    shuffle: list[int] = []
    cuts = [0, plan.samples] if apart is None else [0, apart, plan.samples]
    for start, stop in zip(cuts, cuts[1:], strict=False):
        values = np.arange(start, stop, dtype=np.uint32)
        rng.shuffle(values)
        shuffle += values.tolist()
    return order, rows, shuffle


def test_order_equals_the_slow_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt_dataset, "_BLOCK", 7)  # blocks must not show
    rng = np.random.default_rng(0)
    seen = {"apart": 0, "together": 0, "single": 0}
    for seed in range(300):
        count = int(rng.integers(1, 40))
        lengths = rng.integers(0, int(rng.choice([3, 20, 300])), count).astype(np.int32)
        lengths[rng.random(count) < 0.3] = 0
        first = int(rng.integers(count))
        documents = range(first, int(rng.integers(first + 1, count + 1)))
        tokens = int(lengths[documents.start : documents.stop].sum())
        sequence_length = int(rng.integers(1, 30))
        if tokens < sequence_length + 1:
            continue
        asked = int(rng.integers(1, 5 * tokens // sequence_length + 2))
        plan = plan_epochs(tokens, sequence_length=sequence_length, num_samples=asked)
        assert plan.epochs == _slow_epochs(tokens, sequence_length, asked)
        assert asked <= plan.samples == (plan.epochs * tokens - 1) // sequence_length
        order = build_order(lengths, documents, plan=plan, seed=seed)
        places, rows, shuffle = _slow_order(lengths, documents, plan, seed)
        assert order.document_index.tolist() == places
        assert order.sample_index.tolist() == rows
        assert order.shuffle_index.tolist() == shuffle
        kind = "single" if plan.epochs == 1 else "together"
        seen["apart" if plan.samples_before_last is not None else kind] += 1
    assert min(seen.values()) > 20, seen


# Computed by Megatron's _build_document_index, build_sample_idx_int32 and _build_shuffle_index.
@pytest.mark.parametrize(
    ("asked", "epochs", "apart", "hashes"),
    [
        (90, 1, False, ["c64c068dc10c330c", "2746c890d90da789", "f29b07ecad2c008c"]),
        (250, 3, True, ["243620003d60587f", "b5852cceca467f81", "1ad68924df32a43f"]),
        (290, 3, False, ["75fd46797aa79aca", "5b1a19e18d603fff", "4da5d1ed98ba0b0a"]),
    ],
)
def test_order_is_the_one_that_megatron_computes(
    asked: int, epochs: int, apart: bool, hashes: list[str]
) -> None:
    lengths = (np.arange(40) * 7919 % 101).astype(np.int32)
    lengths[[5, 11, 12]] = 0
    documents = range(3, 37)
    tokens = int(lengths[3:37].sum())
    plan = plan_epochs(tokens, sequence_length=16, num_samples=asked)
    assert (plan.epochs, plan.samples_before_last is not None) == (epochs, apart)
    order = build_order(lengths, documents, plan=plan, seed=1234)
    arrays = (order.document_index, order.sample_index, order.shuffle_index)
    seen = [hashlib.sha256(array.astype("<i8").tobytes()).hexdigest()[:16] for array in arrays]
    assert seen == hashes


def test_the_last_epoch_is_apart_below_four_fifths() -> None:
    # 1001 tokens in samples of 10: 100 per epoch, and the first of three epochs yields 200.
    def apart(asked: int) -> bool:
        plan = plan_epochs(1001, sequence_length=10, num_samples=asked)
        assert plan.epochs == 3
        return plan.samples_before_last is not None

    assert apart(279) and not apart(280)


def test_one_epoch_is_whole_and_no_question_asked_is_one_epoch() -> None:
    plan = plan_epochs(101, sequence_length=10, num_samples=None)
    assert (plan.epochs, plan.samples, plan.samples_before_last) == (1, 10, None)
    assert plan_epochs(101, sequence_length=10, num_samples=10).epochs == 1
    assert plan_epochs(101, sequence_length=10, num_samples=11).epochs == 2


def test_dtypes_widen_where_the_numbers_need_it() -> None:
    def dtypes(documents: int, samples: int) -> list[str]:
        plan = EpochPlan(
            tokens_per_epoch=1,
            sequence_length=1,
            epochs=1,
            samples=samples,
            samples_before_last=None,
        )
        return [dtype.str for _, dtype in expected_arrays(plan, documents).values()]

    assert dtypes(10, 10) == ["<i4", "<i4", "<u4"]
    assert dtypes(2**31 - 1, 2**32 - 3) == ["<i4", "<i4", "<u4"]
    assert dtypes(2**31, 2**32 - 2) == ["<i4", "<i8", "<i8"]
