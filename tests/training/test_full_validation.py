"""`--full-validation` evaluates each sequence of a split once, on every grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.config import parse, resolve
from megatron.data.blended_dataset import BlendedDataset
from megatron.data.data_loader import BatchReader
from megatron.errors import ConfigError
from megatron.parallel.groups import ProcessGroups
from pretrain_gpt import GRADIENT_PATHS
from tests.data.pairs import write_pair
from tests.ranks import Ranks, grid
from tests.training.harness import make_trainer, metrics_of

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --train-iters 1 "
    "--lr 1e-3 --micro-batch-size 2 --global-batch-size 8 --attention-dropout 0 "
    "--hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 49 --full-validation"
)


@pytest.fixture
def data(tmp_path: Path) -> str:
    """Two files of validation data with 18 and 3 whole sequences, and one of training data."""
    train = write_pair(tmp_path / "train", [40] * 20)
    valid = [write_pair(tmp_path / "a", [29] * 10), write_pair(tmp_path / "b", [30, 25])]
    return f"--train-data-path {train} --valid-data-path {' '.join(valid)}"


def on_rank(groups: ProcessGroups, flags: str, pp: int, run_dir: Path) -> None:
    flags += f" --pipeline-model-parallel-size {pp}"
    trainer = make_trainer(grid(groups, pp=pp), flags, run_dir)
    trainer.train()
    trainer.metrics.close()
    trainer.engine.detach()


def on_rank_one_by_one(groups: ProcessGroups, flags: str, run_dir: Path) -> tuple[int, float]:
    """The number of sequences, and the mean of their losses, each computed alone."""
    trainer = make_trainer(groups, flags, run_dir)
    reader = trainer.readers.valid
    assert isinstance(reader, BatchReader)
    chunk: Any = trainer.stage.chunks[0]
    total, tokens = 0.0, 0
    with torch.no_grad():
        chunk.train(False)
        for text in (reader.dataset[number] for number in range(reader.samples)):
            row = torch.from_numpy(text)[None]
            # Where an end-of-document token is the input, its target does not count.
            mask = (row[:, :-1] != 49).float() if "--eod-mask-loss" in flags else None
            total += chunk.loss(row[:, :-1], row[:, 1:], mask).item()
            tokens += 16 if mask is None else int(mask.sum())
    trainer.metrics.close()
    trainer.engine.detach()
    return reader.samples, total / tokens


@pytest.mark.parametrize("masked", ["", " --eod-mask-loss"])
def test_each_sequence_counts_once_on_every_grid(
    ranks: Ranks, tmp_path: Path, data: str, masked: str
) -> None:
    flags = f"{MODEL} {data}{masked}"
    for world, pp in ((1, 1), (2, 1), (2, 2)):
        run = tmp_path / f"{world}-{pp}"
        ranks.run(world, on_rank, flags, pp, run)
        # 21 sequences in global batches of 8: the last one has three paddings.
        ((count, mean),) = ranks.run(1, on_rank_one_by_one, flags, run)
        assert count == 21
        assert metrics_of(run, "valid_loss") == [pytest.approx(mean, rel=1e-5)]


def on_rank_of_batches(groups: ProcessGroups, flags: str, run_dir: Path) -> list[tuple[bool, int]]:
    trainer = make_trainer(groups, flags, run_dir)
    reader: Any = trainer.readers.valid
    assert isinstance(reader.dataset, BlendedDataset)
    found = [(b.uneven, b.counted) for first in (8, 16) for b in reader.read(first, 8)]
    drawn = zip(reader.dataset.dataset_index, reader.dataset.sample_index, strict=True)
    assert len(set(drawn)) == len(reader.dataset) == 21
    trainer.metrics.close()
    trainer.engine.detach()
    return found


def test_a_partial_batch_is_uneven_on_every_rank(ranks: Ranks, tmp_path: Path, data: str) -> None:
    first, second = ranks.run(2, on_rank_of_batches, f"{MODEL} {data}", tmp_path / "run")
    whole, token = [(False, 32)] * 2, 16
    # Sequences 16 to 20 and three paddings: rank 0 reads 16, 17, 20 and rank 1 reads 18, 19.
    assert first == [*whole, (True, 2 * token), (True, token)]
    assert second == [*whole, (True, 2 * token), (True, 0)]


@pytest.mark.parametrize(("world", "pp"), [(1, 1), (2, 2)])
def test_each_of_several_sets_has_the_loss_that_it_has_alone(
    ranks: Ranks, tmp_path: Path, data: str, world: int, pp: int
) -> None:
    """The mean over the sets comes first, whatever their sizes."""
    ranks.run(world, on_rank, f"{MODEL} {data} --multiple-validation-sets", pp, tmp_path / "run")
    alone = []
    for name in "ab":
        other = f"{data.partition('--valid')[0]}--valid-data-path {tmp_path / name}"
        ranks.run(world, on_rank, f"{MODEL} {other}", pp, tmp_path / f"only-{name}")
        (loss,) = metrics_of(tmp_path / f"only-{name}", "valid_loss")
        assert metrics_of(tmp_path / "run", f"valid_lm_loss_{name}") == [loss]
        alone.append(loss)
    assert metrics_of(tmp_path / "run", "valid_loss") == [sum(alone) / 2]
    assert alone[0] != alone[1]


def test_weights_of_sets_that_are_evaluated_apart_are_refused(tmp_path: Path) -> None:
    flags = f"{MODEL} --train-data-path x --valid-data-path 0.5 a 0.5 b --multiple-validation-sets"
    with pytest.raises(ConfigError, match="multiple_validation_sets with weights"):
        resolve(parse(flags.split(), paths=GRADIENT_PATHS), 1)


def test_a_padding_sample_is_a_row_without_weight(tmp_path: Path) -> None:
    from megatron.data.sampler import CollateOptions, collate

    samples = [np.arange(5), np.arange(5) + 10]
    batch = collate(samples, range(1, 3), 7, CollateOptions(), partial=True)  # type: ignore[arg-type]
    assert batch.loss_mask is not None and batch.loss_mask.tolist() == [[1.0] * 4, [0.0] * 4]
    assert batch.tokens.tolist() == [[10, 11, 12, 13]] * 2 and batch.index == 7
