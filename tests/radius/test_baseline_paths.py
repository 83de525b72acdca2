"""The baselines from the command line: options, refusals, planned bytes, whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.config import GPTConfig, parse
from megatron.data_parallel.exchange import Exchange
from megatron.errors import ConfigError
from megatron.parallel.groups import Group, ProcessGroups
from pretrain_gpt import GRADIENT_PATHS
from radius.baselines.demo import DeMoConfig, DeMoReducer
from radius.baselines.lowrank_sparse import LowRankSparseReducer
from radius.baselines.lowrank_sparse_path import LowRankSparseConfig
from radius.baselines.powersgd import WARM_START, PowerSGDReducer
from radius.baselines.powersgd_path import PowerSGDConfig
from radius.baselines.roundrobin import WAITED, RoundRobinConfig, RoundRobinReducer
from radius.baselines.topk import TopKConfig, TopKReducer
from tests.contract.harness import PathCase, copies
from tests.contract.test_contracts import on_rank_resume
from tests.planner.shapes import rank_of
from tests.radius.functional_ranks import bucket_of, infos_of
from tests.ranks import Ranks
from tests.training.harness import NO_DROPOUT, TINY, make_trainer, metrics_of, train
from tests.training.test_resume import differing

pytestmark = pytest.mark.push

SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data"
)


def read(flags: str) -> GPTConfig:
    return parse(f"{SMALL} {flags}".split(), paths=GRADIENT_PATHS)


def refused(flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(flags)
    assert str(caught.value).isprintable()
    return str(caught.value)


# ---- options ------------------------------------------------------------------------------------


def test_options_and_their_defaults() -> None:
    assert read("--grad-path topk").extensions == {
        "topk": TopKConfig(topk_density=0.01, topk_start_iter=0)
    }
    assert read("--grad-path powersgd").extensions == {
        "powersgd": PowerSGDConfig(powersgd_rank=4, powersgd_start_iter=0)
    }
    assert read("--grad-path lowrank+sparse").extensions == {
        "lowrank": LowRankSparseConfig(lowrank_rank=4, lowrank_density=0.01, lowrank_start_iter=0)
    }
    assert read("--grad-path roundrobin").extensions == {
        "roundrobin": RoundRobinConfig(roundrobin_interval=8, roundrobin_start_iter=0)
    }
    share = read("--grad-path powersgd --powersgd-rank-share 0.03125").extensions["powersgd"]
    assert share == PowerSGDConfig(powersgd_rank_share=0.03125)
    given = read("--grad-path topk --topk-density 1 --topk-start-iter 10").extensions
    assert given == {"topk": TopKConfig(topk_density=1.0, topk_start_iter=10)}


@pytest.mark.parametrize("density", ["0", "-0.1", "1.5"])
def test_densities_are_above_0_and_at_most_1(density: str) -> None:
    message = refused(f"--grad-path topk --topk-density {density}")
    assert message.startswith(f"--topk-density: {float(density)} ")
    assert message.endswith("must be in (0, 1]")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("topk --topk-density nan", ["--topk-density", "nan"]),
        ("topk --topk-density inf", ["--topk-density", "inf"]),
        ("topk --topk-density 10%", ["--topk-density: 10%", "10% is 0.1"]),
        ("topk --topk-start-iter -1", ["--topk-start-iter: -1", "at least 0"]),
        (
            "topk --topk-start-iter 11",
            ["topk_start_iter: 11", "last step, 10", "--grad-path dense"],
        ),
        ("powersgd --powersgd-rank 0", ["--powersgd-rank: 0", "at least 1"]),
        ("powersgd --powersgd-rank 2.5", ["--powersgd-rank: 2.5"]),
        ("powersgd --powersgd-start-iter -1", ["--powersgd-start-iter: -1", "at least 0"]),
        ("powersgd --powersgd-start-iter 11", ["powersgd_start_iter: 11", "last step, 10"]),
        ("powersgd --powersgd-rank-share 0", ["--powersgd-rank-share: 0", "(0, 1]"]),
        (
            "powersgd --powersgd-rank 8 --powersgd-rank-share 0.1",
            ["powersgd_rank with powersgd_rank_share", "8", "0.1", "give one of them"],
        ),
        ("lowrank+sparse --lowrank-rank 0", ["--lowrank-rank: 0", "at least 1"]),
        ("lowrank+sparse --lowrank-density 0", ["--lowrank-density: 0", "(0, 1]"]),
        ("lowrank+sparse --lowrank-start-iter 11", ["lowrank_start_iter: 11", "last step, 10"]),
        ("lowrank+sparse --grad-wire bf16", ["grad_wire", "in their own way"]),
        ("roundrobin --roundrobin-interval 0", ["--roundrobin-interval: 0", "at least 1"]),
        ("roundrobin --roundrobin-start-iter 11", ["roundrobin_start_iter: 11", "last step, 10"]),
        (
            "roundrobin --roundrobin-start-iter 4",
            ["roundrobin_interval 8", "steps 4 to 10", "--roundrobin-interval 7 would do"],
        ),
        ("roundrobin --adam-beta1 0", ["adam_beta1 0", "raise adam_beta1"]),
        ("roundrobin --exp-avg-dtype int8", ["exp_avg_dtype or exp_avg_sq_dtype int8", "bf16"]),
        (
            "roundrobin --optimizer sgd --sgd-weight-decay coupled",
            ["sgd_weight_decay coupled", "--sgd-weight-decay decoupled"],
        ),
        ("roundrobin --grad-wire bf16", ["grad_wire", "in their own way"]),
        ("topk --fp16 --loss-scale 65536", ["loss scale that stays above 1", "fall to 1"]),
        ("roundrobin --fp16 --min-loss-scale 8", ["loss scale that stays above 1"]),
        ("powersgd --lowrank-rank 2", ["--lowrank-rank", "--grad-path lowrank+sparse"]),
        ("dense --topk-density 0.1", ["--topk-density", "--grad-path topk"]),
        ("powersgd --topk-density 0.1", ["--topk-density", "--grad-path topk"]),
        ("topk2", ["topk2", "did you mean topk?"]),
        ("power-sgd", ["power-sgd", "did you mean powersgd?"]),
    ],
)
def test_refusals_name_option_value_and_way_out(flags: str, words: list[str]) -> None:
    message = refused(f"--grad-path {flags}")
    assert all(word in message for word in words), message


def test_a_share_given_as_a_flag_replaces_the_rank_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("grad_path: powersgd\npowersgd_rank: 8\n")
    options = read(f"--config {tmp_path / 'run.yaml'} --powersgd-rank-share 0.1").extensions
    assert options["powersgd"] == PowerSGDConfig(powersgd_rank_share=0.1)


def test_an_unknown_path_is_told_what_there_is() -> None:
    message = refused("--grad-path nothing-like-it")
    assert all(name in message for name in GRADIENT_PATHS)


# ---- planned bytes ------------------------------------------------------------------------------

SHAPES = {"wide": (6, 50), "small": (3, 4), "tall": (40, 9)}


@pytest.mark.parametrize("precision", ["", "--bf16 --grad-reduce-in-bf16"])
def test_planned_bytes_are_those_allocated(precision: str) -> None:
    infos = infos_of(SHAPES)
    alone = Group((0,), 0)
    for flags, reducer in (
        ("topk --topk-density 0.1", TopKReducer(infos, Exchange(alone), density=0.1)),
        ("topk --topk-density 1", TopKReducer(infos, Exchange(alone), density=1.0)),
        ("powersgd --powersgd-rank 2", PowerSGDReducer(infos, Exchange(alone), rank=2, seed=0)),
        (
            "powersgd --powersgd-rank-share 0.3",
            PowerSGDReducer(infos, Exchange(alone), rank_share=0.3, seed=0),
        ),
        (
            "lowrank+sparse --lowrank-rank 2",
            LowRankSparseReducer(infos, Exchange(alone), rank=2, density=0.01, seed=0),
        ),
        (
            "roundrobin --roundrobin-interval 3",
            RoundRobinReducer(infos, Exchange(alone), interval=3),
        ),
        (
            "demo --demo-sign false",
            DeMoReducer(infos, Exchange(alone), DeMoConfig(demo_sign=False)),
        ),
        (
            "roundrobin --roundrobin-interval 1",
            RoundRobinReducer(infos, Exchange(alone), interval=1),
        ),
        (
            "lowrank+sparse --lowrank-density 1",
            LowRankSparseReducer(infos, Exchange(alone), rank=4, density=1.0, seed=0),
        ),
    ):
        config = read(f"--grad-path {flags} {precision}")
        bucket = bucket_of(infos, dtype=getattr(torch, config.precision.grad_dtype))
        reducer.attach([bucket])
        planned = GRADIENT_PATHS[reducer.name].plan_bytes(config, rank_of(SHAPES)).kept
        residuals = (reducer._residual, reducer.offered)
        assert planned.get("residual", 0) == sum(
            t.nbytes for held in residuals for t in held.values()
        )
        if isinstance(reducer, PowerSGDReducer):
            assert planned.get("warm start", 0) == sum(q.nbytes for q in reducer.q.values())


# ---- whole runs ---------------------------------------------------------------------------------

STARTING_LATE = [
    PathCase("topk", {"topk_density": 0.1, "topk_start_iter": 5}),
    PathCase("powersgd", {"powersgd_rank": 2, "powersgd_start_iter": 5}),
    PathCase("lowrank+sparse", {"lowrank_rank": 2, "lowrank_start_iter": 5}),
    PathCase("roundrobin", {"roundrobin_interval": 3, "roundrobin_start_iter": 5}),
    PathCase("demo", {"demo_chunk": 16, "demo_k": 8, "demo_start_iter": 5}),
]


@pytest.mark.parametrize("case", STARTING_LATE, ids=lambda case: case.name)
def test_resumed_around_the_first_compressed_step(ranks: Ranks, case: PathCase) -> None:
    assert ranks.run(2, on_rank_resume, case, (3, 4, 5)) == [{3: [], 4: [], 5: []}] * 2


FLAGS = {
    "topk": "--grad-path topk --topk-density 0.05 --topk-start-iter 3",
    "powersgd": "--grad-path powersgd --powersgd-rank 2 --powersgd-start-iter 3",
    "lowrank+sparse": "--grad-path lowrank+sparse --lowrank-rank 2 --lowrank-start-iter 3",
    "roundrobin": "--grad-path roundrobin --roundrobin-interval 3 --roundrobin-start-iter 3",
    "demo": "--grad-path demo --demo-k 32 --demo-start-iter 3 "
    "--optimizer sgd --sgd-momentum 0 --clip-grad 0",
}


PRECISIONS = ["", "--bf16 --grad-reduce-in-bf16", "--fp16"]


# Each path has one precision on every push, in turns.
@pytest.mark.parametrize(
    ("path", "precision"),
    [
        pytest.param(path, precision, marks=[pytest.mark.full] * ((turn - number) % 3 != 0))
        for number, path in enumerate(FLAGS)
        for turn, precision in enumerate(PRECISIONS)
    ],
)
def test_a_run_that_is_left_and_resumed_is_the_one_that_was_not(
    ranks: Ranks, path: str, precision: str, tmp_path: Path
) -> None:
    scale = "--initial-loss-scale 64" if precision == "--fp16" else ""
    if precision == "--fp16" and path == "demo":
        scale += " --accumulate-allreduce-grads-in-fp32"
    flags = f"{TINY} {NO_DROPOUT} {FLAGS[path]} {precision} {scale}"
    through = ranks.run(2, train, flags, tmp_path / "through")
    for step in (2, 5):
        ranks.run(2, train, f"{flags} --exit-interval {step}", tmp_path / "left")
    resumed = ranks.run(2, train, flags, tmp_path / "left")
    for first, second in zip(through, resumed, strict=True):
        assert differing(first, second) == []
    for key in ("lm_loss", "grad_norm", "bytes_sent", "density"):
        assert metrics_of(tmp_path / "left", key) == metrics_of(tmp_path / "through", key), key
    density = metrics_of(tmp_path / "through", "density")
    assert density[:2] == [1.0, 1.0] and max(density[2:]) < 0.6
    losses = metrics_of(tmp_path / "through")
    assert losses[-1] < losses[0]
    for name in ("through", "left"):
        log = (tmp_path / name / "log.txt").read_text(encoding="utf-8")
        assert log.count(f"{path}: gradients of matrices are compressed from here on") == 1


def on_rank_load(groups: ProcessGroups, flags: str, run_dir: Path) -> dict[str, torch.Tensor]:
    trainer = make_trainer(groups, flags, run_dir)
    trainer.metrics.close()
    trainer.engine.detach()
    reducer = trainer.engine.reducer
    found = {f"own/{name}": kept for name, kept in copies(reducer.state_tensors()).items()}
    return found | copies(reducer.shared_tensors())


@pytest.mark.parametrize("path", FLAGS)
def test_other_ranks_take_over_the_mean_of_what_was_not_sent(
    ranks: Ranks, path: str, tmp_path: Path
) -> None:
    flags = f"{TINY} {NO_DROPOUT} {FLAGS[path]}"
    ranks.run(2, train, f"{flags} --exit-interval 5", tmp_path)
    first, second = ranks.run(2, on_rank_load, flags, tmp_path)
    (alone,) = ranks.run(1, on_rank_load, flags, tmp_path)
    assert first.keys() == second.keys() == alone.keys()
    for name, mean in alone.items():
        torch.testing.assert_close(mean, (first[name] + second[name]) / 2, check_dtype=False)
        assert torch.equal(first[name], second[name]) == name.startswith((WARM_START, WAITED))
    (went_on,) = ranks.run(1, train, flags, tmp_path)
    assert went_on["iteration"] == 8 and len(metrics_of(tmp_path)) == 8
