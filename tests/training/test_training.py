"""Tests of laws of whole runs: what must not change a result, and what must happen."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.data.indexed_dataset import IndexedDatasetWriter
from megatron.data.sidecar import write_sidecar
from megatron.errors import CheckpointError, DataError
from megatron.fault_tolerance.exit_signals import ExitRequest, ExitSignals
from megatron.parallel.groups import ProcessGroups
from megatron.training import TrainOutcome
from tests.ranks import Ranks
from tests.tiers import sampled
from tests.training.harness import NO_DROPOUT, TINY, make_trainer, metrics_of, train

pytestmark = pytest.mark.push


def losses(ranks: Ranks, world: int, flags: str, run_dir: Path) -> list[float]:
    ranks.run(world, train, flags, run_dir)
    return metrics_of(run_dir)


def equal_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


def test_loss_falls_and_every_step_is_recorded(ranks: Ranks, tmp_path: Path) -> None:
    curve = losses(ranks, 1, f"{TINY} --train-iters 40", tmp_path)
    assert metrics_of(tmp_path, "iteration")[:40] == list(range(1, 41))
    assert curve[0] == pytest.approx(math.log(96), abs=0.1)
    assert curve[-1] < 0.9 * curve[0]
    (valid,) = metrics_of(tmp_path, "valid_loss")
    (test,) = metrics_of(tmp_path, "test_loss")
    assert valid == pytest.approx(curve[-1], abs=0.5) and test == pytest.approx(valid, abs=0.5)


@pytest.mark.parametrize("flags", sampled([NO_DROPOUT, ""], [""]), ids=["no-dropout", "dropout"])
def test_data_parallel_size_changes_rounding_only(ranks: Ranks, tmp_path: Path, flags: str) -> None:
    """Dropout too: its streams belong to microbatches of the global batch, not to ranks."""
    curves = [
        losses(ranks, world, f"{TINY} {flags} --train-iters 20", tmp_path / str(world))
        for world in (1, 2, 4)
    ]
    for other in curves[1:]:
        assert other == pytest.approx(curves[0], rel=1e-4, abs=1e-4)
    norms = [metrics_of(tmp_path / str(world), "grad_norm") for world in (1, 2, 4)]
    for other in norms[1:]:
        assert other == pytest.approx(norms[0], rel=1e-4)


def test_weight_decay_and_evaluation_without_dropout(ranks: Ranks, tmp_path: Path) -> None:
    plain = f"{TINY} --weight-decay 0 {NO_DROPOUT}"
    ranks.run(1, train, plain, tmp_path / "a")
    (decayed,) = ranks.run(1, train, f"{plain} --weight-decay 1.0", tmp_path / "b")
    assert metrics_of(tmp_path / "b")[-1] != metrics_of(tmp_path / "a")[-1]
    # The weights do not move at such a rate: evaluating twice gives one loss, dropout or not.
    still = f"{TINY} --lr 1e-30 --eval-at-start --eval-interval 4 --train-iters 4"
    ranks.run(1, train, still, tmp_path / "c")
    ranks.run(1, train, f"{still} {NO_DROPOUT}", tmp_path / "d")
    with_dropout = metrics_of(tmp_path / "c", "valid_loss")
    assert with_dropout == metrics_of(tmp_path / "d", "valid_loss") and len(set(with_dropout)) == 1


def test_micro_batch_size_changes_rounding_only(ranks: Ranks, tmp_path: Path) -> None:
    curves = [
        losses(ranks, 2, f"{TINY} {NO_DROPOUT} --micro-batch-size {size}", tmp_path / str(size))
        for size in (1, 2, 8)
    ]
    for other in curves[1:]:
        assert other == pytest.approx(curves[0], abs=1e-4)


@pytest.mark.parametrize(
    "flags",
    [
        "--overlap-grad-reduce false",
        "--recompute-granularity full",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    ],
)
def test_how_a_step_is_run_changes_no_bit(ranks: Ranks, tmp_path: Path, flags: str) -> None:
    small_buckets = f"{TINY} --ddp-bucket-size 4000"
    plain = ranks.run(2, train, small_buckets, tmp_path / "a")
    other = ranks.run(2, train, f"{small_buckets} {flags}", tmp_path / "b")
    for first, second in zip(plain, other, strict=True):
        assert equal_bits(first["state"], second["state"]) == []
    assert metrics_of(tmp_path / "a") == metrics_of(tmp_path / "b")


@pytest.mark.full
@pytest.mark.parametrize(
    "precision",
    ["", "--bf16", "--bf16 --grad-reduce-in-bf16", "--fp16 --initial-loss-scale 16777216"],
)
@pytest.mark.parametrize("world", [1, 2])
def test_left_and_resumed_equals_uninterrupted(
    ranks: Ranks, tmp_path: Path, precision: str, world: int
) -> None:
    flags = f"{TINY} {precision} --train-iters 12 --lr-decay-style cosine --lr-warmup-iters 4"
    through = ranks.run(world, train, flags, tmp_path / "through")
    left = ranks.run(world, train, f"{flags} --exit-interval 5", tmp_path / "left")
    assert [r["outcome"] for r in left] == [(0, "exit-interval")] * world
    assert left[0]["iteration"] == 5
    resumed = ranks.run(world, train, flags, tmp_path / "left")
    for first, second in zip(through, resumed, strict=True):
        assert equal_bits(first["state"], second["state"]) == []
        assert equal_bits(first["params"], second["params"]) == []
    for key in ("lm_loss", "lr", "grad_norm", "loss_scale", "iteration"):
        assert metrics_of(tmp_path / "left", key) == metrics_of(tmp_path / "through", key)


def test_resuming_on_other_ranks_keeps_the_state(ranks: Ranks, tmp_path: Path) -> None:
    flags = f"{TINY} {NO_DROPOUT} --train-iters 8"
    through = losses(ranks, 4, flags, tmp_path / "through")
    ranks.run(4, train, f"{flags} --exit-interval 4", tmp_path / "moved")
    moved = losses(ranks, 2, flags, tmp_path / "moved")
    assert moved == pytest.approx(through, abs=1e-6)


def test_fp16_overflow_halves_the_scale_and_skips(ranks: Ranks, tmp_path: Path) -> None:
    flags = f"{TINY} --fp16 --train-iters 24 --initial-loss-scale 16777216 --hysteresis 1"
    (found,) = ranks.run(1, train, flags, tmp_path)
    skipped = metrics_of(tmp_path, "skipped")
    scales = metrics_of(tmp_path, "loss_scale")
    assert skipped[0] and not skipped[-1] and found["applied"] == 24 - sum(skipped)
    assert found["scale"] == 16777216 / 2 ** sum(skipped) == scales[-1]
    norms = metrics_of(tmp_path, "grad_norm")
    assert [norm is None for norm in norms] == skipped
    # The schedule counts applied steps: linear decay does not begin while all are skipped.
    rates = metrics_of(tmp_path, "lr")
    applied = [sum(not skip for skip in skipped[:step]) for step in range(24)]
    assert rates == pytest.approx([3e-3 * (1 - count / 24) for count in applied])
    assert metrics_of(tmp_path)[-1] < metrics_of(tmp_path)[0]


def test_batch_ramp_up_keeps_the_curve_on_every_grid(ranks: Ranks, tmp_path: Path) -> None:
    flags = TINY.replace("--train-iters 8", "--train-samples 160")
    flags += f" {NO_DROPOUT} --rampup-batch-size 8 8 64"
    curves = [losses(ranks, world, flags, tmp_path / str(world)) for world in (1, 4)]
    consumed = metrics_of(tmp_path / "1", "consumed_samples")
    steps = [b - a for a, b in zip([0, *consumed], consumed, strict=False)]
    assert steps[0] == 8 and steps[-1] == 16 and sorted(steps) == steps
    assert consumed[-1] <= 160 < consumed[-1] + 16
    assert curves[1] == pytest.approx(curves[0], abs=1e-4)


def test_masked_tokens_weigh_by_the_global_batch(ranks: Ranks, tmp_path: Path) -> None:
    """Ranks hold different numbers of counted tokens; the mean is still over all tokens."""
    prefix = tmp_path / "text_document"
    generator = torch.Generator().manual_seed(0)
    writer = IndexedDatasetWriter(prefix, np.uint16)
    for _ in range(300):
        length = int(torch.randint(1, 90, (), generator=generator))
        body = torch.randint(1, 96, (length,), generator=generator).tolist()
        writer.add_document([np.array([*body, 0], dtype=np.uint16)])
    writer.close()
    description = {"type": "x", "vocab_size": 96, "eod": 0, "fingerprint": "f", "files": {}}
    write_sidecar(prefix, description)
    flags = TINY.replace("--mock-data --vocab-size 96", f"--data-path {prefix} --eod-mask-loss")
    flags += f" {NO_DROPOUT} --reset-position-ids --reset-attention-mask --split 8,1,1"
    curves = [losses(ranks, world, flags, tmp_path / str(world)) for world in (1, 2, 4)]
    for other in curves[1:]:
        assert other == pytest.approx(curves[0], abs=1e-4)
    tokens = metrics_of(tmp_path / "1", "tokens")
    assert tokens == metrics_of(tmp_path / "4", "tokens")
    assert all(0.9 * 16 * 32 < count < 16 * 32 for count in tokens)


def on_rank_counting(groups: ProcessGroups, run_dir: Path) -> int:
    """Return the counted tokens of masked batches, on a device that cannot return numbers."""
    trainer = make_trainer(groups, TINY, run_dir)
    trainer.device = torch.device("meta")
    reader: Any = trainer.readers.train
    (batch, *_) = reader.read(0, 16)
    masked = replace(batch, loss_mask=torch.ones(2, 32), counted=3 + groups.dp.rank)
    trainer.engine.detach()
    trainer.metrics.close()
    return trainer._count([masked, masked])


def test_masked_tokens_are_counted_on_the_host(ranks: Ranks, tmp_path: Path) -> None:
    """Reading from the device would wait for the previous step."""
    assert ranks.run(2, on_rank_counting, tmp_path) == [2 * (3 + 4)] * 2


def test_duration_ends_with_a_save_and_asks_to_be_requeued(ranks: Ranks, tmp_path: Path) -> None:
    flags = f"{TINY} --exit-duration-in-mins 0.00001"
    found = ranks.run(2, train, flags, tmp_path)
    assert [r["outcome"] for r in found] == [(75, "exit-duration")] * 2
    assert (tmp_path / "checkpoints" / "step_00000001" / "manifest.json").is_file()


def on_rank_told_to_stop(groups: ProcessGroups, run_dir: Path) -> TrainOutcome:
    """Stop when only the evaluation of the test set is left."""
    trainer = make_trainer(groups, TINY.replace("--train-iters 8", "--train-iters 1"), run_dir)
    trainer.requests = ExitSignals(run_dir)
    trainer.train_step()
    (run_dir / "STOP").touch()
    outcome = trainer._run()
    trainer.metrics.close()
    trainer.engine.detach()
    return outcome


def test_a_stop_during_the_last_evaluation_is_obeyed_once(ranks: Ranks, tmp_path: Path) -> None:
    (outcome,) = ranks.run(1, on_rank_told_to_stop, tmp_path)
    assert outcome == TrainOutcome(75, "STOP")
    assert not (tmp_path / "STOP").exists()


def on_rank_stopped_while_evaluating(
    groups: ProcessGroups, flags: str, run_dir: Path
) -> tuple[TrainOutcome, int]:
    """Stop within the first evaluation."""
    trainer = make_trainer(groups, flags, run_dir)
    trainer.requests = ExitSignals(run_dir if groups.world.rank == 0 else None)
    evaluate = trainer._evaluate

    def stop(kind: str, reader: Any) -> ExitRequest:
        (run_dir / "STOP").touch()
        return evaluate(kind, reader)

    trainer._evaluate = stop
    outcome = trainer.train()
    trainer.metrics.close()
    trainer.engine.detach()
    return outcome, trainer.progress.iteration


@pytest.mark.parametrize("split", ["8,1,1", "9,1,0"])
def test_an_interrupted_last_validation_is_made_up_before_the_run_is_done(
    ranks: Ranks, tmp_path: Path, split: str
) -> None:
    """Also where no test set is left to evaluate."""
    flags = f"{TINY} --split {split}"
    ranks.run(2, train, flags, tmp_path / "whole")
    found = ranks.run(2, on_rank_stopped_while_evaluating, flags, tmp_path / "left")
    assert found == [(TrainOutcome(75, "STOP"), 8)] * 2
    assert metrics_of(tmp_path / "left", "valid_loss") == []
    assert not (tmp_path / "left" / "STOP").exists()
    for _ in range(2):
        again = ranks.run(2, train, flags, tmp_path / "left")
        assert [r["outcome"] for r in again] == [(0, None)] * 2
        for key in ("valid_loss", "test_loss"):
            whole = metrics_of(tmp_path / "whole", key)
            assert metrics_of(tmp_path / "left", key) == whole


def test_an_interrupted_evaluation_between_steps_is_made_up_once(
    ranks: Ranks, tmp_path: Path
) -> None:
    flags = TINY.replace("--eval-interval 100", "--eval-interval 4")
    (whole,) = ranks.run(1, train, flags, tmp_path / "whole")
    (found,) = ranks.run(1, on_rank_stopped_while_evaluating, flags, tmp_path / "left")
    assert found == (TrainOutcome(75, "STOP"), 4)
    assert metrics_of(tmp_path / "left", "valid_loss") == []
    (resumed,) = ranks.run(1, train, flags, tmp_path / "left")
    for key in ("lm_loss", "valid_loss", "test_loss", "iteration"):
        assert metrics_of(tmp_path / "left", key) == metrics_of(tmp_path / "whole", key)
    assert equal_bits(whole["params"], resumed["params"]) == []
    # A run that begins with this checkpoint has not trained the step.
    branch = f"{flags} --load {tmp_path / 'whole'} --ckpt-step 8 --train-iters 9"
    ranks.run(1, train, branch, tmp_path / "branch")
    assert metrics_of(tmp_path / "branch", "iteration") == [9, 9, 9]


def test_a_request_to_leave_the_first_evaluation_is_obeyed_before_a_step(
    ranks: Ranks, tmp_path: Path
) -> None:
    """A new run obeys it, and a run that makes up an evaluation."""
    flags = TINY.replace("--eval-interval 100", "--eval-interval 4 --eval-at-start")
    ranks.run(2, train, flags, tmp_path / "whole")
    left = tmp_path / "left"
    found = ranks.run(2, on_rank_stopped_while_evaluating, flags, left)
    assert found == [(TrainOutcome(75, "STOP"), 0)] * 2
    assert not (left / "STOP").exists() and not (left / "checkpoints").exists()
    later = flags.replace(" --eval-at-start", "")
    for _ in range(2):
        found = ranks.run(2, on_rank_stopped_while_evaluating, later, left)
        assert found == [(TrainOutcome(75, "STOP"), 4)] * 2
    ranks.run(2, train, flags, left)
    assert metrics_of(left, "valid_loss") == metrics_of(tmp_path / "whole", "valid_loss")[1:]


def on_rank_whose_evaluation_fails(groups: ProcessGroups, flags: str, run_dir: Path) -> None:
    trainer = make_trainer(groups, flags, run_dir)

    def fail(kind: str, reader: Any) -> ExitRequest:
        raise DataError(f"{kind}: a token outside of the vocabulary")

    trainer._evaluate = fail
    with pytest.raises(DataError):
        trainer.train()
    trainer.metrics.close()
    trainer.engine.detach()


def test_an_evaluation_that_fails_loses_no_step(ranks: Ranks, tmp_path: Path) -> None:
    """A step whose save is due is saved first."""
    flags = TINY.replace("--eval-interval 100", "--eval-interval 3 --save-interval 3")
    for steps, step in (("8", 3), ("2", 2)):
        run_dir = tmp_path / steps
        length = f"--train-iters {steps}"
        ranks.run(2, on_rank_whose_evaluation_fails, f"{flags} {length}", run_dir)
        names = [path.name for path in (run_dir / "checkpoints").iterdir() if path.is_dir()]
        assert names == [f"step_{step:08}"]


def test_the_duration_counts_the_start(ranks: Ranks, tmp_path: Path) -> None:
    (late,) = ranks.run(1, on_rank_that_began_before, f"{TINY} --exit-duration-in-mins 5", tmp_path)
    assert late == (75, "exit-duration")


def on_rank_that_began_before(
    groups: ProcessGroups, flags: str, run_dir: Path
) -> tuple[int, str | None]:
    trainer = make_trainer(groups, flags, run_dir)
    trainer.began -= 301
    outcome = trainer.train()
    trainer.metrics.close()
    trainer.engine.detach()
    return outcome.exit_code, outcome.left


def test_save_interval_and_last_step(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(1, train, f"{TINY} --save-interval 3", tmp_path)
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir() if p.is_dir())
    assert names == ["step_00000003", "step_00000006", "step_00000008"]


def test_a_finished_run_given_again_changes_nothing(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(1, train, TINY, tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text()
    (again,) = ranks.run(1, train, TINY, tmp_path)
    assert again["iteration"] == 8
    assert (tmp_path / "metrics.jsonl").read_text() == before


def on_rank_refused(groups: ProcessGroups, flags: str, run_dir: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        make_trainer(groups, flags, run_dir)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("--num-layers 3", "model.num_layers: 2 there, 3 here"),
        ("--seed 7", "training.seed: 1234 there, 7 here"),
        ("--global-batch-size 8", "training.global_batch_size: 16 there, 8 here"),
        ("--vocab-size 97", "model.vocab_size: 96 there, 97 here"),
    ],
)
def test_another_runs_checkpoint_is_refused_with_the_keys(
    ranks: Ranks, tmp_path: Path, change: str, named: str
) -> None:
    ranks.run(1, train, f"{TINY} --train-iters 2", tmp_path)
    for world in (1, 2):
        for text in ranks.run(world, on_rank_refused, f"{TINY} {change}", tmp_path):
            assert named in text and "--run-dir" in text


def test_load_starts_another_run_and_finetune_starts_at_step_0(
    ranks: Ranks, tmp_path: Path
) -> None:
    (first,) = ranks.run(1, train, f"{TINY} --train-iters 4", tmp_path / "old")
    load = f"{TINY} --load {tmp_path / 'old'} --train-iters 4"
    (same,) = ranks.run(1, train, load, tmp_path / "same")
    assert equal_bits(first["state"], same["state"]) == []
    (tuned,) = ranks.run(1, train, f"{load} --finetune --seed 5", tmp_path / "tuned")
    assert tuned["iteration"] == tuned["applied"] == 4
    assert equal_bits(first["params"], tuned["params"]) != []
    assert metrics_of(tmp_path / "tuned")[0] < metrics_of(tmp_path / "old")[0]


@pytest.mark.parametrize("flag", ["--finetune", "--no-load-optim"])
def test_a_run_begun_from_another_goes_on_when_started_again(
    ranks: Ranks, tmp_path: Path, flag: str
) -> None:
    ranks.run(1, train, f"{TINY} --train-iters 2", tmp_path / "old")
    flags = f"{TINY} --load {tmp_path / 'old'} {flag} --train-iters 6"
    (through,) = ranks.run(1, train, flags, tmp_path / "through")
    ranks.run(1, train, f"{flags} --exit-interval 3", tmp_path / "left")
    (again,) = ranks.run(1, train, flags, tmp_path / "left")
    assert again["applied"] == through["applied"] == (6 if flag == "--finetune" else 4)
    assert equal_bits(through["state"], again["state"]) == []
    assert metrics_of(tmp_path / "left") == metrics_of(tmp_path / "through")


def test_precision_may_change_on_resume(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(1, train, f"{TINY} --bf16 --exit-interval 4", tmp_path)
    (found,) = ranks.run(1, train, f"{TINY} --fp16 --initial-loss-scale 256", tmp_path)
    assert found["iteration"] == 8 and found["scale"] == 256


def test_going_back_in_a_run_needs_a_folder_of_its_own(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(1, train, f"{TINY} --save-interval 2", tmp_path)
    (text,) = ranks.run(1, on_rank_refused, f"{TINY} --ckpt-step 4", tmp_path)
    assert "--load" in text and "--run-dir" in text
    other = f"{TINY} --load {tmp_path} --ckpt-step 4"
    (branched,) = ranks.run(1, train, other, tmp_path / "branch")
    assert branched["iteration"] == 8


def test_skip_train_evaluates_and_saves_nothing(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(1, train, TINY, tmp_path)
    flags = TINY.replace("--train-iters 8 --lr 3e-3", "--skip-train")
    (found,) = ranks.run(1, train, flags, tmp_path)
    assert found["outcome"] == (0, None)
    valid, test = (metrics_of(tmp_path, f"{kind}_loss") for kind in ("valid", "test"))
    assert len(valid) == len(test) == 2 and valid[0] == valid[1] and test[0] == test[1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_start_that_only_evaluates_knows_the_samples_of_its_step(
    ranks: Ranks, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ranks.run(1, train, TINY, tmp_path)
    flags = TINY.replace("--train-iters 8 --lr 3e-3", "--skip-train")
    ranks.run(1, train, f"{flags} --tensorboard-dir {tmp_path / 'curves'}", tmp_path)
    events = EventAccumulator(str(tmp_path / "curves" / "samples"))
    events.Reload()
    assert [e.step for e in events.Scalars("lm loss validation vs samples")] == [8 * 16]


@pytest.mark.parametrize("window", sampled(["0 3", "7 12", "4 100"], ["7 12"]))
def test_a_profile_window_may_lie_anywhere(ranks: Ranks, tmp_path: Path, window: str) -> None:
    start, end = window.split()
    flags = f"{TINY} --profile --profile-step-start {start} --profile-step-end {end}"
    ranks.run(1, train, f"{flags} --exit-interval 5", tmp_path)
    ranks.run(1, train, flags, tmp_path)
    assert (tmp_path / "profile" / "rank_0.json").stat().st_size > 0


def on_rank_out_of_vocabulary(groups: ProcessGroups, flags: str, run_dir: Path) -> str:
    trainer = make_trainer(groups, flags, run_dir)
    with pytest.raises(DataError) as caught:
        trainer.train()
    return str(caught.value)


def test_ids_outside_the_vocabulary_are_an_error(ranks: Ranks, tmp_path: Path) -> None:
    prefix = tmp_path / "text_document"
    writer = IndexedDatasetWriter(prefix, np.uint16)
    writer.add_document([np.array([5] * 900 + [96], dtype=np.uint16)])
    writer.close()
    flags = TINY.replace("--mock-data", f"--data-path {prefix} --split 1,0,0")
    flags = flags.replace("--global-batch-size 16", "--global-batch-size 32")
    (text,) = ranks.run(1, on_rank_out_of_vocabulary, flags, tmp_path)
    assert "96" in text and "vocabulary" in text


def test_what_the_logging_flags_ask_for_is_logged(ranks: Ranks, tmp_path: Path) -> None:
    flags = (
        f"{TINY} --timing-log-level 2 --timing-log-option all --log-params-norm "
        "--log-num-zeros-in-grad --log-throughput --profile --profile-step-start 2 "
        "--profile-step-end 4 --profile-ranks 1"
    )
    found = ranks.run(2, train, flags, tmp_path)
    masters = [t for name, t in found[0]["state"].items() if name.startswith("param/")]
    norm = math.sqrt(sum(t.double().square().sum().item() for t in masters))
    logged = [value for value in metrics_of(tmp_path, "params_norm") if value is not None]
    assert len(logged) == 2 and logged[-1] == pytest.approx(norm, rel=1e-6)
    zeros = [value for value in metrics_of(tmp_path, "num_zeros") if value is not None]
    # Padding rows, 32 x 32 exact zeros, do not count; elsewhere zeros are rare.
    assert len(zeros) == 2 and all(0 <= count < 100 for count in zeros)
    text = (tmp_path / "log.txt").read_text()
    for name in ("forward-compute", "backward-compute", "batch-generator", "optimizer"):
        assert name in text
    assert "TFLOP/s/GPU" in text and "params norm" in text and "num zeros" in text
    assert {path.name for path in (tmp_path / "profile").iterdir()} == {"rank_1.json", "rank_1.txt"}


def on_rank_with_peaks(groups: ProcessGroups, run_dir: Path) -> list[int]:
    """Return the peaks of two steps on a GPU that holds 100 bytes, and more outside of steps."""
    trainer = make_trainer(groups, TINY, run_dir)
    trainer.device = trainer.reading_device = torch.device("cuda", 0)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for _ in range(2):
            peak = [10**9]  # from before the step
            patch.setattr(torch.cuda, "reset_peak_memory_stats", lambda peak=peak: peak.append(100))
            patch.setattr(torch.cuda, "max_memory_allocated", lambda peak=peak: peak[-1])
            record, _ = trainer.train_step()
            found.append(record.peak_memory_bytes)
    trainer.engine.detach()
    trainer.metrics.close()
    return found


def test_a_peak_on_a_gpu_is_that_of_its_step(ranks: Ranks, tmp_path: Path) -> None:
    """Neither building the model nor an evaluation counts."""
    assert ranks.run(1, on_rank_with_peaks, tmp_path) == [[100, 100]]
