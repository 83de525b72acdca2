"""Tests of the ranks that quickstart.sh starts, with stand-ins for Python and nvidia-smi."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.limits import LIMIT
from tests.slurm.harness import OURS

pytestmark = pytest.mark.push

REPO = Path(__file__).resolve().parents[2]
PYTHON = """#!/bin/sh
echo "$*" >>"$CALLS"
case $1 in
  tools/quickstart_steps.py) echo 4 2 2 0 ;;
esac
"""


def calls(folder: Path, gpus: int, capability: str, **more: str) -> list[str]:
    """Return the command lines that quickstart.sh gave to Python."""
    programs = {
        "venv/bin/python": PYTHON,
        "venv/bin/pip": "#!/bin/sh\n",
        "bin/nvidia-smi": "#!/bin/sh\n"
        f'for i in $(seq {gpus}); do case $1 in -L) echo "GPU $i: H100" ;; '
        f"*) echo {capability} ;; esac; done\n",
    }
    for name, text in programs.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    hidden = (*OURS, "CUDA_VISIBLE_DEVICES", "RANKS", "STEPS", "ENTRY", "PROGRAM")
    env = {name: text for name, text in os.environ.items() if not name.startswith(hidden)}
    env |= {"PATH": f"{folder / 'bin'}:{env['PATH']}", "CALLS": str(folder / "calls")}
    env |= {"VENV": str(folder / "venv"), "DATA": str(folder / "data"), "PYTHON": ""}
    env |= {"RUN_DIR": str(folder / "runs"), **more}
    script = str(REPO / "scripts" / "quickstart.sh")
    done = subprocess.run([script], env=env, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return (folder / "calls").read_text().splitlines()


def trainings(lines: list[str]) -> list[str]:
    """Return the command lines that start ranks."""
    return [line for line in lines if "--grad-path" in line and "--dry-run" not in line]


@pytest.mark.parametrize(
    ("visible", "ranks"), [(None, 2), ("2", 1), ("0,3", 2), ("", 2), ("NoDevFiles", 2)]
)
def test_only_visible_gpus_are_counted(visible: str | None, ranks: int, tmp_path: Path) -> None:
    cpu_has = bool(re.search("avx512_bf16|amx_bf16", Path("/proc/cpuinfo").read_text()))
    on_cpu = visible in ("", "NoDevFiles")
    # The GPUs differ from the processor, so that it shows which of them was asked.
    gpus_have = not cpu_has
    more = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    lines = calls(tmp_path, 4, "9.0" if gpus_have else "7.0", **more)
    started = trainings(lines)
    assert len(started) == 2
    for line in started:
        assert ("--nproc-per-node 2" in line) == (ranks == 2), line
        assert ("--bf16" in line) == (cpu_has if on_cpu else gpus_have), line
    # torch must fit the machine's driver, whichever of its GPUs this start sees.
    (install,) = [line for line in lines if line.startswith("-m pip install")]
    assert "constraints.txt" not in install


def test_settings_of_other_launches_are_not_for_the_quickstart(tmp_path: Path) -> None:
    other = {
        "SITE": "perlmutter",
        "LAUNCHER": "sbatch",
        "ENTRY": "pretrain_vision.py",
        "PROGRAM": "/nowhere/train.py",
        "TIME": "soon",
    }
    started = trainings(calls(tmp_path, 0, "", **other))
    assert len(started) == 2
    for line in started:
        assert line.startswith("-m torch.distributed.run ") and "/pretrain_gpt.py --config" in line
