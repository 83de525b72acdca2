"""A reader that assembles any box of any tensor of a checkpoint from its slices.

Files are memory-mapped, so a rank loads only the pages under the boxes that it reads. A map holds a
file descriptor, so only the maps of the files that were used last are kept. Values are moved as
integers of the same width, so that no bit can change. Imports no torch.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from megatron.checkpoint.format import (
    DATA_PARALLEL,
    DTYPE_BYTES,
    Box,
    Manifest,
    SliceRecord,
    TensorRecord,
    common,
    flat_boxes,
    show,
    volume,
    within,
)
from megatron.checkpoint.io import FILES, StoredTensor, opened
from megatron.checkpoint.verify import check_header, read_header, slices_by_file
from megatron.errors import CheckpointError

MOST_MAPS = 128
"""Maximum number of files that a reader keeps mapped; far below common limits of descriptors."""
_INTEGER = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


class FolderReader:
    """Reads tensors of one step folder.

    A file is opened when it is first needed, and its header is checked against the manifest. Hashes
    are checked by `verify_folder`.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._slices = slices_by_file(manifest)
        self._headers: dict[str, dict[str, StoredTensor]] = {}
        self._maps: dict[str, mmap.mmap] = {}  # by last use

    def close(self) -> None:
        """Unmap all files."""
        # A map that still has views, as after an error, cannot be closed; it ends with its views.
        self._maps.clear()

    def record(self, name: str) -> TensorRecord:
        """Return the record of a tensor. Raises `CheckpointError` if there is none."""
        try:
            return self.manifest.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.folder}: has no tensor {show(name)}") from None

    def fill(self, out: np.ndarray, name: str, box: Box) -> None:
        """Write a box of a tensor into `out`.

        `out` has the box's shape and an integer dtype of the tensor's width (bool for BOOL).
        Entries that a mask left out become 0.
        """
        record = self.record(name)
        for part in record.slices:
            if volume(box) == 0 or common(part.box, box) is None:
                continue
            stored = self._entries(record, part)
            done = 0
            for low, high in flat_boxes(part.shape, *part.range):
                size = volume((low, high))
                piece = (_shift(low, part.start), _shift(high, part.start))
                shared = common(piece, box)
                if shared is not None:
                    block = stored[done : done + size].reshape(_shift(high, low, -1))
                    out[within(shared, box[0])] = block[within(shared, piece[0])]
                done += size

    def _entries(self, record: TensorRecord, part: SliceRecord) -> np.ndarray:
        """Return all entries of a slice as a vector, including masked ones."""
        data, header = self._open(part.file)
        stored = header[part.key]
        dtype = _INTEGER[DTYPE_BYTES[record.dtype]]
        count = (stored.end - stored.begin) // np.dtype(dtype).itemsize
        values: np.ndarray = np.empty(0, dtype)
        if count:
            values = np.frombuffer(data, dtype, count, stored.begin)
        first, last = part.range
        if record.dtype == "BOOL":
            return np.unpackbits(values, count=last - first, bitorder="little").view(np.bool_)
        if record.mask is None:
            return values
        chosen = self._mask(record, part)
        if np.count_nonzero(chosen) != count:
            raise CheckpointError(
                f"{self.folder / part.file}: key {show(part.key)} has {count} entries, its mask "
                f"{show(record.mask.name)} {np.count_nonzero(chosen)}"
            )
        entries = np.zeros(last - first, dtype)
        entries[chosen] = values
        return entries

    def _mask(self, record: TensorRecord, part: SliceRecord) -> np.ndarray:
        """Return which of a slice's entries are stored, as a vector of booleans."""
        assert record.mask is not None
        skip = 1 if record.scope == DATA_PARALLEL else 0
        box = part.start[skip:], part.stop[skip:]
        mask = np.empty(part.shape[skip:], np.bool_)
        self.fill(mask, record.mask.name, box)
        whole = np.broadcast_to(mask == record.mask.value, part.shape).reshape(-1)
        return whole[slice(*part.range)]

    def _open(self, name: str) -> tuple[mmap.mmap, dict[str, StoredTensor]]:
        if name not in self._headers:
            header = read_header(self.folder, name, self.manifest)
            check_header(self.folder / name, header, self._slices[name])
            self._headers[name] = header
        data = self._maps.pop(name, None)
        if data is None:
            with opened(FILES, self.folder / name) as (descriptor, _):
                data = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        self._maps[name] = data
        if len(self._maps) > MOST_MAPS:
            del self._maps[next(iter(self._maps))]
        return data, self._headers[name]


def _shift(corner: tuple[int, ...], origin: tuple[int, ...], sign: int = 1) -> tuple[int, ...]:
    return tuple(a + sign * b for a, b in zip(corner, origin, strict=True))
