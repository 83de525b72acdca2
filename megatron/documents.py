"""The documents that are packed into the samples of a microbatch, in which attention stays."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.transfer import to_device


@dataclass(frozen=True)
class Documents:
    """The documents of b samples of s tokens, in order; a sample begins with a new document."""

    lengths: tuple[int, ...]
    longest: int
    offsets: torch.Tensor | None
    """The first token of each document among all b * s, and the end: int32 [documents + 1].

    None on a device for which torch has no kernel that takes documents.
    """

    @classmethod
    def of(cls, document_ids: NDArray[np.int64], device: torch.device) -> Documents:
        """Return the runs of equal ids in each sample of ids [b, s], for attention on `device`."""
        begins = np.ones_like(document_ids, dtype=bool)
        begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
        offsets = [*np.flatnonzero(begins).tolist(), begins.size]
        lengths = tuple(stop - start for start, stop in pairwise(offsets))
        return cls(lengths, max(lengths), None).to(device)

    def to(self, device: torch.device) -> Documents:
        """Return the same documents for attention on `device`."""
        offsets = None
        if has_document_kernel(device):
            ends = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32)
            offsets = to_device(ends, device)
        return replace(self, offsets=offsets)


@cache
def has_document_kernel(device: torch.device) -> bool:
    """Return whether torch has a kernel for documents with query groups on a device."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    if find_spec("torch.nn.attention.varlen") is None:  # torch 2.9
        return False
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.10 lacks it
