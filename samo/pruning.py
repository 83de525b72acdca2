"""Tickets that are drawn at once: which entries of each weight matrix and embedding to store.

By magnitude, within each tensor or over all of them, or at random; always an exact number, so that
ranks, machines and grids that see the same numbers draw the same masks. All masks that are made
here are on the CPU and of the shape of what they are drawn from.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
import torch

from megatron.data_parallel.interface import ParamInfo
from megatron.errors import ConfigError, NumericsError
from megatron.sparse.reference import BINS, CHUNK, MAGNITUDE, histogram, magnitudes
from megatron.sparse.selection import Largest, select_largest
from samo.shares import is_prunable, stored_count

Scope = Literal["tensor", "global"]
Read = Callable[[str], torch.Tensor]
_SHIFT = 15
"""Bits of a magnitude that the first count of a global draw leaves out: 31 - 15 number its bins."""


class Weights(Mapping[str, torch.Tensor]):
    """Tensors by logical name, each read when it is looked up."""

    def __init__(self, names: Sequence[str], read: Read) -> None:
        self._names, self._read = names, read

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def prunable(infos: Sequence[ParamInfo], *, keep_embeddings: bool) -> list[ParamInfo]:
    """The parameters to prune, in the order given."""
    return [
        info
        for info in infos
        if is_prunable(info.name, info.logical_shape, keep_embeddings=keep_embeddings)
    ]


def magnitude(
    tensors: Mapping[str, torch.Tensor], sparsity: Fraction, *, scope: Scope = "tensor"
) -> dict[str, torch.Tensor]:
    """Masks of the entries of largest magnitude, of fp32, bf16 or fp16 tensors.

    "tensor": `stored_count` entries of each; of equal ones those that come first. "global":
    `stored_count` entries of all together, but of each tensor at least its largest, even if a
    larger one of another has to go; of equal ones those of the tensor that is named first, then
    those that come first. A tensor is looked up once for "tensor", four times for "global", and
    held for that long only, so that a mapping may read it from a file. Raises `NumericsError` for
    entries that are not finite.
    """
    if scope == "global":
        return dict(_draw_together(tensors, sparsity))
    return {name: _draw_alone(name, tensor, sparsity) for name, tensor in tensors.items()}


def refuse_zeros(
    drawn: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor], *, what: str
) -> None:
    """Raise `ConfigError`, in the words `what` for the setting, where a mask keeps entries that the
    network it was drawn from, of masks `stored`, does not have: which zeros would mean nothing."""
    for name, mask in drawn.items():
        if name in stored and (extra := int((mask & ~stored[name]).count_nonzero())):
            raise ConfigError(
                f"{what}: the checkpoint is pruned already, and of {name} {extra} entries that "
                "would be kept are not in it; give a larger one"
            )


def random(
    shapes: Mapping[str, Sequence[int]], sparsity: Fraction, *, seed: int
) -> dict[str, torch.Tensor]:
    """Masks of `stored_count` entries of each tensor, every choice equally likely; from the seed
    and the tensor's name alone."""
    return {
        name: _as_mask(
            select_largest(
                _random_numbers(math.prod(shape), f"samo/{seed}/{name}"),
                stored_count(math.prod(shape), sparsity),
            ),
            shape,
        )
        for name, shape in shapes.items()
    }


