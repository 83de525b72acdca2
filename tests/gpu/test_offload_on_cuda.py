"""States in pinned host memory, with separate streams, compared with states on the device."""

from __future__ import annotations

import torch

from megatron.data_parallel.all_reduce import AllReduceReducer
from megatron.data_parallel.bucket import ParamInfo
from megatron.data_parallel.engine import GradientEngine
from megatron.data_parallel.exchange import Exchange
from megatron.data_parallel.gradient_path import LayoutChange, PathParts
from megatron.data_parallel.layout import BucketLayout, DenseLayout
from megatron.optimizer.bucket_optimizer import BucketOptimizer
from megatron.optimizer.cpu_offload import OffloadedOptimizer
from megatron.optimizer.update_rules import AdamW
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from samo.layout import CompressedLayout
from tests.gpu.sizes import fitting

COUNT = 6
ALONE = ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=1), rank=0)


def bucket_size() -> int:
    """Entries of a piece of the states; a matrix is several."""
    return fitting(1 << 17, 1 << 10)


class OffloadNet:
    """Matrices with given gradients; `share` of their entries exist."""

    def __init__(self, device: torch.device, *, share: float, offloaded: bool) -> None:
        self.device = device
        self.shape = fitting(700, 70), fitting(512, 51)
        self.infos = [
            ParamInfo(
                name=f"{number}",
                leaves=(torch.nn.Parameter(self.draw(number).bfloat16()),),
                logical_shape=self.shape,
            )
            for number in range(COUNT)
        ]
        parts = PathParts(
            layout=self.layout(share, 1), reducer=AllReduceReducer(Exchange(ALONE.dp))
        )
        self.engine = GradientEngine(
            self.infos,
            parts,
            ALONE,
            cap=8 * bucket_size(),
            grad_dtype=torch.bfloat16,
            stream=offloaded,
        )
        rule = AdamW(beta1=0.9, beta2=0.99, eps=1e-8)
        self.optimizer = (
            OffloadedOptimizer(self.engine, rule, bucket_size=bucket_size())
            if offloaded
            else BucketOptimizer(self.engine, rule)
        )

    def draw(self, seed: int) -> torch.Tensor:
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(seed)).to(
            self.device
        )

    def layout(self, share: float, seed: int) -> BucketLayout:
        if share == 1:
            return DenseLayout()
        generator = torch.Generator().manual_seed(seed)
        numel = self.shape[0] * self.shape[1]
        masks = {i.name: torch.rand(numel, generator=generator) < share for i in self.infos}
        return CompressedLayout(masks, device=self.device)

    def step(self, number: int, clip_norm: float) -> float:
        self.engine.expect_last_backward()
        for info in self.infos:
            info.param.grad = self.draw(100 * number + int(info.name)).bfloat16()
            self.engine.accumulate(info.name, info.param)
        step = self.engine.finish(tag=number, clip_norm=clip_norm)
        self.optimizer.step(step, lr=1e-2, weight_decay=0.1)
        self.engine.commit(step)
        return step.norm

    def state(self) -> dict[str, torch.Tensor]:
        found = {info.name: info.param.detach().cpu().clone() for info in self.infos}
        for kind, name, flat in self.optimizer.tensors():
            found[f"{kind}/{name}"] = flat.cpu().clone()
        return found


def compare(device: torch.device, *, share: float, clip_norm: float) -> None:
    nets = [OffloadNet(device, share=share, offloaded=offloaded) for offloaded in (False, True)]
    for number in range(1, 7):
        norms = [net.step(number, clip_norm) for net in nets]
        assert norms[0] == norms[1]
        if number == 3 and share < 1:
            for net in nets:
                net.optimizer.rebucket(LayoutChange(layout=net.layout(share, 2)))
        states = [net.state() for net in nets]
        assert states[0].keys() == states[1].keys()
        for name, tensor in states[0].items():
            assert torch.equal(tensor, states[1][name]), name


def test_dense_states_in_host_memory_make_the_same_bits(device: torch.device) -> None:
    compare(device, share=1.0, clip_norm=0.0)
    compare(device, share=1.0, clip_norm=1.0)


def test_pruned_states_in_host_memory_make_the_same_bits(device: torch.device) -> None:
    compare(device, share=0.2, clip_norm=0.0)


def test_the_device_holds_buffers_and_no_states(device: torch.device) -> None:
    net = OffloadNet(device, share=1.0, offloaded=True)
    optimizer = net.optimizer
    assert isinstance(optimizer, OffloadedOptimizer)
    assert 0 < optimizer.device_bytes <= 16 * bucket_size()
    for state in optimizer.states:
        for tensor in (state.master, *state.moments):
            assert tensor.device.type == "cpu"
            assert tensor.is_pinned() == (device.type == "cuda")
