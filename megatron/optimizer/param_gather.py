"""All-gathers of updated parameters that run on while the next forward pass computes (ZeRO-1).

Buckets are updated and sent in the order in which the forward pass needs them, and a module waits
for the buckets that it reads:

    update    bucket 2 | bucket 1 | bucket 0
    network            |~~~~ 2 ~~~~|~~~~ 1 ~~~~|~~~~ 0 ~~~~|
    forward                        |embedding  |layer 0    |layer 1   ...

Megatron-LM does the same under the same flag, `--overlap-param-gather`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn

from megatron.data_parallel.bucket import GradBucket
from megatron.data_parallel.engine import GradientEngine
from megatron.optimizer.distributed_optimizer import ShardUpdates


class ParamGather(ShardUpdates):
    """All-gathers that stay in progress until a module needs the values, or until `finish`.

    Before its forward pass, a module waits for the buckets of its own parameters and of those of
    its children that have no `forward`, since the module reads these itself. A compiled module
    waits for all parameters inside of it, outside of the compiled code. A bucket with a parameter
    for which no module has waited in the forward pass before, since other code reads it, does not
    stay in progress.

    Args:
        engine: The engine, whose parameters are in forward order.
        modules: The model on this rank.
    """

    most_in_progress = math.inf

    def __init__(self, engine: GradientEngine, modules: Iterable[nn.Module]) -> None:
        super().__init__(engine)
        self._names = {leaf: info.name for info in engine.infos.values() for leaf in info.leaves}
        self._awaited = set[str]()
        for module in modules:
            self._add_waits(module)

    @property
    def buckets(self) -> Sequence[GradBucket]:
        """The buckets in the order in which the forward pass needs them."""
        place = {name: number for number, name in enumerate(self._engine.infos)}
        return sorted(self._engine.buckets, key=lambda bucket: min(place[n] for n in bucket.names))

    def settle(self) -> None:
        for index, (bucket, _, _) in list(self._sent.items()):
            if not self._awaited.issuperset(bucket.names):
                self._receive(index)

    def wait_for(self, names: Sequence[str]) -> None:
        """Receive the buckets of parameters that the forward pass reads next."""
        self._awaited.update(names)
        # There is nothing to receive in most forward passes.
        for name in names if self._sent else ():
            index = self._engine.place(name)[0].index
            if index in self._sent:
                self._receive(index)

    def _add_waits(self, module: nn.Module) -> None:
        """Let a module and the modules inside of it wait for the parameters that they read."""
        if (compiled := module._compiled_call_impl) is not None:
            # Hooks would be inside of the compiled code.
            module._compiled_call_impl = self._waiting(compiled, self._known(module.parameters()))
            return
        if names := self._known(_read_by(module)):
            module.register_forward_pre_hook(partial(self._before_forward, names))
        for child in module.children():
            self._add_waits(child)

    def _known(self, parameters: Iterable[nn.Parameter]) -> list[str]:
        return [self._names[each] for each in parameters if each in self._names]

    def _waiting(self, call: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
        def wait_and_call(*args: Any, **named: Any) -> Any:
            self.wait_for(names)
            return call(*args, **named)

        return wait_and_call

    def _before_forward(self, names: Sequence[str], module: nn.Module, args: Any) -> None:
        self.wait_for(names)


def _read_by(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that the forward pass of a module reads by itself."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield from _read_by(child)
