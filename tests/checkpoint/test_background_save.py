"""A save in the background: the same bytes, one at a time, and its failure known on every rank."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import tree

from megatron.checkpoint.checkpointer import Background, Checkpointer
from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.io import Files
from megatron.checkpoint.store import Snapshots, snapshot, whole
from megatron.errors import CheckpointError, NumericsError
from megatron.parallel.groups import ProcessGroups
from tests.limits import LIMIT
from tests.ranks import Ranks
from tests.training.harness import TINY, make_trainer, train

FLAGS = f"{TINY} --train-iters 6 --save-interval 2 --bf16"


def test_work_is_taken_once_and_its_error_comes_with_it() -> None:
    background: Background[int] = Background()
    assert not background.pending
    go = threading.Event()
    background.start(lambda: (go.wait(), 3)[1])
    assert background.pending and not background.finished
    go.set()
    assert background.take() == 3 and not background.pending
    background.start(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        background.take()
    assert not background.pending


def test_a_snapshot_does_not_change_with_the_tensor() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t()
    copy = snapshot(whole("t", tensor)).tensor
    tensor.zero_()
    assert copy.tolist() == [[0, 3], [1, 4], [2, 5]] and copy.is_contiguous()


class PageLocked:
    """Counts the blocks of page-locked memory that are asked for, and the waits for copies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks: list[int] = []
        self.waits = 0
        monkeypatch.setattr("megatron.checkpoint.store.pinned_zeros", self.allocate)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self)

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self.blocks.append(numel * dtype.itemsize)
        return torch.zeros(numel, dtype=dtype)

    def synchronize(self) -> None:
        self.waits += 1


def test_copies_of_a_device_share_a_block_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, snapshots = PageLocked(monkeypatch), Snapshots()
    tensors = [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor(3.0, dtype=torch.bfloat16),
        torch.tensor([True, False, True]),
        torch.zeros(0, 4),
        torch.arange(100),
    ]
    shards = [whole(str(number), tensor) for number, tensor in enumerate(tensors)]
    first = snapshots.stage(shards)
    assert memory.blocks == [64 * (1 + 1 + 1 + 0 + 13)] and memory.waits == 1
    wanted = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    for shard, copy, tensor in zip(shards, first, wanted, strict=True):
        assert copy == replace(shard, tensor=copy.tensor) and copy.tensor.is_contiguous()
        assert torch.equal(copy.tensor, tensor) and copy.tensor.dtype == tensor.dtype
    assert len({copy.tensor.untyped_storage().data_ptr() for copy in first}) == 1
    again = snapshots.stage(shards[:3])
    assert len(memory.blocks) == 1 and memory.waits == 2
    assert not any(copy.tensor.any() for copy in again)
    snapshots.stage([*shards, whole("more", torch.zeros(1))])
    assert memory.blocks[1:] == [64 * 17]


def test_copies_of_the_host_need_no_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, tensor = PageLocked(monkeypatch), torch.arange(3.0)
    (copy,) = Snapshots().take([whole("t", tensor)])
    tensor.zero_()
    assert copy.tensor.tolist() == [0, 1, 2] and not memory.blocks and not memory.waits


def test_too_little_page_locked_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(numel: int, dtype: torch.dtype) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory\nmore lines")

    monkeypatch.setattr("megatron.checkpoint.store.pinned_zeros", refuse)
    with pytest.raises(CheckpointError, match="async_save: 64 bytes") as caught:
        Snapshots().stage([whole("t", torch.zeros(5))])
    assert "out of memory" in str(caught.value) and "\n" not in str(caught.value)


def test_too_little_host_memory_is_told() -> None:
    huge = torch.zeros(1).expand(2**60)
    with pytest.raises(
        CheckpointError, match=f"async_save: {2**62} bytes of host memory"
    ) as caught:
        Snapshots().take([whole("t", huge)])
    assert "\n" not in str(caught.value)


def saver_of(trainer: Any) -> Checkpointer:
    assert isinstance(trainer.saver, Checkpointer)
    return trainer.saver


class LateFiles(Files):
    """A disk on which a save begins when the next step is long under way."""

    def mkdir(self, path: Path, mode: int = 0o750) -> None:
        time.sleep(0.4)
        super().mkdir(path, mode)


def on_rank_late(groups: ProcessGroups, run_dir: Path) -> None:
    trainer = make_trainer(groups, f"{FLAGS} --async-save", run_dir)
    saver_of(trainer).files = LateFiles()
    trainer.train()
    trainer.engine.detach()
    trainer.metrics.close()
    groups.world.barrier()


@pytest.mark.parametrize("world", [1, 2])
def test_the_same_bytes_as_a_save_that_is_waited_for(
    ranks: Ranks, tmp_path: Path, world: int
) -> None:
    ranks.run(world, train, FLAGS, tmp_path / "sync")
    ranks.run(world, on_rank_late, tmp_path / "async")
    folders = [tree(tmp_path / name / "checkpoints") for name in ("sync", "async")]
    assert folders[0] == folders[1]
    assert len(folders[0]) == 1 + 3 * (world + 1)
    log = (tmp_path / "async" / "log.txt").read_text()
    assert log.count("saved checkpoint") == 3 and log.count("copied in") == 2


class SlowFiles(Files):
    """A disk that takes its time."""

    def fsync(self, descriptor: int) -> None:
        time.sleep(0.1)


