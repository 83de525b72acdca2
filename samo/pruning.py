"""One-shot tickets: which entries of each weight matrix and embedding are stored.

A ticket is drawn by magnitude, within each tensor or over all tensors, or at random. The number of
stored entries is always exact, so that ranks, machines and grids that see the same numbers draw the
same masks. Masks are on the CPU and have the shape of the tensor that they are drawn from.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Literal

import numpy as np
import torch

from megatron.data_parallel.bucket import ParamInfo
from megatron.errors import ConfigError, NumericsError
from megatron.sparse.reference import BINS, CHUNK, MAGNITUDE, add_histogram, magnitudes
from megatron.sparse.selection import LargestSelection, select_largest
from samo.model_parts import ModelParts
from samo.schedule import is_prunable, stored_count

Scope = Literal["tensor", "global"]
Read = Callable[[str], torch.Tensor]
WHOLE = ModelParts()
"""Parts of a model that has all its tensors whole on this rank."""
_SHIFT = 15
"""Low bits of a magnitude that the first histogram of a global draw ignores."""


class NamedWeights(Mapping[str, torch.Tensor]):
    """A mapping from logical names to tensors that reads a tensor at each look-up."""

    def __init__(self, names: Sequence[str], read: Read) -> None:
        self._names, self._read = names, read

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def prunable(
    infos: Sequence[ParamInfo], *, keep_embeddings: bool, dense: Sequence[str] = ()
) -> list[ParamInfo]:
    """Return the parameters to prune, in the given order; see `is_prunable`."""
    return [
        info
        for info in infos
        if is_prunable(info.name, info.logical_shape, keep_embeddings=keep_embeddings, dense=dense)
    ]


def magnitude(
    tensors: Mapping[str, torch.Tensor],
    sparsity: Fraction,
    *,
    scope: Scope = "tensor",
    parts: ModelParts = WHOLE,
) -> dict[str, torch.Tensor]:
    """Return masks of the entries of largest magnitude.

    Ties go to the tensor whose name comes first, then to the first position. With `parts`, tensors
    and masks are this rank's parts, and the call is collective over a copy of the model.

    Args:
        tensors: fp32, bf16 or fp16 tensors. Each is looked up once with scope "tensor" and four
            times with "global", and is released after each use, so that a mapping may read it from
            a file.
        sparsity: the share of the entries that are pruned.
        scope: "tensor" keeps `stored_count` entries of each tensor. "global" keeps `stored_count`
            entries of all tensors, but at least the largest entry of each.

    Raises:
        NumericsError: an entry is not finite. All ranks of the stage raise;
            `ModelParts.raise_on_all_ranks` extends that to the world.
    """
    if scope == "global":
        counts = _counts_of_all(tensors, sparsity, parts)
        return {name: _draw(name, tensors, parts, counts[name]) for name in tensors}
    return {name: _draw(name, tensors, parts, sparsity) for name in tensors}


def refuse_zeros(
    drawn: Mapping[str, torch.Tensor],
    stored: Mapping[str, torch.Tensor],
    *,
    what: str,
    parts: ModelParts = WHOLE,
) -> None:
    """Raise `ConfigError` if masks `drawn` keep entries that the checkpoint's masks `stored` prune.

    Which zeros are kept would be arbitrary. `what` names the setting in the error. Collective over
    the stage with `parts`.
    """
    rows = {name: [_extra(drawn[name], stored[name])] for name in drawn if name in stored}
    for name, (extra,) in parts.summed(rows).items():
        if extra:
            raise ConfigError(
                f"{what}: the checkpoint is pruned already, and of {name} {extra} entries that "
                "would be kept are not in it; give a larger one"
            )


def random(
    shapes: Mapping[str, Sequence[int]], sparsity: Fraction, *, seed: int
) -> dict[str, torch.Tensor]:
    """Return masks of `stored_count` uniformly chosen entries of each tensor.

    A mask depends on the seed and on the tensor's name only.
    """
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


def distance(
    a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor], *, parts: ModelParts = WHOLE
) -> float:
    """Return |A xor B| / (|A| + |B|) over all tensors: 0 for equal masks, 1 for disjoint masks.

    Unrelated masks of sparsity p have distance p. With `parts` of the model, `a` and `b` are this
    rank's parts of the masks, and the call is collective over a copy of the model.
    """
    assert a.keys() == b.keys()
    rows: dict[str, tuple[int, int]] = {}
    for name, first in a.items():
        x, y = first.numpy(), b[name].numpy()
        differing = int(np.count_nonzero(x ^ y))
        rows[name] = differing, int(np.count_nonzero(x) + np.count_nonzero(y))
    differing, stored = (sum(column) for column in zip(*parts.table(rows).values(), strict=True))
    return differing / stored


def _extra(drawn: torch.Tensor, stored: torch.Tensor) -> int:
    return int((drawn & ~stored).count_nonzero())


def _draw(
    name: str, tensors: Mapping[str, torch.Tensor], parts: ModelParts, kept: Fraction | int
) -> torch.Tensor:
    """Return a tensor's mask; `kept` is the sparsity, or the number of entries to keep of all."""
    tensor = _read(name, tensors, parts)
    shard = parts.shard(name)
    total = tensor.numel() if shard is None else shard.total
    k = kept if isinstance(kept, int) else stored_count(total, kept)
    values, sum_bins = tensor.view(-1), parts.sum_bins(name)
    return _as_mask(select_largest(values, k, sum_bins=sum_bins, shard=shard), tensor.shape)


