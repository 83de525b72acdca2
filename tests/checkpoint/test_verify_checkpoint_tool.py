"""The tool reports checkpoints briefly, with the right exit code and without torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.find import ENVIRONMENT, SAVE, CommittedStep, verify_committed
from megatron.checkpoint.format import Manifest
from megatron.checkpoint.store import LocalShard, of_rank, save_checkpoint, whole
from tools import verify_checkpoint

TOOL = Path(__file__).resolve().parents[2] / "tools" / "verify_checkpoint.py"


def tool(*arguments: Path | str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, str(TOOL), *map(str, arguments)], capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def run(tmp_path: Path) -> Path:
    mask = torch.tensor([[True, False], [False, True]])
    pending = LocalShard("residual/w", torch.ones(2), (2, 2), (0, 0), (2, 2), mask="mask/w")
    shards = [
        whole("param/w", torch.zeros(2, 2)),
        whole("mask/w", mask),
        of_rank(pending, data_parallel_rank=0, data_parallel_size=1),
    ]
    for step in (1, 2):
        save_checkpoint(tmp_path / "checkpoints", step=step, tensors=shards, state={})
    return tmp_path


def test_a_good_one(run: Path) -> None:
    folder = run / "checkpoints"
    for path in (run, folder, folder / "step_00000002"):
        code, out, err = tool(path, "--verbose")
        assert (code, err) == (0, "")
        assert "step 2 verifies: 3 tensors in 1 files" in out
        rows = [line.split(maxsplit=5) for line in out.splitlines()]
        assert ["param/w", "F32", "2x2", "1", "1", "whole boxes"] in rows
        assert ["mask/w", "BOOL", "2x2", "1", "1", "bits"] in rows
        stored = "per data-parallel rank, where mask/w"
        assert ["residual/w", "F32", "1x2x2", "1", "1", stored] in rows


def test_a_run_is_checked_where_it_saves(run: Path, tmp_path: Path) -> None:
    saved = tmp_path / "disk"
    shutil.copytree(run / "checkpoints" / "step_00000002", saved / "step_00000002")
    (run / ENVIRONMENT).write_text(json.dumps({SAVE: str(saved)}))
    code, out, err = tool(run)
    assert (code, out.count("\n"), err) == (0, 1, "") and out.startswith(f"{saved}/step_00000002")


def test_a_step_is_one_line_unless_more_is_asked_for(run: Path) -> None:
    code, out, err = tool(run)
    assert (code, out.count("\n"), err) == (0, 2, "")
    assert tool(run, "--quiet") == (code, out, err)
    assert tool(run, "--quiet", "--verbose")[0] == 2


def test_a_damaged_one_is_exit_4_and_one_line(run: Path) -> None:
    path = run / "checkpoints" / "step_00000002" / "rank_00000.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    code, out, err = tool(run)
    assert code == 4 and "step 1 verifies" in out
    assert err.count("\n") == 1 and str(path) in err


def remove_while_read(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let the run remove these steps each time before they are read."""

    def verify(step: CommittedStep) -> Manifest:
        if step.path.name in names:
            shutil.rmtree(step.path)
        return verify_committed(step)

    monkeypatch.setattr(verify_checkpoint, "verify_committed", verify)


def test_a_step_that_the_run_removes_meanwhile_is_no_failure(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run / "checkpoints"
    remove_while_read(monkeypatch, "step_00000001")
    assert verify_checkpoint.main([str(run)]) == 0
    removed, verifies = capsys.readouterr().out.splitlines()
    assert removed == f"{folder / 'step_00000001'}: removed meanwhile, not checked"
    assert "step 2 verifies" in verifies
    # Nothing that verifies is no success.
    remove_while_read(monkeypatch, "step_00000002")
    assert verify_checkpoint.main([str(run)]) == 4
    assert "every checkpoint was removed meanwhile" in capsys.readouterr().err


def test_set_aside_ones_are_told(run: Path) -> None:
    folder = run / "checkpoints"
    (folder / "step_00000002").rename(folder / "step_00000002.damaged-1")
    code, out, _ = tool(run)
    assert code == 0 and "damaged-1: set aside" in out
    (folder / "step_00000001").rename(folder / "step_00000001.damaged-1")
    code, _, err = tool(run)
    assert code == 4 and "set aside" in err


def test_wrong_use(tmp_path: Path) -> None:
    assert tool()[0] == 2
    assert tool("a", "b")[0] == 2
    for path in (tmp_path, tmp_path / "none"):
        code, out, err = tool(path)
        assert (code, out, err.count("\n")) == (4, "", 1)
    (tmp_path / "model.pt").write_bytes(b"\x80\x02")
    code, _, err = tool(tmp_path / "model.pt")
    assert code == 4 and "is a pickle" in err


def test_it_needs_neither_torch_nor_numpy(run: Path) -> None:
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['verify_checkpoint.py', {str(run)!r}]\n"
        "try:\n"
        f"    runpy.run_path({str(TOOL)!r}, run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0\n"
        "assert not {'torch', 'numpy', 'safetensors'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
