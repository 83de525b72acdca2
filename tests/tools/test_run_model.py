"""Tests that the model in a checkpoint's manifest is checked before it is built."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron.checkpoint.find import ENVIRONMENT, SAVE
from megatron.checkpoint.format import MANIFEST_NAME, Manifest, dump
from megatron.errors import CheckpointError, ConfigError
from tests.tools.runs import make_model_run
from tools.run_model import find_model

MODEL = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 4}


def step_folder(folder: Path, identity: object) -> Path:
    """Write a step folder whose manifest has a valid signature, with any content."""
    step = folder / "step_00000001"
    step.mkdir()
    manifest = Manifest(step=1, state={"identity": identity}, world={"size": 1})
    (step / MANIFEST_NAME).write_bytes(dump(manifest))
    return step


def test_the_model_is_what_the_checkpoint_remembers(tmp_path: Path) -> None:
    step = step_folder(tmp_path, {f"model.{key}": value for key, value in MODEL.items()})
    assert find_model(step).model.hidden_size == 8


def test_the_checkpoints_of_a_run_are_where_it_saved_them(tmp_path: Path) -> None:
    """Not in the run folder, which may have older ones."""
    run, saved = tmp_path / "run", tmp_path / "disk" / "saved"
    make_model_run(run, "--vocab-size 64", vocab_size=64)
    shutil.copytree(run / "checkpoints", saved)
    (run / ENVIRONMENT).write_text(json.dumps({SAVE: str(saved)}))
    found = find_model(run)
    assert found.step == saved / "step_00000001" and found.model.hidden_size == 32
    assert find_model(run / "checkpoints").step == run / "checkpoints" / "step_00000001"
    shutil.rmtree(saved)
    with pytest.raises(CheckpointError, match=f"{saved}: no checkpoint was committed there"):
        find_model(run)


@pytest.mark.parametrize("value", ["2", 0, -1, None, [2], {"a": 1}, True, 2.5])
def test_a_signed_manifest_of_wrong_types_is_refused(tmp_path: Path, value: object) -> None:
    identity = {f"model.{key}": 2 for key in MODEL} | {"model.num_layers": value}
    with pytest.raises(CheckpointError, match="model.num_layers is .*which no run can have"):
        find_model(step_folder(tmp_path, identity))


@pytest.mark.parametrize("identity", [[], "text", 3, None])
def test_an_identity_that_is_no_object_is_refused(tmp_path: Path, identity: object) -> None:
    with pytest.raises((CheckpointError, ConfigError)):
        find_model(step_folder(tmp_path, identity))


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path, **_: bool) -> object:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", denied)
    with pytest.raises(CheckpointError, match="cannot read: Permission denied"):
        find_model(tmp_path / "closed")
