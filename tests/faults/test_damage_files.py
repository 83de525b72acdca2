"""Tests of damage to the files of a real run's checkpoints.

Damage is detected and named, the newest good checkpoint is used, and a run never starts from
scratch by mistake.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.find import find_checkpoint
from megatron.errors import CheckpointError
from megatron.parallel.groups import ProcessGroups
from tests import program
from tests.faults.starting import REPO, SCRIPT, environment
from tests.limits import LIMIT
from tests.ranks import Ranks
from tests.training.harness import TINY, make_trainer, metrics_of, train

FLAGS = f"{TINY} --bf16 --lr-decay-style constant --save-interval 2"
FLIPS = 100
NEWEST, BEFORE = "step_00000008", "step_00000006"
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def real_run(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run eight steps on two ranks, saving after every second step. Tests use copies."""
    folder = tmp_path_factory.mktemp("real") / "run"
    ranks.run(2, train, FLAGS, folder)
    return folder


@pytest.fixture
def run(real_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(real_run, tmp_path / "run")
    return tmp_path / "run"


def look(run: Path, *, repair: bool = False) -> tuple[str, str]:
    """Return the name of the step that a new start would load, and its messages."""
    said: list[str] = []
    found = find_checkpoint(run, log=said.append, repair=repair)
    assert found is not None
    return found.name, "\n".join(said)


def flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def test_each_of_100_flipped_bits(run: Path, record_property: Record) -> None:
    """The step of a file is the newest step present while one of its bits is flipped."""
    draw = random.Random(2026)
    steps = sorted((run / "checkpoints").glob("step_*"))
    files = sorted(path for path in (run / "checkpoints").rglob("*") if path.is_file())
    assert len(steps) == 4 and len(files) == 1 + 4 * 3
    for trial in range(FLIPS):
        path = files[trial % len(files)]
        newer = [step for step in steps if path.parent in steps and step > path.parent]
        for step in newer:
            step.rename(run / step.name)
        good = path.read_bytes()
        flip(path, draw)
        if path.parent == steps[0]:
            with pytest.raises(CheckpointError, match="in it verifies: step_00000002"):
                look(run)
        elif path.parent in steps:
            name, said = look(run)
            assert name == steps[steps.index(path.parent) - 1].name and f"not used: {path}" in said
        else:
            name, said = look(run)
            assert name == NEWEST and "latest: says" in said
        path.write_bytes(good)
        for step in newer:
            (run / step.name).rename(step)
    assert look(run) == (NEWEST, "")
    told(record_property, "one flipped bit in a file of a checkpoint", FLIPS)


def told(record: Record, fault: str, trials: int) -> None:
    for key, value in (("fault", fault), ("trials", trials), ("recovered", trials)):
        record(key, value)


def cut_short(folder: Path) -> Path:
    path = folder / "rank_00001.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    return path


def empty(folder: Path) -> Path:
    path = folder / "rank_00000.safetensors"
    path.write_bytes(b"")
    return path


def empty_manifest(folder: Path) -> Path:
    path = folder / "manifest.json"
    path.write_bytes(b"")
    return path


def without_manifest(folder: Path) -> Path:
    (folder / "manifest.json").unlink()
    return folder


def without_a_file(folder: Path) -> Path:
    path = folder / "rank_00001.safetensors"
    path.unlink()
    return path


def with_one_more(folder: Path) -> Path:
    return Path(shutil.copy(folder / "rank_00001.safetensors", folder / "rank_00002.safetensors"))


def of_another_step(folder: Path) -> Path:
    name = "rank_00001.safetensors"
    return Path(shutil.copy(folder.with_name(BEFORE) / name, folder / name))


def files_exchanged(folder: Path) -> Path:
    first, second = folder / "rank_00000.safetensors", folder / "rank_00001.safetensors"
    first.rename(folder / "x")
    second.rename(first)
    (folder / "x").rename(second)
    return first


def under_another_name(folder: Path) -> Path:
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name(BEFORE), folder)
    return folder / "manifest.json"


