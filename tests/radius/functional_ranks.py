"""Buckets and reducers without engine or optimizer, as someone else's loop would use them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron.data_parallel.all_reduce import AllReduceReducer
from megatron.data_parallel.bucket import ALIGNMENT, GradBucket, ParamInfo, Slice
from megatron.data_parallel.exchange import Exchange
from megatron.data_parallel.reducer import ReducedGrad, StepContext
from megatron.parallel.groups import Group
from radius.baselines.feedback import FeedbackReducer

Tensors = Mapping[str, torch.Tensor]


def infos_of(
    shapes: Mapping[str, tuple[int, ...]], padded: Mapping[str, tuple[int, ...]] | None = None
) -> list[ParamInfo]:
    """Parameters of these logical shapes; those in `padded` are larger in memory."""
    return [
        ParamInfo(
            name=name,
            leaves=(torch.nn.Parameter(torch.zeros((padded or {}).get(name, shape))),),
            logical_shape=shape,
        )
        for name, shape in shapes.items()
    ]


def bucket_of(
    infos: list[ParamInfo],
    *,
    index: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> GradBucket:
    """All of them in one bucket, in their order."""
    slices, start = {}, 0
    for info in infos:
        slices[info.name] = Slice(start, info.param.numel())
        start += -(-info.param.numel() // ALIGNMENT) * ALIGNMENT
    return GradBucket(
        index=index,
        slices=slices,
        grad=torch.zeros(start, dtype=dtype, device=device),
        weight_decay=True,
        tied=False,
        tp_sharded=False,
    )


def fill(bucket: GradBucket, gradients: Tensors) -> None:
    """Put gradients in, the way accumulation leaves them."""
    for name, gradient in gradients.items():
        where = bucket.slices[name].of(bucket.grad)
        where.zero_()
        where[: gradient.numel()] = gradient.reshape(-1)


def mean_of(
    reducer: FeedbackReducer, bucket: GradBucket, gradients: Tensors, *, t: int, scale: float = 1.0
) -> dict[str, torch.Tensor]:
    """One committed step: the mean by name, unscaled and flat, padding included."""
    fill(bucket, {name: gradient * scale for name, gradient in gradients.items()})
    reduced: ReducedGrad = reducer.reduce(bucket, StepContext(t=t, loss_scale=scale)).wait()
    assert reduced.index is None and reduced.values.shape == bucket.grad.shape
    assert reduced.values.data_ptr() == bucket.grad.data_ptr(), "in place"
    found = {name: s.of(reduced.values).float() / scale for name, s in bucket.slices.items()}
    reducer.commit(bucket, None)
    return found


def random(
    shapes: Mapping[str, tuple[int, ...]], *seed: int, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Gradients as a function of the numbers given, representable in `dtype`."""
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    return {n: torch.randn(s, generator=generator).to(dtype).float() for n, s in shapes.items()}


def equals_dense(
    group: Group,
    reducer: FeedbackReducer,
    infos: list[ParamInfo],
    shapes: Mapping[str, tuple[int, ...]],
) -> list[bool]:
    """Return, for updates 1 to 4, whether the dense path has the same means, bytes and no state."""
    dense, bucket, other = AllReduceReducer(Exchange(group)), bucket_of(infos), bucket_of(infos)
    reducer.attach([bucket])
    same = []
    for t in range(1, 5):
        mean_of(reducer, bucket, random(shapes, t, group.rank), t=t)
        fill(other, random(shapes, t, group.rank))
        dense.reduce(other, StepContext(t=t)).wait()
        equal_cost = reducer.stats().bytes_sent == dense.stats().bytes_sent
        stateless = not list(reducer.state_tensors()) and not list(reducer.shared_tensors())
        same.append(torch.equal(bucket.grad, other.grad) and equal_cost and stateless)
    return same
