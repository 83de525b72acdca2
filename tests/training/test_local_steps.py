"""Whole runs in which each copy of the model takes local steps (`--grad-path diloco`)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config import parse
from megatron.data_parallel.bucket_plan import ring_all_reduce_bytes
from megatron.data_parallel.local_steps import DilocoConfig
from megatron.errors import CheckpointError, ConfigError, NumericsError
from megatron.parallel.groups import ProcessGroups
from megatron.training import Trainer
from pretrain_gpt import GRADIENT_PATHS
from tests.ranks import Ranks, grid
from tests.tasks.toy import TOY, TOY_TASK
from tests.training.harness import NO_DROPOUT, TINY, make_trainer, metrics_of, train

pytestmark = pytest.mark.push

RUN = f"{TINY} {NO_DROPOUT} --log-interval 1 --eval-interval 4"
LOCAL = (
    f"{RUN} --grad-path diloco --local-steps 4 --check-weight-hash-across-dp-replicas-interval 4"
)
TOP_K = "--outer-compression topk --outer-topk-chunk 300 --outer-topk-k 9"
MEAN = "--outer-lr 1 --outer-momentum 0"
SGD = "--optimizer sgd --sgd-momentum 0 --clip-grad 0 --lr 0.1"


def on_rank(groups: ProcessGroups, tp: int, pp: int, flags: str, run_dir: Path) -> dict[str, Any]:
    sizes = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}"
    return train(grid(groups, tp=tp, pp=pp), f"{flags} {sizes}", run_dir)


def run(ranks: Ranks, world: int, flags: str, run_dir: Path) -> list[dict[str, Any]]:
    return ranks.run(world, on_rank, 1, 1, flags, run_dir)


def differing(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> list[str]:
    """Return the names of weights, moments and counters that differ on a rank."""
    found: list[str] = []
    for mine, theirs in zip(first, second, strict=True):
        for kind in ("state", "params", "buffers"):
            assert mine[kind].keys() == theirs[kind].keys()
            found += [n for n, each in mine[kind].items() if not torch.equal(each, theirs[kind][n])]
        kinds = ("iteration", "consumed", "applied", "scaler")
        found += [kind for kind in kinds if mine[kind] != theirs[kind]]
    return found


# ---- the two limits ------------------------------------------------------------------------------


@pytest.mark.parametrize("more", ["", "--bf16"])
def test_one_replica_whose_anchor_is_the_mean_is_the_dense_path(
    ranks: Ranks, tmp_path: Path, more: str
) -> None:
    dense = run(ranks, 1, f"{RUN} {more}", tmp_path / "dense")
    for steps in (1, 4):
        flags = f"{LOCAL} --local-steps {steps} {MEAN} {more}"
        local = run(ranks, 1, flags, tmp_path / f"local {steps}")
        assert differing(dense, local) == []
        for key in ("lm_loss", "valid_loss", "grad_norm"):
            assert metrics_of(tmp_path / "dense", key) == metrics_of(
                tmp_path / f"local {steps}", key
            )


@pytest.mark.parametrize("world", [2, 4])
def test_replicas_that_average_after_each_sgd_step_are_the_dense_path(
    ranks: Ranks, tmp_path: Path, world: int
) -> None:
    """The mean of w - lr g is w - lr times the mean of g."""
    dense = run(ranks, world, f"{RUN} {SGD}", tmp_path / "dense")
    flags = f"{LOCAL} --local-steps 1 {MEAN} {SGD}"
    local = run(ranks, world, flags, tmp_path / "local")
    for mine, theirs in zip(dense, local, strict=True):
        for name, weight in mine["params"].items():
            torch.testing.assert_close(theirs["params"][name], weight, rtol=1e-5, atol=1e-5)
    losses = [metrics_of(tmp_path / name) for name in ("dense", "local")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


# ---- saved and resumed ---------------------------------------------------------------------------


RESUMED = [
    "",
    "--bf16",
    "--fp16 --initial-loss-scale 1024",
    "--grad-wire int8",
    "--outer-momentum 0 --optimizer sgd --lr 0.1",
    "--local-fragments 2 --ddp-bucket-size 4096",
    f"{TOP_K} --bf16",
    f"{TOP_K} --outer-values int8 --local-fragments 2 --ddp-bucket-size 4096",
]
GRIDS = [(1, 1, 1), (2, 1, 1), (4, 2, 1), (4, 1, 2)]
"""World size, tensor-parallel size, pipeline-parallel size."""


@pytest.mark.full
@pytest.mark.parametrize("left_at", [3, 4])
@pytest.mark.parametrize(
    ("sizes", "more"), [((2, 1, 1), more) for more in RESUMED] + [(sizes, "") for sizes in GRIDS]
)
def test_a_run_that_stops_in_a_round_or_at_its_end_continues_bit_by_bit(
    ranks: Ranks, tmp_path: Path, left_at: int, sizes: tuple[int, int, int], more: str
) -> None:
    (world, tp, pp), flags = sizes, f"{LOCAL} {more}"
    whole = ranks.run(world, on_rank, tp, pp, flags, tmp_path / "whole")
    stop = f"{flags} --exit-interval {left_at}"
    first = ranks.run(world, on_rank, tp, pp, stop, tmp_path / "halves")
    assert first[0]["iteration"] == left_at
    halves = ranks.run(world, on_rank, tp, pp, flags, tmp_path / "halves")
    assert differing(whole, halves) == []
    for key in ("lm_loss", "valid_loss", "bytes_sent", "grad_norm"):
        assert metrics_of(tmp_path / "whole", key) == metrics_of(tmp_path / "halves", key)


@pytest.mark.parametrize("more", ["", "--local-fragments 2 --ddp-bucket-size 4096"])
def test_a_round_that_is_left_ends_where_the_run_is_made_shorter(
    ranks: Ranks, tmp_path: Path, more: str
) -> None:
    flags = f"{LOCAL} --lr-decay-style constant {more}"
    run(ranks, 2, f"{flags} --exit-interval 3", tmp_path / "left")
    log = tmp_path / "left" / "log.txt"
    run(ranks, 2, f"{flags} --skip-train", tmp_path / "left")
    assert "evaluations use the average with which the round began" in log.read_text()
    shorter = run(ranks, 2, f"{flags} --train-iters 3", tmp_path / "left")
    assert "the round of local steps that was left ends here" in log.read_text()
    whole = run(ranks, 2, f"{flags} --train-iters 3", tmp_path / "whole")
    assert differing(whole, shorter) == []
    again = run(ranks, 2, f"{flags} --train-iters 3", tmp_path / "left")
    assert differing(whole, again) == [] and log.read_text().count("ends here") == 1


def test_a_round_that_ends_late_is_evaluated_with_its_own_weights(
    ranks: Ranks, tmp_path: Path
) -> None:
    """An evaluation of the step at which it was left is of the average with which it began."""
    flags = f"{LOCAL} --lr-decay-style constant"
    run(ranks, 2, f"{flags} --exit-interval 3", tmp_path / "left")
    run(ranks, 2, f"{flags} --skip-train", tmp_path / "left")
    before = metrics_of(tmp_path / "left", "valid_loss")
    run(ranks, 2, f"{flags} --train-iters 3", tmp_path / "left")
    run(ranks, 2, f"{flags} --train-iters 3", tmp_path / "whole")
    ended = metrics_of(tmp_path / "left", "valid_loss")
    assert ended[:-1] == before
    assert ended[-1] == metrics_of(tmp_path / "whole", "valid_loss")[-1] != before[-1]


def test_replicas_differ_in_a_round_and_agree_at_its_end(ranks: Ranks, tmp_path: Path) -> None:
    inside = run(ranks, 2, f"{LOCAL} --exit-interval 3", tmp_path / "inside")
    assert any(
        not torch.equal(weight, inside[1]["params"][name])
        for name, weight in inside[0]["params"].items()
    )
    at_end = run(ranks, 2, f"{LOCAL} --exit-interval 4", tmp_path / "end")
    first, second = (found["params"] for found in at_end)
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
    moments = [found["state"]["exp_avg/final_norm.weight"] for found in at_end]
    assert not torch.equal(*moments), "each replica has moments of its own"


# ---- other numbers of replicas -------------------------------------------------------------------


def on_rank_refused(groups: ProcessGroups, flags: str, run_dir: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        make_trainer(groups, flags, run_dir)
    return str(caught.value)


def test_another_number_of_replicas_resumes_at_the_end_of_a_round_only(
    ranks: Ranks, tmp_path: Path
) -> None:
    run(ranks, 2, f"{LOCAL} --exit-interval 3", tmp_path / "inside")
    for text in ranks.run(4, on_rank_refused, LOCAL, tmp_path / "inside"):
        assert "2 replicas" in text and "--reset-grad-state" in text
    load = f"{LOCAL} --load {tmp_path / 'inside' / 'checkpoints'} --reset-grad-state"
    (anchored, *_) = run(ranks, 4, f"{load} --exit-interval 4", tmp_path / "anchored")
    assert anchored["iteration"] == 4

    run(ranks, 2, f"{LOCAL} --exit-interval 4", tmp_path / "end")
    for world in (4, 1):
        load = f"{LOCAL} --load {tmp_path / 'end' / 'checkpoints'}"
        found = run(ranks, world, load, tmp_path / f"end {world}")
        assert found[0]["iteration"] == 8 and found[0]["applied"] == 8
        losses = metrics_of(tmp_path / f"end {world}")
        assert all(math.isfinite(loss) for loss in losses) and len(losses) == 4


def on_rank_unsent(
    groups: ProcessGroups, flags: str, run_dir: Path, trains: bool
) -> dict[str, torch.Tensor]:
    """Return the changes that this replica has not sent, after a run or after a load."""
    trainer = make_trainer(groups, flags, run_dir)
    if trains:
        trainer.train()
    trainer.metrics.close()
    trainer.engine.detach()
    return {name: s.values().clone() for name, s in trainer.engine.reducer.state_tensors()}


def test_another_number_of_replicas_starts_from_the_mean_of_what_was_not_sent(
    ranks: Ranks, tmp_path: Path
) -> None:
    flags = f"{LOCAL} {TOP_K} --exit-interval 4"
    saved = ranks.run(2, on_rank_unsent, flags, tmp_path / "two", True)
    load = f"{LOCAL} {TOP_K} --load {tmp_path / 'two' / 'checkpoints'}"
    for world in (1, 4):
        for found in ranks.run(world, on_rank_unsent, load, tmp_path / f"{world}", False):
            assert found.keys() == saved[0].keys()
            for name, unsent in found.items():
                assert unsent.any()
                mean = torch.stack([each[name].double() for each in saved]).mean(0)
                torch.testing.assert_close(unsent.double(), mean, rtol=1e-6, atol=1e-9)


def test_a_dense_run_and_local_steps_start_from_each_other(ranks: Ranks, tmp_path: Path) -> None:
    """The weights that a checkpoint inside a round has without a prefix are the anchor."""
    run(ranks, 2, f"{RUN} --exit-interval 4", tmp_path / "dense")
    load = f"--load {tmp_path / 'dense' / 'checkpoints'}"
    found = run(ranks, 2, f"{LOCAL} {load} --exit-interval 6", tmp_path / "local")
    assert found[0]["iteration"] == 6 and found[0]["applied"] == 6
    load = f"--load {tmp_path / 'local' / 'checkpoints'} --reset-grad-state"
    flags = f"{RUN} {load} --check-weight-hash-across-dp-replicas-interval 1"
    found = run(ranks, 2, flags, tmp_path / "dense again")
    assert found[0]["iteration"] == 8 and differing([found[0]], [found[1]]) == []
    # The first loss after the anchor of step 4 is that of a dense run after step 4 of other data.
    assert metrics_of(tmp_path / "dense again")[0] < metrics_of(tmp_path / "dense")[0]


# ---- what is sent --------------------------------------------------------------------------------


def on_rank_planned(groups: ProcessGroups, flags: str, run_dir: Path) -> list[int]:
    buckets = make_trainer(groups, flags, run_dir).engine.buckets
    return [ring_all_reduce_bytes(4 * bucket.numel, groups.dp.size) for bucket in buckets]


@pytest.mark.parametrize("world", [2, 4])
def test_weights_are_sent_once_in_a_round(ranks: Ranks, tmp_path: Path, world: int) -> None:
    run(ranks, world, LOCAL, tmp_path / "local")
    (each, *_) = ranks.run(world, on_rank_planned, LOCAL, tmp_path / "built")
    whole = sum(each)
    assert metrics_of(tmp_path / "local", "bytes_sent") == [0, 0, 0, whole] * 2
    run(ranks, world, RUN, tmp_path / "dense")
    assert metrics_of(tmp_path / "dense", "bytes_sent") == [whole] * 8
    assert metrics_of(tmp_path / "local", "density") == [0, 0, 0, 1] * 2


def test_fragments_take_turns(ranks: Ranks, tmp_path: Path) -> None:
    flags = f"{LOCAL} --local-fragments 2 --ddp-bucket-size 4096 --train-iters 7"
    run(ranks, 2, flags, tmp_path / "local")
    (each, *_) = ranks.run(2, on_rank_planned, flags, tmp_path / "built")
    early = sum(each[: len(each) // 2])
    assert 0 < early < sum(each)
    # The last step averages everything.
    expected = [0, early, 0, sum(each) - early, 0, early, sum(each)]
    assert metrics_of(tmp_path / "local", "bytes_sent") == expected


# ---- steps that are skipped ----------------------------------------------------------------------


def poison(trainer: Trainer, steps: set[int]) -> None:
    """Make the gradient of a norm not finite in these steps."""
    accumulate = trainer.engine.accumulate

    def spoilt(name: str, leaf: torch.nn.Parameter) -> None:
        if name == "final_norm.weight" and trainer.progress.iteration in steps:
            assert leaf.grad is not None
            leaf.grad.fill_(math.nan)
        accumulate(name, leaf)

    for info in trainer.engine.infos.values():
        for leaf in info.leaves:
            leaf.register_post_accumulate_grad_hook(lambda leaf, name=info.name: spoilt(name, leaf))


def on_rank_skips(
    groups: ProcessGroups, flags: str, run_dir: Path, bad: set[int]
) -> tuple[int, list[bool], str]:
    """Train with gradients on replica 1 that are not finite in some steps.

    Returns the applied updates, whether each weight is equal to that of replica 0, and the error.
    """
    trainer = make_trainer(groups, flags, run_dir)
    trainer.engine.detach()
    poison(trainer, bad if groups.dp.rank == 1 else set())
    error = ""
    try:
        trainer.train()
    except NumericsError as caught:
        error = str(caught)
    trainer.metrics.close()
    equal = []
    for info, _, _ in trainer.engine.slices():
        first = info.param.detach().clone()
        groups.dp.broadcast(first, 0)
        equal.append(torch.equal(first, info.param.detach()))
    return trainer.optimizer.applied, equal, error


def test_a_replica_skips_a_step_alone_and_the_skip_is_counted(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(2, on_rank_skips, LOCAL, tmp_path, {2, 3, 5})
    assert [applied for applied, _, _ in found] == [8, 5]
    assert all(all(equal) for _, equal, _ in found), "the last step averages"
    counts = metrics_of(tmp_path, "replicas_skipped")
    assert counts == [0, 1, 1, 0, 1, 0, 0, 0]
    assert metrics_of(tmp_path, "skipped") == [count > 0 for count in counts]
    rates = metrics_of(tmp_path, "lr")
    plain = run(ranks, 2, LOCAL, tmp_path / "plain")
    assert rates == metrics_of(tmp_path / "plain", "lr"), "the schedule counts attempted steps"
    assert plain[0]["applied"] == 8


def test_a_replica_that_skips_too_many_steps_ends_the_run_on_all_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    flags = f"{LOCAL} --max-skipped-steps 2"
    for _, _, error in ranks.run(2, on_rank_skips, flags, tmp_path, {5, 6}):
        assert "2 steps in a row" in error and "step 6" in error


def on_rank_spoilt(
    groups: ProcessGroups, flags: str, run_dir: Path
) -> tuple[int, dict[str, float], int]:
    """Return the counters of this rank's replica in a run that another start left."""
    trainer = make_trainer(groups, flags, run_dir)
    found = trainer.optimizer.applied, trainer.scaler.state(), trainer.progress.skipped_in_row
    trainer.metrics.close()
    trainer.engine.detach()
    return found


