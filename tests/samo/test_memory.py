"""Tests of the bytes of a model's tensors, and of the number of dense gradients at a time.

The model state takes 18 f + 2 bytes a parameter, never above the paper's 24 f + 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.data_parallel.bucket import ALIGNMENT
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from megatron.training import Trainer
from samo.memory import memory_note, paper_bytes, state_bytes
from tests.training.harness import NO_DROPOUT, make_trainer
from tools.bench.common.tensors import storages
from tools.bench.samo_memory.model_state import ModelState, count, watch_gradients

pytestmark = pytest.mark.push

# 500 tokens are padded to 512 rows; no activation (2 * 40 tokens) has the shape of a weight. No
# batch is read ahead, as its tensors would be counted.
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 40 --mock-data "
    f"--vocab-size 500 --micro-batch-size 2 --train-iters 100 --lr 3e-3 --bf16 {NO_DROPOUT} "
    "--prefetch-batches false"
)
PADDING = 12 * 64
SMALL = 1024
"""Bytes of other small tensors of a step: a counter, a seed."""

Build = Callable[[str], Trainer]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    """Return a function that builds the trainer for flags in addition to `FLAGS`."""
    built: list[Trainer] = []

    def build(flags: str) -> Trainer:
        groups = ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=1), rank=0)
        built.append(make_trainer(groups, f"{FLAGS} {flags}", tmp_path / str(len(built))))
        return built[-1]

    yield build
    for trainer in built:
        trainer.metrics.close()


def _samo(sparsity: str) -> str:
    return f"--grad-path samo --samo-sparsity {sparsity} --samo-pruning random"


def _counted(build: Build, flags: str) -> tuple[ModelState, int]:
    """Return the model state after two steps, and the number of parameters."""
    before = storages()
    trainer = build(flags)
    for _ in range(2):
        trainer.train_step()
    return count(trainer.optimizer, before), len(trainer.engine.infos)


@pytest.mark.turns
@pytest.mark.parametrize("grad_bytes", [2, 4])
@pytest.mark.parametrize("sparsity", ["0", "0.25", "0.5", "0.8", "0.9", "0.95"])
def test_tensors_of_a_run_are_as_many_bytes_as_are_promised(
    sparsity: str, grad_bytes: int, build: Build
) -> None:
    how = "--grad-reduce-in-bf16" if grad_bytes == 2 else ""
    state, tensors = _counted(build, f"{_samo(sparsity)} {how}")
    entries, stored, found = state.entries, state.stored, dict(state.bytes)
    wanted = state_bytes(
        entries, stored, index=4 * state.indexed, param_bytes=2, grad_bytes=grad_bytes
    )
    assert found["index"] == wanted["index"]
    assert found["parameters"] == wanted["parameters"] + 2 * PADDING
    # Each tensor's slice of a bucket begins at a multiple of 64; a tensor that is stored whole
    # includes its padding.
    gaps = ALIGNMENT * tensors + (PADDING if sparsity == "0" else 0)
    for kind, name, each in (
        ("gradients", "gradients", grad_bytes),
        ("master", "master weights", 4),
    ):
        assert wanted[name] <= found[kind] <= wanted[name] + each * gaps
    assert found["moments"] == 2 * found["master"]
    assert 0 <= found["other"] < SMALL
    # In a model this small, the optimizer's scratch is as long as a bucket.
    kept = sum(found.values()) - found["scratch"]
    assert kept < paper_bytes(entries, stored)
    within = SMALL + (grad_bytes + 12) * gaps + 2 * PADDING
    assert kept <= (grad_bytes + 16) * stored + 2 * entries + within


def test_the_log_names_the_papers_count_of_the_optimizer() -> None:
    kinds = {"parameters": 2000, "index": 400}
    adam = memory_note(kinds, 1000, 100, beside_paper=True)
    assert adam.endswith("(parameters 2.00, index 0.40); the paper's 24 f + 2 is 4.40")
    sgd = memory_note(kinds, 1000, 100, beside_paper=True, moments=1)
    assert sgd.endswith("the paper's 20 f + 2 is 4.00")
    assert "paper" not in memory_note(kinds, 1000, 100, beside_paper=False)


def test_without_masks_as_much_is_kept_as_by_the_dense_path(build: Build) -> None:
    dense, _ = _counted(build, "--grad-path dense")
    samo, _ = _counted(build, _samo("0"))
    assert samo == dense and dense.f == 1.0


def _see(trainer: Trainer, called: Callable[[torch.Tensor], None]) -> None:
    """Call `called` with each dense gradient that the layout gets, before its compression."""
    for verb in ("gather", "gather_add"):
        store: Callable[..., None] = getattr(trainer.engine.layout, verb)

        def seen(
            name: str, dense: torch.Tensor, out: torch.Tensor, store: Callable[..., None] = store
        ) -> None:
            called(dense)
            store(name, dense, out)

        setattr(trainer.engine.layout, verb, seen)


@pytest.mark.parametrize("how", ["", "--grad-reduce-in-bf16", "--recompute-granularity full"])
def test_a_dense_gradient_is_gone_before_the_next_is_handed_over(how: str, build: Build) -> None:
    """A tied embedding has two gradients, and each microbatch makes both again."""
    trainer = build(f"{_samo('0.9')} --global-batch-size 4 {how}")
    earlier: list[StorageWeakRef] = []
    left: list[int] = []

    def called(dense: torch.Tensor) -> None:
        left.append(sum(not gradient.expired() for gradient in earlier))
        earlier.append(StorageWeakRef(dense.untyped_storage()))

    _see(trainer, called)
    trainer.train_step()
    leaves = sum(len(info.leaves) for info in trainer.engine.infos.values())
    assert len(left) == 2 * leaves and set(left) == {0}


def _leaves_of_matrices(trainer: Trainer) -> int:
    return sum(len(i.leaves) for i in trainer.engine.infos.values() if i.param.dim() > 1)


def test_at_most_one_dense_gradient_is_alive_during_backward(build: Build) -> None:
    trainer = build(f"{_samo('0.9')} --global-batch-size 4")
    watch = watch_gradients(trainer)
    trainer.train_step()
    assert watch.seen >= 2 * _leaves_of_matrices(trainer) and watch.most == 1


def test_gradients_that_are_kept_are_seen(build: Build) -> None:
    """The tests above fail if gradients are kept."""
    trainer = build(_samo("0.9"))
    kept: list[torch.Tensor] = []
    _see(trainer, kept.append)
    watch = watch_gradients(trainer)
    trainer.train_step()
    assert watch.most >= _leaves_of_matrices(trainer)
