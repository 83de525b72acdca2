"""Batch norm equals torch's; its statistics change with a committed step alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.data_parallel.buffers import NO_BUFFERS, BufferSet
from megatron.model.batch_norm import BatchNorm2d, batch_norm_buffers
from megatron.parallel.groups import ALONE, ProcessGroups
from tests.ranks import Ranks

CHANNELS = 6


def pair() -> tuple[BatchNorm2d, nn.BatchNorm2d]:
    """Ours and torch's in fp32, with equal weights and biases."""
    ours, theirs = BatchNorm2d(CHANNELS, device="cpu"), nn.BatchNorm2d(CHANNELS)
    for name in ("weight", "bias"):
        values = torch.randn(CHANNELS)
        for module in (ours, theirs):
            getattr(module, name).data.copy_(values)
    return ours, theirs


def images(dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(5, CHANNELS, 7, 3, generator=generator) + 2).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_torchs_in_fp32(dtype: torch.dtype) -> None:
    ours, theirs = pair()
    buffers = BufferSet(batch_norm_buffers(ours), ALONE)
    for seed in range(3):
        mine, other = images(dtype, seed).requires_grad_(), images(dtype, seed).requires_grad_()
        made, wanted = ours(mine), theirs(other.float())
        assert made.dtype == dtype and torch.equal(made, wanted.to(dtype))
        (made.float() * wanted.detach()).sum().backward()
        (wanted.to(dtype).float() * wanted.detach()).sum().backward()
        assert mine.grad is not None and other.grad is not None
        assert torch.equal(mine.grad, other.grad)
        for name in ("weight", "bias"):
            assert torch.equal(getattr(ours, name).grad, getattr(theirs, name).grad)
        buffers.commit()
        statistics = dict(theirs.named_buffers())
        assert torch.equal(ours.running_mean, statistics["running_mean"])
        # Unbiased: over 5 x 7 x 3 - 1.
        assert torch.equal(ours.running_var, statistics["running_var"])
    for module in (ours, theirs):
        module.eval()
    assert torch.equal(ours(images(dtype, 9)), theirs(images(dtype, 9).float()).to(dtype))
    assert all(tensor.dtype == torch.float32 for _, tensor in buffers.tensors())


def test_statistics_change_with_a_committed_step_alone() -> None:
    norm = BatchNorm2d(CHANNELS, device="cpu")
    nn.init.ones_(norm.weight)
    nn.init.zeros_(norm.bias)
    buffers = BufferSet(batch_norm_buffers(norm), ALONE)
    addresses = [tensor.data_ptr() for _, tensor in buffers.tensors()]
    first = {name: tensor.clone() for name, tensor in buffers.tensors()}
    norm(images(torch.float32, 0))
    assert all(torch.equal(first[name], tensor) for name, tensor in buffers.tensors())
    buffers.abort()
    assert all(torch.equal(info.buffer, info.shadow) for info in buffers.infos)
    norm.eval()
    norm(images(torch.float32, 0))
    assert all(torch.equal(info.buffer, info.shadow) for info in buffers.infos)
    norm.train()
    for seed in (1, 2):  # microbatches of a step
        norm(images(torch.float32, seed))
    buffers.commit()
    assert not any(torch.equal(first[name], tensor) for name, tensor in buffers.tensors())
    assert [tensor.data_ptr() for _, tensor in buffers.tensors()] == addresses


def test_buffers_have_the_names_of_their_modules() -> None:
    model = nn.Sequential(nn.Sequential(BatchNorm2d(2, device="cpu")), BatchNorm2d(3, device="cpu"))
    names = [info.name for info in batch_norm_buffers(model)]
    assert names == ["0.0.running_mean", "0.0.running_var", "1.running_mean", "1.running_var"]
    with pytest.raises(AssertionError, match="buffers need names of their own"):
        BufferSet([*batch_norm_buffers(model), *batch_norm_buffers(model)], ALONE)


def on_rank(groups: ProcessGroups) -> dict[str, object]:
    norm = BatchNorm2d(CHANNELS, device="cpu")
    nn.init.ones_(norm.weight)
    nn.init.zeros_(norm.bias)
    buffers = BufferSet(batch_norm_buffers(norm), groups.dp)
    groups.dp.traffic.take()
    NO_BUFFERS.commit()
    buffers.abort()
    quiet = groups.dp.traffic.take()
    norm(images(torch.float32, groups.dp.rank))
    shadows = [info.shadow.clone() for info in buffers.infos]
    buffers.commit()
    sent = groups.dp.traffic.take()
    kept = [tensor.clone() for _, tensor in buffers.tensors()]
    return {"shadows": shadows, "kept": kept, "quiet": quiet, "sent": sent}


def test_a_commit_is_one_mean_over_ranks(ranks: Ranks) -> None:
    found = ranks.run(2, on_rank)
    for mine, other, mean, same in zip(
        *(found[0]["shadows"], found[1]["shadows"], found[0]["kept"], found[1]["kept"]), strict=True
    ):
        assert torch.equal(mean, (mine + other) / 2) and torch.equal(mean, same)
    # All-reduce of two vectors at once; without buffers, and after a skipped step, nothing.
    assert [rank["quiet"] for rank in found] == [0, 0]
    assert [rank["sent"] for rank in found] == [2 * CHANNELS * 4] * 2
