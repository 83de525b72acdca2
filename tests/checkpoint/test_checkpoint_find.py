"""Tests that the newest valid step is found, and no run starts from scratch by mistake."""

from __future__ import annotations

import errno
import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import FailingFiles, QuickFiles, rewrite_manifest, tree

from megatron.checkpoint.find import (
    ENVIRONMENT,
    SAVE,
    CheckpointSource,
    find_checkpoint,
    locate_checkpoint,
)
from megatron.checkpoint.format import NewerFormat
from megatron.checkpoint.store import Checkpoint, save_checkpoint
from megatron.config import Config, parse, resolve
from megatron.errors import CheckpointError
from pretrain_gpt import GPT_TASK, GRADIENT_PATHS


@pytest.fixture
def run(tmp_path: Path) -> Path:
    quick = QuickFiles()
    for step in (10, 20, 30):
        tensors = {"t": torch.full((4,), float(step))}
        save_checkpoint(tmp_path / "checkpoints", step=step, tensors=tensors, state={}, files=quick)
    return tmp_path


def damage(folder: Path) -> None:
    path = folder / "rank_00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def find(path: Path, said: list[str], *, step: int | None = None, repair: bool = False) -> str:
    folder = find_checkpoint(path, log=said.append, step=step, repair=repair)
    assert folder is not None
    return folder.name


def test_newest_from_run_checkpoints_or_step_folder(run: Path) -> None:
    said: list[str] = []
    folder = run / "checkpoints"
    for path in (run, folder, folder / "step_00000030"):
        assert find(path, said) == "step_00000030"
    assert find(run, said, step=20) == "step_00000020"
    assert said == []


def test_nothing_was_ever_committed(tmp_path: Path) -> None:
    said: list[str] = []
    assert find_checkpoint(tmp_path / "none", log=said.append) is None
    assert find_checkpoint(tmp_path, log=said.append) is None
    draft = tmp_path / "checkpoints" / "step_00000005.tmp-00aa"
    draft.mkdir(parents=True)
    (draft / "rank_00000.safetensors").write_bytes(b"half")
    assert said == []
    assert find_checkpoint(tmp_path, log=said.append) is None
    assert len(said) == 1 and "step_00000005.tmp-00aa" in said[0]


def test_a_damaged_one_is_told_set_aside_and_the_one_before_used(run: Path) -> None:
    folder = run / "checkpoints"
    damage(folder / "step_00000030")
    said: list[str] = []
    before = tree(folder)
    assert find(run, said) == "step_00000020"
    assert tree(folder) == before
    assert "step_00000030/rank_00000.safetensors: damaged" in said[0]
    said.clear()
    assert find(run, said, repair=True) == "step_00000020"
    assert (folder / "step_00000030.damaged-1").is_dir()
    assert not (folder / "step_00000030").exists()
    assert (folder / "latest").read_text() == "step_00000020\n"
    said.clear()
    assert find(run, said) == "step_00000020" and said == []
    save_checkpoint(folder, step=30, tensors={}, state={})
    assert find(run, said) == "step_00000030"
    damage_manifest = folder / "step_00000030" / "manifest.json"
    damage_manifest.write_bytes(b"")
    assert find(run, said, repair=True) == "step_00000020"
    assert (folder / "step_00000030.damaged-2").is_dir()


def test_all_damaged_is_an_error_and_stays_one(run: Path) -> None:
    folder = run / "checkpoints"
    for step in (10, 20, 30):
        damage(folder / f"step_000000{step}")
    for _ in range(2):
        with pytest.raises(CheckpointError) as caught:
            find_checkpoint(run, log=lambda text: None, repair=True)
        assert all(f"step_000000{step}" in str(caught.value) for step in (10, 20, 30))
    for step in (10, 20, 30):
        path = folder / f"step_000000{step}"
        path.rename(path.with_name(f"{path.name}.damaged-1"))
    with pytest.raises(CheckpointError, match="damaged-1"):
        find_checkpoint(run, log=lambda text: None, repair=True)


