"""Linear layers sharded over tensor-parallel ranks (Shoeybi et al. 2019, 3).

A column-parallel layer holds a share of the outputs, a row-parallel layer a share of the inputs;
one after the other they need one sum, over the second layer's output. Initial values and logical
shapes are of the whole layer; `shards` has this rank's parts. On one rank a layer is a plain
product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron.parallel.tensor_shard import TensorShard
from megatron.tensor_parallel.collectives import TensorParallel
from megatron.tensor_parallel.products import multiply
from megatron.tensor_parallel.sharded_products import multiply_by_columns, multiply_by_rows


class ShardedModule(nn.Module):
    """A module that holds this rank's shards of parameters.

    `shards` has the shard of each sharded parameter by its name in this module, and is empty on one
    rank. The model fills the values.
    """

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.is_sharded = tp.size > 1
        self.shards: dict[str, TensorShard] = {}

    def _hold(
        self,
        shape: tuple[int, ...],
        *,
        axis: int,
        blocks: int = 1,
        name: str,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Create a parameter with this rank's even share of a tensor of `shape`."""
        if self.is_sharded:
            shard = TensorShard.evenly(
                shape, axis=axis, rank=self.tp.rank, ranks=self.tp.size, blocks=blocks
            )
            self.shards[name] = shard
            shape = shard.local_shape
        setattr(self, name, nn.Parameter(torch.empty(shape, dtype=dtype, device=device)))


def shards_of(model: nn.Module) -> dict[str, TensorShard]:
    """Return the shards of a model's parameters by their `named_parameters` name."""
    return {
        f"{prefix}.{name}": shard
        for prefix, module in model.named_modules()
        if isinstance(module, ShardedModule)
        for name, shard in module.shards.items()
    }


class ColumnParallelLinear(ShardedModule):
    """Linear layer with this rank's share of n outputs: [..., k] -> [..., share of n].

    The sum of the input gradient over ranks overlaps with the weight gradient. The outputs consist
    of `blocks` equal blocks, and a rank has a share of each. With sequence parallelism the input
    is a part of each sequence; the output has whole sequences, with rows by rank.
    """

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        *,
        bias: bool,
        tp: TensorParallel,
        blocks: int = 1,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(tp)
        placed: dict[str, Any] = {"axis": 0, "blocks": blocks, "dtype": dtype, "device": device}
        self.weight: nn.Parameter
        self.bias: nn.Parameter | None = None
        self._hold((num_outputs, num_inputs), name="weight", **placed)
        if bias:
            self._hold((num_outputs,), name="bias", **placed)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Apply the layer: [b, s, k] -> [b, s, share of n].

        With sequence parallelism: [b, s/tp, k] -> [tp * b, s/tp, share of n].
        """
        if self.is_sharded:
            return multiply_by_columns(inputs, self.weight, self.bias, self.tp)
        return multiply(inputs, self.weight, self.bias)


class RowParallelLinear(ShardedModule):
    """Linear layer of this rank's share of k inputs, summed over ranks to [..., n].

    Every rank holds the whole bias, which is added once, after the sum.
    """

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        *,
        bias: bool,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(tp)
        self.weight: nn.Parameter
        self.bias: nn.Parameter | None = None
        self._hold((num_outputs, num_inputs), axis=1, name="weight", dtype=dtype, device=device)
        if bias:
            self.bias = nn.Parameter(torch.empty(num_outputs, dtype=dtype, device=device))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Apply the layer: [b, s, share of k] -> [b, s, n].

        With sequence parallelism: [tp * b, s/tp, share of k] -> [b, s/tp, n].
        """
        if self.is_sharded:
            return multiply_by_rows(inputs, self.weight, self.bias, self.tp)
        return multiply(inputs, self.weight, self.bias)
