"""Comparison of the entries that ranks selected on their own.

Ranks select by equal numbers, but only as far as they compute alike: processors with different
instruction sets round the optimizer's update differently in its last bits, and may then disagree
about the smallest selected entries. Values travel without positions, so ranks with different
entries would add gradients of different weights. A hash of the selection reveals that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from radius.bucket_index import BucketIndex


class IndexChoice(NamedTuple):
    """The selection in `[start, start + length)` of an index."""

    index: BucketIndex
    start: int
    length: int

    @property
    def octets(self) -> torch.Tensor:
        """The selection as packed bits, uint8 on the CPU. Reading them synchronizes the device."""
        return self.index.packed(self.start, self.length)


def hash_of(choices: Iterable[IndexChoice]) -> int:
    """Return a 64-bit hash of the selections, in their order, as a signed integer."""
    digest = hashlib.blake2b(digest_size=8)
    for choice in choices:
        digest.update(choice.octets.numpy().data)
    return int.from_bytes(digest.digest(), "little", signed=True)


def take_first_choice(
    choices: Sequence[IndexChoice], group: dist.ProcessGroup | None, device: torch.device
) -> int:
    """Compare the ranks' selections by a hash; if they differ, use the first rank's selection.

    Collective over `group`, with tensors on `device`; every rank passes the same parts in the same
    order. Returns the bytes that this rank passed to collectives: 16, plus one bit per entry if the
    selections differ.
    """
    mine = hash_of(choices)
    # The largest complement belongs to the smallest hash.
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
