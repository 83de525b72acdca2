"""Initial values of parameters, from seed, logical name and logical shape alone.

Construction order, device, dtype and number of ranks do not matter, so that any grid starts from
the same model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from hashlib import sha256
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron.config import ModelConfig
    from megatron.data_parallel.bucket import ParamInfo

_OUTPUT_PROJECTIONS = ("attention.dense.weight", "mlp.dense_4h_to_h.weight")


def initial_values(
    seed: int, name: str, logical_shape: tuple[int, ...], std: float
) -> torch.Tensor:
    """Return Normal(0, std) values of one logical tensor: fp32, on the CPU.

    Values are equal on CPUs with AVX2 and with AVX512. torch's code for CPUs without AVX2 rounds
    differently, and draws other values for some shapes.
    """
    values = torch.empty(logical_shape, dtype=torch.float32)
    return values.normal_(0.0, std, generator=_generator(seed, name, logical_shape))


def uniform_values(
    seed: int, name: str, logical_shape: tuple[int, ...], bound: float
) -> torch.Tensor:
    """Return Uniform(-bound, bound) values of one logical tensor, as `initial_values` does."""
    values = torch.empty(logical_shape, dtype=torch.float32)
    return values.uniform_(-bound, bound, generator=_generator(seed, name, logical_shape))


def _generator(seed: int, name: str, logical_shape: tuple[int, ...]) -> torch.Generator:
    digest = sha256(f"{seed}:{name}:{logical_shape}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def initialise(infos: Iterable[ParamInfo], config: ModelConfig, *, seed: int) -> None:
    """Fill parameters in place: matrices normal, norm weights 1, biases 0, padding rows 0.

    Projections that write to the residual stream have std / sqrt(2 * num_layers) (GPT-2).
    """
    for info in infos:
        if len(info.logical_shape) >= 2:
            std = config.init_method_std
            if info.name.endswith(_OUTPUT_PROJECTIONS):
                std /= math.sqrt(2 * config.num_layers)
            values = initial_values(seed, info.name, info.logical_shape, std)
        else:
            values = torch.full(info.logical_shape, 0.0 if info.name.endswith("bias") else 1.0)
        set_parameter(info, values)


def set_parameter(info: ParamInfo, values: torch.Tensor) -> None:
    """Copy this rank's part of a logical tensor into a parameter in place; padding rows become 0.

    Values are cast to the parameter's dtype. Raises `ValueError` if they do not have the logical
    shape.
    """
    if tuple(values.shape) != tuple(info.logical_shape):
        raise ValueError(f"{info.name}: shape {tuple(values.shape)}, need {info.logical_shape}")
    with torch.no_grad():
        rows = info.local_shape[0]
        info.param[:rows].copy_(values if info.tp_shard is None else info.tp_shard.of(values))
        info.param[rows:].zero_()
