"""Checkpoints in terms of torch tensors: each rank writes shards, any rank reads any region.

save_checkpoint(folder, step=100, tensors=shards, state={...}, rank=r, world=n, gather=gather)
with Checkpoint.open(folder / "step_00000100") as saved:
    saved.read("param/final_norm.weight")
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import numpy as np
import torch

from megatron.checkpoint.commit import Gather, Part, Save, alone, file_name
from megatron.checkpoint.files import FILES, Files
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.reader import FolderReader
from megatron.checkpoint.regions import Box, flat_boxes, volume
from megatron.checkpoint.shards import (
    DTYPE_NAMES,
    Shard,
    Snapshots,
    of_rank,
    owned,
    owner,
    part_of,
    snapshot,
    whole,
)
from megatron.checkpoint.tensors import DATA_PARALLEL
from megatron.checkpoint.verify import read_manifest, verify_folder
from megatron.errors import CheckpointError

__all__ = [
    "Checkpoint",
    "Shard",
    "Snapshots",
    "of_rank",
    "owner",
    "save_checkpoint",
    "snapshot",
    "whole",
]

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def save_checkpoint(
    directory: Path | str,
    *,
    step: int,
    tensors: Mapping[str, torch.Tensor] | Iterable[Shard],
    state: dict[str, Any],
    rank: int = 0,
    world: int = 1,
    gather: Gather = alone,
    grid: Mapping[str, int] | None = None,
    packages: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda text: None,
    files: Files = FILES,
) -> Path:
    """Write `directory/step_%08d`, whole or not at all; every rank calls, and all return its path
    or all raise the same `CheckpointError`.

    `tensors`: the shards that this rank writes (together each entry exactly once), or a mapping of
    whole tensors that every rank holds alike, which is then spread over the ranks by `owner`.
    `state`: JSON; that of rank 0 is saved, as are `grid` (sizes by name) and `packages` (versions).
    `gather` is called four times. A step that is there already: nothing changes if the bytes are
    the same, else the old one is renamed `.replaced-N`, or `.damaged-N` if it does not verify.
    """
    counts = {**(grid or {}), "size": world}
    manifest = Manifest(step=step, state=state, world=counts, packages=dict(packages or {}))
    save = Save(
        directory=Path(directory),
        manifest=manifest,
        rank=rank,
        gather=gather,
        say=say,
        files=files,
    )

    def part() -> Part:
        if isinstance(tensors, Mapping):
            named = cast("Mapping[str, torch.Tensor]", tensors)
            return part_of(owned(named, rank, world), file_name(rank))
        return part_of(tensors, file_name(rank))

    return save.run(part)


class Checkpoint:
    """A committed step, open for reading. Usable in a `with` statement.

    Several ranks may have the same one open; each reads the pages it asks for. All tensors it
    returns are new, contiguous and on the CPU.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._reader = FolderReader(path, manifest)

    @classmethod
    def open(cls, path: Path | str, *, verify: bool | Collection[str] = True) -> Checkpoint:
        """Open a step folder. `verify`: True checks everything in it; names of files hash those
        only (ranks can share the work); False reads the manifest, and each file's header when it
        is first needed. Raises `CheckpointError` naming file and key."""
        folder = Path(path)
        if verify is False:
            return cls(folder, read_manifest(folder))
        return cls(folder, verify_folder(folder, hashes=verify))

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files; reading again opens them again."""
        self._reader.close()

    @property
    def step(self) -> int:
        """Number of the step."""
        return self.manifest.step

    @property
    def state(self) -> dict[str, Any]:
        """The JSON object that was saved with it."""
        return self.manifest.state

    @property
    def world(self) -> dict[str, int]:
        """Number of ranks that saved it (`size`), and the grid's sizes by name."""
        return self.manifest.world

    def names(self, prefix: str = "") -> tuple[str, ...]:
        """Names of its tensors, sorted."""
        return tuple(sorted(n for n in self.manifest.tensors if n.startswith(prefix)))

    def shape(self, name: str) -> tuple[int, ...]:
        """Whole shape; the first axis of a per-rank tensor counts the ranks that saved it."""
        return self._reader.record(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype that `read` returns."""
        return _DTYPES[self._reader.record(name).dtype]

    def per_rank(self, name: str) -> bool:
        """Whether each data-parallel rank saved its own."""
        return self._reader.record(name).scope == DATA_PARALLEL

    def mask(self, name: str) -> str | None:
        """Name of the boolean tensor that tells which entries are stored, None if all are."""
        mask = self._reader.record(name).mask
        return mask.name if mask is not None else None

    def read(
        self, name: str, start: Sequence[int] | None = None, stop: Sequence[int] | None = None
    ) -> torch.Tensor:
        """The box `[start, stop)` of a tensor, by default all of it, however it was saved.

        Entries that its mask left out are 0. Raises `CheckpointError` for an unknown name and for
        a box outside the tensor.
        """
        box = self._box(name, start, stop)
        out = torch.empty([b - a for a, b in zip(*box, strict=True)], dtype=self.dtype(name))
        self._reader.fill(_numpy(out), name, box)
        return out

    def read_flat(
        self,
        name: str,
        start: int,
        stop: int,
        *,
        box_start: Sequence[int] | None = None,
        box_stop: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Entries `[start, stop)` of the flattened tensor, or of the flattened box given: 1-D."""
        box = self._box(name, box_start, box_stop)
        if not 0 <= start <= stop <= volume(box):
            raise CheckpointError(
                f"{self.path}: {name}: entries {start} to {stop} are outside its {volume(box)}"
            )
        out = torch.empty(stop - start, dtype=self.dtype(name))
        array = _numpy(out)
        done = 0
        shape = [b - a for a, b in zip(*box, strict=True)]
        for low, high in flat_boxes(shape, start, stop):
            region = _moved(low, box[0]), _moved(high, box[0])
            size = volume(region)
            extent = [b - a for a, b in zip(low, high, strict=True)]
            self._reader.fill(array[done : done + size].reshape(extent), name, region)
            done += size
        return out

    def _box(self, name: str, start: Sequence[int] | None, stop: Sequence[int] | None) -> Box:
        shape = self.shape(name)
        low = tuple(start) if start is not None else (0,) * len(shape)
        high = tuple(stop) if stop is not None else shape
        fits = len(low) == len(high) == len(shape) and all(
            0 <= a <= b <= n for a, b, n in zip(low, high, shape, strict=True)
        )
        if not fits:
            raise CheckpointError(
                f"{self.path}: {name}: {list(low)} to {list(high)} is not a box in shape "
                f"{list(shape)}"
            )
        return low, high


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    """View of a tensor's memory as integers of its width; booleans stay booleans."""
    if tensor.dtype == torch.bool:
        return tensor.numpy()
    return tensor.view(_INTEGERS[tensor.element_size()]).numpy()


def _moved(corner: Sequence[int], origin: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(corner, origin, strict=True))
