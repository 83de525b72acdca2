"""Masks in memory and in files: which entries of each pruned tensor exist.

Files (`samo.mask_file`) and collections of masks take one bit per entry.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from megatron.data_parallel.bucket import ParamInfo
from megatron.errors import ConfigError, DataError
from samo.mask_file import (
    BITS,
    MARK,
    SHAPE,
    VERSION,
    mask_shapes,
    misfit,
    opened_masks,
    packed_bytes,
    read_bits,
    refuse_misfits,
)
from samo.model_parts import ModelParts


class PackedMasks(Mapping[str, torch.Tensor]):
    """A mapping of masks packed to one bit per entry; each lookup unpacks a mask on the CPU.

    `bits`: uint8 `[ceil(entries / 8)]` by name, the first entry in the highest bit. `shapes`: the
    shapes of the unpacked masks.
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
        """Pack masks one at a time."""
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


def padded(info: ParamInfo, part: torch.Tensor) -> torch.Tensor:
    """Pad this rank's mask with False to the parameter's size in memory: bool `[param.numel()]`.

    The padding stands for rows that exist in memory only.
    """
    assert part.numel() == info.local_entries, f"{info.name}: a mask of another shape"
    missing = info.param.numel() - part.numel()
    flat = part.reshape(-1)
    return flat if missing == 0 else torch.cat([flat, flat.new_zeros(missing)])


def flat_mask(info: ParamInfo, logical: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a mask of the logical shape, flattened and padded by `padded`."""
    assert tuple(logical.shape) == tuple(info.logical_shape)
    return padded(info, logical if info.tp_shard is None else info.tp_shard.of(logical))


def flat_masks(infos: Iterable[ParamInfo], logical: Mapping[str, torch.Tensor]) -> PackedMasks:
    """Return this rank's parts of masks of logical shapes, flattened and padded.

    Masks that prune nothing are left out, so that their parameters are stored whole with padding.
    Masks are looked up one at a time.
    """
    return PackedMasks.of(
        (info.name, flat_mask(info, mask))
        for info in infos
        if info.name in logical and not (mask := logical[info.name]).all()
    )


def flat_parts(
    infos: Iterable[ParamInfo], masks: Mapping[str, torch.Tensor], parts: ModelParts
) -> PackedMasks:
    """Flatten and pad `masks`, which are this rank's parts already. Collective over the stage.

    Masks that prune nothing on any rank are left out.
    """
    counts = parts.summed({name: [int(mask.count_nonzero())] for name, mask in masks.items()})
    return PackedMasks.of(
        (info.name, padded(info, masks[info.name]))
        for info in infos
        if info.name in masks and counts[info.name] != [info.entries]
    )


def save_masks(path: Path, masks: Mapping[str, torch.Tensor]) -> None:
    """Write bool masks of logical shapes to one file atomically, replacing an existing file.

    Equal masks make equal bytes.

    Raises:
        ConfigError: the file cannot be written.
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


def load_masks(
    path: Path, shapes: Mapping[str, Sequence[int]] | None = None, *, source: str | None = None
) -> PackedMasks:
    """Load the masks of a file, bool of logical shapes, on the CPU.

    With `shapes`, the shapes of the model's tensors, masks that do not fit are refused before they
    are unpacked, so that a small file cannot claim much memory. `source` names the file in errors.

    Raises:
        DataError: the file is missing, damaged, or of another kind or version. The error names the
            file and, if one is at fault, the tensor.
    """
    with opened_masks(path) as archive:
        found = mask_shapes(path, archive)
        if shapes is not None:
            refuse_misfits(found, shapes, source=source or str(path))
        return PackedMasks.of(
            (name, _unpacked(read_bits(path, archive, name, shape), name, shape))
            for name, shape in found.items()
        )


def _unpacked(bits: np.ndarray, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return PackedMasks({name: torch.from_numpy(bits)}, {name: shape})[name]


def masks_for(
    infos: Sequence[ParamInfo],
    masks: Mapping[str, torch.Tensor],
    *,
    source: str,
    elsewhere: Collection[str] = (),
) -> PackedMasks:
    """Convert masks of logical shapes, from `source`, to this rank's flat layout and check them.

    Names in `elsewhere` are checked by other ranks.

    Raises:
        DataError: a mask stores no entry, or is for a tensor that the model does not have, has in
            another shape, or never prunes.
    """
    shapes = {info.name: info.logical_shape for info in infos}
    for name in masks:
        if name not in shapes and name in elsewhere:
            continue
        mask = masks[name]
        wrong = misfit(name, mask.shape, shapes)
        if wrong is None and not mask.any():
            wrong = "of which it stores no entry; leave at least one"
        if wrong is not None:
            raise DataError(f"{source}: masks {name}, {wrong}")
    return flat_masks(infos, masks)


def _write(path: Path, packed: PackedMasks) -> None:
    arrays = {MARK: np.array([VERSION, len(packed)], np.int64)}
    for name, bits in packed.bits.items():
        arrays[f"{SHAPE}{name}"] = np.array(packed.shapes[name], np.int64)
        arrays[f"{BITS}{name}"] = bits.numpy()
    with open(path, "xb") as file:
        with zipfile.ZipFile(file, "w") as archive:
            for name, array in arrays.items():
                # Zip members carry no time, so that equal masks make equal files.
                with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Flush a folder's names to disk where the file system supports that."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