def test_each_replica_resumes_with_its_own_updates_and_loss_scale(
    ranks: Ranks, tmp_path: Path
) -> None:
    flags = f"{LOCAL} --fp16 --initial-loss-scale 1024 --hysteresis 1 --min-loss-scale 512"
    ranks.run(2, on_rank_skips, f"{flags} --exit-interval 3", tmp_path, {2, 3})
    (applied, scaler, row), (own_applied, own_scaler, own_row) = ranks.run(
        2, on_rank_spoilt, flags, tmp_path
    )
    assert (applied, scaler["scale"], scaler["clean_steps"], row) == (3, 1024, 3, 0)
    # The first skip halves the scale, and the second, at the lowest scale, is counted.
    assert (own_applied, own_scaler["scale"], own_scaler["clean_steps"]) == (1, 512, 0)
    assert own_row == 1


@pytest.mark.parametrize("left_at", [3, 4])
def test_batch_norm_statistics_stay_equal_where_one_replica_skips(
    ranks: Ranks, tmp_path: Path, left_at: int
) -> None:
    """Image 20 is in step 2, and in the batch of one replica."""
    flags = (
        f"{TOY} --grad-path diloco --local-steps 4 --eval-interval 4 --poisoned-image 20 "
        "--check-weight-hash-across-dp-replicas-interval 4"
    )
    whole = ranks.run(2, train, flags, tmp_path / "whole", TOY_TASK)
    ranks.run(2, train, f"{flags} --exit-interval {left_at}", tmp_path / "parts", TOY_TASK)
    parts = ranks.run(2, train, flags, tmp_path / "parts", TOY_TASK)
    assert differing(whole, parts) == []
    assert sorted(found["applied"] for found in whole) == [7, 8]
    first, second = (found["buffers"] for found in whole)
    assert first and all(torch.equal(each, second[name]) for name, each in first.items())


