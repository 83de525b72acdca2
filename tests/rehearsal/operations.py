"""Every operation on tensors of the device: checked and recorded as CUDA's, computed by the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.rehearsal import flash
from tests.rehearsal.findings import Findings
from tests.rehearsal.memory import Memory

aten = torch.ops.aten
_CPU = torch._C.DispatchKey.CPU
_below_autograd = torch._C._AutoDispatchBelowADInplaceOrView

# Operations that look at no entry: the CPU's kernel serves tensors of any device.
VIEWS = {"as_strided", "view", "_reshape_alias", "unfold", "set_"}
FACTORIES = {"empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like"}
# CUDA takes a CPU tensor beside its own: as an index, which is copied, or to copy from.
INDEXING = {"index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put"}
PLAYED = {
    "_flash_attention_forward": flash.forward,
    "_flash_attention_backward": flash.backward,
}
"""Operations that have no CPU kernel."""
WAITING = {
    "nonzero": "counts its result on the device",
    "masked_select": "counts its result on the device",
    "_unique2": "counts its result on the device",
    "unique_dim": "counts its result on the device",
    "unique_consecutive": "counts its result on the device",
    "repeat_interleave": "sums up the size of its result",
    "bincount": "looks for the largest entry",
    "histc": "looks for the smallest and the largest entry",
    "equal": "answers the host",
}


class Operations:
    """Kernels for the CUDA dispatch key. `current_index` returns the thread's current device."""

    def __init__(
        self, memory: Memory, findings: Findings, current_index: Callable[[], int]
    ) -> None:
        self.memory, self.findings = memory, findings
        self.timeline = memory.timeline
        self._current_index = current_index
        self.generators = [torch.Generator() for _ in range(8)]
        """The random numbers of each device."""
        self.sync_mode: int | str = "default"
        self._libraries: list[torch.library.Library] = []

    def register(self) -> None:
        """Give every operation of the CUDA dispatch key a kernel, until the process ends."""
        every = torch.library.Library("_", "IMPL")
        every.fallback(self.run, "CUDA")
        own = torch.library.Library("aten", "IMPL", "CUDA")
        own.impl("copy_", self.copy_)
        own.impl("empty.memory_format", self.empty)
        own.impl("empty_strided", self.empty_strided)
        own.impl("_local_scalar_dense", self.item)
        self._libraries += [every, own]

    def index(self, device: Any) -> int:
        """The number of a CUDA device; the current one where `device` does not say."""
        if isinstance(device, int):
            return device
        found = None if device is None else torch.device(device).index
        return self._current_index() if found is None else found

    def wait(self, what: str) -> None:
        """The host waits for the current stream, unless torch's sync debug mode refuses."""
        self.timeline.wait(what, self.timeline.current.clock)
        if self.sync_mode in ("error", 2):
            raise RuntimeError(f"called a synchronizing CUDA operation: {what}")

    # -- operations

    def run(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """The fallback: play one operation."""
        name = op._schema.name.removeprefix("aten::")
        if name in VIEWS:
            return op._op_dk(_CPU, *args, **kwargs)
        self.memory.settle()
        tensors = list(_tensors([args, list(kwargs.values())]))
        on_device = [tensor for tensor in tensors if tensor.is_cuda]
        self._check_devices(name, tensors, on_device)
        if on_device and name not in FACTORIES and name != "resize_":
            self.issue(tensors, written=_written(op._schema, args, kwargs))
        self._note_waits(name, args)
        aliases = {id(tensor): self.memory.on_host(tensor) for tensor in on_device}
        result = self._compute(op, tensors, aliases, args, kwargs)
        self._adopt_resized(name, on_device, aliases)
        owners = {id(aliases[id(tensor)]): tensor for tensor in on_device}
        wanted = kwargs.get("device")
        stays = wanted is not None and torch.device(wanted).type != "cuda"
        index = self.index(on_device[0].device if wanted is None and on_device else wanted)

        def raised(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in owners:
                return owners[id(tensor)]
            if stays:
                return tensor
            made = self.memory.to_device(tensor, index, poison=name in FACTORIES)
            if name not in FACTORIES:
                self.memory.touch(made, self.timeline.current, writes=True)
            return made

        return _mapped(result, raised)

    def issue(self, tensors: Iterable[torch.Tensor], written: set[int]) -> None:
        """One kernel on the current stream, which writes the tensors whose id is in `written`."""
        stream = self.timeline.current
        stream.advance()
        for tensor in tensors:
            self.memory.touch(tensor, stream, writes=id(tensor) in written)

    def copy_(
        self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        if target.numel():
            self.issue([source, target], {id(target)})
            if target.is_cuda != source.is_cuda:
                self._note_copy(target, source, non_blocking)
        there = self.memory.on_host(target) if target.is_cuda else target
        here = self.memory.on_host(source) if source.is_cuda else source
        with _below_autograd():
            aten.copy_.default(there, here, False)
        return target

    def empty(
        self,
        size: Any,
        *,
        dtype: Any = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
        memory_format: Any = None,
    ) -> torch.Tensor:
        made = aten.empty.memory_format(size, dtype=dtype, memory_format=memory_format)
        return self.memory.to_device(made, self.index(device), poison=True)

    def empty_strided(
        self,
        size: Any,
        stride: Any,
        *,
        dtype: Any = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
    ) -> torch.Tensor:
        made = aten.empty_strided.default(size, stride, dtype=dtype)
        return self.memory.to_device(made, self.index(device), poison=True)

    def item(self, tensor: torch.Tensor) -> Any:
        self.issue([tensor], set())
        self.wait("item, int, float, bool or tolist")
        return self.memory.on_host(tensor).item()

    # -- their parts

    def _check_devices(
        self, name: str, tensors: list[torch.Tensor], on_device: list[torch.Tensor]
    ) -> None:
        """Refuse tensors of two devices where CUDA does; a CPU tensor of no dimension is a
        number."""
        devices = {tensor.device for tensor in on_device}
        if name.removesuffix("_") not in INDEXING:
            devices |= {t.device for t in tensors if not t.is_cuda and t.dim()}
        if len(devices) > 1 and on_device:
            found = " and ".join(sorted(map(str, devices)))
            self.findings.note("device", f"{name} of tensors on {found}")
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {found}")

    def _note_waits(self, name: str, args: tuple[Any, ...]) -> None:
        base = name.removesuffix("_")
        if base in WAITING:
            self.wait(f"{name} {WAITING[base]}")
        if base in INDEXING:
            for index in _tensors([args[1]]):
                if index.dtype in (torch.bool, torch.uint8):
                    self.wait(f"{name} counts the mask that is its index")
                elif not index.is_cuda and index.dim():
                    self._pageable(f"{name} copies its index to the device")

    def _note_copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        way = "to the device" if target.is_cuda else "to the host"
        host = source if target.is_cuda else target
        if not non_blocking:
            self.wait(f"copy {way}")
        elif self.memory.block_of(host) is None:
            self._pageable(f"copy {way}")

    def _pageable(self, what: str) -> None:
        self.findings.note("pageable copy", what)
        self.timeline.host.learn(self.timeline.current.clock)

    def _compute(
        self,
        op: Any,
        tensors: list[torch.Tensor],
        aliases: dict[int, torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        def lowered(tensor: torch.Tensor) -> torch.Tensor:
            return aliases.get(id(tensor), tensor)

        args = _mapped(args, lowered)
        kwargs = {key: _mapped(value, lowered) for key, value in kwargs.items()}
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        name = op._schema.name.removeprefix("aten::")
        if name in PLAYED:
            return PLAYED[name](*args, **kwargs)
        if not _draws(op):
            return _call(op, tensors, args, kwargs)
        kwargs.pop("generator", None)
        with self._own_random_numbers():
            return _call(op, tensors, args, kwargs)

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """The generator of the current device in the place of the CPU's."""
        mine, host = self.generators[self._current_index()], torch.default_generator
        kept = host.get_state()
        host.set_state(mine.get_state())
        try:
            yield
        finally:
            mine.set_state(host.get_state())
            host.set_state(kept)

    def _adopt_resized(
        self, name: str, on_device: list[torch.Tensor], aliases: dict[int, torch.Tensor]
    ) -> None:
        """An `out` argument without entries grows: give the tensor its alias' new memory."""
        for tensor in on_device:
            alias = aliases[id(tensor)]
            if alias.shape == tensor.shape:
                continue
            assert not tensor.numel(), f"{name} resizes an argument that has entries"
            with _below_autograd():
                made = self.memory.to_device(alias, tensor.device.index)
                aten.set_.source_Tensor._op_dk(_CPU, tensor, made)


def _draws(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def _call(op: Any, tensors: list[torch.Tensor], args: Any, kwargs: dict[str, Any]) -> Any:
    """Call `op`. torch hands over plain numbers where it was given tensors made of numbers, and
    accepts them back for some operations only; the others get tensors again."""
    try:
        return op(*args, **kwargs)
    except RuntimeError as error:
        if "Unable to cast" not in str(error):
            raise
    # A tensor without dimensions decides on the dtype of a result where no other has dimensions.
    wide = torch.float64 if any(tensor.dim() for tensor in tensors) else None
    remade = [
        torch.tensor(value, dtype=wide if isinstance(value, float) else None)
        if isinstance(value, int | float) and str(parameter.type) == "Tensor"
        else value
        for value, parameter in zip(args, op._schema.arguments, strict=False)
    ]
    return op(*remade, **kwargs)


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Ids of the tensors that the operation writes to."""
    values = itertools.chain(args, itertools.repeat(None))
    pairs = zip(schema.arguments, values, strict=False)
    written = [
        kwargs.get(argument.name, value)
        for argument, value in pairs
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return {id(tensor) for tensor in _tensors(written)}


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)([_mapped(each, change) for each in value])
    return value
