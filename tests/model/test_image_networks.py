"""Image classifiers: published sizes, names, and equality with a plain torch transcription."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from megatron.model.image_classifier import ImageClassifier
from megatron.model.image_shapes import (
    Layer,
    parameter_count,
    parameter_shapes,
    training_flops,
    vgg19_layers,
    wide_resnet101_layers,
    wide_resnet_layers,
)
from megatron.model.resnet import WideResNet101
from megatron.model.vgg import VGG19, pool
from megatron.model.wide_resnet import WideResNet
from megatron.tensor_parallel.rng import DropoutStreams
from tests.model import plain_networks

STREAMS = DropoutStreams(1, device=torch.device("cpu"))


def vgg(*, classes: int, dropout: float = 0.0, **options: object) -> VGG19:
    options = {"seed": 1, "streams": STREAMS} | options
    return VGG19(classes=classes, dropout=dropout, **options)  # type: ignore[arg-type]


WRN_SIZES = {
    (28, 2): 1_456_858,
    (22, 2): 1_068_890,
    (16, 2): 680_922,
    (10, 2): 292_954,
    (28, 1.5): 821_466,
    (28, 1): 366_938,
    (28, 0.75): 207_498,
    (28, 0.5): 93_274,
}


@pytest.mark.parametrize(("size", "count"), WRN_SIZES.items(), ids=str)
def test_wide_resnets_have_the_reports_sizes(size: tuple[int, float], count: int) -> None:
    depth, width = size
    layers = wide_resnet_layers(depth=depth, width=width, classes=10)
    assert parameter_count(layers) == count
    network = WideResNet(depth=depth, width=width, classes=10, seed=1)
    assert sum(param.numel() for param in network.parameters()) == count


def test_a_classifier_takes_the_values_of_another() -> None:
    first, second = (
        ImageClassifier(
            WideResNet(depth=10, width=1, classes=10, seed=seed),
            device=torch.device("cpu"),
            dtype=torch.float32,
            streams=STREAMS,
        )
        for seed in (1, 2)
    )
    values = {info.name: info.param.detach() for info in first.parameter_infos()}
    assert list(values) == [name for name, _ in first.network.named_parameters()]
    second.load_values(values)
    for info in second.parameter_infos():
        assert torch.equal(info.param, values[info.name])
        assert info.weight_decay == (info.param.ndim > 1)
    with pytest.raises(ValueError, match="need"):
        second.load_values({name: torch.zeros(1) for name in values})


def test_sparse_tensors_of_wrn_28_2_have_their_share() -> None:
    shapes = parameter_shapes(wide_resnet_layers(depth=28, width=2, classes=10))
    sparse = [math.prod(s) for name, s in shapes.items() if ".conv" in name]
    assert (len(sparse), sum(sparse)) == (24, 1_451_520)


@pytest.mark.parametrize("depth", [4, 27, 30, 9])
def test_other_depths_are_refused(depth: int) -> None:
    with pytest.raises(ValueError, match=str(depth)):
        wide_resnet_layers(depth=depth, width=2, classes=10)


CASES: dict[str, tuple[Callable[..., list[Layer]], Callable[..., nn.Module]]] = {
    "wrn-28-2": (
        partial(wide_resnet_layers, depth=28, width=2),
        partial(WideResNet, depth=28, width=2, seed=1),
    ),
    "wrn-10-0.75": (
        partial(wide_resnet_layers, depth=10, width=0.75),
        partial(WideResNet, depth=10, width=0.75, seed=1),
    ),
    "vgg19": (partial(vgg19_layers, width=1 / 8), partial(vgg, width=1 / 8)),
    "wide-resnet101": (
        partial(wide_resnet101_layers, width=1 / 8),
        partial(WideResNet101, width=1 / 8, seed=1),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_modules_have_the_shapes_and_operations_that_are_counted(case: str) -> None:
    layers, network = CASES[case]
    size = {"height": 40, "image_width": 57}
    module = network(classes=7)
    shapes = {name: tuple(param.shape) for name, param in module.named_parameters()}
    wanted = parameter_shapes(layers(classes=7, **size))
    assert shapes == dict(wanted)
    with FlopCounterMode(display=False) as counter:
        module(torch.randn(2, 3, 40, 57)).sum().backward()
    assert counter.get_total_flops() == 2 * training_flops(layers(classes=7, **size))


TORCHVISION = {
    "vgg19": (
        vgg19_layers(classes=1000),
        (143_667_240, 143_652_544, 19),
        19.632e9,
        {
            "features.0.weight": (64, 3, 3, 3),
            "features.0.bias": (64,),
            "features.2.weight": (64, 64, 3, 3),
            "features.5.weight": (128, 64, 3, 3),
            "features.34.weight": (512, 512, 3, 3),
            "classifier.0.weight": (4096, 25088),
            "classifier.3.bias": (4096,),
            "classifier.6.weight": (1000, 4096),
        },
    ),
    "wide_resnet101_2": (
        wide_resnet101_layers(classes=1000),
        (126_886_696, 126_747_840, 105),
        22.753e9,
        {
            "conv1.weight": (64, 3, 7, 7),
            "bn1.bias": (64,),
            "layer1.0.conv1.weight": (128, 64, 1, 1),
            "layer1.0.downsample.0.weight": (256, 64, 1, 1),
            "layer1.0.downsample.1.weight": (256,),
            "layer2.0.conv2.weight": (256, 256, 3, 3),
            "layer3.22.conv3.weight": (1024, 512, 1, 1),
            "layer4.2.bn3.weight": (2048,),
            "fc.weight": (1000, 2048),
        },
    ),
}


@pytest.mark.parametrize("name", TORCHVISION)
def test_published_networks_have_torchvisions_sizes(name: str) -> None:
    layers, counts, products, named = TORCHVISION[name]
    shapes = parameter_shapes(layers)
    weights = [math.prod(shape) for shape in shapes.values() if len(shape) > 1]
    assert (parameter_count(layers), sum(weights), len(weights)) == counts
    assert sum(layer.forward_flops for layer in layers) / 2 == pytest.approx(products, rel=1e-4)
    assert {key: shapes[key] for key in named} == named


@pytest.mark.parametrize("name", TORCHVISION)
def test_published_networks_equal_torchvision(name: str) -> None:
    models = pytest.importorskip("torchvision").models
    theirs = getattr(models, name)(weights=None).eval()
    ours = vgg(classes=1000) if name == "vgg19" else WideResNet101(classes=1000, seed=1)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours.eval()(images), theirs(images))


PLAIN: dict[str, Callable[..., torch.Tensor]] = {
    "wrn-28-2": partial(plain_networks.wide_resnet, depth=28),
    "wrn-10-0.75": partial(plain_networks.wide_resnet, depth=10),
    "vgg19": plain_networks.vgg19,
    "wide-resnet101": plain_networks.wide_resnet101,
}


@pytest.mark.parametrize("side", [32, 47])
@pytest.mark.parametrize("case", CASES)
def test_scores_and_gradients_equal_the_transcription(case: str, side: int) -> None:
    network = CASES[case][1](classes=7).double()
    for param in network.parameters():
        if param.dim() == 1:  # distinguish norm weights from one another
            param.data = param.data + 0.1 * torch.randn(param.shape, dtype=torch.float64)
    plain = {n: p.detach().clone().requires_grad_() for n, p in network.named_parameters()}
    images = torch.randn(6, 3, side, side, dtype=torch.float64)
    labels = torch.tensor([0, 6, 3, 3, 1, 2])
    scores, expected = network(images), PLAIN[case](plain, images)
    torch.testing.assert_close(scores, expected, rtol=1e-8, atol=1e-10)
    F.cross_entropy(scores, labels).backward()
    F.cross_entropy(expected, labels).backward()
    for name, param in network.named_parameters():
        wanted = plain[name].grad
        assert param.grad is not None and wanted is not None
        # Batch norm over few values magnifies rounding, and its input has gradients near 0.
        bound = 1e-7 * wanted.norm() + 1e-12
        assert (param.grad - wanted).norm() <= bound, name


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    torch.manual_seed(0)
    first = WideResNet(depth=10, width=1, classes=10, seed=3).state_dict()
    before = torch.get_rng_state()
    again = WideResNet(depth=10, width=1, classes=10, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    deeper = WideResNet(depth=16, width=1, classes=10, seed=3).state_dict()
    name = "groups.2.0.conv1.weight"
    assert torch.equal(first[name], deeper[name])
    other = WideResNet(depth=10, width=1, classes=10, seed=4).state_dict()
    assert not torch.equal(first[name], other[name])
    equal_shapes = ("groups.0.0.conv2.weight", "conv0.weight")
    assert not torch.equal(first[equal_shapes[0]][:, :3], first[equal_shapes[1]])


def test_initial_values_have_their_distributions() -> None:
    state = WideResNet(depth=10, width=2, classes=10, seed=1).state_dict()
    bound = 1 / math.sqrt(64 * 9)
    assert state["groups.1.0.conv2.weight"].abs().max().item() == pytest.approx(bound, rel=1e-3)
    assert state["fc.bias"].abs().max().item() <= 1 / math.sqrt(128)
    assert state["fc.bias"].abs().max().item() > 0
    assert state["bn.weight"].eq(1).all() and state["bn.bias"].eq(0).all()

    state = vgg(classes=10, width=1 / 4).state_dict()
    std = math.sqrt(2 / (128 * 9))
    assert state["features.34.weight"].std().item() == pytest.approx(std, rel=0.01)
    assert state["features.34.bias"].eq(0).all() and state["classifier.6.bias"].eq(0).all()
    assert state["classifier.3.weight"].std().item() == pytest.approx(0.01, rel=0.01)

    state = WideResNet101(classes=10, width=1 / 4, seed=1).state_dict()
    std = math.sqrt(2 / (256 * 9))
    assert state["layer4.0.conv2.weight"].std().item() == pytest.approx(std, rel=0.01)
    assert state["fc.weight"].abs().max().item() == pytest.approx(1 / math.sqrt(512), rel=1e-2)


def test_dropout_draws_by_step_and_microbatch() -> None:
    network = vgg(classes=7, width=1 / 16, dropout=0.5)
    images = torch.randn(2, 3, 32, 32)

    def scores(iteration: int, microbatch: int) -> torch.Tensor:
        STREAMS.at(iteration, microbatch)
        return network(images)

    torch.manual_seed(1)
    first = scores(3, 1)
    torch.manual_seed(2)
    assert torch.equal(scores(3, 1), first)
    assert not torch.equal(scores(3, 2), first)
    assert not torch.equal(scores(4, 1), first)
    network.eval()
    assert torch.equal(scores(3, 1), scores(4, 2))


class DispatchedOperators(TorchDispatchMode):
    """Notes the names of all operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("size", [(1, 1), (2, 5), (7, 7), (14, 9)], ids=str)
def test_deterministic_pooling_averages_the_same_windows(size: tuple[int, int]) -> None:
    features = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
    wanted = pool(features)
    (wanted_grad,) = torch.autograd.grad(wanted.square().sum(), features)
    torch.use_deterministic_algorithms(True)
    try:
        with DispatchedOperators() as seen:
            found = pool(features)
            (grad,) = torch.autograd.grad(found.square().sum(), features)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(grad, wanted_grad)
    assert seen.names and not [name for name in seen.names if "adaptive" in name]
