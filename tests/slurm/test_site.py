"""Tests of a site of one's own: its modules come before Python, and its flags reach srun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import LIMIT
from tests.slurm.harness import OURS, REPO

pytestmark = pytest.mark.push

MODULE = """
module() {
  for name in "${@:2}"; do
    if [[ $name != python/3 ]]; then echo "cannot find $name" >&2; return 1; fi
  done
  PATH=%s:$PATH LOADEDMODULES=python/3
  export PATH LOADEDMODULES
}
"""
CONTAINER = "--container-image=/images/torch.sqsh --container-mounts=/scratch:/scratch"


def started(
    folder: Path, script: str, *arguments: str, modules: str, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of a copy that has the site `mine`, whose modules alone bring a Python."""
    copy, brought = folder / "repo", folder / "brought"
    shutil.copytree(REPO / "scripts", copy / "scripts", dirs_exist_ok=True)
    settings = f"srun_flags=({CONTAINER})\nmodules=({modules})\n"
    (copy / "scripts" / "site" / "mine.env").write_text(settings)
    (copy / "pretrain_gpt.py").touch()
    if not brought.exists():
        (copy / "megatron").symlink_to(REPO / "megatron")
        brought.mkdir()
        (brought / "python-of-a-module").symlink_to(sys.executable)
    init = folder / "init" / "bash"
    init.parent.mkdir(exist_ok=True)
    init.write_text(MODULE % brought)
    env = {k: v for k, v in os.environ.items() if not k.startswith((*OURS, "BASH_FUNC_module"))}
    env |= {"SITE": "mine", "PYTHON": "python-of-a-module", "MODULESHOME": str(folder)}
    env |= {"PROGRAM": str(REPO / "tests" / "slurm" / "stub.py"), "RUN_DIR": str(folder / "run")}
    command = [str(copy / "scripts" / script), *arguments]
    return subprocess.run(
        command, env=env | more, cwd=folder, capture_output=True, text=True, timeout=LIMIT
    )


@pytest.mark.parametrize("launcher", ["srun", "sbatch"])
def test_modules_are_loaded_before_python_is_called(launcher: str, tmp_path: Path) -> None:
    dry = ("launch.sh", "--dry-run")
    shown = started(tmp_path, *dry, modules="python/3", LAUNCHER=launcher)
    assert shown.returncode == 0, shown.stderr
    if launcher == "srun":
        assert "common.sh\nload_modules python/3\n" in shown.stdout
        assert f" {CONTAINER} python-of-a-module " in shown.stdout
    else:
        assert "job.sh first loads the modules of SITE=mine: python/3\n" in shown.stdout
    for modules, words in (
        ("python/3 cuda/0", "launch.sh: module load python/3 cuda/0: cannot find cuda/0"),
        ("", "PYTHON=python-of-a-module: not found"),
    ):
        refused = started(tmp_path, *dry, modules=modules, LAUNCHER=launcher)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert words in refused.stderr and refused.stderr.count("\n") == 1


def test_modules_without_a_module_command_are_refused(tmp_path: Path) -> None:
    hidden = {"MODULESHOME": str(tmp_path / "nowhere"), "LMOD_PKG": "", "MODULEPATH": ""}
    refused = started(tmp_path, "launch.sh", modules="absent/0", LAUNCHER="local", **hidden)
    assert (refused.returncode, refused.stdout) == (2, "")
    # A machine of Debian's may have the command, which then does not know the module.
    assert "absent/0" in refused.stderr and refused.stderr.count("\n") == 1


def test_a_job_loads_the_modules_first(tmp_path: Path) -> None:
    log_dir = tmp_path / "run" / "logs"
    log_dir.mkdir(parents=True)
    job = {"SLURM_JOB_ID": "1", "LOG_DIR": str(log_dir), "LAUNCHER": "local"}
    call = ("job.sh", "--", "--plan", "0")
    done = started(tmp_path, *call, modules="python/3", **job)
    assert done.returncode == 0, done.stderr
    assert ", Python 3." in done.stderr and "modules python/3\n" in done.stderr
    refused = started(tmp_path, *call, modules="cuda/0", **job)
    line = "job.sh: module load cuda/0: cannot find cuda/0\n"
    assert (refused.returncode, refused.stderr) == (2, line)