def a_link(folder: Path) -> Path:
    path = folder / "rank_00000.safetensors"
    path.rename(folder.parent.parent / "moved")
    path.symlink_to(folder.parent.parent / "moved")
    return path


DAMAGES = [
    cut_short, empty, empty_manifest, without_manifest, without_a_file, with_one_more,
    of_another_step, files_exchanged, under_another_name, a_link,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_one(
    run: Path, damage: Callable[[Path], Path], record_property: Record
) -> None:
    path = damage(run / "checkpoints" / NEWEST)
    name, said = look(run, repair=True)
    assert name == BEFORE and str(path) in said
    assert f"{NEWEST} is now {NEWEST}.damaged-1" in said
    assert look(run) == (BEFORE, "")
    told(record_property, f"checkpoint {damage.__name__.replace('_', ' ')}", 1)


@pytest.mark.parametrize(
    "hint", [b"", b"abc", b"step_00000099\n", b"step_00000002\n", b"/etc", b"\xff\0" * 999, None]
)
def test_a_hint_that_lies(run: Path, hint: bytes | None, record_property: Record) -> None:
    path = run / "checkpoints" / "latest"
    path.unlink() if hint is None else path.write_bytes(hint)
    name, said = look(run, repair=True)
    assert name == NEWEST and str(path) in said and NEWEST in said
    assert look(run) == (NEWEST, "")
    told(record_property, "`latest` empty, alien, stale or missing", 1)


@pytest.mark.waits
def test_after_damage_the_run_comes_to_the_same_end(
    ranks: Ranks, real_run: Path, run: Path
) -> None:
    """One interval is repeated, bit by bit."""
    flip(run / "checkpoints" / NEWEST / "rank_00000.safetensors", random.Random(1))
    more = f"{FLAGS} --train-iters 10"
    (again, _) = ranks.run(2, train, more, run)
    shutil.copytree(real_run, run.with_name("good"))
    (good, _) = ranks.run(2, train, more, run.with_name("good"))
    assert all(torch.equal(again["state"][name], good["state"][name]) for name in good["state"])
    assert metrics_of(run) == metrics_of(run.with_name("good"))
    assert (run / "checkpoints" / f"{NEWEST}.damaged-1").is_dir()
    verify = [sys.executable, str(REPO / "tools" / "verify_checkpoint.py"), str(run)]
    done = subprocess.run(verify, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0 and "set aside as damaged" in done.stdout


def on_rank_refused(groups: ProcessGroups, run_dir: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        make_trainer(groups, FLAGS, run_dir)
    return str(caught.value)


@pytest.mark.waits
@pytest.mark.push
def test_none_good_is_exit_4_and_never_a_fresh_start(
    ranks: Ranks, run: Path, record_property: Record
) -> None:
    steps = sorted((run / "checkpoints").glob("step_*"))
    for number, folder in enumerate(steps):
        DAMAGES[number](folder)
    metrics = (run / "metrics.jsonl").read_bytes()
    for text in ranks.run(2, on_rank_refused, run):
        assert "no checkpoint in it verifies" in text
    argv = [*FLAGS.split(), "--run-dir", str(run)]
    done = program.run(SCRIPT, argv, env=environment(), cwd=run)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 4 and all(folder.name in line for folder in steps)
    assert (run / "metrics.jsonl").read_bytes() == metrics and "lm loss" not in done.stdout
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 4)
    assert sorted((run / "checkpoints").glob("step_*")) == steps
    told(record_property, "no checkpoint is good: exit 4", 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give folders away")
@pytest.mark.parametrize("part", ["checkpoints", f"checkpoints/{NEWEST}"])
def test_a_folder_that_anyone_may_write_into_is_refused(run: Path, part: str) -> None:
    folder = run / part
    os.chmod(folder, 0o777)
    assert find_checkpoint(folder, log=lambda text: None) is not None
    os.chown(folder, 12345, -1)
    with pytest.raises(CheckpointError, match="belongs to user 12345 and anyone may write"):
        find_checkpoint(folder, log=lambda text: None)
    os.chmod(folder, 0o755)
    assert find_checkpoint(folder, log=lambda text: None) is not None
