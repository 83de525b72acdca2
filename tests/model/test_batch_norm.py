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
VALUES = 5 * 7 * 3
"""Values of each channel in a batch of `images`."""


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


def rounding(terms: torch.Tensor) -> float:
    """The largest difference of fp32 sums of VALUES terms each that are added in two orders.

    Each of the additions rounds a partial sum, which is at most VALUES times the largest term, by
    half of epsilon; both orders may be wrong.
    """
    return VALUES * torch.finfo(torch.float32).eps * VALUES * float(terms.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_torchs_in_fp32(dtype: torch.dtype) -> None:
    ours, theirs = pair()
    buffers = BufferSet(batch_norm_buffers(ours), ALONE)

    def close(found: torch.Tensor, expected: torch.Tensor, *terms: torch.Tensor) -> None:
        """Compare means, or other sums over VALUES that are divided by VALUES."""
        assert found.dtype == expected.dtype
        if dtype == torch.float32:
            assert torch.equal(found, expected), "the same kernel"
            return
        # Kernels for 16-bit images compute in fp32, in another order; a 16-bit result is rounded
        # once more, to one of two neighbours.
        rtol = torch.finfo(dtype).eps if found.dtype == dtype else 0.0
        atol = sum(rounding(each) for each in terms) / VALUES
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)

    for seed in range(3):
        mine, other = images(dtype, seed).requires_grad_(), images(dtype, seed).requires_grad_()
        made, wanted = ours(mine), theirs(other.float())
        upstream = wanted.detach()
        (made.float() * upstream).sum().backward()
        (wanted.to(dtype).float() * upstream).sum().backward()
        assert mine.grad is not None and other.grad is not None
        values = mine.detach().float()
        std, mean = torch.std_mean(values, dim=(0, 2, 3), keepdim=True, correction=0)
        unit = (values - mean) / std
        weight = ours.weight.detach().view(1, -1, 1, 1)
        close(made, wanted.to(dtype), unit * weight, ours.bias.detach())
        # The gradient of the images is weight / std * (g - mean(g) - unit * mean(g * unit)).
        factor, kept = weight / std, (upstream * unit).abs().mean((0, 2, 3), keepdim=True)
        close(mine.grad, other.grad, 2 * factor * upstream, factor * unit * kept)
        for name, each in (("weight", upstream * unit), ("bias", upstream)):
            close(getattr(ours, name).grad, getattr(theirs, name).grad, VALUES * each)
        buffers.commit()
        statistics = dict(theirs.named_buffers())
        close(ours.running_mean, statistics["running_mean"], values)
        # Unbiased: over VALUES - 1.
        close(ours.running_var, statistics["running_var"], (values - mean).square())
    for module in (ours, theirs):
        module.eval()
    new = images(dtype, 9)
    scale = ours.weight.detach() / ours.running_var.sqrt()
    terms = (new.float() * scale.view(1, -1, 1, 1), ours.running_mean * scale, ours.bias.detach())
    close(ours(new), theirs(new.float()).to(dtype), *terms)
    assert all(tensor.dtype == torch.float32 for _, tensor in buffers.tensors())


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_a_step_of_one_rank_has_torchs_statistics_after_as_many_calls(microbatches: int) -> None:
    ours, theirs = pair()
    buffers = BufferSet(batch_norm_buffers(ours), ALONE)
    for step in range(3):
        for number in range(microbatches):
            batch = images(torch.float32, 10 * step + number)
            ours(batch)
            theirs(batch)
        buffers.commit()
        for name, expected in theirs.named_buffers():
            if name != "num_batches_tracked":
                assert torch.equal(getattr(ours, name), expected), name


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


def after_a_step(groups: ProcessGroups) -> torch.Tensor:
    """The running mean after a step of two microbatches, spread over the ranks."""
    norm = BatchNorm2d(CHANNELS, device="cpu")
    nn.init.ones_(norm.weight)
    nn.init.zeros_(norm.bias)
    buffers = BufferSet(batch_norm_buffers(norm), groups.dp)
    for number in range(groups.dp.rank, 2, groups.dp.size):
        norm(images(torch.float32, number))
    buffers.commit()
    return norm.running_mean.clone()


def test_statistics_depend_on_how_many_ranks_share_the_microbatches(ranks: Ranks) -> None:
    """Two microbatches of a rank weigh 0.09 and 0.1, those of two ranks 0.1 / 2 each."""
    means = [images(torch.float32, number).mean((0, 2, 3)) for number in range(2)]
    weights = {1: (0.9 * 0.1, 0.1), 2: (0.05, 0.05)}
    for world, shares in weights.items():
        expected = shares[0] * means[0] + shares[1] * means[1]
        for found in ranks.run(world, after_a_step):
            atol = rounding(images(torch.float32, 0)) / VALUES
            torch.testing.assert_close(found, expected, rtol=0.0, atol=atol)
