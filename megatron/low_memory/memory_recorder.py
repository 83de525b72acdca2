"""Recorders of memory and FLOPs around a training step, for real tensors and for fake ones.

Fake tensors (`FakeTensorMode`) have shapes and no data: a step on them computes nothing, and the
storages that it would allocate are counted all the same.

    MemoryRecorder    torch's MemTracker, with the bytes by kind at every operator
    SavedActivations  bytes that autograd saves in a forward pass, by layer
    count_flops       FLOPs of products, by torch's FlopCounterMode
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._tools.mem_tracker import MemTracker
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from megatron.low_memory.activation_checkpoint import watching_kept
from megatron.low_memory.operation_graph import HEAD

BEFORE = ("embedding", "conv0")
"""Layers that come before the first numbered one."""


@dataclass(frozen=True, kw_only=True)
class MemorySample:
    """Bytes by kind after one operator of a step.

    Attributes:
        operator: Name of the operator, such as `mm`.
        module: Name of the innermost module that runs forward or backward; empty outside of the
            model.
        phase: "forward", "backward" or "update".
        model: Parameters and buffers.
        optimizer: Gradients in buckets, moments, fp32 copies.
        forward: Activations that the forward pass made.
        backward: Gradients of activations, temporaries of backward, recomputed activations.
        other: The batch, tables, scratch memory, temporaries of the update.
    """

    operator: str
    module: str
    phase: str
    model: int
    optimizer: int
    forward: int
    backward: int
    other: int

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return self.model + self.optimizer + self.forward + self.backward + self.other


class MemoryRecorder(MemTracker):
    """A `MemTracker` that keeps the bytes by kind after every operator of a step.

    Call `begin` after the model and its states are built, then enter the recorder for the step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[MemorySample] = []
        self._phase: str | None = None
        self._parameters = self._others = 0

    def begin(
        self,
        chunks: Iterable[nn.Module],
        states: Iterable[torch.Tensor],
        others: Iterable[torch.Tensor],
    ) -> None:
        """Take in the tensors that exist before the step.

        Args:
            chunks: The model.
            states: Gradients, moments and fp32 copies. Parameters may be views of some.
            others: Tables, scratch memory and the like; tensors of the model or of `states` among
                them are ignored.
        """
        chunks = list(chunks)
        self.track_external(*states)
        self.track_external(*chunks)  # takes shared storages out of the states
        before = self._kinds().get("Other", 0)
        self.track_external(*(each for each in others if each.untyped_storage() not in self._WINFO))
        self._others = self._kinds().get("Other", 0) - before
        for chunk in chunks:
            self._mod_tracker._get_mod_name(chunk)
        self._parameters = sum(
            tensor.nbytes for chunk in chunks for tensor in unique(chunk.parameters())
        )

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record operators as those of a phase: "forward", "backward" or "update"."""
        self._phase, self._in_opt = name, name == "update"
        try:
            yield
        finally:
            self._phase, self._in_opt = None, False

    def now(self, operator: str = "") -> MemorySample:
        """Return a sample of the present bytes."""
        kinds = self._kinds()
        # fp32 parameters share their storages with the fp32 copies, whose gaps are no parameters.
        shared = kinds.get("Parameter", 0)
        return MemorySample(
            operator=operator,
            module=self._module(),
            phase=self._phase or "",
            model=self._parameters + kinds.get("Buffer", 0),
            optimizer=shared - self._parameters + kinds.get("Other", 0) - self._others,
            forward=kinds.get("Activation", 0),
            backward=kinds.get("Temp", 0) + kinds.get("Gradient", 0),
            other=self._others + kinds.get("Optstate", 0),
        )

    def _kinds(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for snapshot in self._curr_mem_snap.values():
            for kind, size in snapshot.items():
                name = str(getattr(kind, "value", kind))
                found[name] = found.get(name, 0) + size
        return found

    def _module(self) -> str:
        inner = max(self._mod_tracker.parents, key=len, default="")
        return inner.partition(".")[2]

    # The tracker's own hooks keep statistics of each module, and refuse a second microbatch. They
    # also count recomputed activations as those of forward, where here they are of backward.

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        pass

    def _post_fw_hook(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        pass

    def _pre_bw_hook(self, module: nn.Module, args: Any) -> None:
        pass

    def _post_bw_hook(self, module: nn.Module, args: Any) -> None:
        pass

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self._phase is not None:
            self.samples.append(self.now(func._schema.name.rpartition("::")[2]))
        return result


def unique(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors without those that share the storage of an earlier one at the same place."""
    seen: dict[tuple[int, int], torch.Tensor] = {}
    for tensor in tensors:
        seen.setdefault((_key(tensor), int(tensor.storage_offset())), tensor)
    return list(seen.values())


