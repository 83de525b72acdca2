"""Activation checkpointing: store little of the forward pass, and recompute the rest in backward.

`recomputed` keeps the inputs of a function alone. It serves `--recompute-granularity full`, whole
layers in spans (`recompute_spans`), including their collectives; ranks that share a layer recompute
in the same order. It also serves "selective", which recomputes, in each layer, the part of
attention whose activations grow quadratically with the sequence (`recomputes_attention`;
Korthikanti et al. 2022, 4.1).

`run_blocks` runs a model, given as blocks of operators, by the other granularities:

    ops             keep what products compute, in each block (`keeping_products`)
    no-norm         recompute what lies between the input of a norm and the next product
    every           keep what passes between runs of m operators
    residual        keep the input of every m-th block
    residual-star   keep the input of every m-th block; in backward of such a segment, the inputs of
                    its blocks, and in backward of a block what no-norm keeps

The last four are those of Sohoni et al. 2019, section 3.4, which `strategies` counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch.utils._python_dispatch import _pop_mode_temporarily
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

if TYPE_CHECKING:
    from megatron.config import RecomputeConfig

State = tuple[torch.Tensor, ...]


class Operator(NamedTuple):
    """A part of a model that maps some tensors to others.

    `kind` is "product" if the operator ends in a matrix product or a convolution, whose input is
    stored in a run without recomputation.
    """

    run: Callable[..., State]
    kind: Literal["norm", "product", "other"]


Block = Sequence[Operator]
"""The operators of a residual block, a transformer layer for example, in forward order."""


def recomputed(function: Callable[..., Any], *args: Any, preserve_rng: bool = False) -> Any:
    """Call `function(*args)`, keep only `args`, and call it again in backward.

    `function` must give the same result both times. It sets its own random state, unless
    `preserve_rng` saves the random state in forward and restores it.
    """
    # Layers seed their own dropout streams (`tensor_parallel.rng`), so that they need no generator
    # state.
    return checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=preserve_rng,
        context_fn=lambda: (_Pass(None), _Pass(None, again=True)),
    )


def keeping_products(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function` as `recomputed` does, and also keep the results of its products.

    Matrix products, convolutions and attention run once, by torch's selective checkpointing and,
    inside of autograd functions, by `product_result`.
    """

    def contexts() -> tuple[Any, Any]:
        results = _ProductResults(keeps=True)
        caching, cached = create_selective_checkpoint_contexts(_policy)
        return _Pass(results, inner=caching), _Pass(results, inner=cached, again=True)

    return checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
    )


