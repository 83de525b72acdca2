"""Translation runs: losses of a plain loop, every gradient path, microbatches, resume, refusals."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.find import list_steps
from megatron.checkpoint.store import Checkpoint
from megatron.config import parse, resolve, to_yaml
from megatron.data.pair_dataset import Packs, PairDataset, PairVocabulary
from megatron.data.preprocess_pairs import PairPaths
from megatron.errors import ConfigError
from megatron.model.dc_transformer import DCTransformer
from megatron.tasks.translation_config import TranslationConfig
from pretrain_gpt import GRADIENT_PATHS
from pretrain_translation import TRANSLATION_TASK, main
from tests import program
from tests.data.translation_data import write_data
from tests.limits import LIMIT
from tests.model.translations import slow_logits, slow_sums
from tests.ranks import Ranks
from tests.tiers import sampled
from tests.training.harness import metrics_of, train
from tools.run_model import PARAM

pytestmark = pytest.mark.push

PROGRAM = Path(__file__).resolve().parents[2] / "pretrain_translation.py"
SHAPE = (
    "--encoder-layers 2 --decoder-layers 2 --embed-dim 16 --attention-heads 2 --dropout 0 "
    "--attention-dropout 0 --weight-dropout 0"
)
SHORT = (
    f"{SHAPE} --micro-batch-size 1 --global-batch-size 2 --max-tokens 60 --train-iters 8 --lr 2e-3 "
    "--eval-interval 100 --eval-iters 0 --log-interval 4 --device cpu"
)
DROPOUT = "--dropout 0.2 --attention-dropout 0.1 --weight-dropout 0.1"
PATHS = {
    "dense": "",
    "samo": "--samo-sparsity 0.5 --samo-pruning random",
    "radius": "--radius-density 0.3 --radius-interval 2 --radius-start-iter 1",
    "samo+radius": "--samo-sparsity 0.5 --samo-pruning random --radius-interval 2 "
    "--radius-start-iter 1",
    "topk": "",
    "powersgd": "",
    "lowrank+sparse": "",
    "roundrobin": "--roundrobin-interval 2",
    "demo": "--demo-sign false",
}
"""Flags of each gradient path."""


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    return write_data(tmp_path_factory.mktemp("pairs"))


@pytest.fixture
def run(ranks: Ranks, pairs: PairPaths) -> Callable[[int, str, Path], list[dict[str, Any]]]:
    """Train on some ranks with the flags of `SHORT` and more; later flags win."""

    def run(world: int, flags: str, folder: Path) -> list[dict[str, Any]]:
        given = f"{SHORT} --data-path {pairs.prefix} {flags}"
        return ranks.run(world, train, given, folder, TRANSLATION_TASK)

    return run


def equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether two runs end with the same bits of parameters and states."""
    return all(
        first[kind].keys() == second[kind].keys()
        and all(torch.equal(first[kind][name], second[kind][name]) for name in first[kind])
        for kind in ("params", "state")
    )


# ---- what is computed ----------------------------------------------------------------------------


