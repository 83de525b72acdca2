"""The wire: the encoding in which the values of a mean travel between data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.data_parallel.bucket_plan import ring_all_reduce_bytes
from megatron.parallel.groups import Group
from megatron.parallel.traffic import Waitable


class Wire:
    """The encoding of values between the ranks of one group; the base class sends them as they are.

    An `Exchange` averages through its wire, so that no reducer depends on the encoding. A subclass
    that encodes values overrides `mean`, `mean_of_part` and `is_exact`. The result must be
    bit-equal on every rank.
    """

    is_exact = True
    """Whether a mean has no error but that of the additions; a sum cannot overflow on its way."""

    def mean(
        self,
        group: Group,
        values: torch.Tensor,
        *,
        matrix: bool = True,
        lost: torch.Tensor | None = None,
    ) -> tuple[Sequence[Waitable | None], int]:
        """Start to average a contiguous tensor over the group, in place.

        Collective over `group`; must not block.

        Args:
            group: The ranks that average, two at least.
            values: This rank's values, overwritten by the mean; owned by the caller.
            matrix: Whether the values belong to matrices. Others, such as biases, are few and
                matter more; a wire may encode them less coarsely.
            lost: Memory (fp32, as long as `values`) for the part of this rank's values that the
                encoding loses: summed over ranks, values = ranks x mean + lost. It is set when
                the collectives are complete; a wire that loses nothing leaves it alone.

        Returns:
            The collectives to wait for, and the bytes that this rank sends by the ring model.
        """
        # A 16-bit sum can overflow where its mean does not, so 16-bit values are divided first.
        op = dist.ReduceOp.AVG
        if values.dtype != torch.float32:
            values.div_(group.size)
            op = dist.ReduceOp.SUM
        pending = group.all_reduce(values, op, async_op=True)
        return [pending], ring_all_reduce_bytes(values.nbytes, group.size)

    def mean_of_part(
        self,
        group: Group,
        own: torch.Tensor,
        whole: torch.Tensor,
        *,
        used: torch.Tensor,
        matrix: bool = True,
        lost: torch.Tensor | None = None,
    ) -> tuple[Sequence[Waitable | None], int]:
        """Start to average `whole` such that each rank has its own part of the mean.

        Collective over `group`; must not block. `own`, `whole` and `used` are those of
        `Exchange.mean_of_part`, and `matrix`, `lost` (as long as `used`) and the result are those
        of `mean`.
        """
        op = dist.ReduceOp.AVG
        if whole.dtype != torch.float32:
            used.div_(group.size)
            op = dist.ReduceOp.SUM
        pending = group.reduce_scatter(own, whole, op, async_op=True)
        return [pending], (group.size - 1) * own.nbytes
