"""Agreement of ranks that choose entries on their own, from equal numbers.

The numbers are equal only as far as the ranks compute alike: processors with other instruction sets
round the optimizer's update differently in its last bits, and the smallest of the chosen entries
are not the same ones then. Values travel without their positions, so ranks with different entries
would add up gradients of different weights. A hash of what is chosen tells.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from radius.index import BucketIndex


class IndexChoice(NamedTuple):
    """The choice in `[start, start + length)` of an index."""

    index: BucketIndex
    start: int
    length: int

    @property
    def octets(self) -> torch.Tensor:
        """Packed, on the CPU. Makes the host wait."""
        return self.index.packed(self.start, self.length)


def hash_of(choices: Iterable[IndexChoice]) -> int:
    """64 bits, as a signed number."""
    digest = hashlib.blake2b(digest_size=8)
    for choice in choices:
        digest.update(choice.octets.numpy().data)
    return int.from_bytes(digest.digest(), "little", signed=True)


def take_first_choice(
    choices: Sequence[IndexChoice], group: dist.ProcessGroup | None, device: torch.device
) -> int:
    """Compare the ranks' choices by a hash; where they differ, use the first rank's choice.

    Returns the bytes that this rank handed to collectives, whose tensors are on `device`: 16, and
    one bit for each entry where choices differed.
    """
    mine = hash_of(choices)
    # The largest complement is that of the smallest hash.
    extremes = torch.tensor([mine, ~mine], device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    sent = extremes.nbytes
    largest, complement = extremes.tolist()
    if largest == ~complement:
        return sent
    first = 0 if group is None else dist.get_global_rank(group, 0)
    for choice in choices:
        octets = choice.octets.to(device)
        dist.broadcast(octets, src=first, group=group)
        choice.index.load(choice.start, choice.length, octets.cpu())
        sent += octets.nbytes
    return sent
