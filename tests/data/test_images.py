"""Image files: what is read, and what is refused by file and image."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megatron.data.images import (
    ImageFiles,
    ImageFolder,
    ImageSource,
    MockImages,
    mock_splits,
    open_images,
    read_archive,
)
from megatron.data.indexed_dataset import changes
from megatron.errors import ConfigError, DataError
from tests.data.image_files import (
    archive_arrays,
    labels_of,
    save_arrays,
    smooth_images,
    write_archives,
    write_cifar10,
    write_folder,
)


def refused(folder: Path, **options: int) -> str:
    with pytest.raises(DataError) as caught:
        open_images(str(folder), **({"classes": 10} | options))
    assert str(caught.value).isprintable()
    return str(caught.value)


def labels_in(source: ImageSource) -> list[int]:
    return [source.label(index) for index in range(len(source))]


def test_cifar10_binary_files_are_read_to_the_byte(tmp_path: Path) -> None:
    images, labels = write_cifar10(tmp_path)
    found = open_images(str(tmp_path), classes=10)
    assert labels_in(found.train) == labels.tolist()
    for index, image in enumerate(images):
        assert np.array_equal(found.train.image(index), image)
    assert len(found.test) == 8 and found.valid is found.test


def test_damaged_cifar10_files_are_named(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    third = tmp_path / "data_batch_3.bin"
    whole = third.read_bytes()
    third.write_bytes(whole[:-1])
    assert f"{third}: {len(whole) - 1} bytes are not whole records of 3073" in refused(tmp_path)
    third.write_bytes(b"")
    assert f"{third}: 0 bytes" in refused(tmp_path)
    changed = bytearray(whole)
    changed[3073 * 5] = 10
    third.write_bytes(changed)
    assert f"{third}: image 5: label 10" in refused(tmp_path)
    third.unlink()
    assert f"{third}: no such file" in refused(tmp_path)


def test_archives_are_decoded(tmp_path: Path) -> None:
    images = write_archives(tmp_path)
    found = open_images(str(tmp_path), classes=10)
    assert labels_in(found.train) == labels_of(12).tolist()
    for index, image in enumerate(images):
        difference = np.abs(found.train.image(index).astype(int) - image)
        assert difference.mean() < 6, "JPEG loses little of two-coloured squares"
    assert len(found.test) == 6


def test_damaged_archives_are_named(tmp_path: Path) -> None:
    write_archives(tmp_path)
    train = tmp_path / "train.npz"
    whole = train.read_bytes()

    def rewritten(**changes: np.ndarray | None) -> str:
        arrays = archive_arrays(smooth_images(12, seed=1), labels_of(12)) | changes
        save_arrays(train, {name: a for name, a in arrays.items() if a is not None})
        return refused(tmp_path)

    train.write_bytes(whole[: len(whole) // 2])
    assert f"{train}: not a readable .npz archive" in refused(tmp_path)
    flipped = bytearray(whole)
    flipped[whole.index(b"\xff\xda") + 40] ^= 0x40  # zip's checksum finds it
    train.write_bytes(flipped)
    assert f"{train}: not a readable .npz archive" in refused(tmp_path)
    train.write_bytes(b"")
    assert str(train) in refused(tmp_path)
    np.save(tmp_path / "one.npy", labels_of(12))
    train.write_bytes((tmp_path / "one.npy").read_bytes())
    assert f"{train}: not a readable .npz archive: a .npy file" in refused(tmp_path)

    assert "has no array labels" in rewritten(labels=None)
    nothing = np.zeros(0, np.uint8)
    message = rewritten(scan=nothing, lengths=nothing, labels=nothing)
    assert message == f"{train}: holds no images"
    assert "scan is uint8 [1, 7]" in rewritten(scan=np.zeros((1, 7), np.uint8))
    assert "header is int64" in rewritten(header=np.zeros(7, np.int64))
    assert "lengths is float64" in rewritten(lengths=np.ones(12))
    assert "label 10" in rewritten(labels=np.full(12, 10))
    assert "11 labels do not fit" in rewritten(labels=labels_of(11))
    assert "the file is damaged" in rewritten(lengths=np.full(12, 7))
    good = archive_arrays(smooth_images(12, seed=1), labels_of(12))
    assert "the file is damaged" in rewritten(lengths=np.append(good["lengths"][:-2], [0, 0]))
    message = rewritten(header=good["header"][:40])
    assert f"{train}: image 0: not a readable image" in message
    message = rewritten(**archive_arrays(smooth_images(12, seed=1, side=16), labels_of(12)))
    assert f"{train}: image 0: is 16 x 16 pixels" in message


def test_any_damage_of_an_archive_is_named_or_harmless(tmp_path: Path) -> None:
    write_archives(tmp_path)
    train, random = tmp_path / "train.npz", np.random.default_rng(1)
    whole, told = train.read_bytes(), 0
    for round_ in range(100):
        damaged = bytearray(whole)
        if round_ % 4 == 0:
            del damaged[random.integers(len(whole)) :]
        else:
            for place in random.integers(len(whole), size=3):
                damaged[place] ^= random.integers(1, 256)
        train.write_bytes(damaged)
        try:
            read_archive(train)
        except DataError as error:
            assert str(train) in str(error) and str(error).isprintable()
            told += 1
    # Bytes of the padding of zip and of its dates may differ without harm.
    assert told >= 90


def test_archives_with_pickles_are_refused(tmp_path: Path) -> None:
    write_archives(tmp_path)
    arrays = archive_arrays(smooth_images(12, seed=1), labels_of(12))
    arrays["labels"] = np.array([{}] * 12, dtype=object)
    save_arrays(tmp_path / "train.npz", arrays)
    assert "not a readable .npz archive" in refused(tmp_path)


def test_folders_of_classes_are_read_by_name(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", {"b": 2, "a": 3, "c": 1}, seed=1)
    write_folder(tmp_path / "val", {"a": 1, "b": 1, "c": 2}, seed=2)
    found = open_images(str(tmp_path), classes=3)
    assert labels_in(found.train) == [0, 0, 0, 1, 1, 2]
    assert np.array_equal(found.train.image(0), smooth_images(3, seed=1)[0])
    assert found.test is found.valid and labels_in(found.valid) == [0, 1, 2, 2]
    write_folder(tmp_path / "test", {"a": 1, "b": 1, "c": 1}, seed=3)
    assert len(open_images(str(tmp_path), classes=3).test) == 3


def test_grey_images_get_three_channels(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_folder(tmp_path / split, {"a": 1}, seed=1)
    grey = np.arange(32 * 32, dtype=np.uint32).reshape(32, 32).astype(np.uint8)
    Image.fromarray(grey).save(tmp_path / "train" / "a" / "000.png")
    image = open_images(str(tmp_path), classes=1).train.image(0)
    assert image.shape == (32, 32, 3) and np.array_equal(image[:, :, 1], grey)


def test_wrong_folders_are_named(tmp_path: Path) -> None:
    assert "no such folder of images" in refused(tmp_path / "absent")
    assert "holds neither data_batch_1.bin nor train.npz" in refused(tmp_path)
    write_folder(tmp_path / "train", {"a": 2, "b": 1}, seed=1)
    assert f"{tmp_path / 'val'}: no such folder" in refused(tmp_path)
    write_folder(tmp_path / "val", {"a": 1, "c": 1}, seed=1)
    assert f"{tmp_path / 'val'}: its classes are not those of" in refused(tmp_path)
    shutil.move(tmp_path / "val" / "c", tmp_path / "val" / "b")
    assert "has 2 classes, num_classes is 10; give --num-classes 2" in refused(tmp_path)
    (tmp_path / "val" / "b" / "000.png").unlink()
    assert f"{tmp_path / 'val' / 'b'}: a class without images" in refused(tmp_path, classes=2)


def test_a_damaged_file_is_named_when_it_is_read(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": 2}, seed=1)
    path = tmp_path / "a" / "001.png"
    path.write_bytes(path.read_bytes()[:60])
    images = ImageFolder.open(tmp_path)
    images.image(0)
    with pytest.raises(DataError, match="001.png: not a readable image"):
        images.image(1)
    path.write_text("no image")
    with pytest.raises(DataError, match="001.png: not a readable image"):
        images.image(1)


@pytest.mark.parametrize("extension", ["png", "jpg", "tif", "bmp", "webp", "ppm"])
def test_any_damage_of_a_file_is_named_or_harmless(extension: str, tmp_path: Path) -> None:
    path, random = tmp_path / "a" / f"000.{extension}", np.random.default_rng(1)
    path.parent.mkdir()
    Image.fromarray(smooth_images(1, seed=1)[0]).save(path)
    images, whole, told = ImageFolder.open(tmp_path), path.read_bytes(), 0
    for round_ in range(100):
        damaged = bytearray(whole)
        if round_ % 4 == 0:
            del damaged[random.integers(len(whole)) :]
        else:
            for place in random.integers(min(len(whole), 200), size=3):
                damaged[place] ^= random.integers(1, 256)
        path.write_bytes(damaged)
        try:
            images.image(0)
        except DataError as error:
            assert str(path) in str(error) and str(error).isprintable()
            told += 1
    assert told >= 25, "each truncated file"


@pytest.mark.parametrize("error", [IndexError, KeyError, Image.DecompressionBombError])
def test_every_error_of_pillow_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    write_folder(tmp_path, {"a": 1}, seed=1)

    def broken(*args: object) -> None:
        raise error("while it decodes")

    monkeypatch.setattr(Image, "open", broken)
    with pytest.raises(DataError, match="000.png: not a readable image: .*while it decodes"):
        ImageFolder.open(tmp_path).image(0)


def test_a_decompression_bomb_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path, {"a": 1}, seed=1)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 32 * 32 // 2 - 1)
    with pytest.raises(DataError, match="000.png: not a readable image: Image size"):
        ImageFolder.open(tmp_path).image(0)


def test_files_without_an_images_extension_are_no_images(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": 2, "b": 1}, seed=1)
    for name in ("Thumbs.db", "list.txt", ".hidden.png", "000.png.md5"):
        (tmp_path / "a" / name).write_text("no image")
    (tmp_path / "README.md").write_text("beside the classes")
    (tmp_path / "a" / "more").mkdir()
    shutil.move(tmp_path / "a" / "001.png", tmp_path / "a" / "more" / "x.JPeG")
    found = ImageFolder.open(tmp_path)
    names = [str(path.relative_to(tmp_path)) for path in found.paths]
    assert names == ["a/000.png", "a/more/x.JPeG", "b/000.png"]
    assert found.names == ("a", "b") and labels_in(found) == [0, 0, 1]
    found.image(1)  # the content tells the format
    (tmp_path / "b" / "000.png").rename(tmp_path / "b" / "000.gif")
    with pytest.raises(DataError, match=r"b: a class without images; their names end in \.jpg"):
        ImageFolder.open(tmp_path)


def test_a_circle_of_links_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": 1}, seed=1)
    (tmp_path / "a" / "again").symlink_to(tmp_path / "a")
    with pytest.raises(DataError, match="again.*: cannot be looked at: Too many levels"):
        ImageFolder.open(tmp_path)


def test_a_link_to_itself_among_the_classes_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": 1}, seed=1)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(DataError, match="loop: cannot be looked at: Too many levels"):
        ImageFolder.open(tmp_path)


def test_without_pillow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_archives(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"pillow: not installed.*sparsetron\[data\]"):
        open_images(str(tmp_path), classes=10)
    write_cifar10(tmp_path)
    open_images(str(tmp_path), classes=10)


def test_facts_tell_that_images_changed(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "cifar")
    before = ImageFiles.find(str(tmp_path / "cifar")).facts()
    assert len(before) == 6 and changes(before, before) == []
    with open(tmp_path / "cifar" / "data_batch_2.bin", "ab") as file:
        file.write(bytes(3073))
    after = ImageFiles.find(str(tmp_path / "cifar")).facts()
    (change,) = changes(before, after)
    assert "data_batch_2.bin: 24584 bytes then, 27657 now" in change

    for split in ("train", "val"):
        write_folder(tmp_path / "folder" / split, {"a": 2}, seed=1)
    before = ImageFiles.find(str(tmp_path / "folder")).facts()
    shutil.move(tmp_path / "folder/train/a/001.png", tmp_path / "folder/train/a/002.png")
    (change,) = changes(before, ImageFiles.find(str(tmp_path / "folder")).facts())
    assert change == f"{tmp_path / 'folder' / 'train'}: other contents"


def test_facts_tell_labels_shapes_and_pixels(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_folder(tmp_path / split, {"a": 1, "b": 1}, seed=1)
    first = tmp_path / "train" / "a" / "000.png"
    pixels = np.asarray(Image.open(first))
    before = ImageFiles.find(str(tmp_path)).facts()
    for changed in (pixels.reshape(64, 16, 3), 255 - pixels):
        Image.fromarray(changed).save(first)
        (change,) = changes(before, ImageFiles.find(str(tmp_path)).facts())
        assert change == f"{tmp_path / 'train'}: other contents"
    Image.fromarray(pixels).save(first)
    assert changes(before, ImageFiles.find(str(tmp_path)).facts()) == []


def test_held_out_images_are_part_of_training_for_nobody(tmp_path: Path) -> None:
    images, labels = write_cifar10(tmp_path)  # 40 images
    found = open_images(str(tmp_path), classes=10, held_out=12)
    assert (len(found.train), len(found.valid)) == (28, 12)
    parts = [
        [(source.image(i).tobytes(), source.label(i)) for i in range(len(source))]
        for source in (found.train, found.valid)
    ]
    everything = [(image.tobytes(), label) for image, label in zip(images, labels, strict=True)]
    assert sorted(parts[0] + parts[1]) == sorted(everything)
    again = open_images(str(tmp_path), classes=10, held_out=12)
    assert labels_in(again.valid) == labels_in(found.valid)
    assert found.test is not found.valid and len(found.test) == 8
    message = refused(tmp_path, held_out=40)
    assert "held_out_images 40: there are 40 training images; lower it" in message


def test_mock_images_depend_on_seed_and_number_alone() -> None:
    size = {"classes": 3, "height": 32, "width": 40}
    found = mock_splits(seed=5, count=20, **size)
    assert (len(found.train), len(found.test)) == (20, 4)
    longer = MockImages(seed=5, count=24, **size)
    assert labels_in(longer) == labels_in(found.train) + labels_in(found.test)
    assert np.array_equal(longer.image(22), found.test.image(2))
    assert longer.image(1).shape == (32, 40, 3)
    assert not np.array_equal(longer.image(1), MockImages(seed=6, count=24, **size).image(1))
    assert not np.array_equal(longer.image(1), longer.image(2))


def test_mock_images_show_their_classes() -> None:
    """The nearest mean of a class tells the class of other images, so a model can learn it."""
    found = mock_splits(seed=5, count=60, classes=4, height=32, width=32)
    labels = np.array(labels_in(found.train))
    train = np.stack([found.train.image(i) for i in range(60)]).astype(float)
    assert set(labels) == {0, 1, 2, 3}
    means = np.stack([train[labels == label].mean(axis=0) for label in range(4)])
    for index, label in enumerate(labels_in(found.test)):
        distances = np.square(means - found.test.image(index)).sum(axis=(1, 2, 3))
        assert distances.argmin() == label


@pytest.mark.push
def test_the_real_archive_is_read(shared_data: Path) -> None:
    found = open_images(str(shared_data / "cifar10-jpeg"), classes=10, held_out=5000)
    assert np.bincount(labels_in(found.test)).tolist() == [1000] * 10
    assert (len(found.train), len(found.valid)) == (45_000, 5_000)
    mean = np.stack([found.test.image(i) for i in range(2000)]).mean(axis=(0, 1, 2))
    assert np.abs(mean - (125.3, 123.0, 113.9)).max() < 4