def _read(name: str, tensors: Mapping[str, torch.Tensor], parts: ModelParts) -> torch.Tensor:
    """Return a contiguous tensor; ranks that hold parts of the tensor succeed or fail together."""
    return parts.raise_on_holders(name, partial(_finite, name, tensors))


def _finite(name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    tensor = tensors[name].detach().contiguous()
    low, high = torch.aminmax(tensor)
    if not math.isfinite(float(high) - float(low)):
        raise NumericsError(
            f"{name}: has entries that are not finite, so none is the largest; take the weights "
            "of an earlier step"
        )
    return tensor


def _as_mask(chosen: LargestSelection, shape: Sequence[int]) -> torch.Tensor:
    mask = torch.empty(chosen.n, dtype=torch.bool)
    for start in range(0, chosen.n, CHUNK):
        stop = min(start + CHUNK, chosen.n)
        mask[start:stop] = chosen.mask(start, stop)
    return mask.view(tuple(shape))


def _random_numbers(count: int, key: str) -> torch.Tensor:
    """Return independent fp32 numbers from 0 up to 2 with bit patterns uniform below 2^30."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "little")
    # numpy promises the same raw words of a bit generator in every version.
    words = np.random.PCG64(seed).random_raw(-(-count // 2))
    return torch.from_numpy((words.view(np.uint32)[:count] >> 2).view(np.float32))


def _counts_of_all(
    tensors: Mapping[str, torch.Tensor], sparsity: Fraction, parts: ModelParts
) -> dict[str, int]:
    """Return how many entries of each tensor a global draw keeps."""
    # The threshold is found by two histograms, as within one tensor (`megatron.sparse.selection`),
    # without a vector of all tensors. No rank begins to sum before all ranks have read their
    # tensors. Each tensor keeps its largest entry; the other kept entries are the largest of the
    # rest.
    tops, sizes, highest = parts.raise_on_all_ranks(partial(_look, tensors, parts))
    numbers = parts.table(sizes).values()
    wanted = stored_count(sum(n for (n,) in numbers), sparsity) - len(numbers)
    if wanted <= 0:
        return dict.fromkeys(tensors, 1)
    first, wanted = _reaching(parts.sum_over_model(highest).numpy(), wanted)
    first <<= _SHIFT
    lowest = parts.raise_on_all_ranks(partial(_look_closer, tensors, tops, parts, first))
    step, wanted = _reaching(parts.sum_over_model(lowest).numpy()[: 1 << _SHIFT], wanted)
    rows = parts.raise_on_all_ranks(partial(_compare, tensors, tops, parts, first + step))
    found: dict[str, int] = {}
    for name, (above, ties) in parts.table(rows).items():
        taken = min(ties, wanted)
        wanted -= taken
        found[name] = 1 + above + taken
    return found


def _look(
    tensors: Mapping[str, torch.Tensor], parts: ModelParts
) -> tuple[dict[str, int], dict[str, list[int]], torch.Tensor]:
    """Return the bits of each tensor's largest magnitude, local sizes, and counts by high bits."""
    counts = torch.zeros(BINS + 1, dtype=torch.int64)  # the last: above the bracket
    largest: dict[str, list[int]] = {}
    sizes: dict[str, list[int]] = {}
    for name in tensors:
        values = _read(name, tensors, parts).view(-1)
        largest[name], sizes[name] = [int(magnitudes(values).max())], [values.numel()]
        if parts.counted(name):
            add_histogram(values.cpu(), torch.tensor([0, MAGNITUDE, _SHIFT]), counts)
    tops = {name: bits for name, (bits,) in parts.greatest(largest).items()}
    for name in filter(parts.counted_once, tops):
        counts[tops[name] >> _SHIFT] -= 1
    return tops, sizes, counts[:BINS]


def _look_closer(
    tensors: Mapping[str, torch.Tensor], tops: Mapping[str, int], parts: ModelParts, first: int
) -> torch.Tensor:
    """Return counts, by low bits, of the magnitudes that share the high bits of `first`."""
    last = first + (1 << _SHIFT) - 1
    counts = torch.zeros(BINS + 1, dtype=torch.int64)  # the last: above the bracket
    for name in tensors:
        values = _read(name, tensors, parts).view(-1)
        if parts.counted(name):
            add_histogram(values.cpu(), torch.tensor([first, last, 0]), counts)
    for name in filter(parts.counted_once, tops):
        if first <= tops[name] <= last:
            counts[tops[name] - first] -= 1
    return counts[:BINS]


def _compare(
    tensors: Mapping[str, torch.Tensor], tops: Mapping[str, int], parts: ModelParts, threshold: int
) -> dict[str, list[int]]:
    """Count each tensor's local entries above and at the threshold, without its first largest."""
    rows: dict[str, list[int]] = {}
    for name in tensors:
        bits = magnitudes(_read(name, tensors, parts).view(-1)).cpu().numpy()
        above, ties = np.count_nonzero(bits > threshold), np.count_nonzero(bits == threshold)
        if parts.speaks(name):
            above -= int(tops[name] > threshold)
            ties -= int(tops[name] == threshold)
        rows[name] = [int(above), int(ties)]
    return rows


def _reaching(counts: np.ndarray, wanted: int) -> tuple[int, int]:
    """Return the bin of the `wanted`-th largest, and how many entries of that bin are wanted."""
    from_top = counts[::-1].cumsum()
    above = int(np.searchsorted(from_top, wanted))
    return counts.size - 1 - above, wanted - (int(from_top[above - 1]) if above else 0)
