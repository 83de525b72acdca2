"""Radius in a training loop of your own: two functions on flat tensors and a process group.

    t % T == 0                 rest = sparse_all_reduce(grad, None, residual)      (dense, flushes)
    else, once chosen          rest = sparse_all_reduce(grad, index, residual)     (a short vector)
    the step was applied       residual = rest
    ... and t % T == 0         index = select(update, 0.4, group=ranks)

All state is the caller's. `grad` and `residual` are 1-D and may hold one tensor or many, but k of n
entries are chosen of the whole: give each matrix its own, as the paper does, and 1-D parameters to
a plain all-reduce. `docs/examples/radius_by_hand.py` is a whole loop.
"""

from __future__ import annotations

from fractions import Fraction

import torch
import torch.distributed as dist

from megatron.errors import ConfigError
from megatron.sparse.selection import select_largest
from radius.agreement import IndexChoice, take_first_choice
from radius.index import BucketIndex, keeps_bits, new_index, num_selected


def select(update: torch.Tensor, density: float, *, group: dist.ProcessGroup | None) -> BucketIndex:
    """Index of the k = ceil(density n) entries of largest magnitude; of equal ones the first.

    `update`: 1-D, what the optimizer has just subtracted from the weights but for the learning
    rate: m^ / (sqrt(v^) + eps) + lambda w for AdamW, the velocity for SGD. Ranks whose
    processors round differently may differ in its last bits, and so in what they select.

    `group`: the ranks that hold this very tensor and send its entries to each other, such as
    `dist.group.WORLD` in plain data parallelism. These ranks compare a hash of 8 bytes, and where
    the hash differs, all of them take the index of the first rank, one bit for each entry:
    collective over `group`. With None this rank selects alone.
    """
    require_flat("update", update)
    exact = exact_density(density)
    count = num_selected(exact, update.numel())
    bits = keeps_bits(update.device.type, exact)
    index = new_index(update.numel(), update.device, bits=bits)
    index.choose(0, select_largest(update.float(), count))
    if group is not None:
        take_first_choice([IndexChoice(index, 0, update.numel())], group, update.device)
    return index


def sparse_all_reduce(
    grad: torch.Tensor,
    index: BucketIndex | None,
    residual: torch.Tensor,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Put the mean gradient over the ranks into `grad` and return the residual that follows.

    With an index, only its entries are sent; the others become 0 and their gradient is part of the
    result. With None all entries are sent together with `residual`, and the result is 0. `residual`
    does not change, so that a step is dropped by forgetting the result; a gradient that is not
    finite on any rank leaves one in `grad` on every rank, whether or not it was sent. Collective
    over `group` (None: all ranks), blocking. Keep the residual in fp32.
    """
    require_flat("grad", grad)
    if residual.shape != grad.shape:
        raise ConfigError(
            f"residual: {residual.numel()} entries for a gradient of {grad.numel()}; must be as "
            "many; begin with torch.zeros_like(grad)"
        )
    ranks = dist.get_world_size(group)
    if index is None:
        grad.add_(residual).mul_(1.0 / ranks)
        dist.all_reduce(grad, group=group)
        return torch.zeros_like(residual)
    values = grad.new_empty(index.numel)
    gather_sent(grad, index, values)
    dist.all_reduce(values.mul_(1.0 / ranks), group=group)
    rest = residual + grad
    index.clear(rest)
    index.place(values, grad)
    return rest


def gather_sent(grad: torch.Tensor, index: BucketIndex, out: torch.Tensor) -> None:
    """Write the entries to send to `out`.

    One of them becomes NaN if any of `grad` is not finite: an entry that stays here is otherwise
    seen by nobody until the next resample.
    """
    index.gather(grad, out)
    # A sum is not finite if an entry is not, in a third of the time of `isfinite().all()`; that of
    # fp16 would overflow where no entry does.
    total = grad.sum(dtype=torch.float32) if grad.dtype == torch.float16 else grad.sum()
    out[:1].add_(total * 0)


def exact_density(density: float) -> Fraction:
    """The density as written: ceil(0.07 * 100) is 8 in floating point."""
    if not 0 < density <= 1:
        raise ConfigError(f"density={density}: must be above 0 and at most 1, as in density=0.4")
    return Fraction(str(density))


def require_flat(name: str, tensor: torch.Tensor) -> None:
    """Raise `ConfigError` unless the tensor is 1-D and contiguous."""
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ConfigError(
            f"{name}: shape {tuple(tensor.shape)}, strides {tensor.stride()}; must be 1-D and "
            "contiguous; pass tensor.view(-1)"
        )
