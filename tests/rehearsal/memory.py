"""Memory of the device and pinned memory of the host, and which stream touched which bytes last."""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from typing import NamedTuple

import numpy as np
import torch

from tests.rehearsal.findings import Findings, Place, place, told
from tests.rehearsal.streams import PlayedStream, StreamTimeline

_CPU = torch._C.DispatchKey.CPU
_KDL_CUDA = 2
_DLPACK_CODES = {  # kind and bits
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.uint16: (1, 16),
    torch.uint32: (1, 32),
    torch.uint64: (1, 64),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.bfloat16: (4, 16),
    torch.complex64: (5, 64),
    torch.bool: (6, 8),
}
_MOST_USES = 64
"""Uses of a block that are remembered."""
_as_strided = torch.ops.aten.as_strided.default


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class _DType(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Managed(ctypes.Structure):
    """A DLManagedTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Use(NamedTuple):
    """An operation on bytes [start, stop) of a block, `count`-th of its stream."""

    start: int
    stop: int
    stream: int
    count: int
    writes: bool
    where: Place


class MemoryBlock:
    """Memory that one storage has. `stream`: whose operations may reuse the memory once it is
    freed; None for pinned memory."""

    def __init__(self, address: int, nbytes: int, stream: PlayedStream | None) -> None:
        self.address, self.nbytes, self.stream = address, nbytes, stream
        self.uses: list[Use] = []
        self.recorded: set[int] = set()
        self.views: dict[torch.dtype, torch.Tensor] = {}

    def host_view(self, dtype: torch.dtype) -> torch.Tensor:
        """All of the memory as a CPU tensor."""
        if dtype not in self.views:
            whole = self.nbytes // dtype.itemsize * dtype.itemsize
            self.views[dtype] = self.views[torch.uint8][:whole].view(dtype)
        return self.views[dtype]


class Memory:
    """The device's memory, by the address of a storage; `freed_by_torch` is the guard's queue."""

    def __init__(self, findings: Findings, library: ctypes.CDLL) -> None:
        self._findings = findings
        self.timeline = StreamTimeline(findings, self.settle)
        self.blocks: dict[int, MemoryBlock] = {}
        self.pinned: dict[int, MemoryBlock] = {}
        self.allocated = self.peak = 0
        self._lock = threading.RLock()
        self._alive: dict[int, tuple[object, ...]] = {}
        self._deleter = ctypes.cast(library.rehearsal_free, ctypes.c_void_p).value
        self._next_freed = library.rehearsal_next_freed
        self._next_freed.restype = ctypes.c_void_p

    # -- tensors

    def to_device(self, host: torch.Tensor, index: int, *, poison: bool = False) -> torch.Tensor:
        """Turn a CPU tensor that nothing else refers to into one of device `index`, over the same
        memory. `poison` fills the memory, as the caching allocator returns what was there."""
        with torch._C._AutoDispatchBelowADInplaceOrView():
            storage = host.untyped_storage()
            assert storage.data_ptr() not in self.blocks, "an operation returned a view"
            if storage.nbytes():
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            else:
                whole = torch.empty(16, dtype=torch.uint8)  # so that every storage has an address
            if poison:
                whole.fill_(0xFF)  # NaN in every floating-point dtype
            flat = self._native(self._adopt(whole), host.dtype, index)
            place_ = (host.shape, host.stride(), host.storage_offset())
            return _as_strided._op_dk(_CPU, flat, *place_)

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a CPU tensor over the memory of a tensor of the device."""
        if not tensor.numel():
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        view = self.blocks[tensor.untyped_storage().data_ptr()].host_view(tensor.dtype)
        return torch.as_strided(view, tensor.shape, tensor.stride(), tensor.storage_offset())

    def block_of(self, tensor: torch.Tensor) -> MemoryBlock | None:
        """The block of a device tensor or of a pinned one; None for pageable memory."""
        table = self.blocks if tensor.device.type == "cuda" else self.pinned
        return table.get(tensor.untyped_storage().data_ptr())

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in pinned memory."""
        room = np.empty(max(1, tensor.nbytes), np.uint8)
        memory = torch.from_numpy(room)
        address = memory.data_ptr()
        self.register(address, room.nbytes)
        weakref.finalize(room, self.unregister, address)
        return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock host memory."""
        self.pinned[address] = MemoryBlock(address, nbytes, None)

    def unregister(self, address: int) -> None:
        self.pinned.pop(address, None)

    def _adopt(self, whole: torch.Tensor) -> MemoryBlock:
        self.settle()
        block = MemoryBlock(whole.data_ptr(), whole.numel(), self.timeline.current)
        block.views[torch.uint8] = whole
        with self._lock:
            self.blocks[block.address] = block
            self.allocated += block.nbytes
            self.peak = max(self.peak, self.allocated)
        return block

    def _native(self, block: MemoryBlock, dtype: torch.dtype, index: int) -> torch.Tensor:
        shape = (ctypes.c_int64 * 1)(block.nbytes // dtype.itemsize)
        strides = (ctypes.c_int64 * 1)(1)
        device, kind = _Device(_KDL_CUDA, index), _DType(*_DLPACK_CODES[dtype], 1)
        managed = _Managed(block.address, device, 1, kind, shape, strides, 0, None, self._deleter)
        key = ctypes.addressof(managed)
        self._alive[key] = (managed, shape, strides, block)  # until torch calls the deleter
        return torch._C._from_dlpack(_new_capsule(key, b"dltensor", None))

    # -- order

    def touch(self, tensor: torch.Tensor, stream: PlayedStream, *, writes: bool) -> None:
        """Record that the stream's last operation reads or writes the tensor; note a race with
        every earlier use that nothing orders before it."""
        block = self.block_of(tensor) if tensor.numel() else None
        if block is None:
            return
        start = tensor.data_ptr() - block.address
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        entries = 1 + sum((size - 1) * abs(stride) for size, stride in sizes)
        stop = start + entries * tensor.itemsize
        count = stream.clock.get(stream.number, 0)
        mine = Use(start, stop, stream.number, count, writes, place(depth=2))
        with self._lock:
            kept = []
            for use in block.uses:
                ordered = stream.follows(use.stream, use.count)
                overlap = use.start < stop and start < use.stop
                if overlap and (writes or use.writes) and not ordered:
                    self._note_race(stream, mine, use)
                covered = start <= use.start and use.stop <= stop
                # An operation that follows this one follows what this one follows and covers.
                if not (ordered and covered and (writes or not use.writes)):
                    kept.append(use)
            block.uses = [*kept[1 - _MOST_USES :], mine]

    def settle(self) -> None:
        """Free what torch gave back since the last call."""
        while (key := self._next_freed()) is not None:
            block = self._alive.pop(key)[-1]
            assert isinstance(block, MemoryBlock)
            self._free(block)

    def _free(self, block: MemoryBlock) -> None:
        with self._lock:
            if self.blocks.get(block.address) is block:
                del self.blocks[block.address]
            self.allocated -= block.nbytes
        owner = block.stream
        if owner is None or sys.is_finalizing():
            return
        for use in block.uses:
            seen = owner.follows(use.stream, use.count)
            seen = seen or self.timeline.host.follows(use.stream, use.count)
            if not seen and use.stream not in block.recorded:
                who = self.timeline.names[use.stream]
                what = f"{block.nbytes} bytes of {owner.name} while {who} has them since"
                self._findings.note("early free", f"{what} {told(use.where)}")

    def _note_race(self, stream: PlayedStream, mine: Use, other: Use) -> None:
        verb, did = ("writes" if mine.writes else "reads"), ("wrote" if other.writes else "read")
        who = self.timeline.names[other.stream]
        self._findings.note("race", f"{stream.name} {verb} what {who} {did} at {told(other.where)}")
