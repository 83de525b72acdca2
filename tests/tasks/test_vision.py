"""Image classifiers train as plain torch does, on every gradient path, and go on bit by bit."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from megatron.checkpoint.store import Checkpoint
from megatron.config import parse, resolve
from megatron.data.image_reader import ImageBatch
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from megatron.report import read_run
from pretrain_gpt import GRADIENT_PATHS
from pretrain_vision import VISION_TASK, main
from samo.pruning import magnitude
from tests import program
from tests.data.image_files import write_cifar10
from tests.limits import LIMIT
from tests.model import plain_networks
from tests.ranks import Ranks
from tests.tasks.test_toy import PATHS, equal
from tests.tiers import sampled
from tests.training.harness import make_trainer, metrics_of, train

pytestmark = pytest.mark.push

REPO = Path(__file__).resolve().parents[2]
SGD = (
    "--optimizer sgd --sgd-nesterov --sgd-weight-decay coupled --weight-decay 5e-4 --clip-grad 0 "
    "--lr-decay-style multi-step --lr-multi-step-iters 10 --lr-multi-step-factors 0.2"
)
COMMON = (
    "--mock-data --mock-images 64 --num-classes 4 --img-h 32 --img-w 32 --micro-batch-size 4 "
    "--global-batch-size 16 --eval-interval 100 --log-interval 4 --eval-iters 0 --device cpu "
    "--hidden-dropout 0"
)
WRN = f"{COMMON} --num-layers 10 --width-factor 0.5 --lr 0.1"
VGG = f"{COMMON} --vision-backbone-type vgg19 --width-factor 0.125 --lr 0.2"
RESNET = f"{COMMON} --vision-backbone-type wide-resnet101 --width-factor 0.0625 --lr 0.01"
NETWORKS = {"wrn": WRN, "vgg": VGG}
FORWARD: dict[str, Callable[..., torch.Tensor]] = {
    "wrn": partial(plain_networks.wide_resnet, depth=10),
    "vgg": plain_networks.vgg19,
}
RATES = {"wrn": 0.1, "vgg": 0.2}
ALONE = ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=1), rank=0)


def run(ranks: Ranks, world: int, flags: str, folder: Path) -> list[dict[str, Any]]:
    return ranks.run(world, train, flags, folder, VISION_TASK)


def test_an_identity_has_no_setting_that_weights_do_not_depend_on() -> None:
    flags = f"{WRN} --train-iters 4"
    first = loaded(f"{flags} --simulated-micro-batch-size 2").identity()
    assert first == loaded(flags).identity()
    assert not {"model.simulated_micro_batch_size", "model.hidden_dropout"} & first.keys()
    assert first["model.num_layers"] == 10


# ---- against plain torch -------------------------------------------------------------------------


def loaded(flags: str) -> Any:
    config = parse(flags.split(), paths=GRADIENT_PATHS, task=VISION_TASK.config)
    return VISION_TASK.open(resolve(config, 1))


def batches_of(flags: str, steps: int) -> list[list[ImageBatch]]:
    """The microbatches of each step, as one rank reads them."""
    opened = loaded(flags)
    readers = opened.readers(ALONE, torch.device("cpu"), log=lambda text: None)
    assert readers.train is not None
    return [list(readers.train.read(16 * step, 16)) for step in range(steps)]


Loss = Callable[[Mapping[str, torch.Tensor], ImageBatch], torch.Tensor]


def trained_by_torch(
    weights: Mapping[str, torch.Tensor],
    loss_of: Loss,
    batches: list[list[ImageBatch]],
    *,
    lr: float,
    dtype: torch.dtype = torch.float32,
    masks: Mapping[str, torch.Tensor] | None = None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train fp32 weights with torch's SGD; returns the losses and the weights.

    Gradients are of the weights in `dtype` (norms in fp32), averaged over the images of a step;
    with masks, weights and gradients are masked by hand.
    """
    keep = {name: 1.0 for name in weights} | dict(masks or {})
    masters = {name: (w.float() * keep[name]).requires_grad_() for name, w in weights.items()}
    optimizer = torch.optim.SGD(
        masters.values(), lr=lr, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    losses = []
    for step, microbatches in enumerate(batches):
        optimizer.param_groups[0]["lr"] = lr * (0.2 if step >= 10 else 1.0)
        images = sum(batch.counted for batch in microbatches)
        total = 0.0
        grads = {name: torch.zeros_like(master) for name, master in masters.items()}
        for batch in microbatches:
            parameters = {
                name: master.detach().to(weights[name].dtype).requires_grad_()
                for name, master in masters.items()
            }
            loss = loss_of(parameters, batch)
            (loss / images).backward()
            total += loss.item()
            for name, parameter in parameters.items():
                assert parameter.grad is not None, name
                grads[name] += parameter.grad.float() * keep[name]
        for name, master in masters.items():
            master.grad = grads[name]
        optimizer.step()
        losses.append(total / images)
    return losses, {name: master.detach() for name, master in masters.items()}


def first_weights(flags: str) -> dict[str, torch.Tensor]:
    (chunk,) = loaded(flags).chunks(ALONE, torch.device("cpu"))
    return {info.name: info.param.detach().clone() for info in chunk.parameter_infos()}


@pytest.mark.turns
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("world", [1, 2])
def test_losses_equal_plain_torch(ranks: Ranks, tmp_path: Path, name: str, world: int) -> None:
    """The network, its batch norm and the loss are `plain_networks`, the update is torch's."""
    flags = f"{NETWORKS[name]} {SGD} --train-iters 20"

    def loss_of(weights: Mapping[str, torch.Tensor], batch: ImageBatch) -> torch.Tensor:
        return F.cross_entropy(FORWARD[name](weights, batch.images), batch.labels, reduction="sum")

    expected, weights = trained_by_torch(
        first_weights(flags), loss_of, batches_of(flags, 20), lr=RATES[name]
    )
    found = run(ranks, world, flags, tmp_path)
    assert metrics_of(tmp_path, "loss") == pytest.approx(expected, rel=1e-3)
    assert len(expected) == 20
    first = first_weights(flags)
    for parameter, weight in weights.items():
        moved, difference = weight - first[parameter], found[0]["params"][parameter] - weight
        assert moved.norm() > 1e-3 * first[parameter].norm(), parameter
        assert difference.norm() <= 1e-2 * moved.norm(), parameter


@pytest.mark.turns
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("world", [1, 2])
def test_an_unpruned_samo_run_is_the_dense_run(
    ranks: Ranks, tmp_path: Path, name: str, world: int
) -> None:
    flags = f"{NETWORKS[name]} {SGD} --train-iters 20"
    dense = run(ranks, world, flags, tmp_path / "dense")
    samo = run(ranks, world, f"{flags} --grad-path samo --samo-sparsity 0", tmp_path / "samo")
    assert metrics_of(tmp_path / "dense", "loss") == metrics_of(tmp_path / "samo", "loss")
    assert all(equal(a, b) for a, b in zip(dense, samo, strict=True))


@pytest.mark.turns
@pytest.mark.parametrize("precision", ["", "--bf16"])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("world", [1, 2])
def test_a_pruned_run_is_masked_sgd(
    ranks: Ranks, tmp_path: Path, name: str, world: int, precision: str
) -> None:
    flags = f"{NETWORKS[name]} {SGD} {precision} --train-iters 20"
    (chunk,) = loaded(flags).chunks(ALONE, torch.device("cpu"))
    weights = first_weights(flags)
    matrices = {n: w for n, w in weights.items() if w.dim() > 1}
    masks = {n: m.view_as(weights[n]) for n, m in magnitude(matrices, Fraction(9, 10)).items()}

    def loss_of(parameters: Mapping[str, torch.Tensor], batch: ImageBatch) -> torch.Tensor:
        images = batch.images.to(chunk.dtype)
        scores = functional_call(chunk.network, dict(parameters), images)
        return F.cross_entropy(scores.float(), batch.labels, reduction="sum")

    expected, wanted = trained_by_torch(
        weights, loss_of, batches_of(flags, 20), lr=RATES[name], masks=masks
    )
    found = run(
        ranks,
        world,
        f"{flags} --grad-path samo --samo-sparsity 0.9 --save-interval 10",
        tmp_path,
    )
    tolerance = 2e-2 if precision else 1e-3
    assert metrics_of(tmp_path, "loss") == pytest.approx(expected, rel=tolerance)
    for parameter, mask in masks.items():
        assert (found[0]["params"][parameter][~mask] == 0).all(), parameter
        moved = wanted[parameter] - weights[parameter].float() * mask
        difference = found[0]["state"][f"param/{parameter}"] - wanted[parameter][mask]
        assert moved.norm() > 0, parameter
        assert difference.norm() <= (0.2 if precision else 1e-2) * moved.norm(), parameter
    # Batch norm's statistics are saved with the model, and come back.
    again = run(ranks, world, f"{flags} --grad-path samo --samo-sparsity 0.9", tmp_path)
    assert all(equal(a, b) for a, b in zip(found, again, strict=True))
    if name == "wrn":
        with Checkpoint.open(tmp_path / "checkpoints" / "step_00000020") as saved:
            for buffer, tensor in found[0]["buffers"].items():
                assert torch.equal(saved.read(f"buffer/{buffer}"), tensor)
        assert len(found[0]["buffers"]) == 14 and precision in ("", "--bf16")


# ---- every way to train --------------------------------------------------------------------------


@pytest.mark.parametrize("path", sampled(PATHS, ("dense", "samo+radius", "powersgd", "demo")))
def test_every_gradient_path_learns(ranks: Ranks, tmp_path: Path, path: str) -> None:
    flags = f"{WRN} --grad-path {path} {PATHS[path]} --train-iters 16 --lr 1e-2"
    found = run(ranks, 2, flags, tmp_path)
    losses = metrics_of(tmp_path, "loss")
    assert sum(losses[-4:]) < 0.95 * sum(losses[:4])
    assert metrics_of(tmp_path, "images") == [16] * 16
    for other in found[1:]:
        assert all(torch.equal(other["buffers"][n], b) for n, b in found[0]["buffers"].items())


MECHANISMS = [
    "--use-distributed-optimizer",
    "--use-distributed-optimizer --bf16",
    "--bf16 --optimizer-cpu-offload --offload-bucket-size 4096",
    "--bf16 --grad-reduce-in-bf16",
    "--fp16 --initial-loss-scale 1024",
    "--predivide-loss",
    "--grad-path samo --samo-sparsity 0.7 --samo-pruning random --dsr-interval 1",
    "--grad-path samo --samo-pruning early-bird --samo-early-bird-interval 1 "
    "--samo-sparsity 0.5 --samo-early-bird-distance 1",
]


@pytest.mark.parametrize("flags", sampled(MECHANISMS, MECHANISMS[1::2]))
def test_every_mechanism_trains_with_torchs_sgd(ranks: Ranks, tmp_path: Path, flags: str) -> None:
    found = run(ranks, 2, f"{WRN} {SGD} --train-iters 10 {flags}", tmp_path)
    losses = metrics_of(tmp_path, "loss")
    assert len(losses) == 10 and min(losses[5:]) < losses[0]
    assert equal(found[0] | {"state": {}}, found[1] | {"state": {}})


def test_a_wide_resnet_101_trains(ranks: Ranks, tmp_path: Path) -> None:
    found = run(ranks, 2, f"{RESNET} --global-batch-size 8 --train-iters 3", tmp_path)
    assert all(loss > 0 for loss in metrics_of(tmp_path, "loss"))
    assert len(found[0]["buffers"]) == 2 * 104


def test_sharded_states_change_no_bit(ranks: Ranks, tmp_path: Path) -> None:
    flags = f"{WRN} {SGD} --train-iters 8 --bf16"
    whole = run(ranks, 2, flags, tmp_path / "a")
    sharded = run(ranks, 2, f"{flags} --use-distributed-optimizer", tmp_path / "b")
    assert metrics_of(tmp_path / "a", "loss") == metrics_of(tmp_path / "b", "loss")
    assert equal(whole[0] | {"state": {}}, sharded[0] | {"state": {}})


def test_microbatches_without_batch_norm_make_no_difference(ranks: Ranks, tmp_path: Path) -> None:
    curves = []
    for micro in (2, 16):
        folder = tmp_path / str(micro)
        run(ranks, 1, f"{VGG} {SGD} --train-iters 6 --micro-batch-size {micro}", folder)
        curves.append(metrics_of(folder, "loss"))
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


def test_evaluations_report_top_1_accuracy(ranks: Ranks, tmp_path: Path) -> None:
    """On 12 of 13 test images after training; counted here one by one."""
    flags = f"{WRN} --mock-images 66 --train-iters 4 --full-validation --eval-iters 1"
    run(ranks, 2, flags, tmp_path)
    (found,) = ranks.run(1, on_rank_top_1, flags, tmp_path)
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    told = next(line for line in lines if "test_accuracy" in line)
    assert found["images"] == 13
    assert told["test_accuracy"] == pytest.approx(found["accuracy"])
    assert told["test_loss"] == pytest.approx(found["loss"], rel=1e-4)
    assert read_run(tmp_path).unit == "images"
    log = (tmp_path / "log.txt").read_text()
    assert "| accuracy: " in log and "WRN-10-0.5" in log


def on_rank_top_1(groups: ProcessGroups, flags: str, run_dir: Path) -> dict[str, float]:
    """Accuracy and loss of the test images by the saved model, one image at a time."""
    trainer = make_trainer(groups, flags, run_dir, task=VISION_TASK)
    network: Any = trainer.stage.chunks[0]
    reader: Any = trainer.readers.test
    network.train(False)
    correct, loss = 0, 0.0
    with torch.no_grad():
        for index in range(reader.samples):
            pixels = reader.transform.normalize(reader.source.image(index)[None])
            scores = network.network(torch.from_numpy(pixels))[0]
            label = reader.source.label(index)
            correct += int(scores.argmax()) == label
            loss += float(scores.logsumexp(0) - scores[label])
    trainer.engine.detach()
    trainer.metrics.close()
    count = reader.samples
    return {"images": count, "accuracy": correct / count, "loss": loss / count}


# ---- going on ------------------------------------------------------------------------------------


@pytest.mark.turns
@pytest.mark.parametrize("path", ["dense", "samo+radius"])
@pytest.mark.parametrize("precision", ["", "--fp16 --initial-loss-scale 3e38 --hysteresis 1"])
def test_a_resumed_run_equals_a_whole_one(
    ranks: Ranks, tmp_path: Path, path: str, precision: str
) -> None:
    """In fp16 every step before the save is skipped: the loss scale is far too high."""
    wide = " --accumulate-allreduce-grads-in-fp32" if precision else ""
    flags = f"{WRN} --optimizer sgd --grad-path {path} {PATHS[path]} {precision}{wide}"
    flags += " --train-iters 8 --save-interval 4"
    whole = run(ranks, 2, flags, tmp_path / "whole")
    run(ranks, 2, f"{flags} --exit-interval 4", tmp_path / "parts")
    parts = run(ranks, 2, flags, tmp_path / "parts")
    assert all(equal(a, b) for a, b in zip(whole, parts, strict=True))
    skipped = metrics_of(tmp_path / "whole", "skipped")
    assert skipped[3] == bool(precision)
    for key in ("loss", "skipped"):
        assert metrics_of(tmp_path / "whole", key) == metrics_of(tmp_path / "parts", key)


def _hashes(run_dir: Path) -> Any:
    manifest = json.loads((run_dir / "checkpoints/step_00000012/manifest.json").read_text())
    return {name: file["sha256"] for name, file in manifest["files"].items()}


def test_a_killed_run_comes_to_the_same_end(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "images", records=32)
    flags = WRN.replace("--mock-data --mock-images 64 --num-classes 4", "--num-classes 10")
    argv = [*flags.split(), *SGD.split(), "--data-path", str(tmp_path / "images")]
    argv += ["--train-iters", "12", "--save-interval", "2", "--lr-multi-step-iters", "7"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}

    def start(name: str) -> program.Program:
        line = [*argv, "--run-dir", str(tmp_path / name)]
        return program.start(REPO / "pretrain_vision.py", line, env=environment, cwd=REPO)

    def finish(process: program.Program) -> int:
        process.communicate(LIMIT)
        return process.wait()

    assert finish(start("whole")) == 0
    process = start("killed")
    wanted = tmp_path / "killed" / "checkpoints" / "step_00000004"
    while not wanted.is_dir():
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert finish(process) == -signal.SIGKILL
    assert finish(start("killed")) == 0
    assert _hashes(tmp_path / "killed") == _hashes(tmp_path / "whole")
    assert metrics_of(tmp_path / "killed", "loss") == metrics_of(tmp_path / "whole", "loss")


# ---- what is refused -----------------------------------------------------------------------------


def code_of(flags: str, folder: Path) -> int:
    return main([*WRN.replace("--mock-data", "").split(), *flags.split(), "--run-dir", str(folder)])


def test_missing_and_wrong_images_are_told_with_their_exit_codes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    short = "--train-iters 2 --global-batch-size 4 --num-classes 10"
    assert code_of(short, tmp_path / "a") == 2
    assert "data_path: not given" in capfd.readouterr().err
    assert code_of(f"{short} --data-path {tmp_path / 'absent'}", tmp_path / "b") == 3
    assert "no such folder of images" in capfd.readouterr().err
    write_cifar10(tmp_path / "images")
    wrong = short.replace("10", "11")
    assert code_of(f"{wrong} --data-path {tmp_path / 'images'}", tmp_path / "c") == 3
    assert "has 10 classes, num_classes is 11" in capfd.readouterr().err
    assert code_of(f"{short} --tensor-model-parallel-size 2", tmp_path / "d") == 2
    assert "tensor_model_parallel_size 2" in capfd.readouterr().err
    # Before anything of the wide network is allocated.
    one = "--vision-backbone-type wide-resnet101 --width-factor 1 --micro-batch-size 1"
    depth = f"{short} --num-layers none {one}"
    assert code_of(depth, tmp_path / "one") == 2
    told = capfd.readouterr().err
    assert told.count("\n") == 1 and "batch normalization layer4.0.bn2 has one value" in told

    good = f"{short} --data-path {tmp_path / 'images'}"
    assert code_of(good, tmp_path / "e") == 0
    more = good.replace("--train-iters 2", "--train-iters 3")
    assert code_of(f"{more} --augmentation none", tmp_path / "e") == 4
    assert "data.augmentation: 'flip-crop' there, 'none' here" in capfd.readouterr().err
    write_cifar10(tmp_path / "images", records=9)
    assert code_of(more, tmp_path / "e") == 4
    assert "data changed since" in capfd.readouterr().err
    assert code_of(f"{more} --accept-new-data", tmp_path / "e") == 0


def test_a_dry_run_looks_at_the_images(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_cifar10(tmp_path / "images")
    (tmp_path / "images" / "data_batch_4.bin").unlink()
    flags = f"--dry-run --train-iters 2 --num-classes 10 --data-path {tmp_path / 'images'}"
    assert code_of(flags, tmp_path / "run") == 3
    assert "data_batch_4.bin: no such file" in capfd.readouterr().err
    write_cifar10(tmp_path / "images")
    assert code_of(flags, tmp_path / "run") == 0
