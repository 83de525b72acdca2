"""The device behind `torch.cuda`. Import this module before torch, and before the program."""

from __future__ import annotations

from tests.rehearsal import guard

_library = guard.load()

import os  # noqa: E402
from collections.abc import Callable  # noqa: E402
from functools import cache  # noqa: E402
from types import SimpleNamespace  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402

from tests.rehearsal.findings import Findings  # noqa: E402
from tests.rehearsal.memory import Memory  # noqa: E402
from tests.rehearsal.operations import Operations  # noqa: E402
from tests.rehearsal.streams import PlayedEvent, PlayedStream, StreamTimeline  # noqa: E402

COUNT = 8
"""Devices, as FakeGuardImpl has them."""
NAME = "a CUDA device played by the CPU"
_MEMORY = 80 << 30


class PlayedDevice:
    """All devices of this process: what the program did to them, and what was noticed."""

    def __init__(self) -> None:
        self.findings = Findings()
        self.memory = Memory(self.findings, _library)
        self.operations = Operations(self.memory, self.findings, _library.rehearsal_get_device)

    @property
    def timeline(self) -> StreamTimeline:
        return self.memory.timeline


@cache
def install() -> PlayedDevice:
    """Make this process see CUDA devices, from now until it ends."""
    device = PlayedDevice()
    device.operations.register()
    _patch_cuda(device)
    _patch_pinned_memory(device.memory)
    _patch_triton(device)
    # Inductor writes kernels for a device that can run them.
    torch.nn.Module.compile = lambda self, *args, **kwargs: None
    return device


def _patch_cuda(device: PlayedDevice) -> None:
    """Answer torch.cuda's questions, all of which go to a library that is not there."""
    cuda, memory, operations = torch.cuda, device.memory, device.operations
    timeline = memory.timeline

    class CudaStream(PlayedStream):
        def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
            super().__init__(timeline, f"stream {len(timeline.names)}")
            self.device = torch.device("cuda", operations.index(device))
            self.priority, self.cuda_stream = priority, self.number

    class CudaEvent(PlayedEvent):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(timeline)

    def set_sync_debug_mode(mode: int | str) -> None:
        operations.sync_mode = mode

    def reset_peak(device: Any = None) -> None:
        memory.peak = memory.allocated

    def synchronize(device: Any = None) -> None:
        timeline.wait("synchronize the device", timeline.latest)

    def seed_all(seed: int) -> None:
        for generator in operations.generators:
            generator.manual_seed(seed)

    properties = SimpleNamespace(
        name=NAME, major=9, minor=0, total_memory=_MEMORY, multi_processor_count=132, warp_size=32
    )
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: COUNT,
        "current_device": lambda: operations.index(None),
        "set_device": lambda index: _library.rehearsal_set_device(operations.index(index)),
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda including_emulation=True: True,
        "Stream": CudaStream,
        "Event": CudaEvent,
        "current_stream": lambda device=None: timeline.current,
        "default_stream": lambda device=None: timeline.default,
        "stream": lambda stream: stream,
        "synchronize": synchronize,
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: memory.allocated,
        "memory_reserved": lambda device=None: memory.allocated,
        "max_memory_allocated": lambda device=None: memory.peak,
        "max_memory_reserved": lambda device=None: memory.peak,
        "reset_peak_memory_stats": reset_peak,
        "mem_get_info": lambda device=None: (_MEMORY - memory.allocated, _MEMORY),
        "cudart": lambda: _Runtime(memory),
        "check_error": lambda code: None,
        "manual_seed": operations.generators[0].manual_seed,
        "manual_seed_all": seed_all,
        "default_generators": tuple(operations.generators),
        "set_sync_debug_mode": set_sync_debug_mode,
        "get_sync_debug_mode": lambda: operations.sync_mode,
    }
    for name, answer in answers.items():
        setattr(cuda, name, answer)


class _Runtime:
    """The functions of CUDA's runtime library that the program calls."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self._memory.register(address, nbytes)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self._memory.unregister(address)
        return 0


def _patch_pinned_memory(memory: Memory) -> None:
    def pinnable(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            tensor = real(*args, **kwargs)
            return memory.pin(tensor) if pin_memory else tensor

        return made

    def is_pinned(self: torch.Tensor, device: Any = None) -> bool:
        return not self.is_cuda and memory.block_of(self) is not None

    def record_stream(self: torch.Tensor, s: Any) -> None:
        block = memory.block_of(self)
        assert block is not None and self.is_cuda
        block.recorded.add(s.number)

    torch.empty, torch.zeros = pinnable(torch.empty), pinnable(torch.zeros)
    torch.Tensor.pin_memory = lambda self, device=None: memory.pin(self)
    torch.Tensor.is_pinned = is_pinned
    torch.Tensor.record_stream = record_stream


def _patch_triton(device: PlayedDevice) -> None:
    """Let Triton's interpreter work on the device's memory itself, not on a copy. Which arguments
    a kernel writes is not known here: all count as read."""
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        from triton.runtime.interpreter import GridExecutor
    except ImportError:
        return
    real = GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        for tensor in tensors:
            if not tensor.is_cuda:
                device.findings.note("device", f"{self.fn.__name__} of a tensor on the CPU")
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        device.operations.issue(tensors, set())

        def lowered(value: Any) -> Any:
            return device.memory.on_host(value) if isinstance(value, torch.Tensor) else value

        return real(self, *map(lowered, args), **{k: lowered(v) for k, v in kwargs.items()})

    GridExecutor.__call__ = call
