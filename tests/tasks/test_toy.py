"""A task other than GPT trains, evaluates, saves and goes on with everything that runs have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.store import Checkpoint
from megatron.config import fields_by_section, parse, to_yaml
from megatron.data.sampler import MicrobatchSampler
from megatron.errors import ConfigError
from megatron.parallel.groups import ProcessGroups
from megatron.report import read_run, write_report
from pretrain_gpt import GRADIENT_PATHS
from tests.ranks import Ranks
from tests.tasks.toy import TOY, TOY_TASK, ToyConfig
from tests.training.harness import make_trainer, metrics_of, train

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


def run(ranks: Ranks, world: int, flags: str, folder: Path) -> list[dict[str, Any]]:
    return ranks.run(world, train, f"{TOY} {flags}", folder, TOY_TASK)


def equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether two runs end with the same bits: parameters, states and buffers."""
    return all(
        first[kind].keys() == second[kind].keys()
        and all(torch.equal(first[kind][name], second[kind][name]) for name in first[kind])
        for kind in ("params", "state", "buffers")
    )


# ---- configuration -------------------------------------------------------------------------------


def read(*flags: str) -> ToyConfig:
    return parse([*TOY.split(), *flags], paths=GRADIENT_PATHS, task=ToyConfig)


def test_a_task_has_its_own_sections_flags_and_rules(tmp_path: Path) -> None:
    config = read("--width", "4")
    assert config.model.width == 4 and config.name == "toy"
    assert list(fields_by_section(GRADIENT_PATHS, ToyConfig))[:2] == ["model", "training"]
    (tmp_path / "toy.yaml").write_text(to_yaml(config))
    again = parse(["--config", str(tmp_path / "toy.yaml")], paths=GRADIENT_PATHS, task=ToyConfig)
    assert (again.model, again.data, again.training) == (config.model, config.data, config.training)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--seq-length 8", "--seq-length: no such flag; see --help"),
        ("--layernorm-epsilon 8", "--layernorm-epsilon: no such flag; see --help"),
        ("--widht 8", "--widht: no such flag; did you mean --width?; see --help"),
        ("--learning-rate 8", "--learning-rate: no such flag; did you mean --lr?; see --help"),
        ("--ignored-every 2 --poisoned-image 3", "one awkward thing at a time"),
        ("--poisoned-image 128", "poisoned_image 128 is never seen; must be less than 128"),
        ("--tensor-model-parallel-size 2", "tensor_model_parallel_size 2: each rank holds a whole"),
        ("--pipeline-model-parallel-size 2", "must be 1; further ranks are data-parallel"),
        ("--recompute-granularity full", "recompute_granularity full: models of the task toy keep"),
        ("--compile", "compile true: models of the task toy are not compiled; leave it out"),
        ("--valid-images 0", "--valid-images: 0 is out of range; must be at least 1"),
    ],
)
def test_a_mistake_is_told_in_the_words_of_the_task(flags: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told.replace("?", r"\?")):
        read(*flags.split())


def test_a_config_of_another_task_is_refused(tmp_path: Path) -> None:
    (tmp_path / "toy.yaml").write_text(to_yaml(read()))
    with pytest.raises(ConfigError, match="width: no such key"):
        parse(["--config", str(tmp_path / "toy.yaml")], paths=GRADIENT_PATHS)


# ---- training ------------------------------------------------------------------------------------


@pytest.mark.push
@pytest.mark.turns
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("world", [1, 2])
def test_every_gradient_path_learns(ranks: Ranks, tmp_path: Path, path: str, world: int) -> None:
    flags = f"--train-iters 30 --grad-path {path} {PATHS[path]} --eval-iters 1"
    found = run(ranks, world, flags, tmp_path)
    losses = metrics_of(tmp_path, "loss")
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert metrics_of(tmp_path, "accuracy")[-1] > 0.4
    assert metrics_of(tmp_path, "images") == [16] * 30
    for other in found[1:]:
        assert all(torch.equal(other["buffers"][n], b) for n, b in found[0]["buffers"].items())
    assert any(tensor.abs().sum() > 0 for tensor in found[0]["buffers"].values())


def test_grids_agree_up_to_statistics(ranks: Ranks, tmp_path: Path) -> None:
    """Microbatches are those of any grid; running statistics alone depend on the ranks."""
    curves = []
    for world in (1, 2):
        run(ranks, world, "--eval-iters 0", tmp_path / str(world))
        curves.append(metrics_of(tmp_path / str(world), "loss"))
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


