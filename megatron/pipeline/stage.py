"""The computation of one pipeline stage on a microbatch, independent of order and transport."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from megatron.data.batches import Batch
from megatron.data_parallel.bucket import ParamInfo
from megatron.data_parallel.buffers import BufferInfo


class Chunk(Protocol):
    """Consecutive layers of the model on one rank: an `nn.Module` with the methods below."""

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        ...

    @property
    def begins(self) -> bool:
        """Whether the chunk takes a batch and not the output of another chunk."""
        ...

    def parameter_infos(self) -> list[ParamInfo]:
        """Return every logical parameter of the chunk, in the order of the forward pass."""
        ...

    def buffer_infos(self) -> list[BufferInfo]:
        """Return every buffer that training updates, such as running statistics; often none."""
        ...

    def run(self, iteration: int, batch: Any, hidden: torch.Tensor | None) -> torch.Tensor:
        """Run the forward pass of one microbatch.

        Args:
            iteration: The step, which seeds random numbers.
            batch: The microbatch, a `Batch` of the task's reader. Every chunk gets it.
            hidden: The output of the previous chunk; None if the chunk `begins`.

        Returns:
            The output for the next chunk, or in the last chunk an fp32 vector [sums] of sums over
            the microbatch, as `Measures.sums` of the task names them. The first is the sum of the
            losses; the others get no gradient.
        """
        ...

    def train(self, mode: bool) -> object:
        """Switch between training and evaluation, as `nn.Module.train` does."""
        ...


class _Graph(NamedTuple):
    """The autograd graph of a microbatch, from `end` (an anchor) to `hidden`, if any.

    `shape` is that of the output, whose gradient goes into `gradient`.
    """

    hidden: torch.Tensor | None
    end: torch.Tensor
    shape: torch.Size
    gradient: list[torch.Tensor]


class Stage:
    """The model chunks of one rank, in forward order.

    Each chunk gets the batch. All but the first of the model also take the hidden state, and all
    but the last, which returns sums, return it. `forward` keeps the graph of a microbatch until its
    `backward`, but not the data of the output, which is freed once sent.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.chunks = list(chunks)
        self._graphs: dict[tuple[int, int], _Graph] = {}

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The chunks as the modules that they are."""
        return [chunk for chunk in self.chunks if isinstance(chunk, torch.nn.Module)]

    def parameter_infos(self) -> list[ParamInfo]:
        """Return every logical parameter of the stage, in the order of the forward pass."""
        return [info for chunk in self.chunks for info in chunk.parameter_infos()]

    def buffer_infos(self) -> list[BufferInfo]:
        """Return every buffer of the stage."""
        return [info for chunk in self.chunks for info in chunk.buffer_infos()]

    def names(self, chunk: int) -> Iterator[str]:
        """Return the logical names of a chunk's parameters."""
        return (info.name for info in self.chunks[chunk].parameter_infos())

    def train(self, mode: bool) -> None:
        """Call `nn.Module.train` for every chunk."""
        for chunk in self.chunks:
            chunk.train(mode)

    def forward(
        self,
        iteration: int,
        batch: Batch,
        hidden: torch.Tensor | None = None,
        *,
        chunk: int = 0,
    ) -> torch.Tensor:
        """Run the forward pass of one chunk; `hidden` is the previous output, or None at the start.

        Returns:
            The output without graph; for the last chunk the fp32 sums over the microbatch.
        """
        model = self.chunks[chunk]
        assert (hidden is None) == model.begins, "either a batch or an activation"
        keeps = torch.is_grad_enabled()
        if hidden is not None:
            hidden.requires_grad_(keeps)
        # Batch step 2: forward.
        output = model.run(iteration, batch, hidden)
        if keeps:
            gradient: list[torch.Tensor] = []
            end = _Anchor.apply(output, gradient)
            assert isinstance(end, torch.Tensor)
            self._graphs[chunk, batch.index] = _Graph(hidden, end, output.shape, gradient)
        return output.detach()

    def backward(
        self, index: int, gradient: torch.Tensor | float, *, chunk: int = 0
    ) -> torch.Tensor | None:
        """Run backward of one chunk; hooks pass the parameter gradients to the engine.

        Args:
            index: Number of the microbatch in the global batch.
            gradient: Gradient of the chunk's output. If the output is a vector of sums, a number:
                the gradient of the first sum; the others get 0.
            chunk: Index of the chunk.

        Returns:
            The gradient of the chunk's input; None if the chunk begins.
        """
        graph = self._graphs.pop((chunk, index))
        if not isinstance(gradient, torch.Tensor):
            gradient = graph.end.new_full(graph.shape, gradient)
            gradient[1:] = 0.0
        graph.gradient.append(gradient)
        # Batch step 4: backward.
        graph.end.backward()
        return None if graph.hidden is None else graph.hidden.grad


class _Anchor(torch.autograd.Function):
    """A substitute for an output, whose data may be freed; backward takes `holder`'s gradient."""

    # torch's own backward would need the output and its memory, and would import sympy, which takes
    # half a second, to compare the shapes of output and gradient.
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, holder: list[torch.Tensor]) -> torch.Tensor:
        ctx.holder = holder
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *unused: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.holder.pop(), None
