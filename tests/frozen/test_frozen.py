"""Checkpoints written by an earlier version verify, hold the same bits and can be resumed.

`tests/frozen/write.py` wrote them. A failure means that an existing run could not be resumed with
the present code.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.store import Checkpoint
from megatron.checkpoint.verify import verify_folder
from megatron.config import parse, resolve
from pretrain_gpt import GRADIENT_PATHS
from tests.frozen.cases import (
    FLAGS,
    FOLDER,
    RUNS,
    SAVED_AT,
    STEPS,
    TABLE,
    WORLD,
    Expected,
    checkpoint_of,
    hashes,
    on_rank,
)
from tests.ranks import Ranks

EXPECTED: Expected = json.loads(TABLE.read_text(encoding="utf-8"))
BY_RANK = ("topk", "powersgd", "lowrank-sparse", "demo", "diloco")
"""Each rank compresses its own gradient or takes steps of its own, so that losses depend on the
number of ranks."""


def test_every_gradient_path_has_a_frozen_checkpoint() -> None:
    frozen = {
        parse(["--config", str(FOLDER / name / "config.yaml")], paths=GRADIENT_PATHS).gradient
        for name in RUNS
    }
    assert {gradient.grad_path for gradient in frozen} == GRADIENT_PATHS.keys()
    assert EXPECTED.keys() == RUNS.keys()


@pytest.mark.parametrize("name", RUNS)
def test_it_verifies_and_holds_the_same_bits(name: str) -> None:
    manifest = verify_folder(checkpoint_of(FOLDER / name))
    assert (manifest.step, manifest.world["size"]) == (SAVED_AT, WORLD)
    assert hashes(checkpoint_of(FOLDER / name)) == EXPECTED[name]["tensors"]


@pytest.mark.parametrize("name", RUNS)
def test_its_configuration_is_that_of_the_same_flags(name: str) -> None:
    """Every value of the file is still read under its old key."""
    file = ["--config", str(FOLDER / name / "config.yaml"), "--device", "cpu"]
    there = parse(file, paths=GRADIENT_PATHS)
    flags = parse([*FLAGS.split(), *RUNS[name].split()], paths=GRADIENT_PATHS)
    assert resolve(there, WORLD).values() == resolve(flags, WORLD).values()


RESIDUALS = ("radius", "radius-rolling", "samo-radius", "topk", "powersgd", "lowrank-sparse")


@pytest.mark.parametrize("name", [*RESIDUALS, "roundrobin"])
def test_residuals_are_in_it(name: str) -> None:
    with Checkpoint.open(checkpoint_of(FOLDER / name)) as saved:
        assert any(saved.read(each).any() for each in saved.names("residual/"))


@pytest.mark.parametrize("name", ["samo", "samo-radius"])
def test_masks_are_in_it(name: str) -> None:
    with Checkpoint.open(checkpoint_of(FOLDER / name)) as saved:
        masks = [each for each in saved.names() if saved.dtype(each) == torch.bool]
        assert masks and any(saved.mask(each) in masks for each in saved.names())


@pytest.mark.parametrize("world", [WORLD, 1])
@pytest.mark.parametrize("name", RUNS)
def test_training_goes_on(ranks: Ranks, tmp_path: Path, name: str, world: int) -> None:
    run_dir = tmp_path / name
    shutil.copytree(FOLDER / name, run_dir)
    flags = f"--config {run_dir / 'config.yaml'} --device cpu"
    losses = ranks.run(world, on_rank, flags, run_dir)[0]
    assert list(losses) == list(range(SAVED_AT + 1, STEPS + 1))
    tolerance = 1e-4
    if name == "offload":
        # Kinds of CPUs differ in whether they round the products of bf16 numbers to bf16.
        tolerance = 1e-3
    if world != WORLD and name in BY_RANK:
        tolerance = 0.05
    assert list(losses.values()) == pytest.approx(EXPECTED[name]["losses"], rel=tolerance)


def test_the_files_name_no_path_and_stay_small() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    kept = {path: path.read_bytes() for path in files if path.suffix not in (".py", ".pyc")}
    assert sum(map(len, kept.values())) < 3 << 19
    texts = {path: text for path, text in kept.items() if path.suffix in (".json", ".yaml")}
    assert texts
    assert not [path for path, text in texts.items() if re.search(rb"[\"' ]/[A-Za-z]", text)]
