"""Old checkpoints make room, and never the one that would be needed."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import DyingFiles, FailingFiles, HookedFiles, Killed, QuickFiles, tree

from megatron.checkpoint.find import Keeper, find_checkpoint
from megatron.checkpoint.io import Files
from megatron.checkpoint.store import save_checkpoint

QUICK = QuickFiles()


def save(directory: Path, step: int, value: float = 0.0, *, finite: int | None = None) -> Path:
    """Save a step, of a run whose last finite step is `finite` if that is given."""
    tensors = {"t": torch.full((3,), value or float(step))}
    state = {} if finite is None else state_of(step, finite)
    return save_checkpoint(directory, step=step, tensors=tensors, state=state, files=QUICK)


def state_of(step: int, finite: int) -> dict[str, Any]:
    progress = {"iteration": step, "consumed_samples": step, "applied_samples": finite}
    progress |= {"skipped_in_row": step - finite, "finite_step": finite}
    empty: dict[str, Any] = {key: {} for key in ("loss_scaler", "identity", "data_files")}
    return {"progress": progress, "applied_updates": finite, "schedule": {}, **empty}


def keeper(directory: Path, count: int, files: Files = QUICK) -> tuple[Keeper, list[str]]:
    said: list[str] = []
    return Keeper(directory=directory, count=count, log=said.append, files=files), said


def steps(directory: Path) -> list[str]:
    found = [p.name for p in directory.iterdir() if p.is_dir()]
    return sorted(name.removeprefix("step_000000") for name in found)


def damage(folder: Path) -> None:
    path = folder / "rank_00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.fixture
def five(tmp_path: Path) -> Path:
    for step in range(1, 6):
        save(tmp_path / "five", step)
    return tmp_path / "five"


def test_the_newest_good_ones_stay(five: Path) -> None:
    keep, said = keeper(five, 2)
    assert [path.name[-2:] for path in keep.prune()] == ["03", "02", "01"]
    assert steps(five) == ["04", "05"] and said == []
    assert keep.prune() == []
    save(five, 6)
    assert [path.name[-2:] for path in keep.prune()] == ["04"]


@pytest.mark.parametrize(("count", "stay"), [(1, [2, 4, 6, 7]), (3, [2, 4, 5, 6, 7])])
def test_multiples_of_the_interval_stay_beside_the_newest(
    tmp_path: Path, count: int, stay: list[int]
) -> None:
    said: list[str] = []
    keep = Keeper(directory=tmp_path, count=count, interval=2, log=said.append, files=QUICK)
    for step in range(1, 8):
        save(tmp_path, step)
        keep.prune()
    assert steps(tmp_path) == [f"0{step}" for step in stay] and said == []


def test_a_step_between_retained_ones_stays_until_a_newer_one_is_good(tmp_path: Path) -> None:
    save(tmp_path, 2)
    save(tmp_path, 3)
    damage(save(tmp_path, 4))
    said: list[str] = []
    keep = Keeper(directory=tmp_path, count=1, interval=2, log=said.append, files=QUICK)
    assert keep.prune() == [] and len(said) == 1
    save(tmp_path, 5)
    assert keep.prune() == [], "3 is the newest that a finite step followed"
    save(tmp_path, 7)
    assert [path.name[-2:] for path in keep.prune()] == ["03"]
    assert steps(tmp_path) == ["02", "04", "05", "07"]


def test_the_newest_that_a_finite_step_followed_stays(tmp_path: Path) -> None:
    """Steps 1 to 5 are finite; the weights after step 5 make no finite step any more."""
    keep, said = keeper(tmp_path, 2)
    for step in (2, 4):
        save(tmp_path, step, finite=step)
        assert keep.prune() == []
    removed: list[str] = []
    for step in (6, 8, 10, 12):
        save(tmp_path, step, finite=5)
        removed += [path.name[-2:] for path in keep.prune()]
    assert removed == ["02", "06", "08"] and said == []
    assert steps(tmp_path) == ["04", "10", "12"]
    save(tmp_path, 14, finite=13)  # it has come round
    assert [path.name[-2:] for path in keep.prune()] == ["10", "04"]


def test_damaged_ones_neither_count_nor_go(five: Path) -> None:
    for step in (5, 4, 1):
        damage(five / f"step_0000000{step}")
    keep, said = keeper(five, 2)
    assert keep.prune() == [] and steps(five) == ["01", "02", "03", "04", "05"]
    assert len(said) == 3 and all("damaged" in text for text in said)
    keep.prune()
    assert len(said) == 3
    save(five, 6)
    assert [path.name[-2:] for path in keep.prune()] == ["02"]
    assert steps(five) == ["01", "03", "04", "05", "06"] and len(said) == 3


def test_the_last_good_one_stays_when_all_others_rot(five: Path) -> None:
    for step in (2, 3, 4, 5):
        damage(five / f"step_0000000{step}")
    keep, _ = keeper(five, 2)
    assert keep.prune() == []
    found = find_checkpoint(five, log=lambda text: None)
    assert found is not None and found.name == "step_00000001"


def test_one_that_rots_after_it_was_counted_is_read_again(five: Path) -> None:
    keep, said = keeper(five, 3)
    keep.prune()
    damage(five / "step_00000005")
    save(five, 6)
    assert keep.prune() == [] and len(said) == 1
    assert steps(five) == ["03", "04", "05", "06"]


def test_each_is_read_once(five: Path) -> None:
    files = HookedFiles()
    keep, _ = keeper(five, 2, files)
    keep.prune()
    read = files.names.count("read")
    keep.prune()
    assert files.names.count("read") == read > 0


def test_a_replaced_one_goes_with_its_step(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 1, 7.0)
    save(tmp_path, 2)
    keep, _ = keeper(tmp_path, 2)
    assert keep.prune() == [] and steps(tmp_path) == ["01", "01.replaced-1", "02"]
    save(tmp_path, 3)
    assert len(keep.prune()) == 2 and steps(tmp_path) == ["02", "03"]


def test_what_else_lies_there_stays(five: Path) -> None:
    for name in ("notes", "step_00000001.damaged-1", "step_1"):
        shutil.copytree(five / "step_00000001", five / name)
    (five / "step_00000000").symlink_to(five / "notes")
    before = tree(five / "notes")
    keeper(five, 2)[0].prune()
    names = {path.name for path in five.iterdir()}
    assert {"notes", "step_00000001.damaged-1", "step_1", "step_00000000"} <= names
    assert tree(five / "notes") == before


def test_power_failure_at_every_call_leaves_whole_ones_and_drafts(
    five: Path, tmp_path: Path
) -> None:
    k = 0
    while True:
        k += 1
        directory = tmp_path / str(k)
        shutil.copytree(five, directory)
        try:
            keeper(directory, 2, DyingFiles(k))[0].prune()
        except Killed:
            pass
        else:
            break
        committed = [name for name in steps(directory) if ".tmp-" not in name]
        assert committed[-2:] == ["04", "05"]
        assert keeper(directory, 5)[0].prune() == []
        save(directory, 6)
        assert not [name for name in steps(directory) if ".tmp-" in name], k
    assert k > 20


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_an_error_at_every_call_is_told_and_loses_nothing(
    five: Path, tmp_path: Path, code: int
) -> None:
    k = 0
    while True:
        k += 1
        directory = tmp_path / str(k)
        shutil.copytree(five, directory)
        files = FailingFiles(k, code)
        keep, said = keeper(directory, 2, files)
        keep.prune()
        assert steps(directory)[-2:] == ["04", "05"]
        if files.failed is None:
            break
        assert said and os.strerror(code) in said[0]
    assert k > 20
