"""Tests that a run which reads ahead is, bit by bit, the run that reads between its steps."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.store import Checkpoint
from megatron.data.data_loader import BatchReader, DeviceMicrobatch
from megatron.errors import DataError
from megatron.parallel.groups import ProcessGroups
from tests.data.counting import prefetch_threads, threads_left
from tests.ranks import Ranks
from tests.tasks.toy import TOY, TOY_TASK
from tests.training.harness import make_trainer, metrics_of, train
from tests.training.test_resume import RAMP_UP, RECORDED, differing, flags_of, write_data

pytestmark = pytest.mark.push

OFF = "--prefetch-batches false"
LEFT = 5
"""Step to leave after, with the batch of the next step read: inside an epoch, past the ramp-up."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "text_document")


def saved(run_dir: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the progress and the tensors of the newest checkpoint."""
    found = find_checkpoint(run_dir / "checkpoints", log=lambda text: None)
    assert found is not None
    with Checkpoint.open(found) as step:
        return step.state["progress"], {name: step.read(name) for name in step.names()}


def assert_equal_checkpoints(first: Path, second: Path) -> None:
    (progress, tensors), (wanted, others) = saved(first), saved(second)
    assert progress == wanted and tensors.keys() == others.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], others[name])] == []


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2])
def test_a_run_is_the_same_also_left_and_resumed(
    ranks: Ranks, tmp_path: Path, text: Path, world: int
) -> None:
    """Epochs end, the batch grows, evaluations come between, and the run leaves and resumes."""
    flags = flags_of(text, RAMP_UP, "--eval-interval 3").replace("--train-iters 8", "")
    ends = {}
    for name, more in (("off", OFF), ("on", "")):
        leaving = f"{flags} {more} --exit-interval {LEFT}"
        left = ranks.run(world, train, leaving, tmp_path / name)
        assert {run["iteration"] for run in left} == {LEFT}
        ends[name, "left"] = left
    assert_equal_checkpoints(tmp_path / "on", tmp_path / "off")
    for name, more in (("off", OFF), ("on", "")):
        ends[name, "done"] = ranks.run(world, train, f"{flags} {more}", tmp_path / name)
    for when in ("left", "done"):
        for first, second in zip(ends["on", when], ends["off", when], strict=True):
            assert differing(first, second) == []
    assert_equal_checkpoints(tmp_path / "on", tmp_path / "off")
    for key in RECORDED:
        values = metrics_of(tmp_path / "on", key)
        assert values == metrics_of(tmp_path / "off", key) and values, key


def test_a_run_with_a_skipped_step_is_the_same(ranks: Ranks, tmp_path: Path) -> None:
    """Another task than GPT; its skipped step consumes a batch, as every step does."""
    flags = f"{TOY} --poisoned-image 40"
    on = ranks.run(2, train, flags, tmp_path / "on", TOY_TASK)
    off = ranks.run(2, train, f"{flags} {OFF}", tmp_path / "off", TOY_TASK)
    for first, second in zip(on, off, strict=True):
        first["buffers"], second["buffers"] = (
            {name: tensor.tolist() for name, tensor in each["buffers"].items()}
            for each in (first, second)
        )
        assert differing(first, second) == []
    assert sum(metrics_of(tmp_path / "on", "skipped")) == 1
    assert_equal_checkpoints(tmp_path / "on", tmp_path / "off")


# ---- errors --------------------------------------------------------------------------------------


def damage(prefix: Path) -> None:
    """Put a token that is not in the vocabulary near the end of the data."""
    path = prefix.with_name(f"{prefix.name}.bin")
    tokens = np.fromfile(path, np.uint16)
    tokens[-100] = 4321
    tokens.tofile(path)


def end_threads_of_earlier_tests() -> None:
    """Wait for the threads of trainers that earlier tests on this rank left behind, in cycles."""
    gc.collect()
    threads_left()


def train_into_error(groups: ProcessGroups, flags: str, run_dir: Path) -> dict[str, Any]:
    """Train until the data are found to be bad; return what is known then."""
    end_threads_of_earlier_tests()
    trainer = make_trainer(groups, flags, run_dir)
    with pytest.raises(DataError) as error:
        trainer.train()
    trainer.metrics.close()
    trainer.engine.detach()
    return {
        "error": str(error.value),
        "step": trainer.heartbeat.step,
        "phase": trainer.heartbeat.phase,
        "consumed": trainer.progress.consumed_samples,
        "threads": threads_left(),
    }


def train_and_watch(groups: ProcessGroups, flags: str, run_dir: Path) -> dict[str, Any]:
    """Train; return the first samples of the global batches that each thread read, in order."""
    end_threads_of_earlier_tests()
    trainer = make_trainer(groups, flags, run_dir)
    read, found = BatchReader.read, {"main": list[int](), "prefetch": list[int]()}

    def noted(self: BatchReader, first_sample: int, size: int) -> Iterator[DeviceMicrobatch]:
        ahead = threading.current_thread() in prefetch_threads()
        found["prefetch" if ahead else "main"].append(first_sample)
        return read(self, first_sample, size)

    with mock.patch.object(BatchReader, "read", noted):
        trainer.train()
    trainer.metrics.close()
    trainer.engine.detach()
    return found | {"threads": threads_left()}


def test_bad_data_are_an_error_of_the_step_that_needs_them(ranks: Ranks, tmp_path: Path) -> None:
    prefix = write_data(tmp_path / "text_document")
    damage(prefix)
    flags = f"{flags_of(prefix)} --eval-iters 0"
    (on,) = ranks.run(1, train_into_error, flags, tmp_path / "on")
    (off,) = ranks.run(1, train_into_error, f"{flags} {OFF}", tmp_path / "off")
    assert on == off
    assert "token id 4321 in document" in on["error"]
    assert on["phase"] == "data" and on["step"] > 1 and on["threads"] == 0
    assert on["consumed"] == 16 * (on["step"] - 1)
    assert metrics_of(tmp_path / "on") == metrics_of(tmp_path / "off")


STARTS = [0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128]
"""First samples of the steps of `RAMP_UP` that have whole batches, in its 152 samples."""


@pytest.mark.parametrize(
    ("more", "alone", "ahead"),
    [
        ("", STARTS[:1], STARTS[1:]),
        ("--exit-interval 4", STARTS[:1], STARTS[1:5]),
        (OFF, STARTS, []),
    ],
    ids=["on", "left", "off"],
)
def test_one_thread_reads_each_batch_once_and_ends(
    ranks: Ranks, tmp_path: Path, text: Path, more: str, alone: list[int], ahead: list[int]
) -> None:
    flags = flags_of(text, RAMP_UP, "--eval-iters 0", more).replace("--train-iters 8", "")
    (found,) = ranks.run(1, train_and_watch, flags, tmp_path / "run")
    assert found == {"main": alone, "prefetch": ahead, "threads": 0}
