"""Tests that batches read ahead are those that would be read in turn, one step ahead at most."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.data import prefetch
from megatron.data.batches import Reader
from megatron.data.build import MockDataset
from megatron.data.data_loader import BatchReader
from megatron.data.pair_dataset import Packs, PairDataset, PairVocabulary
from megatron.data.prefetch import Prefetcher, copy_to
from megatron.data.sampler import CollateOptions, MicrobatchSampler
from megatron.errors import DataError
from tests.data import test_image_reader, test_pair_dataset
from tests.data.counting import Counting, prefetch_threads, threads_left
from tests.data.translation_data import write_data
from tests.limits import LIMIT

CPU = torch.device("cpu")
PLACES = [(0, 4), (4, 4), (8, 8), (16, 8), (24, 8), (32, 8)]
"""Global batches of a ramp-up that pass the end of the first epoch of the readers below."""


def token_reader() -> BatchReader:
    """A reader whose last global batch of `PLACES` is padded."""
    options = CollateOptions(eod=3, eod_mask_loss=True, reset_attention_mask=True)
    return BatchReader(
        dataset=MockDataset(37, sequence_length=16, vocab_size=64, seed=1),
        sampler=MicrobatchSampler(2, 0, 1),
        options=options,
        device=CPU,
    )


@pytest.fixture(params=["tokens", "images", "packs"])
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Reader]:
    """Return a function that opens a task's reader again."""
    if request.param == "packs":
        paths = write_data(tmp_path)

        def packs() -> Packs:
            pairs = PairDataset(paths, "train", PairVocabulary.load(paths))
            return Packs(pairs, max_tokens=120, seed=3)

        assert packs().per_epoch < 40
        return lambda: test_pair_dataset.reader(packs(), tokens=60)
    return {"tokens": token_reader, "images": test_image_reader.reader}[request.param]


def values(batches: Any) -> list[dict[str, Any]]:
    """Return the fields of each batch, tensors and arrays as bytes."""

    def plain(value: Any) -> Any:
        if not isinstance(value, torch.Tensor | np.ndarray):
            return value
        return value.dtype, tuple(value.shape), np.asarray(value).tobytes()

    return [{f.name: plain(getattr(batch, f.name)) for f in fields(batch)} for batch in batches]


def test_the_batches_are_those_of_the_reader(reader: Callable[[], Reader]) -> None:
    alone, prefetcher = reader(), Prefetcher(reader(), CPU)
    for place, following in zip(PLACES, [*PLACES[1:], None], strict=True):
        batches = prefetcher.read(*place)
        if following is not None:
            prefetcher.prefetch(*following)
        assert values(batches) == values(alone.read(*place)) != []
        assert values(copy_to(batch, CPU) for batch in batches) == values(batches)
    prefetcher.close()


def test_a_run_that_goes_elsewhere_gets_what_it_asks_for() -> None:
    """A skip or a rollback: what was read ahead is dropped."""
    prefetcher = Prefetcher(Counting(CPU), CPU)
    prefetcher.prefetch(2, 2)
    assert numbers(prefetcher.read(10, 3)) == [10, 11, 12]
    prefetcher.prefetch(13, 2)
    assert numbers(prefetcher.read(13, 2)) == [13, 14]
    prefetcher.close()


def numbers(batches: Any) -> list[int]:
    return [int(batch.numbers[0]) for batch in batches]


def test_one_step_is_read_ahead_by_one_thread_while_the_caller_goes_on() -> None:
    here, gate, read = threading.get_ident(), threading.Event(), list[tuple[int, int]]()

    def before(number: int) -> None:
        if threading.get_ident() != here:
            assert gate.wait(LIMIT)
        read.append((number, threading.get_ident()))

    prefetcher = Prefetcher(Counting(CPU, before), CPU)
    prefetcher.read(0, 2)
    assert read == [(0, here), (1, here)], "without `prefetch` the caller reads"
    prefetcher.prefetch(2, 2)
    with pytest.raises(AssertionError):
        prefetcher.prefetch(4, 2)
    assert len(read) == 2
    gate.set()
    for first in (2, 4):
        assert numbers(prefetcher.read(first, 2)) == [first, first + 1]
        prefetcher.prefetch(first + 2, 2)
    prefetcher.close()
    threads = {thread for number, thread in read if number >= 2}
    assert len(threads) == 1 and here not in threads and max(read)[0] <= 7


def fail_at(bad: int) -> Callable[[int], None]:
    def before(number: int) -> None:
        if number == bad:
            raise DataError(f"sample {number} is damaged")

    return before


def test_an_error_is_raised_by_the_step_that_needs_the_batch() -> None:
    prefetcher = Prefetcher(Counting(CPU, fail_at(3)), CPU)
    prefetcher.read(0, 2)
    prefetcher.prefetch(2, 2)
    time.sleep(0.05)  # the thread has failed
    with pytest.raises(DataError, match="^sample 3 is damaged$"):
        prefetcher.read(2, 2)
    prefetcher.prefetch(2, 2)
    assert numbers(prefetcher.read(8, 2)) == [8, 9], "nobody needs what is damaged"
    prefetcher.close()


@dataclass
class Gate:
    """Holds the thread at each sample until it is opened."""

    entered: threading.Event
    opened: threading.Event

    def __call__(self, number: int) -> None:
        self.entered.set()
        assert self.opened.wait(LIMIT)


def test_closing_ends_the_thread_in_the_middle_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_CLOSE_TIMEOUT_SECONDS", 0.05)
    gate, read = Gate(threading.Event(), threading.Event()), list[int]()
    assert threads_left() == 0, "of the tests before"
    prefetcher = Prefetcher(Counting(CPU, lambda n: (gate(n), read.append(n))), CPU)
    prefetcher.prefetch(0, 100)
    assert gate.entered.wait(LIMIT)
    prefetcher.close()  # does not wait for a read that hangs
    assert len(prefetch_threads()) == 1
    gate.opened.set()
    assert threads_left() == 0
    assert read == [0]
    prefetcher.prefetch(0, 2)
    assert numbers(prefetcher.read(0, 2)) == [0, 1], "a closed one reads when it is asked"
    assert not prefetch_threads()


def test_no_thread_outlives_a_prefetcher_that_is_forgotten() -> None:
    prefetcher = Prefetcher(Counting(CPU), CPU)
    prefetcher.prefetch(0, 2)
    del prefetcher
    assert threads_left() == 0
