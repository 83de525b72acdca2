"""Run folders that hold a run already, and files of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from megatron.config import parse, resolve, to_yaml
from megatron.errors import ConfigError
from megatron.run_dir import CONFIG
from megatron.status import Status, write_status
from pretrain_gpt import GRADIENT_PATHS
from tools.bench.common.rows import append_row, read_rows
from tools.bench.common.training_runs import is_finished

FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --mock-data "
    "--micro-batch-size 2 --global-batch-size 2 --lr 1e-3 --train-iters 20"
).split()


def finish(folder: Path, *, state: Literal["done", "left"] = "done", last: int = 20) -> Path:
    """Write the folder of a run that took steps up to `last`."""
    folder.mkdir()
    flags = [*FLAGS, "--run-dir", "elsewhere"]
    (folder / CONFIG).write_text(to_yaml(resolve(parse(flags, paths=GRADIENT_PATHS), 1)))
    write_status(folder, Status(state=state, exit_code=0, iteration=last))
    return folder


def test_a_finished_run_is_told_from_one_that_is_not(tmp_path: Path) -> None:
    assert not is_finished(tmp_path / "none", FLAGS, 1)
    assert not is_finished(finish(tmp_path / "left", state="left", last=10), FLAGS, 1)
    assert not is_finished(finish(tmp_path / "shorter", last=10), FLAGS, 1)
    done = finish(tmp_path / "done")
    assert is_finished(done, FLAGS, 1)
    (done / CONFIG).unlink()
    assert not is_finished(done, FLAGS, 1)


def test_a_folder_of_other_settings_is_no_substitute(tmp_path: Path) -> None:
    folder = finish(tmp_path / "done")
    with pytest.raises(ConfigError, match="other settings: optimizer; .*another --work"):
        is_finished(folder, [*FLAGS, "--adam-beta2", "0.95"], 1)
    with pytest.raises(ConfigError, match="training"):
        is_finished(folder, [*FLAGS, "--global-batch-size", "4"], 1)


def test_a_torn_line_of_a_file_of_rows_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append_row(path, {"name": "a", "seed": 1})
    with open(path, "a") as stream:
        stream.write('{"name": "torn')
    append_row(path, {"name": "b", "seed": 2})
    append_row(path, {"name": "a", "seed": 3})
    assert [(row["name"], row["seed"]) for row in read_rows(path)] == [("a", 3), ("b", 2)]
