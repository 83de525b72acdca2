"""Radius in a custom training loop: two functions on flat tensors and a process group.

    t % T == 0                 rest = sparse_all_reduce(grad, None, residual)      (dense, flushes)
    else, once selected        rest = sparse_all_reduce(grad, index, residual)     (a short vector)
    the step was applied       residual = rest
    ... and t % T == 0         index = select(update, 0.4, group=ranks)

The caller owns all state. `grad` and `residual` are 1-D and may hold one tensor or many, but k of n
entries are selected in the whole: pass each matrix separately, as in the paper, and 1-D parameters
to a plain all-reduce. `docs/examples/radius_by_hand.py` is a complete loop.
"""

from __future__ import annotations

from fractions import Fraction

import torch
import torch.distributed as dist

from megatron.errors import ConfigError
from megatron.sparse.selection import select_largest
from radius.agreement import IndexChoice, take_first_choice
from radius.bucket_index import BucketIndex
from radius.index import keeps_bits, new_index, num_selected


def select(update: torch.Tensor, density: float, *, group: dist.ProcessGroup | None) -> BucketIndex:
    """Return the index of the k = ceil(density n) largest magnitudes; of equal ones the first.

    Args:
        update: 1-D, the change that the optimizer has just applied, without the learning rate: m^ /
            (sqrt(v^) + eps) + lambda w for AdamW, the velocity for SGD. It may differ in its last
            bits between processors that round differently, and so may the selection.
        density: Share of the entries to select.
        group: Ranks that hold this tensor and exchange its entries, such as `dist.group.WORLD` in
            plain data parallelism. They compare a hash of 8 bytes; if it differs, all use the index
            of the first rank, sent as one bit per entry. Collective over `group`. None: this rank
            selects alone.

    Raises:
        ConfigError: `update` is not flat, or `density` is not in (0, 1].
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
    """Write the mean gradient over the ranks to `grad`, and return the next residual.

    With an index, only its entries are sent; the others become 0, and the result is the residual
    plus their gradient. With None, all entries are sent together with `residual`, and the result is
    0. `residual` is not changed, so a step is dropped by ignoring the result. A non-finite gradient
    on any rank makes `grad` non-finite on every rank, whether or not the entry is sent. Keep the
    residual in fp32. Collective over `group` (None: all ranks); blocks.

    Raises:
        ConfigError: `grad` is not flat, or `residual` has another shape.
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

    One of them becomes NaN if any entry of `grad` is not finite: other ranks would not see an
    unsent entry until the next resample.
    """
    index.gather(grad, out)
    # A sum is non-finite if an entry is, and takes a third of the time of `isfinite().all()`. An
    # fp16 sum could overflow although no entry is non-finite.
    total = grad.sum(dtype=torch.float32) if grad.dtype == torch.float16 else grad.sum()
    out[:1].add_(total * 0)


def exact_density(density: float) -> Fraction:
    """Return the density as an exact decimal fraction: ceil(0.07 * 100) is 8 in floating point.

    Raises `ConfigError` if the density is not in (0, 1].
    """
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
