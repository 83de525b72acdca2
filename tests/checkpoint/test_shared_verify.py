"""Ranks share the hashing of a checkpoint, and none waits in a collective while another hashes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import CheckpointRanks, QuickFiles

from megatron.checkpoint import shared_verify, verify
from megatron.checkpoint.find import Keeper, find_checkpoint, locate_checkpoint
from megatron.checkpoint.format import NewerFormat
from megatron.checkpoint.shared_verify import SharedVerification
from megatron.checkpoint.store import LocalShard, save_checkpoint
from megatron.checkpoint.verify import verify_folder
from megatron.config import parse
from megatron.errors import CheckpointError
from megatron.launch import Launch, Runtime
from megatron.parallel.groups import ProcessGroups
from megatron.pretrain import open_run
from pretrain_gpt import GRADIENT_PATHS
from tests.limits import LIMIT
from tests.ranks import Ranks
from tests.training.harness import TINY, make_trainer

WORLD = 3
QUICK = QuickFiles()


def save(directory: Path, step: int) -> Path:
    """Save a checkpoint with a file of each rank."""
    ranks = CheckpointRanks(WORLD)

    def write(rank: int, gather: Any) -> Path:
        tensor = torch.full((2,), float(step))
        shard = LocalShard("t", tensor, (2 * WORLD,), (2 * rank,), (2 * rank + 2,))
        return save_checkpoint(
            directory,
            step=step,
            tensors=[shard],
            state={},
            rank=rank,
            world=WORLD,
            gather=gather,
            files=QUICK,
        )

    return ranks.run(write)[0]


def shared(work: Callable[[SharedVerification], Any], world: int = WORLD) -> list[Any]:
    """Return the result or error of each rank while rank 0 does `work`."""

    def act(rank: int, gather: Any) -> Any:
        verification = SharedVerification(rank, gather, QUICK)
        return verification.lead(lambda: work(verification))

    return CheckpointRanks(world).run(act)


def damage(folder: Path, rank: int) -> None:
    path = folder / f"rank_{rank:05d}.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that receives the name of each file that is hashed."""
    names: list[str] = []
    check = verify._check_hash

    def count(path: Path, *rest: Any) -> None:
        names.append(path.name)
        check(path, *rest)

    monkeypatch.setattr(verify, "_check_hash", count)
    return names


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_all_ranks_together_hash_each_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    path, names = save(tmp_path, 1), counted(monkeypatch)
    found = shared(lambda ranks: ranks.verify(path), world)
    assert found == [verify_folder(path, hashes=False), *[None] * (world - 1)]
    assert sorted(names) == [f"rank_{rank:05d}.safetensors" for rank in range(WORLD)]


@pytest.mark.parametrize("rank", range(WORLD))
def test_damage_in_the_share_of_any_rank_is_found(tmp_path: Path, rank: int) -> None:
    path = save(tmp_path, 1)
    damage(path, rank)
    found = shared(lambda ranks: ranks.verify(path))
    assert isinstance(found[0], CheckpointError) and found[1:] == [None, None]
    assert f"rank_{rank:05d}.safetensors: damaged" in str(found[0])


def test_an_error_of_another_kind_reaches_rank_0_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, 1)

    def lack_memory(file: Path, *rest: Any) -> None:
        if file.name == "rank_00001.safetensors":
            raise MemoryError("no room")

    monkeypatch.setattr(verify, "_check_hash", lack_memory)
    found = shared(lambda ranks: ranks.verify(path))
    assert str(found[0]) == "MemoryError: no room" and found[1:] == [None, None]


def test_rank_0_goes_on_to_an_older_one(tmp_path: Path) -> None:
    older, newer, said = save(tmp_path, 1), save(tmp_path, 2), []
    damage(newer, 1)
    found = shared(
        lambda ranks: find_checkpoint(tmp_path, log=said.append, repair=True, verify=ranks.verify)
    )
    assert found == [older, None, None]
    assert (tmp_path / "step_00000002.damaged-1").is_dir() and "rank_00001" in said[0]


