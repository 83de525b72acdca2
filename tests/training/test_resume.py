"""Tests that a resumed run equals the uninterrupted run bit by bit, wherever it left."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.data.indexed_dataset import IndexedDatasetWriter
from megatron.data.sidecar import write_sidecar
from megatron.errors import CheckpointError
from megatron.parallel.groups import ProcessGroups
from tests.ranks import Ranks
from tests.training.harness import NO_DROPOUT, TINY, make_trainer, metrics_of, train

pytestmark = pytest.mark.push

LENGTH, BATCH = 32, 16
EPOCH_STEPS = 3
"""Steps that one epoch lasts: 48 samples."""

LEAVES = (1, 2, 5, 9)
"""Steps to leave after.

After the first step and inside LR warm-up (1, 2), in the middle of an epoch (5), and at the start
of the last epoch, which is shuffled separately (9).
"""
WARM_UP = "--train-iters 11 --lr-decay-style cosine --lr-warmup-iters 4 --eval-interval 4"
RAMP_UP = "--train-samples 152 --lr-warmup-samples 40 --rampup-batch-size 8 8 64"
"""Steps of 8 samples up to sample 64, then of 16: step 4 is inside, step 8 at the edge."""
RECORDED = ("lm_loss", "lr", "grad_norm", "loss_scale", "skipped", "iteration", "valid_loss")


def write_data(prefix: Path, *, seed: int = 0) -> Path:
    """Write a data set of exactly `EPOCH_STEPS` global batches an epoch."""
    generator = torch.Generator().manual_seed(seed)
    writer = IndexedDatasetWriter(prefix, np.uint16)
    left = EPOCH_STEPS * BATCH * LENGTH
    while left:
        length = min(left, int(torch.randint(10, 90, (), generator=generator)))
        body = torch.randint(1, 96, (length - 1,), generator=generator).tolist()
        writer.add_document([np.array([*body, 0], dtype=np.uint16)])
        left -= length
    writer.close()
    description = {"type": "x", "vocab_size": 96, "eod": 0, "fingerprint": "f", "files": {}}
    write_sidecar(prefix, description)
    return prefix


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "text_document")


def flags_of(text: Path, *more: str) -> str:
    """Return flags of the tiny run on that data set; later flags override earlier ones."""
    data = f"--train-data-path {text} --valid-data-path {text}"
    return " ".join([TINY.replace("--mock-data --vocab-size 96", data), *more])


def differing(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Return the names of the tensors and values that differ at the end of two runs."""
    found = [key for key in first.keys() - {"state", "params"} if first[key] != second[key]]
    for kind in ("state", "params"):
        assert first[kind].keys() == second[kind].keys()
        pairs = ((name, first[kind][name], second[kind][name]) for name in first[kind])
        found += [name for name, a, b in pairs if a.dtype != b.dtype or not torch.equal(a, b)]
    return found


def check_left_and_resumed(
    ranks: Ranks,
    world: int,
    flags: str,
    leaves: tuple[int, ...],
    folder: Path,
    run: Callable[..., dict[str, Any]] = train,
    *more: Any,
) -> None:
    """Compare an uninterrupted run with a run that leaves after each step of `leaves`.

    Each rank calls `run(groups, flags, run_dir, *more)`.
    """
    through = ranks.run(world, run, flags, folder / "through", *more)
    for step in leaves:
        left = ranks.run(world, run, f"{flags} --exit-interval {step}", folder / "left", *more)
        assert [r["outcome"] for r in left] == [(0, "exit-interval")] * world
        assert left[0]["iteration"] == step
    resumed = ranks.run(world, run, flags, folder / "left", *more)
    for first, second in zip(through, resumed, strict=True):
        assert differing(first, second) == []
    for key in RECORDED:
        values = metrics_of(folder / "left", key)
        assert values == metrics_of(folder / "through", key) and values, key


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("precision", ["", "--bf16"], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("schedule", "leaves"), [(WARM_UP, LEAVES), (RAMP_UP, (4, 8))], ids=["warm-up", "ramp-up"]
)
def test_left_and_resumed_is_uninterrupted(
    ranks: Ranks,
    tmp_path: Path,
    text: Path,
    world: int,
    precision: str,
    schedule: str,
    leaves: tuple[int, ...],
) -> None:
    """Dropout is on."""
    flags = flags_of(text, schedule, precision)
    if schedule == RAMP_UP:
        flags = flags.replace("--train-iters 8", "")
    check_left_and_resumed(ranks, world, flags, leaves, tmp_path)