def reachable(*roots: object) -> list[torch.Tensor]:
    """Return the tensors that objects hold in their attributes and containers, at any depth.

    Only objects of this repository, modules and plain containers are looked into.
    """
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    todo: list[object] = list(roots)
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, Mapping):
            todo += each.values()
        elif isinstance(each, list | tuple | set):
            todo += each
        elif type(each).__module__.partition(".")[0] in OURS or isinstance(each, nn.Module):
            todo += getattr(each, "__dict__", {}).values()
    return found


OURS = ("megatron", "radius", "samo")


class SavedActivations:
    """The bytes of storages that autograd saves, each once, by the layer that saves them first.

    Args:
        chunks: The modules whose layers are told apart.
        known: Tensors that exist without a forward pass: parameters, buffers, tables, labels.
        layer_of: Maps a chunk and the name of one of its modules to the name of a layer.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        known: Iterable[torch.Tensor],
        layer_of: Callable[[nn.Module, str], str],
    ) -> None:
        self._chunks, self._layer_of = chunks, layer_of
        # A weak reference keeps the address of a storage from being used again.
        self._seen = {_key(tensor): _weak(tensor) for tensor in known}
        self._running: list[str] = []
        self._between = 0
        self.by_layer: dict[str, int] = {}

    @property
    def total(self) -> int:
        """Bytes of all layers."""
        return sum(self.by_layer.values())

    @contextmanager
    def watch(self) -> Iterator[SavedActivations]:
        """Count what is saved inside the context."""
        handles = []
        for chunk in self._chunks:
            for name, module in chunk.named_modules():
                if name in ("", "network"):
                    continue  # what the chunk itself saves between layers is the next layer's input
                handles.append(module.register_forward_pre_hook(self._enter(chunk, name)))
                handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            with saved_tensors_hooks(self._pack, lambda tensor: tensor), watching_kept(self._pack):
                yield self
        finally:
            self._settle(HEAD)
            for handle in handles:
                handle.remove()

    def _enter(self, chunk: nn.Module, name: str) -> Callable[..., None]:
        layer = self._layer_of(chunk, name)

        def enter(*unused: object) -> None:
            self._running.append(layer)
            self._settle(layer)

        return enter

    def _settle(self, layer: str) -> None:
        """Count what was saved between layers, such as the input of a recomputed one."""
        size, self._between = self._between, 0
        if size:
            self.by_layer[layer] = self.by_layer.get(layer, 0) + size

    def _leave(self, *unused: object) -> None:
        self._running.pop()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if _key(tensor) not in self._seen:
            self._seen[_key(tensor)] = _weak(tensor)
            self._between += tensor.untyped_storage().nbytes()
            if self._running:
                self._settle(self._running[-1])
        return tensor


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _weak(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


_NUMBERED = re.compile(r"(?:[A-Za-z_]\w*\.)*?\w+(?:\.\d+)+(?=\.|$)")


def layer_of(chunk: nn.Module, module: str) -> str:
    """Return the layer of a module: `layers.3.mlp` is in `layers.3`, counted over the whole model.

    What has no number is in `HEAD`, but for the layers `BEFORE`.
    """
    name = module.removeprefix("network").removeprefix(".")
    found = _NUMBERED.match(name)
    if found is None:
        first = name.partition(".")[0]
        return first if first in BEFORE else HEAD
    numbers = getattr(chunk, "layer_numbers", None)
    layer = found.group()
    if numbers is not None and layer.startswith("layers."):
        return f"layers.{numbers[int(layer.removeprefix('layers.'))]}"
    return layer


@contextmanager
def count_flops() -> Iterator[FlopCounterMode]:
    """Count the FLOPs of products inside the context, two for a multiplication with an addition."""
    ops = torch.ops.aten
    # Operators that torch's counter does not know.
    operators: dict[Any, Any] = {
        ops._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
        ops._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
        ops.addmm_: _addmm_flops,
    }
    if torch.backends.mkldnn.is_available():
        operators[torch.ops.mkldnn._linear_pointwise] = _linear_flops
    with FlopCounterMode(display=False, custom_mapping=operators) as counter:
        yield counter


# The counter calls these with shapes in place of tensors.


def _linear_flops(rows: Any, weight: Any, *unused: Any, out_shape: Any = None, **also: Any) -> int:
    return 2 * math.prod(rows) * weight[0]


def _addmm_flops(
    out: Any, left: Any, right: Any, *unused: Any, out_shape: Any = None, **also: Any
) -> int:
    return 2 * math.prod(left) * right[-1]


def _attention_flops(
    query: Any, key: Any, value: Any, *unused: Any, out_shape: Any = None, **also: Any
) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward_flops(
    grad: Any, query: Any, key: Any, value: Any, *unused: Any, out_shape: Any = None, **also: Any
) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)
