"""Settings of image classifiers: shipped files, refusals by name, what a dry run looks at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron.config import parse, resolve, to_yaml
from megatron.errors import ConfigError
from megatron.model.batch_norm import BatchNorm2d
from megatron.model.image_shapes import parameter_count, wide_resnet101_layers
from megatron.model.resnet import WideResNet101
from megatron.optimizer.build import learning_rate
from megatron.tasks.vision_config import VisionConfig
from pretrain_gpt import GRADIENT_PATHS

REPO = Path(__file__).resolve().parents[2]
WRN = REPO / "configs" / "wrn28_2_cifar10.yaml"
TABLES: dict[str, Any] = yaml.safe_load(
    (REPO / "configs" / "tables" / "wrn28_2_cifar10.yaml").read_text(encoding="utf-8")
)
BASE = "--mock-data --micro-batch-size 4 --train-iters 10 --lr 0.1"


def read(flags: str = "", base: str = BASE) -> VisionConfig:
    config = parse([*base.split(), *flags.split()], paths=GRADIENT_PATHS, task=VisionConfig)
    assert isinstance(config, VisionConfig)
    return config


def refused(flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(flags)
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "parameters", "batch"),
    [
        ("wrn28_2_cifar10", 1_456_858, 100),
        ("vgg19", 143_667_240, 128),
        ("wide_resnet101", 126_886_696, 128),
    ],
)
def test_shipped_files_have_the_published_networks(name: str, parameters: int, batch: int) -> None:
    config = read(base=f"--config {REPO / 'configs' / name}.yaml --mock-data")
    assert parameter_count(config.model.layers()) == parameters
    assert config.training.global_batch_size == batch
    optimizer = config.optimizer
    assert (optimizer.optimizer, optimizer.sgd_weight_decay) == ("sgd", "coupled")
    assert optimizer.sgd_momentum == 0.9 and optimizer.clip_grad == 0


def test_the_reports_networks_have_their_sizes() -> None:
    for network in TABLES["networks"]:
        layers, width = network["num_layers"], network["width_factor"]
        config = read(
            f"--num-layers {layers} --width-factor {width}", f"--config {WRN} --mock-data"
        )
        assert parameter_count(config.model.layers()) == network["parameters"]


def test_the_reports_schedule_is_that_of_its_table() -> None:
    config = resolve(read(base=f"--config {WRN} --mock-data"), 1)
    rate, updates = learning_rate(config), TABLES["images"] // TABLES["batch"]
    assert config.training.train_iters == updates * TABLES["epochs"] == 100_000
    assert config.training.global_batch_size == TABLES["batch"]
    factor = TABLES["sparse"][100]["learning_rate"]
    expected = 0.0
    for epoch in range(1, TABLES["epochs"] + 1):
        expected = TABLES["learning_rates"].get(epoch, expected)
        for update in (updates * (epoch - 1), updates * epoch - 1):
            assert rate.at(update * TABLES["batch"]) == pytest.approx(factor * expected)


def test_defaults_are_wrn_28_2s_and_megatrons() -> None:
    model = resolve(read(), 1).model
    assert (model.num_layers, model.width_factor) == (28, 2.0)
    assert (model.num_classes, model.img_h, model.img_w) == (1000, 224, 224)
    vgg = resolve(read("--vision-backbone-type vgg19"), 1).model
    assert (vgg.num_layers, vgg.width_factor) == (None, 1.0)


def test_a_resolved_configuration_reads_back(tmp_path: Path) -> None:
    config = resolve(read("--num-layers 16 --img-h 48 --image-std 1 2 3.5 --held-out-images 7"), 2)
    (tmp_path / "a.yaml").write_text(to_yaml(config), encoding="utf-8")
    again = read(base=f"--config {tmp_path / 'a.yaml'}")
    assert (again.model, again.data, again.training) == (
        config.model,
        config.data,
        config.training,
    )


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            "--tensor-model-parallel-size 2",
            "tensor_model_parallel_size 2: each rank holds",
        ),
        (
            "--pipeline-model-parallel-size 2",
            "pipeline_model_parallel_size 2: each rank holds",
        ),
        ("--recompute-granularity full", "an image classifier has no transformer layers"),
        (
            "--vision-backbone-type vgg19 --num-layers none --recompute-granularity residual",
            "that network has neither norms nor residual blocks",
        ),
        (
            "--vision-backbone-type vgg19 --num-layers none --simulated-micro-batch-size 2",
            "that network has no batch normalization",
        ),
        (
            "--micro-batch-size 8 --simulated-micro-batch-size 3",
            "simulated_micro_batch_size 3 does not divide micro_batch_size 8; nearest "
            "micro_batch_size: 6, 9",
        ),
        ("--compile true", "models of the task vision are not compiled"),
        ("--num-layers 27", "num_layers 27 is not 6 n + 4; nearest: 22, 28"),
        ("--num-layers 28 --vision-backbone-type vgg19", "the depth of that network is fixed"),
        ("--num-layers 4", "--num-layers: 4 is out of range; must be in [10, 10000]"),
        ("--img-w 31", "--img-w: 31 is out of range; must be in [32, 4096]"),
        ("--width-factor 0", "--width-factor: 0.0 is out of range"),
        ("--num-classes 0", "--num-classes: 0 is out of range"),
        ("--hidden-dropout 1", "--hidden-dropout: 1.0 is out of range; must be in [0, 1)"),
        ("--image-std 1 0 1", "--image-std: 0.0 is out of range; must be more than 0"),
        ("--image-mean 1 2", "--image-mean: 2 values given; must be 3"),
        ("--augmentation flips", "flips is not known; must be one of flip-crop, none"),
        ("--vision-backbone-type vit", "must be one of wide-resnet, vgg19, wide-resnet101"),
        ("--seq-length 8", "--seq-length: no such flag"),
        ("--num-clases 8", "--num-clases: no such flag; did you mean --num-classes?"),
        ("--grad-path radius --optimizer sgd --sgd-weight-decay coupled", "an L2 term"),
    ],
)
def test_wrong_values_are_refused_by_name(flags: str, told: str) -> None:
    assert told in refused(flags)


ONE_IMAGE = "--vision-backbone-type wide-resnet101 --micro-batch-size 1"


def test_batch_norm_of_one_value_is_refused() -> None:
    message = refused(f"{ONE_IMAGE} --img-h 32 --img-w 32")
    assert message == (
        "micro_batch_size 1 with vision_backbone_type wide-resnet101, img_h 32 and img_w 32: batch "
        "normalization layer4.0.bn2 has one value of each channel, and needs two; give "
        "--micro-batch-size 2 or larger images"
    )
    for legal in (
        f"{ONE_IMAGE} --img-h 32 --img-w 33",
        f"{ONE_IMAGE} --img-h 32 --img-w 32 --micro-batch-size 2",
        f"{ONE_IMAGE} --img-h 32 --img-w 32 --skip-train",
        "--micro-batch-size 1 --img-h 32 --img-w 32",
        "--micro-batch-size 1 --img-h 32 --img-w 32 --vision-backbone-type vgg19",
    ):
        read(legal)


@pytest.mark.parametrize("size", [(32, 32), (32, 33), (33, 33), (40, 57)])
def test_the_rule_refuses_what_torch_refuses(size: tuple[int, int]) -> None:
    """The size of a map at a normalization is counted as the network computes it."""
    network = WideResNet101(classes=3, seed=1, width=1 / 16)
    layers = wide_resnet101_layers(classes=3, width=1 / 16, height=size[0], image_width=size[1])
    counted = {layer.name: layer.positions for layer in layers if layer.kind == "norm"}
    found: dict[str, int] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda _, inputs: found.update({name: inputs[0][0, 0].numel()})

    for name, module in network.named_modules():
        if isinstance(module, BatchNorm2d):
            module.register_forward_pre_hook(note(name))
    network(torch.randn(2, 3, *size))
    assert found == counted
    if 1 in found.values():
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            network(torch.randn(1, 3, *size))
    else:
        network(torch.randn(1, 3, *size))


def test_a_run_may_not_write_among_its_images(tmp_path: Path) -> None:
    message = refused(f"--mock-data false --data-path {tmp_path} --run-dir {tmp_path}")
    assert "is a data folder" in message
    read(f"--mock-data false --data-path {tmp_path} --run-dir {tmp_path / 'run'}")