def distance(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float:
    """|A xor B| / (|A| + |B|) over all tensors, for masks of the same ones: 0 for equal masks, 1
    for those that have no entry in common, p for unrelated ones."""
    assert a.keys() == b.keys()
    differing = stored = 0
    for name, first in a.items():
        x, y = first.numpy(), b[name].numpy()
        differing += np.count_nonzero(x ^ y)
        stored += np.count_nonzero(x) + np.count_nonzero(y)
    return differing / stored


def _draw_alone(name: str, tensor: torch.Tensor, sparsity: Fraction) -> torch.Tensor:
    values = _flat(name, tensor)
    return _as_mask(select_largest(values, stored_count(values.numel(), sparsity)), tensor.shape)


def _flat(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a contiguous vector, a view if it can be."""
    values = tensor.detach().reshape(-1).contiguous()
    low, high = torch.aminmax(values)
    if not math.isfinite(float(high) - float(low)):
        raise NumericsError(
            f"{name}: has entries that are not finite, so none is the largest; take the weights "
            "of an earlier step"
        )
    return values


def _as_mask(chosen: Largest, shape: Sequence[int]) -> torch.Tensor:
    mask = torch.empty(chosen.n, dtype=torch.bool)
    for start in range(0, chosen.n, CHUNK):
        stop = min(start + CHUNK, chosen.n)
        mask[start:stop] = chosen.mask(start, stop)
    return mask.view(tuple(shape))


def _random_numbers(count: int, key: str) -> torch.Tensor:
    """Independent fp32 numbers from 0 up to 2, whose bits are equally likely below 2^30."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "little")
    # The raw words of a bit generator, which numpy promises to be the same in every version.
    words = np.random.PCG64(seed).random_raw(-(-count // 2))
    return torch.from_numpy((words.view(np.uint32)[:count] >> 2).view(np.float32))


@dataclass(frozen=True)
class _Top:
    """The largest entry of a tensor of `entries`, the first of equal ones: its place and the bits
    of its magnitude."""

    entries: int
    place: int
    bits: int

    @classmethod
    def of(cls, values: torch.Tensor) -> _Top:
        bits = magnitudes(values).cpu().numpy()
        place = int(bits.argmax())  # numpy's is the first of equal ones
        return cls(bits.size, place, int(bits[place]))


def _draw_together(
    tensors: Mapping[str, torch.Tensor], sparsity: Fraction
) -> Iterator[tuple[str, torch.Tensor]]:
    """Masks of the largest entry of each tensor, and of the largest of all others.

    The magnitude at which these end is found by counting, as within one tensor (see
    `megatron.sparse.selection`), so that no vector of all tensors is made.
    """
    tops = {name: _Top.of(_flat(name, tensor)) for name, tensor in tensors.items()}
    wanted = stored_count(sum(top.entries for top in tops.values()), sparsity) - len(tops)
    threshold = MAGNITUDE  # above which there is nothing, nor at it
    if wanted > 0:
        first, wanted = _reaching(_count_others(tensors, tops, 0, _SHIFT), wanted)
        first <<= _SHIFT
        step, wanted = _reaching(_count_others(tensors, tops, first, 0)[: 1 << _SHIFT], wanted)
        threshold = first + step
    for name, tensor in tensors.items():
        bits, top = magnitudes(_flat(name, tensor)).cpu().numpy(), tops[name].place
        mask, ties = bits > threshold, bits == threshold
        ties[top] = False
        taken = np.flatnonzero(ties)[: max(wanted, 0)]
        wanted -= taken.size
        mask[taken] = mask[top] = True
        yield name, torch.from_numpy(mask).view(tensor.shape)


def _count_others(
    tensors: Mapping[str, torch.Tensor], tops: Mapping[str, _Top], first: int, shift: int
) -> np.ndarray:
    """Entries that are no tensor's top, by their bits less `first` without the lowest `shift`."""
    last = MAGNITUDE if shift else first + (1 << _SHIFT) - 1
    counts = torch.zeros(BINS, dtype=torch.int64)
    for name, tensor in tensors.items():
        counts += histogram(_flat(name, tensor).cpu(), torch.tensor([first, last, shift]))[:BINS]
        if first <= tops[name].bits <= last:
            counts[(tops[name].bits - first) >> shift] -= 1
    return counts.numpy()


def _reaching(counts: np.ndarray, wanted: int) -> tuple[int, int]:
    """The bin in which the `wanted`-th from the top lies, and how many are wanted of that bin."""
    from_top = counts[::-1].cumsum()
    above = int(np.searchsorted(from_top, wanted))
    return counts.size - 1 - above, wanted - (int(from_top[above - 1]) if above else 0)