def recomputing_operand(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function` as `recomputed` does, where it ends in a product, which runs once.

    Backward recomputes the operand of the product. The function must contain no other product.
    """

    def contexts() -> tuple[Any, Any]:
        results = _ProductResults(keeps=False)
        return _Pass(results), _Pass(results, again=True)

    # torch stops recomputation at the last tensor that a graph stores, and its own products store
    # their operands before they multiply. Autograd functions store after they multiply, so they
    # call `product_result`.
    return checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
    )


def run_blocks(
    blocks: Sequence[Block],
    *state: torch.Tensor,
    recompute: RecomputeConfig | None,
    preserve_rng: bool = False,
) -> State:
    """Run blocks one after the other, and recompute as `recompute` asks.

    Args:
        blocks: Blocks of operators in forward order. Operators seed their own dropout, such that
            a whole block draws the same numbers again.
        state: Arguments of the first operator.
        recompute: The granularity, with `recompute_num_layers` as m; None or no granularity to
            store everything. "full" and "selective" are not served.
        preserve_rng: Whether operators draw random numbers without seeding for themselves.
    """
    granularity = None if recompute is None else recompute.recompute_granularity
    length = (recompute and recompute.recompute_num_layers) or 1
    operators = list(chain.from_iterable(blocks))
    if granularity is None or not torch.is_grad_enabled():
        return _run(operators, *state)
    if granularity == "no-norm":
        return _run_without_norms(operators, *state)
    if granularity == "every":
        for run in _split(operators, length):
            state = recomputed(partial(_run, run), *state, preserve_rng=preserve_rng)
    elif granularity == "ops":
        for block in blocks:
            state = keeping_products(partial(_run, block), *state)
    elif granularity == "residual":
        for run in _split(blocks, length):
            state = recomputed(partial(_run, list(chain.from_iterable(run))), *state)
    else:
        assert granularity == "residual-star", granularity
        for run in _split(blocks, length):
            state = _run_star(run, *state)
    return state


def is_recomputing() -> bool:
    """Return whether this thread recomputes a forward pass, so that no state may be updated."""
    return _now.recomputing


def product_result(function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """Return `function(*args)`, the result of a product inside of an autograd function's forward.

    `keeping_products` stores the result and does not call the function again, whose collectives
    are also left out. `recomputing_operand` calls it once too, and recomputation gets a tensor of
    undefined values, all of whose entries share one element of memory (strides of 0), so that the
    caller must not write to it.
    """
    results = _now.results
    return function(*args) if results is None else results.of(function, *args)


@contextmanager
def watching_kept(watch: Callable[[torch.Tensor], object]) -> Iterator[None]:
    """Pass each result that `keeping_products` stores inside the context to `watch`.

    Hooks on saved tensors do not see these results.
    """
    _watchers.append(watch)
    try:
        yield
    finally:
        _watchers.remove(watch)


_watchers: list[Callable[[torch.Tensor], object]] = []


class _Now(threading.local):
    """The innermost region of a thread, which is in its forward pass or recomputed."""

    results: _ProductResults | None = None
    recomputing: bool = False


_now = _Now()


class _Pass:
    """A context for the forward pass of a region or, with `again`, for its recomputation."""

    def __init__(
        self, results: _ProductResults | None, *, inner: Any = None, again: bool = False
    ) -> None:
        self._results, self._inner, self._again = results, inner, again

    def __enter__(self) -> None:
        self._outer = _now.results, _now.recomputing
        _now.results = self._results
        _now.recomputing = self._again or _now.recomputing
        if self._again and self._results is not None:
            self._results.restart()
        if self._inner is not None:
            self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._inner is not None:
            self._inner.__exit__(*error)
        _now.results, _now.recomputing = self._outer


class _ProductResults:
    """The results of `product_result` in a region, in the order of the calls."""

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self._results: list[Callable[[], torch.Tensor]] = []
        self._next: int | None = None

    def restart(self) -> None:
        self._next = 0

    def of(self, function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        if self._next is None:
            return self._call(function, *args)
        self._next += 1
        return self._results[self._next - 1]()

    def _call(self, function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        if not self._keeps:
            result = function(*args)
            empty = partial(torch.empty, (), dtype=result.dtype, device=result.device)
            shape = result.shape
            self._results.append(lambda: empty().expand(shape))  # a single entry of memory
            return result
        # Without the mode of selective checkpointing, which would keep what the function computes
        # on its way, and expect it again.
        with _pop_mode_temporarily():
            result = function(*args)
        self._results.append([result.detach()].pop)
        _tell(result)
        return result


def _tell(kept: object) -> None:
    for watch in _watchers:
        for tensor in kept if isinstance(kept, tuple) else (kept,):
            if isinstance(tensor, torch.Tensor):
                watch(tensor)


_ATTENTIONS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention")
_KEPT = {
    *(f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "convolution")),
    *(f"aten._scaled_dot_product_{name}.default" for name in (*_ATTENTIONS, "cudnn_attention")),
    "torch_attn._varlen_attn.default",
}
"""The operators of torch whose results `keeping_products` keeps.

They are named, since torch registers the last one when the compiler is loaded.
"""


def _policy(context: Any, op: Any, *args: Any, **named: Any) -> CheckpointPolicy:
    if str(op) not in _KEPT or _draws(op, args, named):
        return CheckpointPolicy.PREFER_RECOMPUTE
    _tell(getattr(context, "op_output", None))  # torch 2.9 does not show it
    return CheckpointPolicy.MUST_SAVE


def _draws(op: Any, args: Sequence[Any], named: dict[str, Any]) -> bool:
    """Return whether attention draws dropout.

    It is recomputed then, so that the generator moves on for the dropout behind it.
    """
    for place, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[place] if place < len(args) else named.get("dropout_p", 0.0))
    return False


def _run(operators: Sequence[Operator], *state: torch.Tensor) -> State:
    for operator in operators:
        state = operator.run(*state)
    return state


def _split(items: Sequence[Any], length: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + length] for start in range(0, len(items), length))


def _run_without_norms(operators: Sequence[Operator], *state: torch.Tensor) -> State:
    """Run operators, and recompute what lies between the input of a norm and the next product."""
    start = 0
    while start < len(operators):
        stop = start + 1
        if operators[start].kind == "norm":
            rest = (n for n in range(stop, len(operators)) if operators[n].kind == "product")
            product = next(rest, None)
            if product is not None:
                run = operators[start : product + 1]
                state = recomputing_operand(partial(_run, run), *state)
                start = product + 1
                continue
        state = _run(operators[start:stop], *state)
        start = stop
    return state


def _run_star(blocks: Sequence[Block], *state: torch.Tensor) -> State:
    """Keep the input of a segment, and in its backward those of its blocks.

    Backward of a block keeps what no-norm keeps.
    """

    def run(*state: torch.Tensor) -> State:
        for block in blocks:
            state = recomputed(partial(_run_without_norms, block), *state)
        return state

    return run(*state) if len(blocks) == 1 else recomputed(run, *state)
