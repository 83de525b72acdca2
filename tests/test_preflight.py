"""A dry run finds a wrong path at once, with the exit code that the run itself would leave with."""

from __future__ import annotations

from pathlib import Path

import pytest

import pretrain_gpt
from tests.training.harness import TINY


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
