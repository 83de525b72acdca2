"""Index arrays kept on disk, so that the second run and the other ranks map what the first built.

An entry is `{md5}-{kind}-{split}-NAME.npy` per array and `...-description.txt`, the JSON text whose
md5 is in the names (Megatron's names). The description is written last and vouches for the arrays.
A damaged or foreign entry is never trusted: it is built again and replaced.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

Say = Callable[[str], None]
Layout = Mapping[str, tuple[tuple[int, ...], np.dtype]]


class IndexCache:
    """Finds or builds index arrays; `folder` None keeps them in `cache/` beside the data.

    `cache/` is announced when it is made. A folder that cannot be written is announced once; arrays
    then stay in memory.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, *, say: Say) -> None:
        self._folder = None if folder is None else Path(folder)
        self._say = say
        self._announced = False

    def folder(self, prefix: str, kind: str) -> Path:
        """Where the entries of a kind for the data under `prefix` lie."""
        if self._folder is not None:
            return self._folder
        return Path(prefix).parent / "cache" / f"{kind}_indices"

    def get(
        self,
        description: Mapping[str, object],
        *,
        folder: Path,
        kind: str,
        split: str,
        layout: Layout,
        build: Callable[[], Mapping[str, NDArray]],
    ) -> Mapping[str, NDArray]:
        """Arrays of an entry, mapped read-only from disk where possible.

        `layout` gives the shape and dtype of each; `build` makes them if the entry is not there or
        is not exactly that. The description must name all that the values depend on.
        """
        text = json.dumps(description, indent=4)
        digest = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
        entry = _Entry(folder / f"{digest}-{kind}-{split}", text, layout)
        found = entry.load()
        if found is not None:
            return found
        arrays = build()
        for name, (shape, dtype) in layout.items():
            assert arrays[name].shape == shape and arrays[name].dtype == dtype, name
        try:
            beside_data = self._folder is None and not folder.parent.exists()
            folder.mkdir(parents=True, exist_ok=True)
            if beside_data:
                self._say(f"index cache: made {folder.parent} (elsewhere: --data-cache-path)")
            entry.store(arrays)
        except OSError as error:
            if not self._announced:
                self._say(
                    f"index cache {folder}: cannot be written ({error.strerror}); going on without "
                    "(each rank and each start builds its own; see --data-cache-path)"
                )
            self._announced = True
            return arrays
        return entry.load() or arrays


class _Entry:
    def __init__(self, stem: Path, text: str, layout: Layout) -> None:
        self._stem = stem
        self._text = text
        self._layout = layout

    def _path(self, suffix: str) -> Path:
        return self._stem.with_name(f"{self._stem.name}-{suffix}")

    def load(self) -> dict[str, NDArray] | None:
        """The arrays, or None unless the description and every header and size are as expected."""
        try:
            if self._path("description.txt").read_bytes() != self._text.encode():
                return None
            return {name: self._map(name, *form) for name, form in self._layout.items()}
        except (OSError, ValueError):
            return None

    def store(self, arrays: Mapping[str, NDArray]) -> None:
        for name, form in self._layout.items():
            array = np.ascontiguousarray(arrays[name])
            _replace(self._path(f"{name}.npy"), _header(*form), array.data.cast("B"))
        _replace(self._path("description.txt"), self._text.encode())

    def _map(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> NDArray:
        # The header is compared, not parsed: nothing in the file decides what is allocated.
        path, header = self._path(f"{name}.npy"), _header(shape, dtype)
        size = len(header) + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        with open(path, "rb") as file:
            if file.read(len(header)) != header or os.fstat(file.fileno()).st_size != size:
                raise ValueError(path)
        mapped = np.memmap(path, dtype=dtype, mode="r", offset=len(header), shape=shape)
        return mapped.view(np.ndarray)  # indexing a memmap itself costs several times more


def _header(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    buffer = io.BytesIO()
    description = npy.dtype_to_descr(dtype)
    npy.write_array_header_1_0(
        buffer, {"descr": description, "fortran_order": False, "shape": shape}
    )
    return buffer.getvalue()


def _replace(path: Path, *contents: bytes | memoryview) -> None:
    # Not the process id: ranks on several hosts may share this folder.
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            for content in contents:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
