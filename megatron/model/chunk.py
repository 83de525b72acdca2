"""The base of models that train as a chunk of the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from megatron.data_parallel.bucket import ParamInfo
from megatron.model.init import set_parameter

if TYPE_CHECKING:
    from megatron.data_parallel.buffers import BufferInfo


class ModelChunk(nn.Module):
    """A module with the methods of `Chunk` that concern parameters and buffers.

    A subclass sets `_infos` in its constructor to its logical parameters, in forward order.
    """

    _infos: list[ParamInfo]
    before_last_layer: Callable[[], None] | None = None
    """Called by models that know their layers where one layer of a pass is left; set by training.

    In a forward pass that is before the last layer, in a backward pass once the output of the first
    layer has a gradient, on a thread of autograd. A model calls it in both passes or in neither.
    """

    def parameter_infos(self) -> list[ParamInfo]:
        """Return each logical parameter of the chunk once, in forward order."""
        return list(self._infos)

    def buffer_infos(self) -> list[BufferInfo]:
        """Return the buffers that training updates: none by default."""
        return []

    def load_values(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set every parameter from a tensor of its logical shape, cast to the parameter's dtype.

        Raises:
            KeyError: A tensor is missing.
            ValueError: A shape differs.
        """
        for info in self._infos:
            set_parameter(info, values[info.name])


def whole_parameters(module: nn.Module) -> list[ParamInfo]:
    """Return every parameter of a module that no rank shards, by its name in the module.

    Weight decay applies to matrices and kernels, not to biases and the weights of norms.
    """
    return [
        ParamInfo(
            name=name,
            leaves=(parameter,),
            logical_shape=tuple(parameter.shape),
            weight_decay=parameter.ndim >= 2,
        )
        for name, parameter in module.named_parameters()
    ]
