"""Compressed storage of the training state of a pruned model.

Gradient, master weight and moments have an entry for each weight that exists and none for pruned
weights; the parameter stays dense, filled with zeros, for the dense kernels of forward and backward
(SAMO III-A). All states of a parameter share one index over its flattened view (III-B); each torch
sparse tensor would instead carry int64 positions of every dimension.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from megatron.data_parallel.layout import DenseLayout
from megatron.errors import ConfigError
from megatron.sparse.reference import BLOCK, CHUNK, GROUP, WORDS, Bits, positions
from megatron.transfer import to_device
from samo import reference

if TYPE_CHECKING:
    from megatron.data_parallel.bucket import ParamInfo
    from megatron.data_parallel.layout import Masks

MOST_ENTRIES = 2**31 - 1
"""The most entries of a pruned parameter on a CPU, where positions are int32."""


class StoredCount(NamedTuple):
    """Counts of stored entries and of all entries; the paper's f is their ratio."""

    stored: int
    all: int


class CompressedLayout:
    """A `BucketLayout` of the entries that `masks` marks.

    A parameter without a mask, or whose mask prunes nothing, is stored as `DenseLayout` stores it.
    On a CPU an index takes 4 bytes for each stored entry, as in the paper; on a GPU, one bit for
    each entry. Casts use chunks of at most `CHUNK` entries instead of the whole 16-bit copy of the
    stored weights (2 f bytes per parameter, Eq. 1).

    Args:
        masks: flat bool masks by name, looked up one at a time.
        device: the device of the parameters; None for the device of the masks.
        cut: names of sharded parameters, which get an index even if the mask of this rank's part
            prunes nothing: other ranks' parts may be pruned.
    """

    def __init__(
        self,
        masks: Masks,
        *,
        device: torch.device | None = None,
        cut: Collection[str] = (),
    ) -> None:
        self._dense = DenseLayout()
        self._indices: dict[str, PositionStore | BitmapStore] = {}
        for name in sorted(masks):
            mask = masks[name]
            assert mask.dtype == torch.bool and mask.dim() == 1, f"{name}: not a flat mask"
            on = mask.device if device is None else device
            _refuse_too_long(name, mask.numel(), on)
            if name in cut or not mask.all():
                held = mask.cpu()
                self._indices[name] = (
                    PositionStore(held) if on.type == "cpu" else BitmapStore(held, on)
                )

    @property
    def nbytes(self) -> int:
        """Bytes of all indices."""
        return sum(index.nbytes for index in self._indices.values())

    def index_nbytes(self, name: str) -> int:
        """Return the bytes of one parameter's index; 0 if it has none."""
        return self._indices[name].nbytes if name in self._indices else 0

    def __contains__(self, name: str) -> bool:
        """Return whether the parameter is stored by an index rather than whole."""
        return name in self._indices

    def count(self, infos: Iterable[ParamInfo]) -> StoredCount:
        """Count entries of these parameters on this rank, without vocabulary padding."""
        stored = everything = 0
        for info in infos:
            index, entries = self._indices.get(info.name), info.local_entries
            stored += entries if index is None else index.stored
            everything += entries
        return StoredCount(stored, everything)

    def numel(self, name: str, param: torch.Tensor) -> int:
        """Return the number of stored entries of a parameter."""
        index = self._indices.get(name)
        if index is None:
            return self._dense.numel(name, param)
        assert index.length == param.numel(), f"{name}: the mask is of another length"
        return index.stored

    def gather(self, name: str, dense: torch.Tensor, out: torch.Tensor) -> None:
        """Write the stored entries of a dense tensor, cast to `out`'s dtype, into its slice."""
        index = self._indices.get(name)
        if index is None:
            self._dense.gather(name, dense, out)
        else:
            index.compress(dense.reshape(-1), out, add=False)

    def gather_add(self, name: str, dense: torch.Tensor, out: torch.Tensor) -> None:
        """Add the stored entries of a dense gradient to its slice, rounding once."""
        index = self._indices.get(name)
        if index is None:
            self._dense.gather_add(name, dense, out)
        else:
            index.compress(dense.reshape(-1), out, add=True)

    def scatter(self, name: str, flat: torch.Tensor, param: torch.Tensor) -> None:
        """Write stored entries into a dense tensor in place, cast to its dtype (III-C3, "expand").

        Pruned entries are 0 already and are not touched.
        """
        index = self._indices.get(name)
        if index is None:
            self._dense.scatter(name, flat, param)
        else:
            index.expand(flat, param.view(-1))

    def bind(self, name: str, flat: torch.Tensor, leaves: Sequence[torch.nn.Parameter]) -> None:
        """Fill the master slice from the parameter, and zero pruned entries in place.

        All leaves share one storage of their own, also for fp32, unless the parameter is stored
        whole.
        """
        index = self._indices.get(name)
        if index is None:
            self._dense.bind(name, flat, leaves)
            return
        param = leaves[0].detach()
        index.compress(param.view(-1), flat, add=False)
        if param.untyped_storage().nbytes() > param.nbytes:
            # A view, perhaps of earlier whole master weights, would keep those alive.
            param = torch.empty_like(param)
            for leaf in leaves:
                leaf.data = param
        param.zero_()
        index.expand(flat, param.view(-1))

    def mask(self, name: str) -> torch.Tensor | None:
        """Return a parameter's mask: bool [param.numel()], on the CPU; None without an index."""
        index = self._indices.get(name)
        return None if index is None else index.mask()

    def positions(self, name: str, start: int, stop: int, device: torch.device) -> torch.Tensor:
        """Return the positions of stored entries `[start, stop)`: int64, ascending."""
        index = self._indices.get(name)
        if index is None:
            return self._dense.positions(name, start, stop, device)
        return to_device(index.positions(start, stop), device)

    def fingerprint(self) -> str:
        """Return a hex digest of all masks; equal to `DenseLayout`'s if every entry is stored."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        if not self._indices:
            return self._dense.fingerprint()
        digest = hashlib.sha256(b"compressed")
        for name, index in self._indices.items():
            digest.update(f"\n{name}\n{index.length}\n".encode())
            digest.update(np.packbits(index.mask().numpy()).tobytes())
        return digest.hexdigest()


class PositionStore:
    """An index of ascending int32 positions: the fastest form for gathering on a CPU."""

    def __init__(self, mask: torch.Tensor) -> None:
        self.length, self.stored = mask.numel(), int(mask.count_nonzero())
        self._at = torch.empty(self.stored, dtype=torch.int32)
        done = 0
        for start in range(0, self.length, CHUNK):
            found = torch.from_numpy(np.flatnonzero(mask[start : start + CHUNK].numpy()))
            self._at[done : done + found.numel()] = found.add_(start)
            done += found.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the positions."""
        return self._at.nbytes

    def compress(self, dense: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
        """Write the stored entries of `dense`, cast to `out`'s dtype, into `out`, or add them."""
        if dense.dtype == out.dtype and not add:
            torch.index_select(dense, 0, self._at, out=out)
            return
        # Cast after gathering: torch gathers 16-bit numbers and then widens them in less time than
        # it does both at once.
        scratch = dense.new_empty(min(CHUNK, self.stored))
        for start in range(0, self.stored, CHUNK):
            at, mine = self._at[start : start + CHUNK], out[start : start + CHUNK]
            found = torch.index_select(dense, 0, at, out=scratch[: at.numel()])
            mine.add_(found) if add else mine.copy_(found)

    def expand(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write `values`, cast to `out`'s dtype, to the stored entries of `out` in place."""
        # `index_copy_`, the fastest operation, needs int64. `index_add_` takes int32, but twice the
        # time and zeros to begin with.
        wide = torch.empty(min(CHUNK, self.stored), dtype=torch.int64)
        scratch = out.new_empty(wide.numel())
        for start in range(0, self.stored, CHUNK):
            at, mine = self._at[start : start + CHUNK], values[start : start + CHUNK]
            numel = at.numel()
            out.index_copy_(0, wide[:numel].copy_(at), scratch[:numel].copy_(mine))

    def positions(self, start: int, stop: int) -> torch.Tensor:
        """Return the positions of stored entries `[start, stop)`: int64."""
        return self._at[start:stop].long()

    def mask(self) -> torch.Tensor:
        """Return the mask of stored entries: bool `[length]`, on the CPU."""
        found = torch.zeros(self.length, dtype=torch.bool)
        for at in self._at.split(CHUNK):
            found.index_fill_(0, at.long(), True)
        return found


class BitmapStore:
    """An index of one bit per entry, on `device`: the fastest form for gathering on a GPU."""

    def __init__(self, mask: torch.Tensor, device: torch.device) -> None:
        self.length, self.stored = mask.numel(), int(mask.count_nonzero())
        self._kernels = _kernels(device)
        octets = np.zeros(-(-self.length // (GROUP * BLOCK)) * GROUP * BLOCK // 8, np.uint8)
        octets[: -(-self.length // 8)] = np.packbits(mask.numpy())
        words = torch.from_numpy(octets).view(torch.int32).view(-1, WORDS)
        words = to_device(words, device)
        self._bits = Bits.of(self.length, words, self._kernels.count_blocks(words))

    @property
    def nbytes(self) -> int:
        """Bytes of the bitmap with its counts and offsets."""
        bits = self._bits
        return bits.words.nbytes + bits.counts.nbytes + bits.offsets.nbytes

    def compress(self, dense: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
        """Gather stored entries as `PositionStore.compress` does."""
        self._kernels.compress(self._bits, dense, out, add=add)

    def expand(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Scatter stored entries as `PositionStore.expand` does."""
        self._kernels.expand(self._bits, values, out)

    def positions(self, start: int, stop: int) -> torch.Tensor:
        """Return the positions of stored entries `[start, stop)`: int64, on the device."""
        # The blocks that hold these entries; their first entry may be an earlier one.
        offsets = self._bits.offsets
        ends = torch.tensor([start, max(stop - 1, start)], dtype=offsets.dtype)
        bounds = to_device(ends, offsets.device)
        first, last = (torch.searchsorted(offsets, bounds, right=True) - 1).tolist()
        skipped = start - int(offsets[first])
        found = positions(self._bits, first, last + 1) + first * BLOCK
        return found[skipped : skipped + stop - start]

    def mask(self) -> torch.Tensor:
        """Return the mask as `PositionStore.mask` does."""
        octets = self._bits.words.view(torch.uint8).view(-1).cpu().numpy()
        return torch.from_numpy(np.unpackbits(octets, count=self.length).view(np.bool_))


def _kernels(device: torch.device) -> ModuleType:
    if device.type == "cpu" or find_spec("triton") is None:
        return reference
    from samo import kernels

    return kernels


def _refuse_too_long(name: str, entries: int, device: torch.device) -> None:
    if device.type == "cpu" and entries > MOST_ENTRIES:
        raise ConfigError(
            f"{name}: {entries} entries on this rank; a pruned parameter has at most "
            f"{MOST_ENTRIES} on a CPU; split it with a larger --tensor-model-parallel-size"
        )
