"""What one pipeline stage computes on a microbatch. Knows nothing of order or transport."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from megatron.data.data_loader import DeviceMicrobatch
from megatron.data_parallel.bucket import ParamInfo


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

    def run(
        self, iteration: int, batch: DeviceMicrobatch, hidden: torch.Tensor | None
    ) -> torch.Tensor:
        """Run the forward pass of one microbatch.

        Args:
            iteration: The step, from which random numbers are drawn.
            batch: The microbatch. Every chunk gets it.
            hidden: The output of the chunk before; None where the chunk `begins`.

        Returns:
            The output for the next chunk, or in the last chunk the sum of the losses of the
            microbatch, an fp32 scalar.
        """
        ...

    def train(self, mode: bool) -> object:
        """Switch between training and evaluation, as `nn.Module.train` does."""
        ...


class _Graph(NamedTuple):
    """What backward of a microbatch needs: the input that takes a gradient, None for tokens; and
    what backward starts from, a loss or the anchor of an output."""

    hidden: torch.Tensor | None
    end: torch.Tensor
    gradient: list[torch.Tensor]


class Stage:
    """The runs of layers of one rank, its chunks, in the order in which a microbatch passes them.

    The chunk with the embedding begins with tokens, that with the head ends in a loss; others take
    and give the hidden state. `forward` keeps the graph of its microbatch until `backward` of the
    same, but not the output's data: once that is sent, it is gone.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.chunks = list(chunks)
        self._graphs: dict[tuple[int, int], _Graph] = {}

    def parameter_infos(self) -> list[ParamInfo]:
        """Every logical parameter held here, in the order of the forward pass."""
        return [info for chunk in self.chunks for info in chunk.parameter_infos()]

    def names(self, chunk: int) -> Iterator[str]:
        """Logical names of a chunk's parameters."""
        return (info.name for info in self.chunks[chunk].parameter_infos())

    def train(self, mode: bool) -> None:
        """As `nn.Module.train`, of every chunk."""
        for chunk in self.chunks:
            chunk.train(mode)

    def forward(
        self,
        iteration: int,
        batch: DeviceMicrobatch,
        hidden: torch.Tensor | None = None,
        *,
        chunk: int = 0,
    ) -> torch.Tensor:
        """From `hidden`, the output of the chunk before (None: from the tokens), this chunk's
        output; of the last the sum of the microbatch's token losses, an fp32 scalar. The result
        has no graph."""
        model = self.chunks[chunk]
        assert (hidden is None) == model.begins, "either tokens or an activation"
        keeps = torch.is_grad_enabled()
        if hidden is not None:
            hidden.requires_grad_(keeps)
        # Batch step 2: forward.
        output = model.run(iteration, batch, hidden)
        if keeps:
            gradient: list[torch.Tensor] = []
            end = _Anchor.apply(output, gradient)
            assert isinstance(end, torch.Tensor)
            self._graphs[chunk, batch.index] = _Graph(hidden, end, gradient)
        return output.detach()

    def backward(
        self, index: int, gradient: torch.Tensor | float, *, chunk: int = 0
    ) -> torch.Tensor | None:
        """Gradients of microbatch `index` (its number in the global batch) through the engine's
        hooks, and that of the chunk's input, None where it began with tokens. `gradient`: of the
        chunk's output; a number where that is the loss."""
        graph = self._graphs.pop((chunk, index))
        if not isinstance(gradient, torch.Tensor):
            gradient = torch.full_like(graph.end, gradient)
        graph.gradient.append(gradient)
        # Batch step 4: backward.
        graph.end.backward()
        return None if graph.hidden is None else graph.hidden.grad


class _Anchor(torch.autograd.Function):
    """Stands for an output whose data may go: backward from here hands on the gradient that is by
    then in `holder`. torch itself would want the output, and its memory, back, and would import
    sympy, which takes half a second, to compare the shapes of an output and its gradient."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, holder: list[torch.Tensor]) -> torch.Tensor:
        ctx.holder = holder
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *unused: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.holder.pop(), None