@pytest.mark.parametrize("world", [1, 2])
def test_the_loss_scaler_goes_on_where_it_was(
    ranks: Ranks, tmp_path: Path, text: Path, world: int
) -> None:
    """The run leaves between two overflows, with hysteresis half used, in a growth window."""
    scaler = "--initial-loss-scale 8388608 --hysteresis 2 --loss-scale-window 2"
    flags = flags_of(text, WARM_UP, "--fp16", scaler)
    check_left_and_resumed(ranks, world, flags, (1, 2, 7), tmp_path)
    skipped = metrics_of(tmp_path / "through", "skipped")
    assert skipped[0] and skipped[1] and not all(skipped)
    scales = metrics_of(tmp_path / "through", "loss_scale")
    moves = {b / a for a, b in zip(scales, scales[1:], strict=False)}
    assert scales[0] == scales[1] and moves == {0.5, 1, 2}


def test_what_async_save_left_resumes_as_exactly(ranks: Ranks, tmp_path: Path, text: Path) -> None:
    flags = flags_of(text, WARM_UP, "--bf16 --async-save --save-interval 2 --keep-last 2")
    check_left_and_resumed(ranks, 2, flags, (5,), tmp_path)


def restored(groups: ProcessGroups, flags: str, run_dir: Path) -> dict[str, torch.Tensor]:
    """Return the state with which a run starts."""
    trainer = make_trainer(groups, flags, run_dir)
    state = {f"{kind}/{name}": t.clone() for kind, name, t in trainer.optimizer.tensors()}
    trainer.engine.detach()
    trainer.metrics.close()
    return state


@pytest.mark.parametrize("world", [1, 2, 4])
def test_another_number_of_ranks_takes_over(
    ranks: Ranks, tmp_path: Path, text: Path, world: int
) -> None:
    flags = flags_of(text, NO_DROPOUT, WARM_UP)
    left = ranks.run(world, train, f"{flags} --exit-interval 5", tmp_path / "left")[0]
    for other in {1, 2, 4} - {world}:
        shutil.copytree(tmp_path / "left", tmp_path / str(other))
        for state in ranks.run(other, restored, flags, tmp_path / str(other)):
            for name, tensor in left["state"].items():
                # Padding at the end of a bucket may differ; it is not part of any tensor.
                assert torch.equal(state[name], tensor), name
        ranks.run(other, train, flags, tmp_path / str(other))
    ranks.run(world, train, flags, tmp_path / "left")
    expected = metrics_of(tmp_path / "left")
    for other in {1, 2, 4} - {world}:
        assert metrics_of(tmp_path / str(other)) == pytest.approx(expected, rel=0, abs=1e-6)


