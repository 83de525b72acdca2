"""Tests of which gradient path may start from which checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.compatibility import (
    check_data,
    check_identity,
    check_path,
    path_differences,
)
from megatron.config import ModelConfig
from megatron.errors import CheckpointError

DENSE: dict[str, Any] = {"model.hidden_size": 8, "gradient.grad_path": "dense"}
SPARSE: dict[str, Any] = DENSE | {"gradient.grad_path": "sparse", "sparse.density": 0.4}


def _check(was: dict[str, Any], now: dict[str, Any], *, own: bool, reset: bool = False) -> list:
    said: list[str] = []
    check_path(was, now, where=Path("step_00000001"), own=own, reset=reset, log=said.append)
    return said


def _check_run(
    was: dict[str, Any],
    now: dict[str, Any],
    *,
    own: bool = True,
    model_only: bool = False,
    new_data: bool = False,
) -> list[str]:
    said: list[str] = []
    check_identity(
        was,
        now,
        where=Path("."),
        own=own,
        model_only=model_only,
        new_data=new_data,
        log=said.append,
    )
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
    _check_run(DENSE, DENSE | {name: default})
    with pytest.raises(CheckpointError, match=f"{name}: {default} there, {other} here"):
        _check_run(DENSE, DENSE | {name: other})


def test_the_path_is_no_part_of_what_makes_another_run() -> None:
    _check_run(DENSE, SPARSE)
    with pytest.raises(CheckpointError, match=r"model.hidden_size"):
        _check_run(DENSE, SPARSE | {"model.hidden_size": 9})


def test_a_setting_in_another_spelling_is_the_same() -> None:
    _check_run(DENSE | {"data.split": "969, 30, 1"}, DENSE | {"data.split": "969,30,1"})


@pytest.mark.parametrize(
    ("name", "there", "here"),
    [
        ("data.split", "969, 30, 1", "969,31,1"),
        ("data.split", "not a split", "969,30,1"),
        ("data.mock_data", None, True),
    ],
)
def test_another_value_is_told_as_it_was_given(name: str, there: Any, here: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        _check_run(DENSE | {name: there}, DENSE | {name: here})
    assert f"{name}: {there!r} there, {here!r} here" in str(caught.value)


BASE = DENSE | {"data.split": "9,1,0", "training.global_batch_size": 8, "training.train_iters": 9}


def test_the_way_out_is_one_that_helps() -> None:
    """Settings outside the weights may differ with --finetune; those of the weights never."""
    split, longer = BASE | {"data.split": "8,2,0"}, BASE | {"training.train_iters": 7}
    keep = "give --accept-new-data to keep its moments, or --finetune to take its weights"
    for now, own, way_out in (
        (split, True, "use another --run-dir, or give the same settings"),
        (split, False, keep),
        (longer, False, "give --finetune to take its weights alone, or give the same settings"),
        (split | {"model.hidden_size": 9}, False, "here; give the same settings"),
    ):
        with pytest.raises(CheckpointError) as caught:
            _check_run(BASE, now, own=own)
        assert str(caught.value).endswith(way_out)


def test_a_run_that_begins_may_keep_moments_with_other_data_and_batches() -> None:
    other = BASE | {"data.split": "8,2,0", "training.global_batch_size": 16}
    assert _check_run(BASE, other, own=False, new_data=True) == [
        "data.split: '9,1,0' there, '8,2,0' here, from here on",
        "training.global_batch_size: 8 there, 16 here, from here on",
    ]
    with pytest.raises(CheckpointError, match="split: .*global_batch_size: 8 there, 16 here"):
        _check_run(BASE, other, new_data=True)
    with pytest.raises(CheckpointError, match="hidden_size: 8 there, 9 here; give the same"):
        _check_run(BASE, other | {"model.hidden_size": 9}, own=False, new_data=True)


ROPE = {"model.position_embedding_type": "rope", "model.rotary_base": 10000}
LONGER = {"model.seq_length": 128, "model.max_position_embeddings": 128}


def test_weights_alone_decide_what_a_finetuned_model_may_change() -> None:
    was = DENSE | ROPE | {"model.seq_length": 64, "model.max_position_embeddings": 64}
    said = _check_run(was, was | LONGER | {"model.rotary_base": 5e5}, own=False, model_only=True)
    assert [text.split(":")[0] for text in said] == [
        "model.max_position_embeddings",
        "model.rotary_base",
        "model.seq_length",
    ]
    assert all(text.endswith(", from here on") for text in said)
    learned = was | {"model.position_embedding_type": "learned_absolute"}
    with pytest.raises(CheckpointError, match="max_position_embeddings: 64 there, 128 here"):
        _check_run(learned, learned | LONGER, own=False, model_only=True)


def _facts(prefix: str, size: int = 9, sha: str = "a") -> dict[str, Any]:
    return {
        f"{prefix}.bin": {"bytes": size, "modified": 1},
        f"{prefix}.idx": {"bytes": 3, "modified": 1, "sha256": sha},
    }


def _check_files(
    there: Any, here: Any, files: tuple[dict[str, Any], dict[str, Any]], *, accept: bool = False
) -> list[str]:
    said: list[str] = []
    check_data(
        DENSE | {"data.data_path": there},
        DENSE | {"data.data_path": here},
        files,
        where=Path("step_00000001"),
        own=True,
        accept=accept,
        log=said.append,
    )
    return said


BLEND = ["0.3", "a/x", "0.7", "b"]
BLEND_FILES = _facts("a/x") | _facts("b", 8, "b")
MOVED = ["0.30", "/disk/x.bin", "0.7", "/disk/b"]
MOVED_FILES = _facts("/disk/x") | _facts("/disk/b", 8, "b")


def test_the_same_data_under_other_paths_are_the_same() -> None:
    assert _check_files(BLEND, MOVED, (BLEND_FILES, MOVED_FILES)) == []
    spelled = ["0.3", "./a//x.bin", "0.7", "b.idx"]
    assert _check_files(spelled, BLEND, (BLEND_FILES, BLEND_FILES)) == []
    assert _check_files(spelled, MOVED, (BLEND_FILES, MOVED_FILES)) == []
    for other in ("./x", "x.idx", str(Path("x").absolute())):
        assert _check_files(["x"], [other], ({}, {})) == []


@pytest.mark.parametrize(
    ("here", "files"),
    [
        (["0.4", "/disk/x", "0.6", "/disk/b"], MOVED_FILES),  # other weights
        (["0.3", "/disk/b", "0.7", "/disk/x"], MOVED_FILES),  # the other way round
        (MOVED, MOVED_FILES | _facts("/disk/b", 7, "b")),  # another size
        (MOVED, MOVED_FILES | _facts("/disk/b", 8, "c")),  # other documents
        (["/disk/x"], MOVED_FILES),
        (None, {}),
    ],
)
def test_other_data_are_refused_unless_accepted(here: Any, files: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="--accept-new-data") as caught:
        _check_files(BLEND, here, (BLEND_FILES, files))
    assert f"data.data_path: {BLEND!r} there, {here!r} here" in str(caught.value)
    assert len(_check_files(BLEND, here, (BLEND_FILES, files), accept=True)) == 1


TOKENIZER = {"data.tokenizer": "f1", "data.tokenizer_type": None, "data.vocab_file": "v.json"}
NAMED = {"data.tokenizer_type": "GPT2BPETokenizer", "data.vocab_file": "/disk/v.json"}


def test_an_equal_fingerprint_makes_a_tokenizer_the_same() -> None:
    _check_run(DENSE | TOKENIZER, DENSE | TOKENIZER | NAMED)
    with pytest.raises(CheckpointError, match=r"data.tokenizer: 'f1' there, 'f2' here"):
        _check_run(DENSE | TOKENIZER, DENSE | TOKENIZER | NAMED | {"data.tokenizer": "f2"})


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
