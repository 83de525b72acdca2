"""Batch normalization (Ioffe and Szegedy 2015, arXiv 1502.03167) in data-parallel training.

Each rank normalises by its own microbatch, as torch's DistributedDataParallel does. The running
statistics that evaluations use are averaged over ranks when a step is committed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron.data_parallel.buffers import BufferInfo
from megatron.low_memory.activation_checkpoint import is_recomputing


class BatchNorm2d(nn.Module):
    """Batch normalization over the channels of images [n, c, h, w].

    The module computes as `torch.nn.BatchNorm2d` does, but training updates a shadow of the running
    statistics, which the engine commits. Weight, bias and statistics are fp32, whatever the dtype
    of the images. `weight` and `bias` are not initialized here.

    Args:
        channels: The number of channels c.
        device: The device of parameters and buffers.
        epsilon: The term added to the variance.
        momentum: The weight of a microbatch in the running statistics.
        group_size: Images that are normalized together in training, as if they were a microbatch
            of their own (simulated microbatching of Sohoni et al. 2019, section 3.3); None for all.
    """

    running_mean: torch.Tensor
    running_var: torch.Tensor
    _shadow_mean: torch.Tensor
    _shadow_var: torch.Tensor

    def __init__(
        self,
        channels: int,
        *,
        device: torch.device | str,
        epsilon: float = 1e-5,
        momentum: float = 0.1,
        group_size: int | None = None,
    ) -> None:
        super().__init__()
        self.epsilon, self.momentum = epsilon, momentum
        self.group_size = group_size
        self.weight = nn.Parameter(torch.empty(channels, dtype=torch.float32, device=device))
        self.bias = nn.Parameter(torch.empty_like(self.weight))
        self.register_buffer("running_mean", torch.zeros_like(self.weight, requires_grad=False))
        self.register_buffer("running_var", torch.ones_like(self.weight, requires_grad=False))
        self.register_buffer("_shadow_mean", self.running_mean.clone(), persistent=False)
        self.register_buffer("_shadow_var", self.running_var.clone(), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Normalise images [n, c, h, w], in fp32; the result has their dtype.

        Training uses the mean and the biased variance of `images`, or of each group of them, and
        moves the shadow of the running statistics towards their mean and unbiased variance, group
        by group. Recomputation in backward leaves the shadow alone. Evaluation uses the committed
        statistics.
        """
        if self.training and self.group_size is not None and len(images) > self.group_size:
            groups = images.split(self.group_size)
            return torch.cat([self._normalise(group) for group in groups])
        return self._normalise(images)

    def _normalise(self, images: torch.Tensor) -> torch.Tensor:
        mean, var = self.running_mean, self.running_var
        if self.training:
            mean, var = self._shadow_mean, self._shadow_var
        # A factor of 0 leaves the shadow as it is. Without statistics the kernel would store fewer
        # tensors than in its first pass, which checkpointing refuses.
        momentum = 0.0 if is_recomputing() else self.momentum
        # Kernels for CPU and CUDA take 16-bit images with fp32 statistics and compute in fp32.
        return F.batch_norm(
            images,
            mean,
            var,
            self.weight,
            self.bias,
            self.training,
            momentum,
            self.epsilon,
        )

    def buffer_infos(self, prefix: str) -> list[BufferInfo]:
        """Return the running statistics with logical names that begin with `prefix`."""
        return [
            BufferInfo(
                name=f"{prefix}running_mean", buffer=self.running_mean, shadow=self._shadow_mean
            ),
            BufferInfo(
                name=f"{prefix}running_var", buffer=self.running_var, shadow=self._shadow_var
            ),
        ]


def batch_norm_buffers(model: nn.Module) -> list[BufferInfo]:
    """Return the buffers of every `BatchNorm2d` of a model, by the names of its modules."""
    return [
        info
        for name, module in model.named_modules()
        if isinstance(module, BatchNorm2d)
        for info in module.buffer_infos(f"{name}." if name else "")
    ]
