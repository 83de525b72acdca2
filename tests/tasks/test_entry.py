"""Launcher, dry run, status and verification take the script of any task."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import program
from tests.limits import LIMIT
from tests.program import REPO, WITHOUT_PICTURES
from tests.sweep.asking import LAUNCHERS
from tests.tasks.toy import TOY

pytestmark = pytest.mark.push

PATH = f"{WITHOUT_PICTURES}:{REPO}"
TOY_SCRIPT = "tests/tasks/toy.py"
SHORT = "--micro-batch-size 4 --global-batch-size 8 --train-iters 2 --lr 0.01 --device cpu"


def launch(folder: Path, flags: str, *, dry: bool = False, **variables: str):
    """`scripts/launch.sh` in a folder, with these variables."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    known = {"PYTHON": sys.executable, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"}
    command = [str(REPO / "scripts" / "launch.sh"), *["--dry-run"] * dry, "--", *flags.split()]
    return subprocess.run(
        command,
        cwd=folder,
        env=kept | known | variables,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_the_launcher_starts_the_script_that_it_is_told(tmp_path: Path, ranks: str) -> None:
    done = launch(tmp_path, SHORT, ENTRY=TOY_SCRIPT, RANKS_PER_NODE=ranks)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "toy"
    assert (run / "report.html").is_file()
    for tool in ("status.py", "verify_checkpoint.py", "report.py"):
        command = [sys.executable, str(REPO / "tools" / tool), str(run)]
        env = os.environ | {"PYTHONPATH": PATH}
        told = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)
        assert told.returncode == 0, told.stderr
    assert (
        (run / "config.yaml").read_text().startswith("# All settings of a run of pretrain_toy.py;")
    )


def test_the_first_line_of_the_configuration_may_name_the_script(tmp_path: Path) -> None:
    (tmp_path / "new.yaml").write_text("# pretrain_nothing.py: a task without a script\nlr: 1.0\n")
    done = launch(tmp_path, "", dry=True, CONFIG="new.yaml", RANKS_PER_NODE="1")
    assert done.returncode == 2
    assert f"ENTRY=pretrain_nothing.py: no such script in {REPO}" in done.stderr
    # The variable wins.
    done = launch(
        tmp_path, SHORT, dry=True, CONFIG="new.yaml", RANKS_PER_NODE="1", ENTRY=TOY_SCRIPT
    )
    assert done.returncode == 0, done.stderr
    assert f"{TOY_SCRIPT} --config new.yaml --run-dir runs/new" in done.stdout


def run_toy(*flags: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    env = kept | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    return program.run(REPO / TOY_SCRIPT, flags, env=env, cwd=REPO)


def test_mistakes_and_usage_are_those_of_the_task(tmp_path: Path) -> None:
    usage = run_toy()
    assert usage.returncode == 2 and "usage: pretrain_toy.py --config FILE" in usage.stderr
    assert "ENTRY=pretrain_toy.py RANKS_PER_NODE=4 CONFIG=FILE scripts/launch.sh" in usage.stderr
    wrong = run_toy(*TOY.split(), "--seq-length", "8")
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1
    assert "--seq-length: no such flag" in wrong.stderr
    helped = run_toy("--help")
    assert helped.returncode == 0 and "--width N" in helped.stdout
    assert "--hidden-size" not in helped.stdout
    dry = run_toy(*TOY.split(), "--dry-run", "--load", str(tmp_path))
    assert dry.returncode == 4 and "no checkpoint" in dry.stderr