def on_rank_refused(groups: ProcessGroups, flags: str, run_dir: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        make_trainer(groups, flags, run_dir)
    return str(caught.value)


def test_another_data_set_is_refused_by_key(ranks: Ranks, tmp_path: Path, text: Path) -> None:
    ranks.run(2, train, flags_of(text, "--train-iters 2"), tmp_path / "run")
    other = write_data(tmp_path / "other_document", seed=1)
    for said in ranks.run(2, on_rank_refused, flags_of(other), tmp_path / "run"):
        assert f"data.train_data_path: ['{text}'] there, ['{other}'] here" in said
        assert "data.valid_data_path" in said and "model" not in said
    (said,) = ranks.run(1, on_rank_refused, flags_of(text, "--eod-mask-loss"), tmp_path / "run")
    assert "data.eod_mask_loss: False there, True here" in said
    (said,) = ranks.run(1, on_rank_refused, flags_of(text, "--swiglu"), tmp_path / "run")
    assert "model.swiglu: False there, True here" in said


def rewrite_with_other_text(prefix: Path) -> str:
    """Write other documents under the old name; return the file that must be named."""
    write_data(prefix, seed=1)
    return f"{prefix}.idx: other contents"


def touch(prefix: Path) -> str:
    """Change a byte of the data file so that only its modification time shows the change."""
    path = prefix.with_name(f"{prefix.name}.bin")
    tokens = bytearray(path.read_bytes())
    tokens[100] ^= 1
    path.write_bytes(tokens)
    os.utime(path, (1.0e9, 1.0e9))
    return f"{path}: written "


@pytest.mark.parametrize("change", [rewrite_with_other_text, touch])
@pytest.mark.parametrize("world", [1, 2])
def test_data_that_changed_is_refused_by_name_unless_accepted(
    ranks: Ranks, tmp_path: Path, change: Any, world: int
) -> None:
    prefix = write_data(tmp_path / "text_document")
    flags = flags_of(prefix)
    ranks.run(world, train, f"{flags} --train-iters 2", tmp_path / "run")
    named = change(prefix)
    for said in ranks.run(world, on_rank_refused, flags, tmp_path / "run"):
        assert named in said and "--accept-new-data" in said and "step_00000002" in said
    accepted = ranks.run(world, train, f"{flags} --accept-new-data", tmp_path / "run")
    assert accepted[0]["iteration"] == 8
    assert "data changed since step_00000002" in (tmp_path / "run" / "log.txt").read_text()
    again = ranks.run(world, train, f"{flags} --train-iters 9", tmp_path / "run")
    assert again[0]["iteration"] == 9


@pytest.mark.parametrize(("longer", "told"), [(2, False), (60, True)])
def test_a_longer_run_that_reads_in_another_order_says_so(
    ranks: Ranks, tmp_path: Path, longer: int, told: bool
) -> None:
    flags = flags_of(write_data(tmp_path / "text_document"))
    ranks.run(1, train, f"{flags} --train-iters 1", tmp_path / "run")
    # Three steps read more than one epoch.
    ranks.run(1, train, f"{flags} --train-iters {longer}", tmp_path / "run")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert ("samples are not those that were read" in log) == told


def forget_test_loss(run_dir: Path) -> None:
    """Remove the test loss from the metrics, as after a crash following the last save."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(x for x in lines if "test_loss" not in x))


@pytest.mark.parametrize("world", [1, 2])
def test_a_test_loss_that_a_crash_lost_is_made_up_for(
    ranks: Ranks, tmp_path: Path, world: int
) -> None:
    first = ranks.run(world, train, TINY, tmp_path)
    (loss,) = metrics_of(tmp_path, "test_loss")
    forget_test_loss(tmp_path)
    again = ranks.run(world, train, TINY, tmp_path)
    assert metrics_of(tmp_path, "test_loss") == [loss]
    assert [r["outcome"] for r in again] == [(0, None)] * world
    assert differing(first[0], again[0]) == []
    ranks.run(world, train, TINY, tmp_path)
    assert metrics_of(tmp_path, "test_loss") == [loss], "known: not evaluated again"
    ranks.run(world, train, f"{TINY} --train-iters 10", tmp_path)
    assert len(metrics_of(tmp_path, "test_loss")) == 2, "another end, another loss"


@pytest.mark.parametrize(
    ("decay", "before", "after"), [("", "1.96e-03", "2.93e-03"), ("--lr-decay-iters 20", "", "")]
)
def test_a_learning_rate_that_jumps_is_told(
    ranks: Ranks, tmp_path: Path, decay: str, before: str, after: str
) -> None:
    """The change of the number of steps moves the learning rate if the decay depends on it."""
    flags = f"{TINY} --lr-decay-style cosine {decay} --train-iters"
    ranks.run(1, train, f"{flags} 10 --exit-interval 4", tmp_path)
    ranks.run(1, train, f"{flags} 40 --exit-interval 6", tmp_path)
    log = (tmp_path / "log.txt").read_text()
    assert "training.train_iters: 10 in the checkpoint, 40 from here on" in log
    told = re.search(r"learning rate at step 5: (\S+) by \D+, (\S+) from here on(.*)", log)
    if not decay:
        assert told is not None and "--lr-decay-iters" in told[3]
        assert float(told[2]) == pytest.approx(metrics_of(tmp_path, "lr")[4], rel=1e-2)
    assert (told[1], told[2]) == (before, after) if told else not before


def test_steps_of_the_learning_rate_are_no_change(ranks: Ranks, tmp_path: Path) -> None:
    """A checkpoint has lists where the configuration has tuples."""
    flags = f"{TINY} --lr-decay-style multi-step --lr-multi-step-iters 3 5"
    flags += " --lr-multi-step-factors 0.5 0.1 --exit-interval 4"
    for _ in range(2):
        ranks.run(1, train, flags, tmp_path)
    assert metrics_of(tmp_path, "lr")[-1] == pytest.approx(3e-4)
    assert "in the checkpoint" not in (tmp_path / "log.txt").read_text()