def test_an_explicit_step_is_that_one_or_an_error(run: Path) -> None:
    with pytest.raises(CheckpointError, match="no step 25; steps found: 10, 20, 30"):
        find(run, [], step=25)
    with pytest.raises(CheckpointError, match="no step 1; steps found: none"):
        find(run / "elsewhere", [], step=1)
    with pytest.raises(CheckpointError, match="is step 30, asked for was step 20"):
        find(run / "checkpoints" / "step_00000030", [], step=20)
    damage(run / "checkpoints" / "step_00000020")
    with pytest.raises(CheckpointError, match="rank_00000.safetensors: damaged"):
        find(run, [], step=20, repair=True)


@pytest.mark.parametrize(
    "text", ["", "abc", "step_00000099\n", "../..", "\xff\n\n", "step_00000010"]
)
def test_latest_is_a_hint_only(run: Path, text: str) -> None:
    hint = run / "checkpoints" / "latest"
    hint.write_text(text)
    said: list[str] = []
    assert find(run, said) == "step_00000030"
    assert len(said) == 1 and "step_00000030" in said[0] and "\n" not in said[0]
    assert ascii(text.strip())[1:-1] in said[0] or "\\" in said[0]
    hint.unlink()
    hint.mkdir()
    assert find(run, said) == "step_00000030"
    hint.rmdir()
    os.mkfifo(hint)
    assert find(run, said) == "step_00000030"


def test_a_name_that_tells_another_step_is_not_believed(run: Path) -> None:
    folder = run / "checkpoints"
    (folder / "step_00000030").rename(folder / "step_00000040")
    said: list[str] = []
    assert find(run, said) == "step_00000020"
    assert "is 30" in said[0] and "step_00000040" in said[0]


def test_a_newer_version_is_neither_skipped_nor_renamed(run: Path) -> None:
    rewrite_manifest(run / "checkpoints" / "step_00000030", lambda d: d.update(version=3))
    before = tree(run)
    with pytest.raises(NewerFormat, match="version 3.*version 2"):
        find(run, [], repair=True)
    assert tree(run) == before


def test_a_step_replaced_by_one_that_never_came(run: Path) -> None:
    """A crash between the two renames of a replacement leaves this folder."""
    folder = run / "checkpoints"
    (folder / "step_00000030").rename(folder / "step_00000030.replaced-1")
    assert find(run, []) == "step_00000030.replaced-1"
    assert find(run, [], step=30) == "step_00000030.replaced-1"