def test_a_newer_format_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 1)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise NewerFormat("newer")

    monkeypatch.setattr(verify, "read_manifest", refuse)
    found = shared(
        lambda ranks: find_checkpoint(
            tmp_path, log=lambda text: None, repair=True, verify=ranks.verify
        )
    )
    assert isinstance(found[0], NewerFormat) and path.is_dir()


def test_an_older_one_goes_only_once_all_ranks_have_read_the_newer(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    damage(tmp_path / "step_00000003", 2)
    said: list[str] = []

    def prune(ranks: SharedVerification) -> list[Path]:
        keeper = Keeper(directory=tmp_path, count=2, log=said.append, verify=ranks.verify)
        return keeper.prune()

    assert shared(prune)[0] == [] and "rank_00002" in said[0]
    save(tmp_path, 4)
    assert [path.name for path in shared(prune)[0]] == ["step_00000001"]


@pytest.mark.parametrize("slow", [0, 1])
def test_no_collective_waits_for_a_rank_that_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: int
) -> None:
    path, asked, often = save(tmp_path, 1), [], threading.Event()
    check = verify._check_hash

    def check_slowly(file: Path, *rest: Any) -> None:
        if file.name == f"rank_{slow:05d}.safetensors":
            assert often.wait(LIMIT), "the ranks wait for this one instead of asking again"
        check(file, *rest)

    monkeypatch.setattr(verify, "_check_hash", check_slowly)
    monkeypatch.setattr(shared_verify, "ASKING_SECONDS", 0.02)

    def act(rank: int, gather: Any) -> Any:
        def counted(text: str) -> list[str]:
            texts = gather(text)
            asked.append(rank)
            if asked.count(rank) > 5:
                often.set()
            return texts

        verification = SharedVerification(rank, counted, QUICK)
        return verification.lead(lambda: verification.verify(path))

    assert CheckpointRanks(WORLD).run(act)[0].step == 1 and often.is_set()


def on_rank_counts(groups: ProcessGroups, flags: str, run_dir: Path) -> list[list[str]]:
    """Return the names that this rank hashes at each save of a run, and at its next start."""
    with pytest.MonkeyPatch.context() as patch:
        names = counted(patch)
        trainer = make_trainer(groups, flags, run_dir)
        counts = []
        for _ in range(2):
            trainer.train_step()
            trainer.saver.save(trainer.progress, wait=True)
            counts.append(names.copy())
            names.clear()
        trainer.engine.detach()
        trainer.metrics.close()
        rank, size = groups.world.rank, groups.world.size
        launch = Launch(
            launcher="test", rank=rank, world_size=size, local_rank=rank, local_world_size=size
        )
        runtime = Runtime(launch=launch, device=torch.device("cpu"), backend="gloo")
        config = parse(flags.split(), paths=GRADIENT_PATHS)
        origin, heartbeat = open_run(
            config, runtime, groups, run_dir, "again", log=lambda text: None
        )
        heartbeat.close()
        assert origin is not None and origin.path.name == "step_00000002"
        return [*counts, names]


@pytest.mark.parametrize("more", ["", "--async-save"])
def test_a_run_shares_what_it_hashes(ranks: Ranks, tmp_path: Path, more: str) -> None:
    flags = f"{TINY} --save-interval 1 --keep-last 2 {more}"
    for rank, counts in enumerate(ranks.run(2, on_rank_counts, flags, tmp_path)):
        assert [len(names) for names in counts] == [1, 1, 1], (rank, counts)
        assert counts[0] == counts[1] == counts[2]


def test_the_step_that_is_asked_for_is_hashed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "checkpoints", 1)
    names = counted(monkeypatch)
    flags = f"{TINY} --load {tmp_path} --ckpt-step 1 --run-dir {tmp_path}"
    config = parse(flags.split(), paths=GRADIENT_PATHS)
    found = locate_checkpoint(config, tmp_path, log=lambda text: None)
    assert found is not None and found.own and len(names) == WORLD