def test_ranks_may_count_differently(ranks: Ranks, tmp_path: Path) -> None:
    curves = []
    for world in (1, 2):
        run(ranks, world, "--ignored-every 3", tmp_path / str(world))
        curves.append(metrics_of(tmp_path / str(world), "loss"))
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)
    counts = [sum(i % 3 != 0 for i in range(16 * n, 16 * n + 16)) for n in range(8)]
    assert metrics_of(tmp_path / "2", "images") == counts


@pytest.mark.push
@pytest.mark.parametrize(
    "precision",
    [
        "--bf16",
        "--bf16 --grad-reduce-in-bf16",
        "--fp16",
        "--bf16 --use-distributed-optimizer",
        "--bf16 --optimizer-cpu-offload",
        "--fp16 --optimizer-cpu-offload --clip-grad 0",
        f"--bf16 --grad-path samo+radius {PATHS['samo+radius']}",
    ],
)
def test_norms_stay_in_fp32(ranks: Ranks, tmp_path: Path, precision: str) -> None:
    flags = f"{precision} --initial-loss-scale 1024 --train-iters 30"
    found = run(ranks, 2, flags, tmp_path)
    dtypes = {name: tensor.dtype for name, tensor in found[0]["params"].items()}
    half = torch.bfloat16 if "bf16" in precision else torch.float16
    assert dtypes["bn1.weight"] == torch.float32 and dtypes["conv1.weight"] == half
    losses = metrics_of(tmp_path, "loss")
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    for kind in ("params", "buffers"):
        assert all(torch.equal(found[1][kind][name], t) for name, t in found[0][kind].items())


# ---- evaluation ----------------------------------------------------------------------------------


def validation(run_dir: Path) -> dict[str, float]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return next(line for line in lines if "valid_loss" in line)


def on_rank_one_by_one(groups: ProcessGroups, flags: str, run_dir: Path) -> dict[str, float]:
    """The means of the validation images, computed one image at a time."""
    trainer = make_trainer(groups, flags, run_dir, task=TOY_TASK)
    trainer.stage.train(False)
    reader: Any = trainer.readers.valid
    sums = torch.zeros(2, dtype=torch.float64)
    count = 0
    with torch.no_grad():
        for number in range(reader.samples):
            batch = next(reader.__class__(**{**vars(reader), "sampler": _ONE}).read(number, 1))
            sums += trainer.stage.chunks[0].run(0, batch, None)
            count += batch.counted
    trainer.engine.detach()
    trainer.metrics.close()
    loss, accuracy = (sums / count).tolist()
    return {"valid_loss": loss, "valid_accuracy": accuracy}


_ONE = MicrobatchSampler(1, 0, 1)


@pytest.mark.parametrize("ignored", ["", "--ignored-every 4"])
def test_full_validation_counts_each_image_once(ranks: Ranks, tmp_path: Path, ignored: str) -> None:
    """21 images in batches of 16: the second batch has one rank's worth of padding and more."""
    flags = f"--full-validation --train-iters 2 {ignored}"
    run(ranks, 2, flags, tmp_path)
    found = validation(tmp_path)
    (told,) = ranks.run(1, on_rank_one_by_one, f"{TOY} {flags}", tmp_path)
    assert {key: found[key] for key in told} == pytest.approx(told, rel=1e-5)


def test_evaluations_are_no_longer_than_the_split(ranks: Ranks, tmp_path: Path) -> None:
    run(ranks, 1, "--train-iters 1 --eval-iters 100", tmp_path / "a")
    run(ranks, 1, "--train-iters 1 --full-validation", tmp_path / "b")
    assert validation(tmp_path / "a") == validation(tmp_path / "b")


# ---- buffers -------------------------------------------------------------------------------------


def on_rank_of_a_skipped_step(groups: ProcessGroups, flags: str, run_dir: Path) -> list[bool]:
    """Whether buffers are as before after a good and after a poisoned step, shadows included."""
    trainer = make_trainer(groups, flags, run_dir, task=TOY_TASK)
    same: list[bool] = []
    for _ in range(3):
        before = [tensor.clone() for _, tensor in trainer.buffers.tensors()]
        trainer.train_step()
        infos = trainer.buffers.infos
        kept = all(torch.equal(a, info.buffer) for a, info in zip(before, infos, strict=True))
        assert all(torch.equal(info.buffer, info.shadow) for info in infos)
        same.append(kept)
    trainer.engine.detach()
    trainer.metrics.close()
    return same


