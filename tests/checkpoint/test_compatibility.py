"""Tests of which gradient path may start from which checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.compatibility import check_identity, check_path, path_differences
from megatron.config import ModelConfig
from megatron.errors import CheckpointError

DENSE: dict[str, Any] = {"model.hidden_size": 8, "gradient.grad_path": "dense"}
SPARSE: dict[str, Any] = DENSE | {"gradient.grad_path": "sparse", "sparse.density": 0.4}


def _check(was: dict[str, Any], now: dict[str, Any], *, own: bool, reset: bool = False) -> list:
    said: list[str] = []
    check_path(was, now, where=Path("step_00000001"), own=own, reset=reset, log=said.append)
    return said


def _check_run(was: dict[str, Any], now: dict[str, Any], *, own: bool = True) -> None:
    check_identity(was, now, where=Path("."), own=own, model_only=False)


def test_a_dense_checkpoint_of_another_run_starts_any_path() -> None:
    (text,) = _check(DENSE, SPARSE, own=False)
    assert "sparse" in text and "dense" in text


@pytest.mark.parametrize(
    ("was", "now", "own"),
    [(DENSE, SPARSE, True), (SPARSE, DENSE, False), (SPARSE, SPARSE | {"sparse.density": 1}, True)],
)
def test_another_path_is_refused_with_what_differs_and_may_be_forced(
    was: dict[str, Any], now: dict[str, Any], own: bool
) -> None:
    differing = [key for key in now | was if was.get(key) != now.get(key)]
    with pytest.raises(CheckpointError, match="--reset-grad-state") as caught:
        _check(was, now, own=own)
    assert all(key in str(caught.value) for key in differing)
    assert _check(was, now, own=own, reset=True)


def test_the_same_path_goes_on_without_a_word() -> None:
    assert _check(SPARSE, SPARSE, own=True) == [] == path_differences(SPARSE, SPARSE)


LATER = {"model.use_rope_scaling": (False, True), "model.rope_scaling_factor": (8.0, 4.0)}


@pytest.mark.parametrize("name", LATER)
def test_a_setting_that_an_older_checkpoint_does_not_mention_was_the_default(name: str) -> None:
    default, other = LATER[name]
    assert getattr(ModelConfig, name.removeprefix("model.")) == default
    _check_run(DENSE, DENSE | {name: default})
    with pytest.raises(CheckpointError, match=f"{name}: {default} there, {other} here"):
        _check_run(DENSE, DENSE | {name: other})


def test_the_path_is_no_part_of_what_makes_another_run() -> None:
    _check_run(DENSE, SPARSE)
    with pytest.raises(CheckpointError, match=r"model.hidden_size"):
        _check_run(DENSE, SPARSE | {"model.hidden_size": 9})


@pytest.mark.parametrize(
    ("name", "there", "here"),
    [
        ("data.split", "969, 30, 1", "969,30,1"),
        ("data.data_path", ["0.3", "a/x", "0.7", "y"], ["0.3", "./a//x.bin", "0.7", "y.idx"]),
        ("data.valid_data_path", ["x"], ["./x"]),
    ],
)
def test_a_setting_in_another_spelling_is_the_same(name: str, there: Any, here: Any) -> None:
    _check_run(DENSE | {name: there}, DENSE | {name: here})


@pytest.mark.parametrize(
    ("name", "there", "here"),
    [
        ("data.split", "969, 30, 1", "969,31,1"),
        ("data.split", "not a split", "969,30,1"),
        ("data.data_path", ["a/x"], ["b/x"]),
        ("data.data_path", None, ["x"]),
    ],
)
def test_another_value_is_told_as_it_was_given(name: str, there: Any, here: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        _check_run(DENSE | {name: there}, DENSE | {name: here})
    assert f"{name}: {there!r} there, {here!r} here" in str(caught.value)


def test_the_way_out_is_one_that_helps() -> None:
    """Settings outside the weights may differ with --finetune; those of the weights never."""
    data, wide = DENSE | {"data.data_path": ["x"]}, DENSE | {"model.hidden_size": 9}
    for now, own, way_out in (
        (data, True, "use another --run-dir, or give the same settings"),
        (data, False, "give --finetune to take its weights alone, or give the same settings"),
        (wide, False, "here; give the same settings"),
    ):
        with pytest.raises(CheckpointError) as caught:
            _check_run(DENSE | {"data.data_path": None}, data | now, own=own)
        assert str(caught.value).endswith(way_out)


SAMO: dict[str, Any] = DENSE | {"gradient.grad_path": "samo", "samo.samo_sparsity": 0.9}
ADDED = {"samo.samo_dense": None, "samo.dsr_frequency": 1.0, "samo.dsr_growth": "survivors"}


@pytest.mark.parametrize("growth", ["survivors", "zeros"])
def test_a_pruned_run_of_before_goes_on_by_either_growth(growth: str) -> None:
    assert path_differences(SAMO, SAMO | ADDED | {"samo.dsr_growth": growth}) == []


@pytest.mark.parametrize(
    ("name", "other"),
    [("samo.samo_dense", ["*.mlp.*"]), ("samo.dsr_frequency", 0.5)],
)
def test_a_pruned_run_of_before_had_none_of_what_was_added(name: str, other: object) -> None:
    (found,) = path_differences(SAMO, SAMO | ADDED | {name: other})
    assert found == f"{name}: None there, {other!r} here"


@pytest.mark.parametrize(
    ("name", "other"),
    [("samo.samo_dense", ["*.mlp.*"]), ("samo.dsr_frequency", 0.5), ("samo.dsr_growth", "zeros")],
)
def test_a_pruned_run_of_today_keeps_what_it_began_with(name: str, other: object) -> None:
    now = SAMO | ADDED
    assert path_differences(now, now) == []
    assert len(path_differences(now, now | {name: other})) == 1
    assert len(path_differences(now | {name: other}, now)) == 1
