"""The memory of a process: as Linux counts it, of live tensors, and of gradients in backward."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


def resident(field: str) -> int:
    """Return VmRSS, the resident memory of this process, or VmHWM, its peak, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise AssertionError(f"Linux tells {field} of every process")


def release() -> None:
    """Give memory of tensors that are no longer referenced back to Linux."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def storages() -> dict[int, int]:
    """Return the bytes of every live tensor storage, by address."""
    gc.collect()
    # Not isinstance, which reads attributes that make some objects of torch warn.
    kinds = (torch.Tensor, torch.nn.Parameter)
    return bytes_of(x for x in gc.get_objects() if type(x) in kinds)


def bytes_of(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of the storages of these tensors, by address, each storage once."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in found}


class WholeGradients(TorchDispatchMode):
    """Counts live tensors of the shapes `shapes`, or their transposes, inside the context.

    Around a backward whose activations have other shapes, it counts dense gradients. `most` is the
    maximum number alive at once.
    """

    def __init__(self, shapes: Iterable[tuple[int, ...]]) -> None:
        super().__init__()
        self._shapes = {tuple(shape) for shape in shapes}
        self._shapes |= {shape[::-1] for shape in self._shapes}
        self._made: dict[int, StorageWeakRef] = {}
        self.most = self.seen = 0

    @property
    def alive(self) -> int:
        """Number of these tensors that are alive now."""
        return sum(not made.expired() for made in self._made.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for made in result if isinstance(result, tuple | list) else [result]:
            if not isinstance(made, torch.Tensor) or tuple(made.shape) not in self._shapes:
                continue
            storage = made.untyped_storage()
            if storage.data_ptr() in given:
                continue  # a view of an existing tensor, or an operation in place
            before = self._made.get(storage.data_ptr())
            self.seen += before is None or before.expired()
            self._made[storage.data_ptr()] = StorageWeakRef(storage)
            self.most = max(self.most, self.alive)
        return result