def test_a_skipped_step_leaves_buffers_alone(ranks: Ranks, tmp_path: Path) -> None:
    flags = f"{TOY} --poisoned-image 20"
    found = ranks.run(2, on_rank_of_a_skipped_step, flags, tmp_path)
    assert found == [[False, True, False]] * 2


def test_buffers_are_means_over_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """After one step from (0, 1): the mean of what each rank found in its microbatches."""
    (alone,) = run(ranks, 1, "--train-iters 1 --micro-batch-size 16", tmp_path / "1")
    two = run(ranks, 2, "--train-iters 1 --micro-batch-size 8", tmp_path / "2")
    mean = "bn1.running_mean"
    # One microbatch each: the mean of means of halves is the mean.
    assert torch.allclose(two[0]["buffers"][mean], alone["buffers"][mean], atol=1e-6)


@pytest.mark.parametrize("path", ["dense", "samo+radius"])
@pytest.mark.parametrize("poisoned", ["", "--poisoned-image 50"])
def test_a_resumed_run_equals_a_whole_one(
    ranks: Ranks, tmp_path: Path, path: str, poisoned: str
) -> None:
    """Also where the last step before the save was skipped (image 50 is in step 4)."""
    flags = f"--grad-path {path} {PATHS[path]} {poisoned} --save-interval 4"
    whole = run(ranks, 2, flags, tmp_path / "whole")
    run(ranks, 2, f"{flags} --exit-interval 4", tmp_path / "parts")
    parts = run(ranks, 2, flags, tmp_path / "parts")
    assert all(equal(a, b) for a, b in zip(whole, parts, strict=True))
    assert metrics_of(tmp_path / "whole", "loss") == metrics_of(tmp_path / "parts", "loss")
    assert whole[0]["applied"] == (7 if poisoned else 8)


@pytest.mark.parametrize("zero", ["", "--use-distributed-optimizer"])
def test_buffers_are_saved_once_and_loaded_by_any_number_of_ranks(
    ranks: Ranks, tmp_path: Path, zero: str
) -> None:
    two = run(ranks, 2, zero, tmp_path)
    with Checkpoint.open(tmp_path / "checkpoints" / "step_00000008") as saved:
        names = saved.names("buffer/")
        assert {name.removeprefix("buffer/") for name in names} == set(two[0]["buffers"])
        for name, tensor in two[0]["buffers"].items():
            assert torch.equal(saved.read(f"buffer/{name}"), tensor)
    (one,) = run(ranks, 1, "--train-iters 8", tmp_path)
    assert all(torch.equal(one["buffers"][n], b) for n, b in two[0]["buffers"].items())


def test_weights_for_another_run_bring_their_buffers(ranks: Ranks, tmp_path: Path) -> None:
    first = run(ranks, 1, "", tmp_path / "a")
    more = f"--load {tmp_path / 'a'} --finetune --skip-train --full-validation"
    (second,) = run(ranks, 1, more, tmp_path / "b")
    assert all(torch.equal(second["buffers"][n], b) for n, b in first[0]["buffers"].items())


def on_rank_with_a_changed_buffer(groups: ProcessGroups, flags: str, run_dir: Path) -> str:
    trainer = make_trainer(groups, flags, run_dir, task=TOY_TASK)
    trainer.train_step()
    if groups.world.rank == 1:
        trainer.buffers.infos[0].buffer[0] += 1e-6
    try:
        trainer._compare_replicas()
    except Exception as error:
        return f"{type(error).__name__} {error}"
    finally:
        trainer.engine.detach()
        trainer.metrics.close()
    return ""


def test_a_buffer_that_drifts_is_named(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks.run(2, on_rank_with_a_changed_buffer, TOY, tmp_path):
        assert told.startswith("NumericsError") and "bn1.running_mean (buffer)" in told


# ---- files ---------------------------------------------------------------------------------------


def test_log_and_report_speak_of_images(ranks: Ranks, tmp_path: Path) -> None:
    run(ranks, 1, "--full-validation", tmp_path)
    log = (tmp_path / "log.txt").read_text()
    assert "| loss: " in log and "| accuracy: " in log and "| images/s: " in log
    assert "lm loss" not in log and "tokens" not in log and "PPL" not in log
    read = read_run(tmp_path)
    assert read.unit == "images" and len(read.means["accuracy"]["train"]) == 8
    assert [i for i, _ in read.means["accuracy"]["valid"]] == [8]
    page = write_report(tmp_path).read_text()
    assert "Accuracy" in page and "Images per second" in page and "perplexity" not in page
