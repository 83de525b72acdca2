"""Splits and blends are read as Megatron reads them, or refused with the rule."""

from __future__ import annotations

import pytest

from megatron.data.blended_dataset import (
    documents_of,
    filled_split,
    parse_blend,
    parse_split,
    split_sources,
)
from megatron.errors import ConfigError, DataError
from tests.data.pairs import Options


@pytest.mark.parametrize("text", ["969, 30, 1", "8,1,1", "0.5,0.25,0.25", "1e2,0,1"])
@pytest.mark.parametrize("count", [1, 7, 1000, 123_457])
def test_splits_cover_all_documents_once(text: str, count: int) -> None:
    ranges = [documents_of(part, count) for part in parse_split(text) if part is not None]
    assert [index for part in ranges for index in part] == list(range(count))


def test_ends_are_rounded() -> None:
    assert [documents_of(part, 1000) for part in parse_split("949,50,1") if part] == [
        range(0, 949),
        range(949, 999),
        range(999, 1000),
    ]
    assert parse_split("1,0,1")[1] is None


@pytest.mark.parametrize("text", ["900,50", "-1,1,1", "0,0,0", "a,b,c", "", "1,2,3,4", "nan,1,1"])
def test_a_wrong_split_is_refused_with_the_rule(text: str) -> None:
    with pytest.raises(ConfigError, match="--split wants three numbers"):
        parse_split(text)


def test_a_split_is_filled_for_few_documents() -> None:
    assert filled_split("969, 30, 1", 460) == "969,31,0"
    assert filled_split("969, 30, 1", 4) == "1000,0,0"
    assert filled_split("969, 30, 1", 1000) == "969,30,1"


def test_the_three_forms_of_a_data_path() -> None:
    assert parse_blend(["a"], name="f").weights is None
    assert parse_blend(["a", "b"], name="f").prefixes == ("a", "b")
    assert parse_blend(["a", "b", "c"], name="f").weights is None
    weighted = parse_blend(["3", "a", "1", " b "], name="f")
    assert (weighted.prefixes, weighted.weights) == (("a", "b"), (0.75, 0.25))
    assert parse_blend(["0", "a", "2", "b"], name="f").prefixes == ("b",)


@pytest.mark.parametrize(
    ("items", "match"),
    [
        (["0.3", "a", "0.7"], "2 weights for 1 prefixes"),
        (["0.3", "a", "b", "0.7"], "2 weights for 2 prefixes"),
        (["0.3", "a", "b", "c"], "1 weights for 3 prefixes"),
        (["-1", "a", "2", "b"], "weight -1.0 of a"),
        (["-1", "a", "b"], "weight -1.0 of a"),
        (["nan", "a", "2", "b"], "weight nan of a"),
        (["inf", "a", "2", "b"], "weight inf of a"),
        (["0", "a", "0.0", "b"], "sum to 0.0"),
        ([], "names no data"),
    ],
)
def test_wrong_weights_are_refused(items: list[str], match: str) -> None:
    with pytest.raises(DataError, match=f"^f: .*{match}"):
        parse_blend(items, name="f")


def test_paths_are_for_all_splits_or_for_each() -> None:
    shared = split_sources(Options(data_path=("a",), split="1,0,1"))
    assert [source is None for source in shared] == [False, True, False]
    own = split_sources(Options(train_data_path=("a",), valid_data_path=("b",)))
    assert [source and source.fractions for source in own] == [(0.0, 1.0), (0.0, 1.0), None]
    with pytest.raises(ConfigError, match="valid_data_path"):
        split_sources(Options(data_path=("a",), valid_data_path=("b",)))
    with pytest.raises(ConfigError, match="--mock-data"):
        split_sources(Options())
