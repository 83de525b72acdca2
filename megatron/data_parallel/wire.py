"""The wire: the encoding in which the values of a mean travel between data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.data_parallel.bucket_plan import ring_all_reduce_bytes
from megatron.parallel.groups import Group


class Wire:
    """The encoding of values between the ranks of one group; the base class sends them as they are.

    An `Exchange` averages through its wire, so that no reducer depends on the encoding. A subclass
    that encodes values overrides `mean`. The result must be bit-equal on every rank.
    """

    def mean(self, group: Group, values: torch.Tensor) -> tuple[Sequence[dist.Work | None], int]:
        """Start to average a contiguous tensor over the group, in place.

        Collective over `group`; must not block.

        Args:
            group: The ranks that average, two at least.
            values: This rank's values, overwritten by the mean; owned by the caller.

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