def test_errors_of_the_disk_are_like_damage(run: Path) -> None:
    said: list[str] = []
    k = 0
    while True:
        k += 1
        files = FailingFiles(k, errno.EIO)
        try:
            path = find_checkpoint(run, log=said.append, files=files)
        except CheckpointError as error:
            assert "Input/output error" in str(error)
            assert files.failed in ("entries", "close")
            continue
        assert path is not None and path.name in ("step_00000030", "step_00000020")
        if files.failed is None:
            break
    assert k > 10
    assert any("Input/output error" in line for line in said)


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_pickles_and_foreign_folders_are_named_and_not_opened(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    evil = pickle.dumps(Canary(canary))
    (tmp_path / "model.pt").write_bytes(evil)
    with zipfile.ZipFile(tmp_path / "zipped", "w") as archive:
        archive.writestr("archive/data.pkl", evil)
    for name, inside in [
        ("dcp", ".metadata"),
        ("megatron", "latest_checkpointed_iteration.txt"),
        ("hf", "pytorch_model.bin"),
    ]:
        (tmp_path / name).mkdir()
        (tmp_path / name / inside).write_bytes(evil)
    expected = {
        "model.pt": "a pickle",
        "zipped": "a zip or torch.save file",
        "dcp": "a torch.distributed.checkpoint folder",
        "megatron": "a Megatron-LM checkpoint",
        "hf": "a Hugging Face model",
    }
    for name, kind in expected.items():
        for act in (
            lambda path: find_checkpoint(path, log=lambda text: None),
            lambda path: find_checkpoint(path, log=lambda text: None, step=3),
            Checkpoint.open,
        ):
            with pytest.raises(CheckpointError, match=f"{name}: is {kind}, not a checkpoint"):
                act(tmp_path / name)
    assert not canary.exists()


def config_of(flags: str) -> Config:
    needed = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --mock-data "
    needed += "--vocab-size 96 --micro-batch-size 1 --global-batch-size 1 --train-iters 90 --lr 1 "
    return resolve(parse((needed + flags).split(), paths=GRADIENT_PATHS, task=GPT_TASK.config), 1)


def test_a_run_that_saves_into_another_run_folder_finds_its_own_steps(
    run: Path, tmp_path: Path
) -> None:
    config = config_of(f"--load {run} --save {run}")
    other = tmp_path / "other"
    first = locate_checkpoint(config, other, log=print)
    assert first == CheckpointSource(run / "checkpoints" / "step_00000030", own=False)
    save_checkpoint(run, step=40, tensors={"t": torch.zeros(4)}, state={}, files=QuickFiles())
    again = locate_checkpoint(config, other, log=print)
    assert again == CheckpointSource(run / "step_00000040", own=True)


def test_a_folder_to_save_to_with_checkpoints_in_it_is_not_ignored(run: Path) -> None:
    with pytest.raises(CheckpointError, match=r"would begin at step 0 beside them"):
        locate_checkpoint(config_of(f"--save {run}"), run, log=print)
    found = locate_checkpoint(config_of(f"--save {run / 'checkpoints'}"), run, log=print)
    assert found == CheckpointSource(run / "checkpoints" / "step_00000030", own=True)


def recorded(run_dir: Path, save: Path) -> None:
    """Let a run folder record, as `keep_config` does, that its last start saved to `save`."""
    (run_dir / ENVIRONMENT).write_text(json.dumps({SAVE: str(save)}))


def test_a_run_whose_checkpoints_are_elsewhere_does_not_begin_again(
    run: Path, tmp_path: Path
) -> None:
    """`--save` was given to one start and not to the next, or names another folder now."""
    moved = config_of(f"--save {tmp_path / 'new'}")
    with pytest.raises(CheckpointError, match=f"give --save {run / 'checkpoints'} to resume, or"):
        locate_checkpoint(moved, run, log=print)
    other = tmp_path / "other"
    other.mkdir()
    recorded(other, run / "checkpoints")
    for config in (config_of(""), moved):
        with pytest.raises(CheckpointError, match=f"give --save {run / 'checkpoints'} to resume"):
            locate_checkpoint(config, other, log=print)
    newest = run / "checkpoints" / "step_00000030"
    same = config_of(f"--save {run / 'checkpoints'}")
    assert locate_checkpoint(same, other, log=print) == CheckpointSource(newest, own=True)
    # Where it saved is gone, or holds nothing: there is nothing to lose.
    recorded(other, tmp_path / "gone")
    assert locate_checkpoint(config_of(""), other, log=print) is None


def test_the_run_that_is_loaded_may_save_elsewhere(run: Path, tmp_path: Path) -> None:
    source, new = tmp_path / "source", tmp_path / "new"
    source.mkdir()
    recorded(source, run / "checkpoints")
    newest = run / "checkpoints" / "step_00000030"
    config = config_of(f"--load {source}")
    assert locate_checkpoint(config, new, log=print) == CheckpointSource(newest, own=False)
    again = config_of(f"--load {source} --save {run / 'checkpoints'}")
    assert locate_checkpoint(again, source, log=print) == CheckpointSource(newest, own=True)
    recorded(source, tmp_path / "gone")
    there = f"{tmp_path / 'gone'}: no checkpoint was ever committed there, where {source} saves"
    with pytest.raises(CheckpointError, match=f"{there}; check --load"):
        locate_checkpoint(config, new, log=print)


def test_steps_in_the_folder_that_is_loaded_come_before_its_record(
    run: Path, tmp_path: Path
) -> None:
    """The record may be of a folder that was copied, or of a start that has saved nothing yet."""
    newest, saves = run / "checkpoints" / "step_00000030", tmp_path / "saves"
    copied = tmp_path / "copied"
    save_checkpoint(copied, step=50, tensors={"t": torch.zeros(4)}, state={}, files=QuickFiles())
    for place in (saves, copied):
        recorded(run, place)
        config = config_of(f"--load {run} --save {saves}")
        assert locate_checkpoint(config, run, log=print) == CheckpointSource(newest, own=False)


def test_one_folder_for_both_does_not_begin_a_run_again(run: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    with pytest.raises(CheckpointError, match="to resume, or another --run-dir"):
        locate_checkpoint(config_of(f"--load {new} --save {new}"), run, log=print)
    assert locate_checkpoint(config_of(f"--load {new} --save {new}"), new, log=print) is None
