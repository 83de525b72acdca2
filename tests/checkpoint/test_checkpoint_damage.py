"""Nothing damaged, forged or foreign is read, and the error says which file and key."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import QuickFiles, rehash, rewrite_manifest

from megatron.checkpoint.format import (
    MANIFEST_LIMIT,
    MANIFEST_NAME,
    NewerFormat,
    check_state,
    parse,
    sign,
)
from megatron.checkpoint.store import Checkpoint, LocalShard, save_checkpoint, whole
from megatron.checkpoint.verify import verify_folder
from megatron.errors import CheckpointError

FILE = "rank_00000.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    mask = torch.arange(12).reshape(3, 4) % 3 == 0
    shards = [
        whole("mask", mask),
        LocalShard("kept", torch.arange(4.0), (3, 4), (0, 0), (3, 4), mask="mask"),
        LocalShard("cut", torch.arange(5), (3, 4), (0, 0), (3, 4), (0, 5)),
        LocalShard("cut", torch.arange(7), (3, 4), (0, 0), (3, 4), (5, 12)),
        whole("other", torch.zeros(3, dtype=torch.bfloat16)),
    ]
    state = {"a": [1.5, None, {"b": "c"}]}
    return save_checkpoint(tmp_path, step=3, tensors=shards, state=state, files=QuickFiles())


def refused(folder: Path, *parts: str, kind: type[CheckpointError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        verify_folder(folder)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 700
    for part in parts:
        assert part in text, text
    with pytest.raises(CheckpointError):
        Checkpoint.open(folder)
    return text


def test_each_of_100_bit_flips_is_found_and_its_file_named(folder: Path) -> None:
    draw = random.Random(17)
    files = sorted(folder.iterdir())
    for trial in range(100):
        path = files[trial % len(files)]
        good = path.read_bytes()
        bad = bytearray(good)
        bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        path.write_bytes(bad)
        refused(folder, path.name)
        path.write_bytes(good)
    verify_folder(folder)


def test_every_bit_of_the_manifest_counts(folder: Path) -> None:
    good = (folder / MANIFEST_NAME).read_bytes()
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << position % 8
        with pytest.raises(CheckpointError):
            parse(bytes(bad), "manifest.json")


@pytest.mark.parametrize("name", [FILE, MANIFEST_NAME])
def test_every_truncation_is_found(folder: Path, name: str) -> None:
    path = folder / name
    good = path.read_bytes()
    for size in {0, 1, 7, 8, 9, len(good) // 2, len(good) - 1}:
        path.write_bytes(good[:size])
        refused(folder, name)
    path.write_bytes(good + b"\0")
    refused(folder, name)


def test_missing_extra_and_special_files(folder: Path, tmp_path: Path) -> None:
    path = folder / FILE
    (folder / ".nfs0001").write_bytes(b"")
    verify_folder(folder)
    shutil.copy(path, folder / "rank_00001.safetensors")
    refused(folder, "rank_00001.safetensors", "not listed")
    (folder / "rank_00001.safetensors").unlink()
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    refused(folder, FILE, "No such file")
    path.symlink_to(elsewhere)
    refused(folder, FILE, "is a link")
    path.unlink()
    os.mkfifo(path)
    refused(folder, FILE, "not a plain file")
    path.unlink()
    path.mkdir()
    refused(folder, FILE, "not a plain file")
    path.rmdir()
    elsewhere.rename(path)
    verify_folder(folder)
    manifest = folder / MANIFEST_NAME
    manifest.rename(elsewhere)
    manifest.symlink_to(elsewhere)
    refused(folder, MANIFEST_NAME, "is a link")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", ".hidden", "", "x", "a\0b", "é"])
def test_names_that_could_leave_the_folder(folder: Path, name: str) -> None:
    def change(document: dict[str, Any]) -> None:
        document["files"][name] = document["files"].pop(FILE)
        for tensor in document["tensors"].values():
            for part in tensor["slices"]:
                part["file"] = name

    rewrite_manifest(folder, change)
    refused(folder, MANIFEST_NAME, "files[", "plain name")


def tensor(name: str, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["tensors"][name].update(fields)


def part(name: str, number: int, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["tensors"][name]["slices"][number].update(fields)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (part("cut", 1, flat=[4, 12]), ["'cut'", "overlap"]),
        (part("cut", 1, flat=[6, 12]), ["'cut'", "hole"]),
        (part("cut", 1, flat=[5, 11]), ["'cut'", "end at 11"]),
        (part("cut", 1, flat=[5, 13]), ["'cut'", "end at 13"]),
        (part("cut", 1, flat=[5, 5]), ["'cut'", "flat"]),
        (part("cut", 0, flat=[5, 12]), ["'cut'", "stored twice"]),
        (part("cut", 0, stop=[2, 4]), ["'cut'"]),
        (part("other", 0, stop=[2]), ["'other'", "end at 2"]),
        (part("other", 0, stop=[4]), ["'other'", "outside"]),
        (part("other", 0, stop=[2**70]), ["'other'", "2**62"]),
        (part("other", 0, start=[-1]), ["'other'", "start"]),
        (part("other", 0, start=[True]), ["'other'", "start"]),
        (part("other", 0, stop=[3.0]), ["'other'", "stop"]),
        (part("other", 0, file="rank_7.safetensors"), ["'other'", "not listed"]),
        (part("other", 0, key="mask"), ["'mask'", "used twice"]),
        (part("other", 0, key="gone"), ["'gone'", "missing"]),
        (part("other", 0, more=1), ["'other'", "'more'"]),
        (tensor("other", dtype="F32"), ["'other'", "F32"]),
        (tensor("other", dtype="F33"), ["'other'", "F33"]),
        (tensor("other", dtype=["F32"]), ["'other'", "dtype"]),
        (tensor("other", shape=[3, 2**40, 2**40]), ["'other'", "2**62"]),
        (tensor("other", shape=[1] * 17), ["'other'", "shape"]),
        (tensor("other", scope="mine"), ["'other'", "scope"]),
        (tensor("other", slices={}), ["'other'", "slices"]),
        (tensor("other", slices=[]), ["'other'", "end at 0"]),
        (tensor("kept", mask={"name": "cut", "value": True}), ["'kept'", "BOOL"]),
        (tensor("kept", mask={"name": "kept", "value": True}), ["'kept'", "BOOL"]),
        (tensor("kept", mask={"name": "mask", "value": 1}), ["'kept'", "mask.value"]),
        (tensor("mask", mask={"name": "mask", "value": True}), ["'mask'", "stored whole"]),
        (tensor("kept", scope="data_parallel"), ["'kept'", "shape [3, 4]"]),
        (lambda d: d["tensors"].pop("other"), ["'other'", "not listed"]),
        (lambda d: d["tensors"].pop("mask"), ["'mask'"]),
        (lambda d: d.pop("world"), ["world", "missing"]),
        (lambda d: d.update(world={"size": 0}), ["world.size"]),
        (lambda d: d.update(world={"size": "4"}), ["world"]),
        (lambda d: d.update(step="3"), ["step"]),
        (lambda d: d.update(step=-1), ["step"]),
        (lambda d: d.update(state=[]), ["state"]),
        (lambda d: d.update(format="other"), ["format"]),
        (lambda d: d.update(version=0), ["version"]),
        (lambda d: d.update(packages={"torch": 2}), ["packages", "torch"]),
        (lambda d: d.update(extra=1), ["extra"]),
        (lambda d: d.update(files=[]), ["files"]),
        (lambda d: d["files"][FILE].update(sha256="A" * 64), ["files", "sha256"]),
        (lambda d: d["files"][FILE].update(bytes=1), [FILE, "says 1"]),
    ],
)
def test_a_forged_manifest(
    folder: Path, change: Callable[[dict[str, Any]], Any], parts: list[str]
) -> None:
    rewrite_manifest(folder, change)
    refused(folder, *parts)


STATE: dict[str, Any] = {
    "progress": {
        "iteration": 3,
        "consumed_samples": 12,
        "applied_samples": 8,
        "skipped_in_row": 1,
        "finite_step": 2,
        "losses": [1.5],
    },
    "applied_updates": 2,
    "loss_scaler": {"scale": 1.0, "clean_steps": 2, "hysteresis_left": 1},
    "identity": {"model.num_layers": 2},
    "schedule": {"optimizer.lr": 0.1},
    "data_files": {"a.idx": {"bytes": 1, "modified": 2, "sha256": "a"}},
}
NO_COUNTS: tuple[object, ...] = (None, True, "3", 1.5, -1, 10**30, [], {})
OF_STATE: dict[str, tuple[object, ...]] = {
    "progress": (None, "x", 3, []),
    "progress/iteration": (*NO_COUNTS, 2, 4, 10**12),
    "progress/consumed_samples": (*NO_COUNTS, 10**15),
    "progress/applied_samples": (*NO_COUNTS, 13),
    "progress/skipped_in_row": (*NO_COUNTS, 4),
    "progress/finite_step": (*NO_COUNTS, 4),
    "progress/losses": (None, 3, ["x"], [None]),
    "progress/other": (1,),
    "applied_updates": (*NO_COUNTS, 4),
    "loss_scaler": (None, [], 3, {"scale": 1.0}),
    "loss_scaler/scale": (None, "x", True, 0, -1.0),
    "loss_scaler/clean_steps": NO_COUNTS,
    "loss_scaler/hysteresis_left": (None, True, "3", 1.5, 10**30, [], {}),
    "identity": (None, [], "x", 3),
    "schedule": (None, [], "x", 3),
    "data_files": (None, [], "x", {"a": 3}, {"a": {}}),
    "data_files/a.idx/bytes": NO_COUNTS,
    "data_files/a.idx/modified": (None, True, "3", 1.5),
    "data_files/a.idx/sha256": (None, 3, []),
    "replicas": (None, "x", {}, [3], [{}]),
}
"""Values that these keys cannot have; keys are paths below `state`."""


def test_a_whole_state_is_accepted() -> None:
    check_state(STATE, 3)
    check_state(STATE | {"replicas": []}, 3)
    for key in STATE:
        check_state({name: value for name, value in STATE.items() if name != key}, 3)


@pytest.mark.parametrize("place", OF_STATE)
def test_a_state_in_which_no_run_can_be_is_refused(folder: Path, place: str) -> None:
    *parents, last = place.split("/")
    for value in OF_STATE[place]:
        state = copy.deepcopy(STATE)
        inner = state
        for key in parents:
            inner = inner[key]
        inner[last] = value
        rewrite_manifest(folder, lambda document, state=state: document.update(state=state, step=3))
        refused(folder, parents[-1] if last == "other" else last.partition(".")[0])


def test_a_newer_version_names_both(folder: Path) -> None:
    rewrite_manifest(folder, lambda document: document.update(version=9, news="?"))
    refused(folder, "version 9", "version 2", kind=NewerFormat)


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        (b'"a": NaN}', ["finite"]),
        (b'"a": 1e999}', ["finite"]),
        (b'"a": -Infinity}', ["finite"]),
        (b'"a": 1, "a": 2}', ["'a'", "twice"]),
        (b'"a": ' + b"[" * 100000 + b"]" * 100000 + b"}", [MANIFEST_NAME]),
        (b'"a": ' + b"9" * 5000 + b"}", [MANIFEST_NAME]),
        (b'"a": "\xff"}', [MANIFEST_NAME]),
        (b'"a": ', [MANIFEST_NAME]),
        (b"", [MANIFEST_NAME]),
    ],
)
def test_json_that_is_not_strict(folder: Path, body: bytes, parts: list[str]) -> None:
    (folder / MANIFEST_NAME).write_bytes(sign(body))
    refused(folder, *parts)


def test_a_huge_manifest_is_not_even_read(folder: Path) -> None:
    os.truncate(folder / MANIFEST_NAME, MANIFEST_LIMIT + 1)
    refused(folder, MANIFEST_NAME, "limit")


def replace_header(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / FILE
    data = path.read_bytes()
    span = int.from_bytes(data[:8], "little")
    document = json.loads(data[8 : 8 + span])
    result = change(document)
    text = json.dumps(result if isinstance(result, list) else document).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + span :])
    rehash(folder, FILE)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda h: h["other"].update(data_offsets=[0, 6]), ["overlap"]),
        (lambda h: h["other"].update(data_offsets=[6, 0]), ["'other'"]),
        (lambda h: h["other"].update(data_offsets=[0, 2**62]), ["'other'"]),
        (lambda h: h["other"].update(data_offsets=[2**62, 2**62 + 6]), ["'other'"]),
        (lambda h: h["other"].update(data_offsets=[-6, 0]), ["'other'"]),
        (lambda h: h["other"].update(data_offsets=[0]), ["'other'"]),
        (lambda h: h["other"].update(shape=[4]), ["'other'", "BF16"]),
        (lambda h: h["other"].update(dtype="F16"), ["'other'", "BF16"]),
        (lambda h: h["other"].update(dtype="F8_E4M3"), ["'other'"]),
        (lambda h: h.update(more=h.pop("other")), ["'more'"]),
        (lambda h: h["mask"].update(shape=[1, 2], dtype="I8"), ["'mask'"]),
        (lambda h: h.pop("other"), [FILE]),
        (lambda h: [h], ["object"]),
    ],
)
def test_a_forged_file_header(
    folder: Path, change: Callable[[dict[str, Any]], Any], parts: list[str]
) -> None:
    replace_header(folder, change)
    refused(folder, FILE, *parts)


def mutated(value: Any, draw: random.Random) -> Any:
    """The document with one place of it changed to something else."""
    odd = [None, True, -1, 0, 1, 2**63, 1.5, "", "../x", "F32", [], {}, [0], {"size": 1}, "\ud800"]
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(sorted(value))
        fate = draw.random()
        if fate < 0.1:
            del value[key]
        elif fate < 0.2:
            value[draw.choice(["x", "", "a" * 999, "flat", "mask"])] = copy.deepcopy(value[key])
        else:
            value[key] = mutated(value[key], draw)
        return value
    if isinstance(value, list) and value and draw.random() < 0.85:
        index = draw.randrange(len(value))
        fate = draw.random()
        if fate < 0.1:
            del value[index]
        elif fate < 0.2:
            value.append(copy.deepcopy(value[index]))
        else:
            value[index] = mutated(value[index], draw)
        return value
    if isinstance(value, int) and draw.random() < 0.5:
        return value + draw.choice([-1, 1, 2**32])
    return copy.deepcopy(draw.choice(odd))


def test_forged_manifests_are_refused_or_read(folder: Path) -> None:
    path = folder / MANIFEST_NAME
    good = json.loads(path.read_bytes())
    del good["sha256"]
    draw = random.Random(23)
    read = 0
    for _ in range(100):
        document = copy.deepcopy(good)
        for _ in range(draw.randint(1, 3)):
            document = mutated(document, draw)
        if not isinstance(document, dict):
            continue
        path.write_bytes(sign(json.dumps(document)[1:].encode()))
        try:
            with Checkpoint.open(folder) as saved:
                for name in saved.names():
                    saved.read(name)
            read += 1
        except CheckpointError as error:
            assert "\n" not in str(error) and len(str(error)) < 900
    assert 0 < read < 50


def test_forged_headers_are_refused_or_read(folder: Path) -> None:
    path = folder / FILE
    good = path.read_bytes()
    end = 8 + int.from_bytes(good[:8], "little")
    draw = random.Random(29)
    for _ in range(100):
        bad = bytearray(good)
        for _ in range(draw.randint(1, 3)):
            bad[draw.randrange(end)] = draw.choice(b'0123456789"{}[],:\x00\xff-e')
        path.write_bytes(bad)
        rehash(folder, FILE)
        try:
            with Checkpoint.open(folder) as saved:
                for name in saved.names():
                    saved.read(name)
        except CheckpointError as error:
            assert FILE in str(error) and "\n" not in str(error)
