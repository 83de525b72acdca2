"""Mask files come back as they were or are refused by name; masks meet parameters in memory."""

from __future__ import annotations

import io
import os
import tracemalloc
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megatron.data_parallel.bucket import ParamInfo
from megatron.errors import ConfigError, DataError
from samo import mask as module
from samo.mask import PackedMasks, flat_mask, flat_masks, load_masks, masks_for, save_masks


def some_masks() -> dict[str, torch.Tensor]:
    shapes = {"z/odd name": (3, 5), "a.weight": (8, 2), "conv": (2, 3, 1, 2), "file": (1, 1)}
    return {name: torch.rand(shape) < 0.4 for name, shape in shapes.items()}


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(
        a[name].shape == b[name].shape and torch.equal(a[name], b[name]) for name in a
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_masks(tmp_path / "masks.npz", some_masks())
    return tmp_path / "masks.npz"


def test_a_file_comes_back(tmp_path: Path) -> None:
    masks = some_masks()
    save_masks(tmp_path / "one", masks)
    save_masks(tmp_path / "two", PackedMasks.of(masks.items()))
    assert same(load_masks(tmp_path / "one"), masks)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_a_file_takes_a_bit_an_entry(tmp_path: Path) -> None:
    save_masks(tmp_path / "masks", {"w": torch.rand(1000, 800) < 0.1})
    assert 100_000 < (tmp_path / "masks").stat().st_size < 101_000


def test_numpy_reads_it(file: Path) -> None:
    with np.load(file) as arrays:
        assert arrays["masks"].tolist() == [module.VERSION, 4]
        shape = arrays["shape/conv"]
        bits = np.unpackbits(arrays["bits/conv"], count=shape.prod()).reshape(shape)
    assert np.array_equal(bits.astype(bool), load_masks(file)["conv"].numpy())


def test_a_file_that_is_there_is_replaced_or_stays(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = file.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    new = {"w": torch.ones(2, 2, dtype=torch.bool)}
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ConfigError, match=r"masks\.npz: cannot be written: No space left"):
            save_masks(file, new)
    assert file.read_bytes() == old and list(file.parent.iterdir()) == [file]
    save_masks(file, new)
    assert same(load_masks(file), new)


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "masks", tmp_path):
        with pytest.raises(ConfigError, match="cannot be written"):
            save_masks(path, {"w": torch.ones(2, 2, dtype=torch.bool)})
    assert list(tmp_path.iterdir()) == []


def refused(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        load_masks(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    return message


def test_files_that_are_none(tmp_path: Path, file: Path) -> None:
    assert "no such file" in refused(tmp_path / "none")
    assert "not a plain file" in refused(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "not a plain file" in refused(tmp_path / "pipe")
    for number, data in enumerate(
        (b"", b"\x80\x02", file.read_bytes()[:-1], file.read_bytes()[:99])
    ):
        path = tmp_path / str(number)
        path.write_bytes(data)
        assert "not a mask file, or cut short" in refused(path)
    other = tmp_path / "other.npz"
    np.savez(other, w=np.ones(3))
    assert "not a mask file" in refused(other)


def rewritten(file: Path, arrays: dict[str, np.ndarray | None]) -> Path:
    """A copy of the file with some arrays replaced, added or (None) left out, and right sums."""
    with np.load(file) as old:
        new: dict[str, np.ndarray | None] = {name: old[name] for name in old.files} | arrays
    path = file.with_name("other.npz")
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in new.items():
            if array is not None:
                data = io.BytesIO()
                np.lib.format.write_array(data, array)
                archive.writestr(f"{name}.npy", data.getvalue())
    return path


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"masks": np.array([2, 4])}, "version 2, this program reads 1"),
        ({"masks": np.array([1, 3])}, "not a mask file, or cut short"),
        ({"masks": np.zeros(0, np.int64)}, "not a mask file, or cut short"),
        ({"masks": None}, "not a mask file"),
        ({"bits/conv": None}, "'conv' is damaged"),
        ({"bits/conv": np.zeros(1, np.uint8)}, "'conv' is damaged: 1 bytes do not hold"),
        ({"bits/conv": np.zeros(2, np.int8)}, "'conv' is damaged: bits/conv: not a vector"),
        ({"bits/conv": np.zeros((2, 1), np.uint8)}, "'conv' is damaged"),
        ({"shape/conv": np.array([2, 3, 0, 2])}, "'conv' is damaged"),
        ({"shape/conv": np.array([-4, -3])}, "'conv' is damaged"),
        ({"shape/conv": np.array([2.0, 6.0])}, "'conv' is damaged"),
        ({"masks": np.array([1, 5]), "shape/new": np.array([2, 6])}, "'new' is damaged"),
        ({"bits/new": np.zeros(1, np.uint8)}, "holds 'bits/new', which belongs to no mask"),
        ({"else": np.zeros(1, np.uint8)}, "holds 'else', which belongs to no mask"),
    ],
)
def test_contents_that_do_not_fit_are_named(
    file: Path, arrays: dict[str, np.ndarray | None], words: str
) -> None:
    assert words in refused(rewritten(file, arrays))


