"""What checkpointing strategies store and recompute: published counts, and a network by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.low_memory.operation_graph import CountedOperation, Graph, wide_resnet_graph
from megatron.low_memory.strategies import (
    ActivationCourse,
    Strategy,
    activation_course,
    stored_entries,
)
from megatron.model.image_shapes import training_flops, wide_resnet_layers
from megatron.model.wide_resnet import WideResNet

pytestmark = pytest.mark.push

WRN = wide_resnet_graph()
ALL = [
    Strategy("none"),
    Strategy("no-norm"),
    *(Strategy("every", m) for m in (1, 2, 6, 12, 100)),
    *(Strategy("residual", m) for m in (1, 2, 3, 12)),
    *(Strategy("residual-star", m) for m in (1, 2, 3, 12)),
]


def course(strategy: Strategy, *, batch: int = 100, entry_bytes: int = 4) -> ActivationCourse:
    return activation_course(WRN, strategy, batch=batch, entry_bytes=entry_bytes)


def test_wrn_28_2_stores_the_counted_entries() -> None:
    assert stored_entries(WRN, WRN.needed) == (945_290, 475_136)
    no_norm = Strategy("no-norm").kept(WRN)
    assert stored_entries(WRN, no_norm) == (478_218, 0)
    assert training_flops(wide_resnet_layers(depth=28, width=2, classes=10)) == WRN.training_flops
    assert WRN.training_flops == pytest.approx(1275.8e6, rel=1e-4)


def test_residual_2_star_reduces_activations_5_77_times_for_31_1_percent() -> None:
    star = course(Strategy("residual-star", 2))
    assert star.peak.total == 100 * (166_912 * 4 + 4_096)
    assert course(Strategy("none")).peak.total / star.peak.total == pytest.approx(5.77, abs=0.005)
    assert star.flops_ratio == pytest.approx(1.311, abs=5e-4)
    assert star.peak.operation == "groups.0.3.conv2" and star.peak.is_backward
    half = course(Strategy("residual-star", 2), batch=1, entry_bytes=2)
    assert half.peak.total == 337_920


def test_no_norm_saves_nearly_half_for_less_than_one_percent() -> None:
    none, no_norm = course(Strategy("none")), course(Strategy("no-norm"))
    assert 0.49 < 1 - no_norm.peak.total / none.peak.total < 0.5
    assert no_norm.flops_ratio == 1
    assert 3 * no_norm.recomputed_entries < 0.01 * no_norm.training_flops


def test_figure_5_goes_from_most_memory_to_most_operations() -> None:
    names = [Strategy("none"), Strategy("no-norm")]
    courses = [course(s) for s in (*names, *(Strategy("residual-star", m) for m in (1, 2)))]
    peaks = [each.peak.total for each in courses]
    ratios = [each.flops_ratio for each in courses]
    assert peaks == sorted(peaks, reverse=True) and ratios == sorted(ratios)
    assert ratios[2] == pytest.approx(1.156, abs=5e-4)


@pytest.mark.parametrize("strategy", ALL, ids=str)
def test_every_strategy_stores_what_it_needs_and_ends_empty(strategy: Strategy) -> None:
    played = course(strategy, batch=1)
    forward = [moment for moment in played.moments if not moment.is_backward]
    backward = [moment for moment in played.moments if moment.is_backward]
    assert [m.operation for m in backward] == [m.operation for m in reversed(forward)]
    entries, bits = stored_entries(WRN, strategy.kept(WRN))
    assert forward[-1].stored == 4 * entries + bits // 8
    assert backward[-1].stored == 4 * WRN.input_size
    assert all(moment.gradient == 0 for moment in forward)
    # Without nested segments a product is recomputed at most once.
    if strategy.name != "residual-star":
        assert played.recomputed_flops <= WRN.forward_flops


def test_a_chain_by_hand() -> None:
    # conv -> norm -> relu -> conv -> loss, one block of 10 entries each, on an image of 5.
    operations = [
        CountedOperation(
            name="stem", kind="convolution", inputs=("image",), size=10, block=0, flops=7
        ),
        CountedOperation(name="norm", kind="norm", inputs=("stem",), size=10, block=1),
        CountedOperation(name="relu", kind="relu", inputs=("norm",), size=10, block=1),
        CountedOperation(
            name="out", kind="linear", inputs=("relu",), size=2, block=1, flops=9, ends_block=True
        ),
        CountedOperation(name="loss", kind="loss", inputs=("out",), size=1, block=2),
    ]
    graph = Graph(operations, 5)
    assert graph.needed == {"image", "stem", "relu bits", "relu", "out"}
    assert graph.training_flops == 3 * 16 - 7
    none = activation_course(graph, Strategy("none"), batch=8, entry_bytes=4)
    stored = [moment.stored for moment in none.moments]
    image, hidden, bits, out = 8 * 5 * 4, 8 * 10 * 4, 8 * 10 // 8, 8 * 2 * 4
    full = image + 2 * hidden + bits + out
    assert stored[:5] == [
        image + hidden,
        image + hidden,
        image + 2 * hidden + bits,
        full,
        full,
    ]
    # Backward of loss, out, relu, norm, stem: each frees what it alone needed.
    assert stored[5:] == [full, full - out, image + hidden + bits, image + hidden, image]
    assert [moment.gradient for moment in none.moments[5:]] == [out, *4 * [hidden]]
    one = activation_course(graph, Strategy("residual", 1), batch=8, entry_bytes=4)
    assert [m.stored for m in one.moments[:5]] == [image, image, image, image + out, image + out]
    assert one.recomputed_flops == 8 * 7
    assert one.recomputed_entries == 8 * 20
    no_norm = activation_course(graph, Strategy("no-norm"), batch=8, entry_bytes=4)
    assert [m.stored for m in no_norm.moments[4:6]] == 2 * [image + hidden + out]
    assert no_norm.moments[6].stored == image + 2 * hidden + bits


def test_none_counts_what_autograd_saves() -> None:
    """The count of a small network equals torch's saved tensors, but for known differences."""
    network = WideResNet(depth=10, width=0.5, classes=10, seed=1)
    graph = wide_resnet_graph(depth=10, width=0.5, height=16, image_width=16)
    own = {param.untyped_storage().data_ptr() for param in network.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    own |= {buffer.untyped_storage().data_ptr() for buffer in network.buffers()}
    batch = 3
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = network(torch.randn(batch, 3, 16, 16))
        F.cross_entropy(scores, torch.tensor([1, 2, 3]))
    sizes = sum(tensor.untyped_storage().nbytes() // 4 for tensor in saved.values())
    entries, _ = stored_entries(graph, graph.needed)
    channels = sum(s.numel() for n, s in network.named_parameters() if "bn" in n)
    # torch keeps a batch's mean and inverse deviation, and the output of the last ReLU. Its
    # cross-entropy keeps the logarithms of the probabilities in place of the scores, and a number.
    last_relu = graph.size("relu")
    assert sizes == batch * (entries + last_relu) + channels + 1