def plain_losses(paths: PairPaths, config: TranslationConfig) -> list[tuple[float, float]]:
    """Train by loops over sentences and positions, with torch's AdamW; (loss, nll) of each step."""
    dataset = PairDataset(paths, "train", vocabulary := PairVocabulary.load(paths))
    packs = Packs(dataset, max_tokens=config.data.max_tokens, seed=config.training.seed)
    model = DCTransformer(
        config.model,
        source_size=len(vocabulary.source),
        target_size=len(vocabulary.target),
        seed=config.training.seed,
        dtype=torch.float32,
        device="cpu",
    )
    values = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    o = config.optimizer
    optimizer = torch.optim.AdamW(
        [
            {"params": [v for v in values.values() if v.ndim > 1], "weight_decay": o.weight_decay},
            {"params": [v for v in values.values() if v.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(o.adam_beta1, o.adam_beta2),
        eps=o.adam_eps,
    )
    batch, warm_up, found = config.training.global_batch_size, o.lr_warmup_iters, []
    assert batch is not None and o.lr is not None
    for step in range(config.total_iterations()):
        sums, count = torch.zeros(2), 0
        for sample in range(step * batch, (step + 1) * batch):
            for pair in packs.pairs(sample).tolist():
                source, target = dataset.source(pair).tolist(), dataset.target(pair).tolist()
                logits = slow_logits(values, config.model, source, [2, *target[:-1]])
                sums = sums + slow_sums(logits, target, config.model.label_smoothing)
                count += len(target)
        # fairseq's inverse square root: linear from the first rate, then lr sqrt(warm-up / n).
        rise = o.lr_warmup_init + (o.lr - o.lr_warmup_init) * step / warm_up
        rate = rise if step <= warm_up else o.lr * math.sqrt(warm_up / step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        (sums[0] / count).backward()
        optimizer.step()
        found.append((sums[0].item() / count, sums[1].item() / count))
    return found


def test_twenty_steps_equal_a_plain_loop(
    run: Callable[..., Any], pairs: PairPaths, tmp_path: Path
) -> None:
    flags = (
        "--train-iters 20 --max-tokens 40 --encoder-kernel-size-list 3 4 --lr 2e-2 "
        "--lr-decay-style inverse-square-root --lr-warmup-iters 5 "
        "--lr-warmup-init 1e-7 --adam-beta2 0.98 --weight-decay 0.01 --clip-grad 0"
    )
    given = f"{SHORT} --data-path {pairs.prefix} {flags}".split()
    config = parse(given, paths=GRADIENT_PATHS, task=TranslationConfig)
    wanted = plain_losses(pairs, resolve(config, 1))
    assert wanted[-1][1] < 0.8 * wanted[0][1]
    for world in (1, 2):
        run(world, flags, tmp_path / str(world))
        for number, key in enumerate(("loss", "nll")):
            found = metrics_of(tmp_path / str(world), key)
            assert found == pytest.approx([losses[number] for losses in wanted], rel=1e-4)


@pytest.mark.parametrize("path", sampled(PATHS, ("samo+radius", "topk", "lowrank+sparse", "demo")))
def test_every_gradient_path_learns(run: Callable[..., Any], tmp_path: Path, path: str) -> None:
    flags = f"{DROPOUT} --train-iters 30 --lr 1e-2 --grad-path {path} {PATHS[path]}"
    found = run(2, flags, tmp_path)
    losses = metrics_of(tmp_path, "nll")
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    for other in found[1:]:
        assert all(torch.equal(other["params"][n], p) for n, p in found[0]["params"].items())


def test_grids_agree(run: Callable[..., Any], tmp_path: Path) -> None:
    """Packs differ in their tokens, so ranks count differently; dropout is that of any grid."""
    curves = []
    for world, zero in ((1, ""), (2, ""), (2, "--use-distributed-optimizer")):
        folder = tmp_path / f"{world}{zero}"
        run(world, f"{DROPOUT} --train-iters 10 {zero}", folder)
        curves.append(metrics_of(folder, "loss"))
        assert len(set(metrics_of(folder, "tokens"))) > 1
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)
    assert curves[1] == pytest.approx(curves[2], rel=1e-4)


def test_no_sparsity_is_dense_to_the_last_bit(run: Callable[..., Any], tmp_path: Path) -> None:
    dense = run(2, DROPOUT, tmp_path / "dense")
    samo = run(2, f"{DROPOUT} --grad-path samo --samo-sparsity 0", tmp_path / "samo")
    assert all(torch.equal(samo[0]["params"][n], p) for n, p in dense[0]["params"].items())


@pytest.mark.parametrize("world", [1, 2])
def test_microbatches_of_few_tokens_equal_whole_packs(
    run: Callable[..., Any], tmp_path: Path, world: int
) -> None:
    flags = "--max-tokens 400 --train-iters 10 --lr 1e-2"
    run(world, flags, tmp_path / "whole")
    run(world, f"{flags} --microbatch-tokens 40", tmp_path / "parts")
    for key in ("loss", "nll", "grad_norm"):
        found = [metrics_of(tmp_path / name, key) for name in ("whole", "parts")]
        assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert metrics_of(tmp_path / "whole", "tokens") == metrics_of(tmp_path / "parts", "tokens")


def test_recomputed_layers_change_no_bit(run: Callable[..., Any], tmp_path: Path) -> None:
    plain = run(1, DROPOUT, tmp_path / "plain")
    again = run(1, f"{DROPOUT} --recompute-granularity full", tmp_path / "again")
    assert equal(plain[0], again[0])


@pytest.mark.parametrize("precision", ["--bf16", "--fp16 --initial-loss-scale 1024"])
def test_16_bit_runs_learn(run: Callable[..., Any], tmp_path: Path, precision: str) -> None:
    found = run(2, f"{precision} --train-iters 30 --lr 1e-2", tmp_path)
    losses = metrics_of(tmp_path, "loss")
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert {p.dtype for p in found[0]["params"].values()} in ({torch.bfloat16}, {torch.float16})


# ---- evaluation ----------------------------------------------------------------------------------


def test_full_validation_counts_each_pair_once(
    run: Callable[..., Any], pairs: PairPaths, tmp_path: Path
) -> None:
    found = []
    for world in (1, 2):
        folder = tmp_path / str(world)
        run(world, "--full-validation --global-batch-size 4 --train-iters 2", folder)
        (line,) = [
            json.loads(text)
            for text in (folder / "metrics.jsonl").read_text().splitlines()
            if "valid_loss" in text
        ]
        found.append((line["valid_loss"], line["valid_nll"]))
        assert line["valid_perplexity"] == pytest.approx(math.exp(line["valid_nll"]))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    vocabulary = PairVocabulary.load(pairs)
    dataset = PairDataset(pairs, "valid", vocabulary)
    with Checkpoint.open(tmp_path / "1" / "checkpoints" / "step_00000002") as saved:
        values = {n.removeprefix(PARAM): saved.read(n) for n in saved.names(PARAM)}
    config = parse([*SHORT.split()], paths=GRADIENT_PATHS, task=TranslationConfig)
    sums = torch.zeros(2)
    for pair in range(len(dataset)):
        source, target = dataset.source(pair).tolist(), dataset.target(pair).tolist()
        logits = slow_logits(values, config.model, source, [2, *target[:-1]])
        sums += slow_sums(logits, target, config.model.label_smoothing)
    wanted = sums / int(dataset.target_lengths.sum())
    assert found[0] == pytest.approx(wanted.tolist(), rel=1e-4)


# ---- going on ------------------------------------------------------------------------------------


@pytest.mark.turns
@pytest.mark.parametrize("path", ["dense", "samo+radius"])
@pytest.mark.parametrize("more", ["", "--fp16 --initial-loss-scale 16777216"])
def test_a_resumed_run_equals_a_whole_one(
    run: Callable[..., Any], pairs: PairPaths, tmp_path: Path, path: str, more: str
) -> None:
    """The resumed part crosses the end of an epoch; in fp16 it begins right after skipped steps."""
    dataset = PairDataset(pairs, "train", PairVocabulary.load(pairs))
    epoch = Packs(dataset, max_tokens=200, seed=1234).per_epoch
    steps = epoch // 2 + 4  # of two packs
    half = 2 if more else epoch // 4
    assert 0 < 2 * half < epoch < 2 * steps
    flags = f"{DROPOUT} --max-tokens 200 --train-iters {steps} --grad-path {path} {PATHS[path]}"
    if "radius" in path and more:
        flags += " --accumulate-allreduce-grads-in-fp32"
    whole = run(2, f"{flags} {more}", tmp_path / "whole")
    first = run(2, f"{flags} {more} --exit-interval {half}", tmp_path / "parts")
    assert first[0]["iteration"] == half and first[0]["consumed"] == 2 * half
    parts = run(2, f"{flags} {more}", tmp_path / "parts")
    assert all(equal(a, b) for a, b in zip(whole, parts, strict=True))
    assert metrics_of(tmp_path / "whole", "loss") == metrics_of(tmp_path / "parts", "loss")
    skipped = metrics_of(tmp_path / "whole", "skipped")
    assert skipped[half - 1] is bool(more)
    assert whole[0]["applied"] == steps - sum(skipped) > 0


def test_a_killed_run_goes_on_bitwise(pairs: PairPaths, tmp_path: Path) -> None:
    """The run is killed at less than half an epoch and ends in the next one."""
    dataset = PairDataset(pairs, "train", PairVocabulary.load(pairs))
    epoch = Packs(dataset, max_tokens=60, seed=1234).per_epoch
    assert 4 * 10 < epoch < 2 * 40
    flags = [*SHORT.split(), "--data-path", pairs.prefix, *DROPOUT.split()]
    flags += ["--train-iters", "40", "--save-interval", "5"]

    def start(folder: Path) -> program.Program:
        argv = [*flags, "--run-dir", str(folder)]
        return program.start(PROGRAM, argv, env=os.environ, cwd=tmp_path)

    cut = start(tmp_path / "cut")
    deadline = time.monotonic() + LIMIT
    while not (tmp_path / "cut" / "checkpoints" / "step_00000010").is_dir():
        assert cut.poll() is None, cut.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    cut.send_signal(signal.SIGKILL)
    cut.communicate()
    assert cut.returncode == -signal.SIGKILL
    steps = list_steps(tmp_path / "cut" / "checkpoints").committed
    assert 2 * steps[0].step < epoch
    for folder in ("cut", "whole"):
        process = start(tmp_path / folder)
        _, told = process.communicate(timeout=LIMIT)
        assert process.returncode == 0, told
    losses = [metrics_of(tmp_path / folder, "loss") for folder in ("cut", "whole")]
    assert losses[0] == losses[1] and len(losses[0]) == 40
    step = "checkpoints/step_00000040"
    with (
        Checkpoint.open(tmp_path / "cut" / step) as a,
        Checkpoint.open(tmp_path / "whole" / step) as b,
    ):
        assert a.names() == b.names()
        assert all(torch.equal(a.read(name), b.read(name)) for name in a.names())


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--embed-dim 15", "embed_dim 15 is not a multiple of attention_heads 2"),
        ("--encoder-kernel-size-list 3", "encoder_kernel_size_list 3 has 1 sizes"),
        ("--decoder-kernel-size-list 3 3 3", "decoder_layers is 2; give one size for each layer"),
        ("--micro-batch-size 2", "micro_batch_size 2 must be 1"),
        ("--microbatch-tokens 61", "microbatch_tokens 61 is more than max_tokens 60"),
        ("--source-lang en", "target_lang en is source_lang too"),
        ("--label-smoothing 1", "--label-smoothing: 1.0 is out of range"),
        ("--max-tokens 1", "--max-tokens: 1 is out of range"),
        ("--encoder-layers 0", "--encoder-layers: 0 is out of range"),
        ("--recompute-granularity selective", "give --recompute-granularity full"),
        ("--recompute-granularity full --recompute-method sqrt", "--recompute-method uniform"),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 3",
            "recompute_num_layers 3 is more than encoder_layers 2",
        ),
        ("--tensor-model-parallel-size 2", "tensor_model_parallel_size"),
        ("--pipeline-model-parallel-size 2", "pipeline_model_parallel_size"),
        ("--seq-length 8", "--seq-length: no such flag"),
        ("--embed-dmi 8", "did you mean --embed-dim"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(flags: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse([*SHORT.split(), *flags.split()], paths=GRADIENT_PATHS, task=TranslationConfig)
    assert told in str(error.value) and "\n" not in str(error.value)


def told_by(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    code = main(arguments)
    return code, capsys.readouterr().err.strip().splitlines()[-1]


def test_wrong_files_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write_data(tmp_path)
    given = [*SHORT.split(), "--run-dir", str(tmp_path / "run"), "--dry-run"]
    code, line = told_by([*given, "--data-path", str(tmp_path / "nowhere")], capsys)
    assert code == 3 and "nowhere.de.dict.txt" in line
    code, line = told_by([*given, "--data-path", paths.prefix, "--target-lang", "fr"], capsys)
    assert code == 3 and "de-en.fr.dict.txt" in line
    code, line = told_by([*given, "--data-path", paths.prefix, "--max-tokens", "5"], capsys)
    assert code == 2 and "max_tokens: 5 is less than" in line
    broken = Path(f"{paths.tokens('train', 'en')}.bin")
    broken.write_bytes(broken.read_bytes()[:-2])
    code, line = told_by([*given, "--data-path", paths.prefix], capsys)
    assert code == 3 and "de-en.train.en.bin" in line and "--check-paths false" in line


def test_a_run_without_data_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = parse(SHORT.split(), paths=GRADIENT_PATHS, task=TranslationConfig)
    with pytest.raises(ConfigError, match="data_path: not given"):
        TRANSLATION_TASK.open(config)
    code, line = told_by([*SHORT.split(), "--run-dir", str(tmp_path / "run"), "--dry-run"], capsys)
    assert code == 0 and "a run needs --data-path" in line


def test_a_run_does_not_go_on_with_other_data(
    run: Callable[..., Any], pairs: PairPaths, ranks: Ranks, tmp_path: Path
) -> None:
    run(1, "--train-iters 2", tmp_path / "run")
    other = write_data(tmp_path, pairs=200)
    flags = f"{SHORT} --data-path {other.prefix} --train-iters 4"
    with pytest.raises(Exception, match="belongs to another run: data.vocabulary"):
        ranks.run(1, train, flags, tmp_path / "run", TRANSLATION_TASK)
    with pytest.raises(Exception, match="data.max_tokens"):
        run(1, "--train-iters 4 --max-tokens 80", tmp_path / "run")
    run(1, "--train-iters 4 --microbatch-tokens 50 --dropout 0.1", tmp_path / "run")


def test_the_script_starts_the_program_of_the_task(pairs: PairPaths) -> None:
    script = PROGRAM.parent / "scripts" / "dc_transformer_de_en.sh"
    command = [str(script), "--dry-run", "--", "--data-path", pairs.prefix, "--max-tokens", "999"]
    environment = {**os.environ, "PYTHON": sys.executable, "GRAD_PATH": "samo"}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert shown.returncode == 0, shown.stderr
    for part in ("pretrain_translation.py", "--grad-path samo", "runs/dc_transformer_de_en"):
        assert part in shown.stdout
    refused = subprocess.run(
        [*command, "--embed-dim", "3"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert refused.returncode == 2 and "embed_dim 3 is not a multiple" in refused.stderr


# ---- configuration -------------------------------------------------------------------------------


def test_a_configuration_comes_back_from_its_file(tmp_path: Path) -> None:
    given = [*SHORT.split(), "--encoder-kernel-size-list", "3", "9"]
    config = parse(given, paths=GRADIENT_PATHS, task=TranslationConfig)
    assert config.model.encoder_kernels == (3, 9) and config.model.decoder_kernels == (3, 7)
    (tmp_path / "t.yaml").write_text(to_yaml(resolve(config, 1)))
    again = parse(
        ["--config", str(tmp_path / "t.yaml")], paths=GRADIENT_PATHS, task=TranslationConfig
    )
    assert again.model == config.model and again.data == config.data


def test_log_and_metrics_speak_of_tokens(run: Callable[..., Any], tmp_path: Path) -> None:
    run(1, "--train-iters 4 --full-validation", tmp_path)
    log = (tmp_path / "log.txt").read_text()
    assert "| loss: " in log and "| nll: " in log and "| tokens/s: " in log
    assert "parameters, dictionaries de " in log
    assert sum(metrics_of(tmp_path, "flops")) > 0
