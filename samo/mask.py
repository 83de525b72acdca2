"""Masks, in memory and in a file: which entries of each pruned tensor exist.

In a file, and where several masks are kept, they take a bit an entry. A file is an archive of
arrays that `numpy.load` reads: `masks` holds the version of the form and the number of masks,
`shape/NAME` and `bits/NAME` the logical shape of a tensor and its bits, packed as `numpy.packbits`
does. The archive keeps a
CRC-32 of each array, so a damaged file is found out when it is read.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import struct
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from megatron.data_parallel.interface import ParamInfo
from megatron.errors import ConfigError, DataError
from samo.parts import Parts

VERSION = 1
_MARK, _SHAPE, _BITS = "masks", "shape/", "bits/"
_ANEW = "write it anew with tools/prune_checkpoint.py"
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    ValueError,
    RuntimeError,
    KeyError,
    EOFError,
    OverflowError,
    MemoryError,
)
"""What the readers of archives and arrays raise for bytes that make no sense."""


class PackedMasks(Mapping[str, torch.Tensor]):
    """Masks kept at a bit an entry; each is unpacked anew, on the CPU, when it is asked for.

    `bits`: uint8 [ceil(entries / 8)] by name, the first entry in the highest bit. `shapes`: what a
    mask is unpacked to.
    """

    def __init__(
        self, bits: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        assert bits.keys() == shapes.keys()
        for name, shape in shapes.items():
            assert bits[name].shape == (packed_bytes(shape),), f"{name}: bits of another shape"
        self.bits, self.shapes = dict(bits), dict(shapes)

    @classmethod
    def of(cls, masks: Iterable[tuple[str, torch.Tensor]]) -> PackedMasks:
        """Pack masks, each as it comes."""
        bits: dict[str, torch.Tensor] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for name, mask in masks:
            assert mask.dtype == torch.bool
            bits[name] = torch.from_numpy(np.packbits(mask.detach().cpu().numpy().reshape(-1)))
            shapes[name] = tuple(mask.shape)
        return cls(bits, shapes)

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self.shapes[name]
        entries = np.unpackbits(self.bits[name].numpy(), count=math.prod(shape))
        return torch.from_numpy(entries.view(np.bool_)).view(shape)

    def __contains__(self, name: object) -> bool:
        return name in self.bits

    def __iter__(self) -> Iterator[str]:
        return iter(self.bits)

    def __len__(self) -> int:
        return len(self.bits)


def packed_bytes(shape: Sequence[int]) -> int:
    """Bytes of the packed mask of a tensor of this shape."""
    return -(-math.prod(shape) // 8)


def padded(info: ParamInfo, part: torch.Tensor) -> torch.Tensor:
    """The mask of what is on this rank as the parameter lies in its memory: bool [param.numel()],
    False for rows that exist in memory only."""
    assert part.numel() == info.local_entries, f"{info.name}: a mask of another shape"
    missing = info.param.numel() - part.numel()
    flat = part.reshape(-1)
    return flat if missing == 0 else torch.cat([flat, flat.new_zeros(missing)])


def flat_mask(info: ParamInfo, logical: torch.Tensor) -> torch.Tensor:
    """This rank's part of a mask of the logical shape, `padded`."""
    assert tuple(logical.shape) == tuple(info.logical_shape)
    return padded(info, logical if info.cut is None else info.cut.of(logical))


def flat_masks(infos: Iterable[ParamInfo], logical: Mapping[str, torch.Tensor]) -> PackedMasks:
    """This rank's parts of masks of logical shapes, as the parameters lie in memory, without those
    that leave nothing out: such a parameter is stored whole, padding and all, as if it had none.
    Masks are looked up one after another."""
    return PackedMasks.of(
        (info.name, flat_mask(info, mask))
        for info in infos
        if info.name in logical and not (mask := logical[info.name]).all()
    )


def flat_parts(
    infos: Iterable[ParamInfo], masks: Mapping[str, torch.Tensor], parts: Parts
) -> PackedMasks:
    """The same of masks of which each rank has its part already. Collective over the stage."""
    counts = parts.summed({name: [int(mask.count_nonzero())] for name, mask in masks.items()})
    return PackedMasks.of(
        (info.name, padded(info, masks[info.name]))
        for info in infos
        if info.name in masks and counts[info.name] != [info.entries]
    )