class HeldFiles(Files):
    """A disk on which fsync returns only after `release`; `most` calls were in it at once."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.waiting = 0
        self.most = 0

    def fsync(self, descriptor: int) -> None:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        assert self.release.wait(LIMIT / 2), "nothing releases the disk"
        self.waiting -= 1


class ReleasingBackground(Background[Any]):
    """A thread for saves that releases the disk when somebody waits for the thread."""

    def __init__(self, files: HeldFiles, events: list[str]) -> None:
        super().__init__()
        self.files, self.events = files, events

    def start(self, work: Callable[[], Any]) -> None:
        self.events.append("save begins")
        super().start(work)

    def take(self) -> Any:
        self.events.append("ended" if self.finished else "wait")
        self.files.release.set()
        written = super().take()
        self.events.append(f"step {written.iteration} is written")
        return written


def on_rank_held(groups: ProcessGroups, run_dir: Path) -> tuple[list[str], int]:
    """Return the order of steps and saves on a disk that writes only once a save waits for it."""
    trainer = make_trainer(groups, f"{FLAGS} --async-save", run_dir)
    saver, files, events = saver_of(trainer), HeldFiles(), list[str]()
    saver.files, saver._background = files, ReleasingBackground(files, events)
    for _ in range(2):
        trainer.train_step()
        events.append(f"step {trainer.progress.iteration}")
        saver.save(trainer.progress, wait=False)
        if not files.release.is_set():
            saver.settle()  # a look between steps, which does not wait for the save
    saver.settle(wait=True)
    trainer.engine.detach()
    trainer.metrics.close()
    return events, files.most


@pytest.mark.parametrize("world", [1, 2])
def test_training_goes_on_and_the_next_save_waits(ranks: Ranks, tmp_path: Path, world: int) -> None:
    for events, most in ranks.run(world, on_rank_held, tmp_path):
        first = ["step 1", "save begins", "step 2", "wait", "step 1 is written"]
        assert events[:6] == [*first, "save begins"], "step 2 came while the disk was held"
        assert events[-1] == "step 2 is written" and most == 1
    steps = sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*"))
    assert steps == ["step_00000001", "step_00000002"]


def on_rank_nan(groups: ProcessGroups, run_dir: Path) -> int:
    """Step 2 is still being saved when the numbers of step 3 turn out wrong."""
    trainer = make_trainer(groups, f"{FLAGS} --async-save --max-skipped-steps 1", run_dir)
    saver_of(trainer).files = SlowFiles()
    scatter = trainer.optimizer.finish_load

    def save(progress: Any, *, wait: bool) -> None:
        Checkpointer.save(saver_of(trainer), progress, wait=wait)
        trainer.optimizer.states[0].master.fill_(float("nan"))
        scatter()

    trainer.saver.save = save
    with pytest.raises(NumericsError):
        trainer.train()
    trainer.engine.detach()
    trainer.metrics.close()
    return trainer.progress.iteration


@pytest.mark.parametrize("world", [1, 2])
def test_a_save_is_finished_though_the_numbers_went_wrong(
    ranks: Ranks, tmp_path: Path, world: int
) -> None:
    assert ranks.run(world, on_rank_nan, tmp_path) == [3] * world
    found = find_checkpoint(tmp_path, log=print)
    assert found is not None and found.name == "step_00000002"


class FullFiles(Files):
    def write(self, descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def on_rank_full(groups: ProcessGroups, run_dir: Path, rank: int) -> tuple[int, str]:
    trainer = make_trainer(groups, f"{FLAGS} --async-save --train-iters 9", run_dir)
    saver = saver_of(trainer)
    if groups.world.rank == rank:
        saver.files = FullFiles()
    with pytest.raises(CheckpointError) as caught:
        trainer.train()
    trainer.engine.detach()
    trainer.metrics.close()
    return trainer.progress.iteration, str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_on_one_rank_is_raised_on_all_at_one_step(
    ranks: Ranks, tmp_path: Path, rank: int
) -> None:
    results = ranks.run(2, on_rank_full, tmp_path, rank)
    (iteration, text), other = results
    assert other == (iteration, text)
    assert 3 <= iteration <= 4, "saved after step 2, told before the save after step 4 began"
    assert f"on rank {rank}" in text and "No space left" in text
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == []


def on_rank_without_memory(groups: ProcessGroups, run_dir: Path) -> str:
    trainer = make_trainer(groups, f"{FLAGS} --async-save", run_dir)

    class NoMemory(Snapshots):
        def take(self, shards: object) -> list[Any]:
            raise CheckpointError("no memory")

    if groups.world.rank == 1:
        saver_of(trainer)._snapshots = NoMemory()
    with pytest.raises(CheckpointError) as caught:
        trainer.train()
    trainer.engine.detach()
    trainer.metrics.close()
    return str(caught.value)


def test_a_rank_without_memory_for_its_copies_stops_all(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, on_rank_without_memory, tmp_path) == ["no memory"] * 2


def test_older_ones_make_room_while_it_trains(ranks: Ranks, tmp_path: Path) -> None:
    for extra in ("", " --async-save"):
        folder = tmp_path / f"run{extra.strip()}"
        flags = f"{TINY} --save-interval 1 --keep-last 3{extra}"
        ranks.run(2, train, flags, folder)
        steps = sorted(path.name for path in (folder / "checkpoints").glob("step_*"))
        assert steps == ["step_00000006", "step_00000007", "step_00000008"]
        assert "removed older checkpoints: step_00000005" in (folder / "log.txt").read_text()


def test_retained_steps_stay_while_it_trains(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, train, f"{TINY} --save-interval 1 --save-retain-interval 3", tmp_path)
    steps = sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*"))
    followed = "step_00000007"  # the newest after which a step was finite
    assert steps == ["step_00000003", "step_00000006", followed, "step_00000008"]
