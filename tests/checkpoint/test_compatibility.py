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
    check_identity(DENSE, DENSE | {name: default}, where=Path("."), model_only=False)
    with pytest.raises(CheckpointError, match=f"{name}: {default} there, {other} here"):
        check_identity(DENSE, DENSE | {name: other}, where=Path("."), model_only=False)


def test_the_path_is_no_part_of_what_makes_another_run() -> None:
    check_identity(DENSE, SPARSE, where=Path("."), model_only=False)
    with pytest.raises(CheckpointError, match=r"model.hidden_size"):
        check_identity(DENSE, SPARSE | {"model.hidden_size": 9}, where=Path("."), model_only=False)