def save_masks(path: Path, masks: Mapping[str, torch.Tensor]) -> None:
    """Write masks (bool, of logical shapes) to one file, whole or not at all: the bytes go beside
    it first, and a file that is there is replaced. Equal masks make equal bytes.

    Raises `ConfigError` where the file cannot be written.
    """
    draft = path.parent / f"{path.name}.tmp-{secrets.token_hex(4)}"
    packed = masks if isinstance(masks, PackedMasks) else PackedMasks.of(masks.items())
    try:
        _write(draft, packed)
        os.replace(draft, path)
        _sync(path.parent)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written: {error.strerror}; choose another place"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def load_masks(path: Path) -> PackedMasks:
    """The masks of a file, bool of logical shapes, on the CPU.

    Raises `DataError` naming the file, and the tensor where it is one's fault: for a missing file,
    one of another kind or version, and a damaged one.
    """
    if not path.is_file():
        what = (
            "is not a plain file" if path.exists() else f"no such file (looked from {Path.cwd()})"
        )
        raise DataError(f"{path}: {what}; give a mask file, as tools/prune_checkpoint.py writes it")
    try:
        with zipfile.ZipFile(path) as archive:
            return PackedMasks.of(_read(path, archive))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except _DAMAGE as error:
        raise DataError(f"{path}: not a mask file, or cut short; {_ANEW}") from error


def masks_for(
    infos: Sequence[ParamInfo],
    masks: Mapping[str, torch.Tensor],
    *,
    source: str,
    elsewhere: Collection[str] = (),
) -> PackedMasks:
    """Masks of logical shapes that came from `source`, as the parameters of this model lie in
    memory; those of `elsewhere` are other ranks' affair.

    Raises `DataError` for a mask of a tensor that the model does not have, or has in another
    shape, or never prunes, and for a mask without a stored entry.
    """
    known = {info.name: info for info in infos}
    for name in masks:
        if name not in known and name in elsewhere:
            continue
        mask = masks[name]
        if name not in known:
            wrong = "of which the model has none; the mask is of another model"
        elif tuple(mask.shape) != tuple(shape := known[name].logical_shape):
            wrong = f"but has it in shape {list(mask.shape)}, the model in {list(shape)}"
        elif len(mask.shape) < 2:
            wrong = "which has one axis: biases and norms are never pruned; leave it out"
        elif not mask.any():
            wrong = "of which it stores no entry; leave at least one"
        else:
            continue
        raise DataError(f"{source}: masks {name}, {wrong}")
    return flat_masks(infos, masks)


def _write(path: Path, packed: PackedMasks) -> None:
    arrays = {_MARK: np.array([VERSION, len(packed)], np.int64)}
    for name, bits in packed.bits.items():
        arrays[f"{_SHAPE}{name}"] = np.array(packed.shapes[name], np.int64)
        arrays[f"{_BITS}{name}"] = bits.numpy()
    with open(path, "xb") as file:
        with zipfile.ZipFile(file, "w") as archive:
            for name, array in arrays.items():
                # Without a time of its own, so that equal masks make equal files.
                with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Wait until the disk has the names in a folder, where it can be asked to."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path, archive: zipfile.ZipFile) -> Iterator[tuple[str, torch.Tensor]]:
    version, *count = _array(archive, _MARK, np.int64).tolist()
    if version != VERSION:
        raise DataError(f"{path}: version {version}, this program reads {VERSION}; {_ANEW}")
    members = [name.removesuffix(".npy") for name in archive.namelist()]
    names = [name.removeprefix(_SHAPE) for name in members if name.startswith(_SHAPE)]
    alien = {*members} - {_MARK} - {f"{kind}{name}" for kind in (_SHAPE, _BITS) for name in names}
    if alien:
        raise DataError(f"{path}: holds {min(alien)!r}, which belongs to no mask; {_ANEW}")
    if count != [len(names)]:
        raise ValueError("the archive's list of its members is damaged")
    for name in names:
        try:
            yield name, _read_one(archive, name)
        except _DAMAGE as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise DataError(f"{path}: mask of {name!r} is damaged: {reason}; {_ANEW}") from error


def _read_one(archive: zipfile.ZipFile, name: str) -> torch.Tensor:
    shape = tuple(_array(archive, f"{_SHAPE}{name}", np.int64).tolist())
    bits = _array(archive, f"{_BITS}{name}", np.uint8)
    if any(size < 1 for size in shape) or bits.size != packed_bytes(shape):
        raise ValueError(f"{bits.size} bytes do not hold shape {list(shape)}")
    return PackedMasks({name: torch.from_numpy(bits)}, {name: shape})[name]


def _array(archive: zipfile.ZipFile, name: str, dtype: type[np.generic]) -> np.ndarray:
    """A vector out of the archive, which compares its CRC when the last byte is read."""
    with archive.open(f"{name}.npy") as member:
        array = np.lib.format.read_array(member, allow_pickle=False)
        if array.dtype != dtype or array.ndim != 1 or member.read(1):
            raise ValueError(f"{name}: not a vector of {np.dtype(dtype)}")
    return array
