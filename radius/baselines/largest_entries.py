"""Messages of a rank's largest entries, which are all-gathered and averaged.

    one bucket's message, K entries of all its parameters:   [ K positions | K values | padding ]

Ranks select different positions, so values cannot be added on the way: each rank's message goes to
every other rank, and traffic grows with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron.errors import ConfigError
from radius.baselines.message_bytes import POSITION_BYTES, count, message_bytes

if TYPE_CHECKING:
    import torch

    from megatron.data_parallel.bucket import GradBucket

MOST_ENTRIES = 2**31 - 1


def check_positions(bucket: GradBucket, name: str) -> None:
    """Raise `ConfigError` if positions of the bucket do not fit a message of the path `name`."""
    if bucket.numel > MOST_ENTRIES:
        raise ConfigError(
            f"ddp_bucket_size: a bucket has {bucket.numel} entries; the positions that {name} "
            f"sends reach to {MOST_ENTRIES}; give a smaller --ddp-bucket-size, or split the "
            "largest parameter with --tensor-model-parallel-size"
        )


def take_largest(
    bucket: GradBucket, offered: Mapping[str, torch.Tensor], *, density: float, loss_scale: float
) -> tuple[torch.Tensor, int]:
    """Return the message of the largest entries of `offered`, and their number K.

    The share `density` of each parameter's entries is selected. Values are in the dtype of the
    gradient, times `loss_scale`; they are subtracted from `offered`, where rounding errors remain.
    """
    import torch

    from megatron.sparse.selection import largest

    counts = {name: count(density, tensor.numel()) for name, tensor in offered.items()}
    entries, grad = sum(counts.values()), bucket.grad
    length = message_bytes(entries, grad.element_size())
    raw = torch.zeros(length, dtype=torch.uint8, device=grad.device)
    positions, values = split_message(raw, entries, grad.dtype)
    at = 0
    for name, k in counts.items():
        tensor = offered[name]
        chosen = largest(tensor, k)
        picked = tensor[chosen]
        sent = values[at : at + k].copy_(picked * loss_scale)
        tensor[chosen] = picked - sent.float() / loss_scale
        positions[at : at + k] = chosen + bucket.slices[name].start
        at += k
    return raw, entries


def add_mean(
    received: torch.Tensor, entries: int, mean: torch.Tensor, dtype: torch.dtype | None = None
) -> None:
    """Add the mean of the messages of all ranks, [ranks, bytes], to a bucket-sized tensor.

    `dtype` is that of the sent values, by default that of the mean.

    Every rank adds the messages in rank order. A message has no position twice, so the order of its
    entries does not matter.
    """
    for raw in received:
        positions, values = split_message(raw, entries, dtype or mean.dtype)
        mean.index_add_(0, positions, values.to(mean.dtype).div_(len(received)))


def split_message(
    raw: torch.Tensor, entries: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the positions (int32) and of the values of a message (uint8)."""
    import torch

    head = entries * POSITION_BYTES
    tail = head + entries * dtype.itemsize
    return raw[:head].view(torch.int32), raw[head:tail].view(dtype)
