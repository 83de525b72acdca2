"""Collectives of tensor-parallel ranks inside forward and backward.

Between layers, hidden states [b, s, h] are equal on all ranks or, with sequence parallelism, rank r
holds positions [r s/tp, (r+1) s/tp) of every sequence (Korthikanti et al. 2022, 4.2.2):

        norm     column-parallel    row-parallel     dropout, residual sum
    whole  --(f)--> this rank's columns --(g)--> whole        f: sum backward, g: sum forward
    part   --(f)--> this rank's columns --(g)--> part         f: gather and its reverse, g: likewise

Gathered rows are ordered "by rank", [tp * b, s/tp, ...]. Products and losses do not depend on the
order of rows, so that only attention pays for a copy into [b, s, ...].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from itertools import count
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from megatron.parallel.groups import ALONE, Group
from megatron.parallel.traffic import Waitable

F = TypeVar("F", bound=Callable[..., Any])


# An operator in a compiled graph takes tensors and numbers, and no other object. torch finds the
# group of its own collectives by name, and ours are found by number.
_NUMBERS = count()
_BY_NUMBER: WeakValueDictionary[int, TensorParallel] = WeakValueDictionary()


def of_number(number: int) -> TensorParallel:
    """Return the object with this `number`."""
    return _BY_NUMBER[number]


@dataclass(frozen=True)
class TensorParallel:
    """The tensor-parallel group, and whether its ranks shard the sequence between layers."""

    group: Group = ALONE
    sequence_parallel: bool = False
    number: int = field(init=False, compare=False, repr=False)
    """The name of this object in compiled graphs, see `of_number`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", next(_NUMBERS))
        _BY_NUMBER[self.number] = self

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size

    @property
    def rank(self) -> int:
        """Index of this rank in the group."""
        return self.group.rank

    @property
    def cuts_sequence(self) -> bool:
        """Whether each rank holds a part of each sequence between layers."""
        return self.sequence_parallel and self.size > 1

    def whole_length(self, length: int) -> int:
        """Return the length of the whole sequence, given the local length between layers."""
        return length * self.size if self.cuts_sequence else length

    def positions(self, length: int) -> slice:
        """Return this rank's slice of `length` positions between layers."""
        if not self.cuts_sequence:
            return slice(0, length)
        assert length % self.size == 0, "the sequence comes out even"
        share = length // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def by_rank(self, values: torch.Tensor) -> torch.Tensor:
        """Reorder [b, s, ...] as gathered rows [tp * b, s/tp, ...]; a view if b is 1."""
        if not self.cuts_sequence:
            return values
        return values.unflatten(1, (self.size, -1)).transpose(0, 1).flatten(0, 1)

    def by_position(self, rows: torch.Tensor) -> torch.Tensor:
        """Reorder gathered rows to [b, s, ...], reversing `by_rank`."""
        if not self.cuts_sequence:
            return rows
        return rows.unflatten(0, (self.size, -1)).transpose(0, 1).flatten(1, 2)

    def gather(
        self, part: torch.Tensor, *, async_op: bool = False
    ) -> tuple[torch.Tensor, Waitable | None]:
        """Gather parts [b, s/tp, n] to [tp * b, s/tp, n], and return the work handle of `async_op`.

        Without sequence parallelism `part` is returned as it is.
        """
        if not self.cuts_sequence:
            return part, None
        rows = part.new_empty(self.size * part.shape[0], *part.shape[1:])
        return rows, self.group.all_gather(rows, part.contiguous(), async_op=async_op)

    def add_up(
        self, terms: torch.Tensor, *, async_op: bool = False
    ) -> tuple[torch.Tensor, Waitable | None]:
        """Sum contiguous `terms` over ranks, and return the sum with the work handle of `async_op`.

        The sum overwrites `terms`. With sequence parallelism, `terms` are by rank, and the sum is a
        new tensor of this rank's positions.
        """
        if not self.cuts_sequence:
            return terms, self.group.all_reduce(terms, dist.ReduceOp.SUM, async_op=async_op)
        part = terms.new_empty(terms.shape[0] // self.size, *terms.shape[1:])
        work = self.group.reduce_scatter(part, terms, dist.ReduceOp.SUM, async_op=async_op)
        return part, work


UNCUT = TensorParallel()
"""A single rank, which holds layers whole."""


_UNCOMPILED: list[list[Callable[..., Any]]] = []
"""Functions that `keep_uncompiled` has yet to exclude; each wrapper calls the item of its list."""


def uncompiled(function: F) -> F:
    """Exclude `function` from torch.compile once `keep_uncompiled` has been called."""
    called: list[Callable[..., Any]] = [function]
    _UNCOMPILED.append(called)

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        return called[0](*args, **named)

    return cast(F, call)


def keep_uncompiled() -> None:
    """Exclude all functions that `uncompiled` has wrapped so far from torch.compile."""
    # Not at import, since the compiler takes as long to load as the rest of torch.
    while _UNCOMPILED:
        called = _UNCOMPILED.pop()
        called[0] = torch.compiler.disable(called[0])


@uncompiled
def add_up_terms(terms: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """Sum contiguous terms [..., n] over ranks (g); `terms` may be overwritten.

    With sequence parallelism terms are by rank, and the result is this rank's part of each
    sequence.
    """
    return _AddUpTerms.apply(terms, tp)


class _AddUpTerms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, terms: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
        ctx.tp = tp
        total, _ = tp.add_up(terms)
        if total is terms:
            ctx.mark_dirty(terms)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Every term has the gradient of the sum.
        grad_terms, _ = ctx.tp.gather(grads[0])
        return grad_terms, None
