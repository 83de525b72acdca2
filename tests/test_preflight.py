"""A dry run finds a wrong path at once, with the exit code that the run itself would leave with."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import pretrain_gpt
from megatron.config import GPTConfig, parse, resolve
from megatron.data.sidecar import write_sidecar
from megatron.memory_estimate import logical_shapes
from samo.mask_file import check_mask_file, packed_bytes
from tests.data.pairs import write_pair
from tests.training.harness import TINY

FROZEN = Path(__file__).resolve().parent / "frozen" / "dense"


def dry(folder: Path, *flags: str, data: str = "--mock-data") -> int:
    line = TINY.replace("--mock-data", data).split()
    return pretrain_gpt.main([*line, "--run-dir", str(folder / "run"), "--dry-run", *flags])


@pytest.mark.parametrize(
    ("flags", "data", "code", "words"),
    [
        ((), "--mock-data", 0, ""),
        ((), "--data-path nowhere", 3, "nowhere.bin and nowhere.idx not found"),
        (("--load", "nowhere"), "--mock-data", 4, "nowhere"),
        (("--ckpt-step", "3"), "--mock-data", 4, "no step 3"),
        (
            ("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", "no.model"),
            "--mock-data",
            3,
            "no.model: no such file",
        ),
        (
            ("--grad-path", "samo", "--samo-pruning", "file", "--samo-mask-file", "no.npz"),
            "--mock-data",
            3,
            "no.npz: no such file",
        ),
    ],
)
def test_missing_files_are_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    data: str,
    code: int,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert dry(tmp_path, *flags, data=data) == code
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == (code != 0)
    assert dry(tmp_path, *flags, "--check-paths", "false", data=data) == 0
    assert not (tmp_path / "run").exists()


def test_a_configuration_without_data_is_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry(tmp_path, data="") == 0
    assert "no data is named" in capsys.readouterr().err
    assert dry(tmp_path) == 0
    assert "no data is named" not in capsys.readouterr().err


def test_damaged_headers_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "d.bin").write_bytes(b"")
    (tmp_path / "d.idx").write_bytes(b"MMIDIDX")
    assert dry(tmp_path, data=f"--data-path {tmp_path / 'd'}") == 3
    assert "d.idx: truncated" in capsys.readouterr().err
    masks = tmp_path / "masks.npz"
    masks.write_bytes(b"PK")
    flags = ("--grad-path", "samo", "--samo-pruning", "file", "--samo-mask-file", str(masks))
    assert dry(tmp_path, *flags) == 3
    assert "not a mask file" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["truncated", "missing", "manifest"])
def test_damaged_checkpoints_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    shutil.copytree(FROZEN, tmp_path / "old")
    step = tmp_path / "old" / "checkpoints" / "step_00000005"
    asked = [
        "--config",
        str(FROZEN / "config.yaml"),
        "--run-dir",
        str(tmp_path / "run"),
        "--dry-run",
    ]
    asked += ["--load", str(tmp_path / "old")]
    assert pretrain_gpt.main(asked) == 0
    tensors = step / "rank_00000.safetensors"
    match damage:
        case "truncated":
            tensors.write_bytes(tensors.read_bytes()[:-4])
        case "missing":
            tensors.unlink()
        case _:
            (step / "manifest.json").write_text("{")
    capsys.readouterr()
    assert pretrain_gpt.main(asked) == 4
    said = capsys.readouterr().err
    assert "checkpoint not used" in said and "no checkpoint in it verifies" in said
    assert step.is_dir(), "a dry run renames nothing"


def test_a_folder_that_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed, real = tmp_path / "closed", Path.stat

    def denied(path: Path, **options: bool) -> object:
        if closed in (path, *path.parents):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, **options)

    monkeypatch.setattr(Path, "stat", denied)
    assert dry(tmp_path, "--load", str(closed)) == 4
    assert "closed: cannot read: Permission denied" in capsys.readouterr().err


def write_masks(path: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    """A mask file whose own headers agree, for tensors of these shapes."""
    arrays = {"masks": np.array([1, len(shapes)])}
    for name, shape in shapes.items():
        arrays[f"shape/{name}"] = np.array(shape)
        arrays[f"bits/{name}"] = np.full(packed_bytes(shape), 255, np.uint8)
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    return path


def config_of(world: int, *flags: str) -> GPTConfig:
    paths = pretrain_gpt.GRADIENT_PATHS
    return resolve(parse([*TINY.split(), *flags], paths=paths), world)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("layers.0.mlp.dense_h_to_4h.weight", (128, 32), ""),
        ("embedding.word_embeddings.weight", (96, 32), ""),
        ("embedding.word_embeddings.weight", (97, 32), "shape [97, 32], the model in [96, 32]"),
        ("layers.0.mlp.dense_h_to_4h.weight", (4, 4), "shape [4, 4], the model in [128, 32]"),
        ("layers.2.mlp.dense_h_to_4h.weight", (128, 32), "the mask is of another model"),
        ("layers.1.input_norm.weight", (32,), "biases and norms are never pruned"),
    ],
)
def test_masks_are_compared_with_the_model(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    shape: tuple[int, ...],
    words: str,
) -> None:
    masks = write_masks(tmp_path / "masks.npz", {name: shape})
    flags = ("--grad-path", "samo", "--samo-pruning", "file", "--samo-mask-file", str(masks))
    assert dry(tmp_path, *flags) == (3 if words else 0)
    said = capsys.readouterr().err
    assert words in said and (not words or f"masks {name}" in said)


def test_masks_whose_model_is_unknown_are_compared_with_themselves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tokenizer of the hub is not downloaded for a dry run."""
    masks = write_masks(tmp_path / "masks.npz", {"any": (3, 5)})
    check_mask_file(masks, None)
    flags = ("--grad-path", "samo", "--samo-pruning", "file", "--samo-mask-file", str(masks))
    hub = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "some-name")
    assert dry(tmp_path, *flags, *hub, "--vocab-size", "none") == 0
    assert dry(tmp_path, *flags) == 3
    assert "masks any, of which the model has none" in capsys.readouterr().err


def test_the_shapes_of_a_model_do_not_depend_on_the_grid() -> None:
    grid = ("--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "2")
    path = pretrain_gpt.GRADIENT_PATHS["dense"]
    shapes = logical_shapes(config_of(1), path, vocabulary=95)
    assert shapes["embedding.word_embeddings.weight"] == (95, 32)
    assert logical_shapes(config_of(4, *grid), path, vocabulary=95) == shapes


@pytest.mark.parametrize("ids", [2, 3, 4])
@pytest.mark.parametrize("source", ["sidecar", "tokenizer"])
def test_every_tensor_parallel_rank_has_a_token(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    source: str,
    ids: int,
) -> None:
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    prefix = write_pair(tmp_path / "d", [40])
    flags = ["--tensor-model-parallel-size", "4", "--vocab-size", "none"]
    if source == "sidecar":
        write_sidecar(prefix, {"vocab_size": ids, "eod": 0})
    else:
        flags += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(ids - 1)]
    data = f"--data-path {prefix}"
    assert dry(tmp_path, *flags, data=data) == (2 if ids < 4 else 0)
    words = f"vocab_size {ids} is less than tensor_model_parallel_size 4"
    assert (words in capsys.readouterr().err) == (ids < 4)
    assert dry(tmp_path, *flags, "--check-paths", "false", data=data) == 0
