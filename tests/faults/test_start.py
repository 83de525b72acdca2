"""Tests of ranks that do not find each other, or that were started differently."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from megatron.data.batches import Readers, fingerprint_of
from megatron.errors import ConfigError
from megatron.fault_tolerance.consistency import compare, compare_data
from megatron.launch import _check_address, free_port
from megatron.parallel.groups import ProcessGroups
from tests.faults.starting import TIMEOUT, start_ranks
from tests.ranks import Ranks

THREE = "--micro-batch-size 1 --global-batch-size 6"


@pytest.mark.waits
@pytest.mark.push
def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    """The cases: one of three is missing, rank 0 is missing, rank 0's port is taken."""
    port = free_port()
    flags = f"--train-iters 2 {TIMEOUT}"
    incomplete = start_ranks(3, tmp_path / "a", f"{THREE} {flags}", ranks=range(0, 3, 2))
    alone = start_ranks(2, tmp_path / "b", flags, ranks=range(1, 2), port=port)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        busy = start_ranks(2, tmp_path / "c", flags, ranks=range(1), port=number).finish()
    assert busy.codes == [2] and f"MASTER_PORT={number}: in use" in busy.stderr[0], busy.stderr
    ended = incomplete.finish()
    assert ended.codes == [6, 6], ended.all_stderr
    assert "2 of 3 ranks joined" in ended.stderr[0] and "missing: rank 1" in ended.stderr[0]
    other = alone.finish()
    assert other.codes == [6], other.all_stderr
    assert f"127.0.0.1:{port}" in other.stderr[0] and "MASTER_ADDR" in other.stderr[0]


def test_an_address_that_is_none_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store would look it up again and again, until its timeout."""
    asked: list[str] = []
    look_up = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a: asked.append(a[0]) or look_up(*a))
    with pytest.raises(ConfigError, match=r"MASTER_ADDR=no-such-host\.invalid: cannot be resolved"):
        _check_address("no-such-host.invalid", 29500)
    assert asked == ["no-such-host.invalid"]


def on_rank_compare(groups: ProcessGroups, odd: int, change: dict[str, object]) -> str:
    facts: dict[str, object] = {"seed": 1234, "code": "abc", "torch": "2.13"}
    if groups.world.rank == odd:
        facts |= change
    try:
        compare(groups.world, facts, ConfigError, "start them alike")
    except ConfigError as error:
        assert error.shared
        return str(error)
    return ""


@pytest.mark.parametrize("odd", [0, 3])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 7}, "seed: 7 there, 1234 on rank"),
        ({"code": "xyz"}, "code: 'xyz' there, 'abc' on rank"),
        ({"torch": "2.9", "apex": "1"}, "apex: '1' there, None on rank"),
    ],
)
def test_a_rank_that_was_started_differently_is_named(
    ranks: Ranks, odd: int, change: dict[str, object], named: str
) -> None:
    texts = ranks.run(4, on_rank_compare, odd, change)
    assert len(set(texts)) == 1
    assert texts[0].startswith(f"rank {odd} was started differently: {named}"), texts[0]
    assert ranks.run(4, on_rank_compare, odd, {}) == [""] * 4


class _Source:
    """A data source of which one sample may differ."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int):  # noqa: ANN204
        import numpy as np

        return np.array([index, self.value])


class _PipeReader:
    samples = 9

    def __init__(self, dataset: _Source) -> None:
        self.dataset = dataset

    def fingerprint(self) -> str:
        return fingerprint_of(self.samples, lambda number: self.dataset[number].tobytes())


def on_rank_data(groups: ProcessGroups) -> str:
    try:
        reader: Any = _PipeReader(_Source(groups.world.rank // 2))
        compare_data(Readers(train=reader), groups.world)
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return ""


def test_a_rank_with_other_data_is_named(ranks: Ranks) -> None:
    texts = ranks.run(4, on_rank_data)
    assert len(set(texts)) == 1 and texts[0].startswith("DataError rank 2 was started differently")
    assert "train data" in texts[0]