def on_rank_broken_anchor(groups: ProcessGroups, flags: str, run_dir: Path) -> str:
    trainer = make_trainer(groups, flags, run_dir)
    trainer.train_step()
    trainer._compare_replicas()
    if groups.dp.rank == 1:
        assert trainer.engine.local_steps is not None
        trainer.engine.local_steps.anchors[0].weights[0] += 1
    with pytest.raises(NumericsError) as caught:
        trainer._compare_replicas()
    trainer.metrics.close()
    trainer.engine.detach()
    return str(caught.value)


def test_anchors_that_drift_apart_are_found_inside_a_round(ranks: Ranks, tmp_path: Path) -> None:
    for text in ranks.run(2, on_rank_broken_anchor, LOCAL, tmp_path):
        assert "replicas have drifted apart" in text


# ---- refused settings ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--use-distributed-optimizer", "use_distributed_optimizer"),
        ("--optimizer-cpu-offload", "optimizer_cpu_offload"),
        ("--predivide-loss", "predivide_loss"),
        ("--skip-loss-spikes 4", "skip_loss_spikes"),
        ("--bf16 --exp-avg-dtype bf16", "fp32"),
        ("--eval-interval 6", "eval_interval 6 is not a multiple of local_steps 4; nearest: 4, 8"),
        (
            "--check-weight-hash-across-dp-replicas-interval 2",
            "replicas_interval 2 is not a multiple of local_steps 4",
        ),
        ("--local-fragments 5", "--local-fragments 4"),
        (f"{TOP_K} --grad-wire int8", "outer_compression topk; grad_wire; --outer-values"),
        (f"{TOP_K} --outer-topk-k 301", "outer_topk_k 301; outer_topk_chunk 300; at most"),
        ("--outer-topk-chunk 32769", "outer-topk-chunk"),
        ("--outer-values int8", "without outer_compression; give --outer-compression topk"),
        ("--outer-topk-k 8", "without outer_compression; give --outer-compression topk"),
        ("--outer-decay 1.5", "outer-decay"),
        ("--outer-lr 0", "outer-lr"),
        ("--outer-momentum 1", "outer-momentum"),
        ("--samo-pruning early-bird", "samo-pruning"),
    ],
)
def test_settings_that_do_not_fit_local_steps_are_refused(flags: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"{LOCAL} {flags}".split(), paths=GRADIENT_PATHS)
    message = str(caught.value)
    for part in text.split("; "):
        assert part in message
    assert "\n" not in message


def test_error_feedback_takes_the_place_of_outer_momentum_unless_it_is_given() -> None:
    for more, momentum in (("", 0.9), (TOP_K, 0.0), (f"{TOP_K} --outer-momentum 0.5", 0.5)):
        config = parse(f"{LOCAL} {more}".split(), paths=GRADIENT_PATHS)
        options = config.extensions["diloco"]
        assert isinstance(options, DilocoConfig) and options.outer_momentum == momentum