def bomb(path: Path, member: str, entries: int) -> Path:
    """A small mask file of which one array unpacks to many zeros."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, array in {
            "masks": np.array([1, 1]),
            "shape/w": np.array([entries, 8]),
            "bits/w": np.zeros(entries, np.uint8),
        }.items():
            array = np.zeros(entries, array.dtype) if name == member else array
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, array)
    return path


@pytest.mark.parametrize("member", ["masks", "shape/w", "bits/w"])
def test_a_small_file_cannot_take_much_memory(tmp_path: Path, member: str) -> None:
    entries = 2**25
    path = bomb(tmp_path / "bomb", member, entries)
    assert path.stat().st_size < entries // 100
    tracemalloc.start()
    try:
        with pytest.raises(DataError):
            load_masks(path, {"w": (4, 4)})
        assert tracemalloc.get_traced_memory()[1] < entries // 8
    finally:
        tracemalloc.stop()


def test_array_headers_that_do_not_parse_are_damage(tmp_path: Path, file: Path) -> None:
    path = tmp_path / "odd"
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, data.replace(b"{'descr'", b"{(descr'") if "masks" in name else data)
    assert "not a mask file" in refused(path)


def test_a_mask_file_that_may_not_be_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path, **_: bool) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", denied)
    assert "cannot be read: Permission denied" in refused(file)


def test_no_damage_of_a_byte_goes_unseen(tmp_path: Path) -> None:
    file = tmp_path / "masks"
    save_masks(file, {"a": torch.rand(2, 5) < 0.5, "b": torch.rand(3, 5) < 0.5})
    good, masks = file.read_bytes(), load_masks(file)
    damaged = file.with_name("damaged")
    refusals = 0
    for place in range(len(good)):
        data = bytearray(good)
        data[place] ^= 0x41
        damaged.write_bytes(data)
        try:
            found = load_masks(damaged)
        except DataError:
            refusals += 1
        else:  # a date or a flag of the archive
            assert same(found, masks)
    assert refusals > len(good) // 2


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=40), max_size=3))
def test_packing_loses_nothing(rows: list[list[bool]]) -> None:
    masks = {str(number): torch.tensor([row]) for number, row in enumerate(rows)}
    packed = PackedMasks.of(masks.items())
    assert same(dict(packed), masks) and len(packed) == len(masks)
    assert [bits.numel() for bits in packed.bits.values()] == [-(-len(row) // 8) for row in rows]


def info(name: str, *shape: int, rows: int | None = None) -> ParamInfo:
    logical = (shape[0] if rows is None else rows, *shape[1:])
    return ParamInfo(name=name, leaves=(nn.Parameter(torch.zeros(shape)),), logical_shape=logical)


def test_padding_is_never_stored() -> None:
    table = info("table", 8, 2, rows=5)
    logical = torch.rand(5, 2) < 0.5
    flat = flat_mask(table, logical)
    assert flat.shape == (16,) and not flat[10:].any()
    assert torch.equal(flat[:10].view(5, 2), logical)
    plain = info("plain", 5, 2)
    assert torch.equal(flat_mask(plain, logical).view(5, 2), logical)


def test_a_mask_that_leaves_nothing_out_is_none() -> None:
    """Padding and all: the parameter is then stored as a dense one."""
    infos = [info("table", 8, 2, rows=5), info("plain", 5, 2)]
    logical = {"table": torch.ones(5, 2, dtype=torch.bool), "plain": torch.eye(5, 2) > 0}
    assert flat_masks(infos, logical).keys() == {"plain"}


def test_masks_for_a_model() -> None:
    infos = [info("table", 8, 2, rows=5), info("w", 3, 4), info("bias", 3)]
    masks = {"w": torch.arange(12).view(3, 4) % 5 > 0, "table": torch.arange(10).view(5, 2) > 0}
    found = masks_for(infos, masks, source="masks.npz")
    assert list(found) == ["table", "w"]
    assert all(torch.equal(found[i.name], flat_mask(i, masks[i.name])) for i in infos[:2])


@pytest.mark.parametrize(
    ("name", "mask", "words"),
    [
        ("other", torch.ones(3, 4), "masks other, of which the model has none"),
        ("table", torch.ones(8, 2), r"masks table, .*shape \[8, 2\], the model in \[5, 2\]"),
        ("bias", torch.ones(3), "masks bias, which has one axis"),
        ("w", torch.zeros(3, 4), "masks w, of which it stores no entry"),
    ],
)
def test_masks_of_another_model_are_refused(name: str, mask: torch.Tensor, words: str) -> None:
    infos = [info("table", 8, 2, rows=5), info("w", 3, 4), info("bias", 3)]
    with pytest.raises(DataError, match=f"^some file: {words}"):
        masks_for(infos, {name: mask.bool()}, source="some file")
