"""A save is complete or absent, at whichever system call it ends."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import (
    CheckpointRanks,
    DyingFiles,
    FailingFiles,
    HookedFiles,
    Killed,
    PeerGone,
    QuickFiles,
    tree,
)

from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.io import Files
from megatron.checkpoint.store import Checkpoint, save_checkpoint
from megatron.errors import CheckpointError

QUICK = QuickFiles()
REPO = Path(__file__).resolve().parents[2]


def silent(text: str) -> None:
    pass


def save(directory: Path, step: int, value: float, files: Files = QUICK) -> Path:
    tensors = {"t": torch.full((5,), value), "u": torch.full((3, 2), value).bfloat16()}
    return save_checkpoint(
        directory, step=step, tensors=tensors, state={"value": value}, files=files
    )


def found(directory: Path) -> tuple[int, float] | None:
    """Return step and value of the checkpoint that a new start would load, fully verified."""
    path = find_checkpoint(directory, log=silent, repair=True)
    if path is None:
        return None
    with Checkpoint.open(path) as saved:
        value = saved.state["value"]
        assert saved.read("t").tolist() == [value] * 5
        assert saved.read("u").tolist() == [[value] * 2] * 3
        return saved.step, value


def drafts(directory: Path) -> list[str]:
    return [str(p) for p in directory.rglob("*.tmp-*")] if directory.exists() else []


def prepare_nothing(directory: Path) -> None:
    pass


def prepare_older(directory: Path) -> None:
    save(directory, 1, 1.0)


def prepare_same_step(directory: Path) -> None:
    save(directory, 2, 1.0)


def prepare_damaged_step(directory: Path) -> None:
    save(directory, 1, 1.0)
    path = save(directory, 2, 1.5)
    os.truncate(path / "rank_00000.safetensors", 20)


SCENES: list[tuple[Callable[[Path], None], object]] = [
    (prepare_nothing, None),
    (prepare_older, (1, 1.0)),
    (prepare_same_step, (2, 1.0)),
    (prepare_damaged_step, (1, 1.0)),
]


@pytest.mark.parametrize(("prepare", "old"), SCENES)
def test_power_failure_at_every_call(
    tmp_path: Path, prepare: Callable[[Path], None], old: object
) -> None:
    outcomes = []
    k = 0
    while True:
        k += 1
        directory = tmp_path / str(k) / "checkpoints"
        prepare(directory)
        files = DyingFiles(k)
        try:
            save(directory, 2, 2.0, files)
        except Killed:
            pass
        else:
            break
        outcomes.append(found(directory))
        assert outcomes[-1] in (old, (2, 2.0)), (k, files.names[-1])
        save(directory, 3, 3.0)
        assert drafts(directory) == [], k
        assert found(directory) == (3, 3.0)
    assert k >= 28
    switch = outcomes.index((2, 2.0))
    assert all(outcome == (2, 2.0) for outcome in outcomes[switch:])
    assert 0 < switch < len(outcomes) - 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EDQUOT])
@pytest.mark.parametrize("sticky", [False, True])
def test_an_error_at_every_call(tmp_path: Path, code: int, sticky: bool) -> None:
    """The save fails with the path and leaves nothing, or it is committed; never in between."""
    k = 0
    while True:
        k += 1
        directory = tmp_path / str(k) / "checkpoints"
        save(directory, 1, 1.0)
        before = tree(directory)
        files = FailingFiles(k, code, sticky=sticky)
        try:
            save(directory, 2, 2.0, files)
        except CheckpointError as error:
            text = str(error)
            assert str(directory) in text and os.strerror(code) in text and "\n" not in text
            if code == errno.ENOSPC and files.failed == "write":
                assert "need" in text and "have" in text
            committed = (directory / "step_00000002").exists()
            assert found(directory) == ((2, 2.0) if committed else (1, 1.0))
            kept = tree(directory)
            assert committed or {n: kept[n] for n in before} == before
        else:
            assert found(directory) == (2, 2.0)
        removable = files.failed not in ("unlink", "rmdir", "entries")
        assert not (removable and drafts(directory)), (k, files.names)
        if files.failed is None:
            break
    assert k > 20


def test_no_space_is_known_before_anything_is_written(tmp_path: Path) -> None:
    class Full(Files):
        def free(self, path: Path) -> int:
            return 100

    save(tmp_path, 1, 1.0)
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match=r"need \d+ bytes, have 100"):
        save(tmp_path, 2, 2.0, Full())
    assert tree(tmp_path) == before


def test_order_of_calls(tmp_path: Path) -> None:
    """File and folder are on disk before the rename, the rename before `latest` is touched."""
    files = HookedFiles()
    save(tmp_path, 1, 1.0, files)
    names = [name for name in files.names if name in ("fsync", "rename")]
    assert names == ["fsync"] * 3 + ["rename", "fsync"] + ["fsync", "rename", "fsync"]
    assert (tmp_path / "latest").read_text() == "step_00000001\n"


def test_modes_keep_others_out(tmp_path: Path) -> None:
    path = save(tmp_path / "new", 1, 1.0)
    assert path.stat().st_mode & 0o027 == 0
    assert all(entry.stat().st_mode & 0o137 == 0 for entry in path.iterdir())


def test_a_linked_folder_of_checkpoints_is_fine(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "checkpoints").symlink_to("scratch")
    save(tmp_path / "checkpoints", 1, 1.0)
    assert found(tmp_path) == (1, 1.0)


def test_only_drafts_are_removed(tmp_path: Path) -> None:
    keep = ["step_00000001.tmp", "step_1.tmp-ab", "notes.tmp-ab", "step_00000009.damaged-1"]
    gone = ["step_00000001.tmp-00ff", "latest.tmp-0a"]
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("x")
    for name in keep + gone[:1]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / gone[0] / "link").symlink_to(tmp_path / "outside")
    (tmp_path / gone[1]).write_text("x")
    save(tmp_path, 2, 2.0)
    assert all((tmp_path / name / "file").exists() for name in [*keep, "outside"])
    assert not any((tmp_path / name).exists() for name in gone)


def save_on(directory: Path, files: dict[int, Files]) -> list[object]:
    tensors = {f"t{i}": torch.full((8,), float(i)) for i in range(4)}

    def act(rank: int, gather: Callable[[str], list[str]]) -> Path:
        return save_checkpoint(
            directory,
            step=2,
            tensors=tensors,
            state={"value": 2.0},
            rank=rank,
            world=4,
            gather=gather,
            files=files.get(rank, QUICK),
        )

    return CheckpointRanks(4).run(act)


@pytest.mark.parametrize("rank", [0, 3])
def test_all_ranks_tell_the_same_of_one_that_failed(tmp_path: Path, rank: int) -> None:
    save(tmp_path, 1, 1.0)
    k = 0
    while True:
        k += 1
        files = FailingFiles(k, errno.EIO)
        results = save_on(tmp_path, {rank: files})
        texts = {str(result) for result in results}
        assert len(texts) == 1, texts
        if isinstance(results[0], Path):
            break
        assert all(isinstance(result, CheckpointError) for result in results)
        assert f"on rank {rank}" in texts.pop()
        assert find_checkpoint(tmp_path, log=silent) is not None
    assert k > 3


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_dies_leaves_nothing_torn(tmp_path: Path, rank: int) -> None:
    save(tmp_path, 1, 1.0)
    k = 0
    while True:
        k += 1
        results = save_on(tmp_path, {rank: DyingFiles(k)})
        if isinstance(results[rank], Path):
            break
        assert isinstance(results[rank], Killed)
        assert all(isinstance(r, PeerGone) for i, r in enumerate(results) if i != rank)
        path = find_checkpoint(tmp_path, log=silent)
        assert path is not None
        with Checkpoint.open(path) as saved:
            assert saved.step in (1, 2)
    assert k > 3
    assert drafts(tmp_path) == []


@pytest.mark.push
def test_all_but_store_work_without_torch() -> None:
    code = (
        "import sys, megatron.checkpoint.writer, megatron.checkpoint.find\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
        "import megatron.checkpoint.reader\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPO)
