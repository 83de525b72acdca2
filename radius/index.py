"""The number of selected entries, and the choice of an index for them. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from megatron.sparse.sizes import bitmap_bytes
from radius.native_library import instruction_sets

if TYPE_CHECKING:
    import torch

    from megatron.data_parallel.bucket import Slice
    from megatron.sparse.shard import FlatShard
    from radius.bucket_index import BucketIndex

LEAST_DENSITY = {"AVX2": Fraction(1, 10), "AVX-512": Fraction(1, 16)}
"""Least density at which a bitmap is used on a CPU, by instruction set.

At this density gathering and scattering by a bitmap takes about as long as by offsets
(`tools/bench/native_kernels/README.md`).
"""


def num_selected(density: Fraction, entries: int) -> int:
    """Return k = ceil(d n), the number of entries to send, so that no tensor is left out."""
    return -(-density.numerator * entries // density.denominator)


@dataclass(frozen=True)
class IndexPart:
    """A parameter, or one of the T parts of a parameter in a rolling schedule.

    Attributes:
        name: The parameter's name; a part has its number appended.
        start: First position of this rank's entries in the bucket.
        places: Positions of this rank's entries in the whole tensor; there may be none.
        wanted: Number of entries of the whole tensor that are selected. How many of them are on
            this rank is known only after the selection.
        within: Name of the whole parameter if this is a part of it, else "".
    """

    name: str
    start: int
    places: FlatShard
    wanted: int
    within: str = ""

    @property
    def of(self) -> str:
        """Name of the parameter, also for a part."""
        return self.within or self.name

    @property
    def length(self) -> int:
        """Number of entries on this rank."""
        return self.places.numel

    @property
    def stop(self) -> int:
        """Position in the bucket after the last entry of this rank."""
        return self.start + self.length

    def of_shard(self, shard: Slice) -> tuple[IndexPart, slice]:
        """Return the entries of this part that are in a shard of the bucket, as a part and a slice.

        The slice is of this part's entries on this rank. `start` of the returned part is a position
        in the shard, and has no meaning if the shard has none of the entries.
        """
        first = min(max(shard.start - self.start, 0), self.length)
        stop = min(max(shard.start + shard.numel - self.start, 0), self.length)
        start = max(self.start + first - shard.start, 0)
        places = self.places.local_part(first, stop)
        return replace(self, start=start, places=places), slice(first, stop)

    def cut(self, number: int, parts: int, density: Fraction) -> IndexPart:
        """Return part `number` of `parts` nearly equal parts of the whole tensor.

        All parts together select as many entries as the whole.
        """
        if parts == 1:
            return self
        lo = self.places.total * number // parts
        hi = self.places.total * (number + 1) // parts
        wanted = num_selected(density, hi) - num_selected(density, lo)
        start = self.start + self.places.below(lo)
        name = f"{self.name} {number}/{parts}"
        return IndexPart(name, start, self.places.part(lo, hi), wanted, within=self.name)


def keeps_bits(device: str, density: Fraction) -> bool:
    """Return whether an index on "cpu" or "cuda" is a bitmap.

    On a CPU a bitmap needs the kernels of `native.c` and a density at which most cache lines hold a
    selected entry; offsets need not read the other lines.
    """
    if device != "cpu":
        return True
    return any(density >= LEAST_DENSITY[best] for best in instruction_sets()[-1:])


def new_index(length: int, device: torch.device, *, bits: bool) -> BucketIndex:
    """Return an index for a bucket of this length: a bitmap, or offsets on a CPU."""
    if not bits:
        from radius.offset_index import OffsetIndex

        return OffsetIndex(length)
    from radius.bitmap_index import BitmapIndex

    return BitmapIndex(length, device)


def index_bytes(length: int, chosen: int, *, bits: bool) -> int:
    """Return the bytes of an index with `chosen` selected entries in a bucket of `length`."""
    return bitmap_bytes(length) if bits else 4 * chosen
