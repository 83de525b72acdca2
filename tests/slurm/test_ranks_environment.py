"""Tests of what launch.sh tells ranks: how many threads they have, and where they meet."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.limits import LIMIT
from tests.slurm.harness import OURS, REPO

pytestmark = pytest.mark.push

SHOW = 'echo "threads ${OMP_NUM_THREADS-none}, master ${MASTER_ADDR-none}"'
TWO_NODES = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[7-8]"}
SLURM = {
    "hostname": "echo login",
    "squeue": "exit 1",
    "scontrol": "case $2 in hostnames) printf 'node7\\nnode8\\n' ;; "
    '*) echo "   NodeAddr=$ADDRESS NodeHostName=$3 Version=23.02" ;; esac',
    "getent": 'case $RESOLVES in yes) echo "10.1.1.1 $2" ;; *) exit 2 ;; esac',
}


def told(folder: Path, programs: dict[str, str], *arguments: str, **more: str) -> str:
    """Return what launch.sh says, and a rank's threads and meeting place as it would see them."""
    programs = {"python": SHOW, "srun": SHOW, "mpiexec": SHOW, **programs}
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    env = {name: text for name, text in os.environ.items() if not name.startswith(OURS)}
    env |= {"PATH": f"{folder}:{env['PATH']}", "PYTHON": str(folder / "python")}
    env |= {"PROGRAM": "train.py", "RUN_DIR": str(folder / "run"), "OMP_NUM_THREADS": "", **more}
    env["MPIEXEC"] = str(folder / "mpiexec")
    command = [str(REPO / "scripts" / "launch.sh"), *arguments]
    done = subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    return done.stderr + done.stdout


@pytest.mark.parametrize(("locks", "place"), [("exit 0", "/here/"), ("exit 1", "/dev/shm/")])
def test_torchrun_meets_in_a_file_where_files_can_be_locked(
    tmp_path: Path, locks: str, place: str
) -> None:
    (tmp_path / "here").mkdir()
    more = {"LAUNCHER": "torchrun", "RANKS_PER_NODE": "2", "TMPDIR": str(tmp_path / "here")}
    said = told(tmp_path, {"flock": locks}, **more)
    assert re.search(rf"--rdzv-endpoint \S*{place}\S*/agent ", said), said
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize(
    ("launcher", "ranks", "more", "threads"),
    [
        ("local", "1", {}, "64"),
        ("torchrun", "4", {}, "16"),
        ("torchrun", "99", {}, "1"),
        # One task of the allocation has all cores; ranks share them.
        ("local", "1", {"SLURM_CPUS_PER_TASK": "64"}, "64"),
        ("torchrun", "4", {"SLURM_CPUS_PER_TASK": "64"}, "16"),
        ("mpiexec", "4", {"SLURM_CPUS_PER_TASK": "64"}, "16"),
        # A job on some of the cores, where Slurm binds nobody to them.
        ("torchrun", "4", {"SLURM_CPUS_ON_NODE": "32"}, "8"),
        ("srun", "4", {"SLURM_CPUS_PER_TASK": "6", "CPUS_PER_TASK": "4"}, "6"),
        ("srun", "4", {"SLURM_JOB_ID": "7"}, "16"),
        ("srun", "4", {"SLURM_JOB_ID": "7", "CPUS_PER_TASK": "4"}, "4"),
        # On a login node, whose cores say nothing of those that srun will bring.
        ("srun", "4", {"CPUS_PER_TASK": "4"}, "4"),
        ("srun", "4", {}, "none"),
    ],
)
def test_threads_are_those_of_the_cores_of_a_rank(
    launcher: str, ranks: str, more: dict[str, str], threads: str, tmp_path: Path
) -> None:
    programs = {"nproc": "echo 64", "squeue": "exit 1"}
    more = {"LAUNCHER": launcher, "RANKS_PER_NODE": ranks, **more}
    assert f"\nthreads {threads}, " in told(tmp_path, programs, **more)
    shown = told(tmp_path, programs, "--dry-run", **more)
    if threads == "none":
        assert "OMP_NUM_THREADS" not in shown and "as many as cores thread(s) each" in shown
    else:
        assert f"\nexport OMP_NUM_THREADS={threads}\n" in shown


@pytest.mark.parametrize("launcher", ["srun", "mpiexec"])
@pytest.mark.parametrize(("nodes", "job", "master"), [("2", "2", "node7"), ("2", "4", "none")])
def test_ranks_on_some_nodes_of_a_job_find_the_first_by_themselves(
    launcher: str, nodes: str, job: str, master: str, tmp_path: Path
) -> None:
    more = TWO_NODES | {"NODES": nodes, "SLURM_JOB_NUM_NODES": job, "LAUNCHER": launcher}
    said = told(tmp_path, SLURM, **more, RANKS_PER_NODE="1", ADDRESS="node7", RESOLVES="yes")
    assert f", master {master}\n" in said


@pytest.mark.parametrize(
    ("resolves", "address", "here", "master", "words"),
    [
        ("yes", "10.0.0.7", "login", "node7", ""),
        ("no", "10.0.0.7", "login", "10.0.0.7", "node7 does not resolve here"),
        ("no", "10.0.0.7", "node7", "10.0.0.7", "node7 does not resolve here"),
        ("yes", "node7", "node7", "node7", ""),
        ("yes", "10.0.0.7", "node7", "10.0.0.7", "node7 is this node"),
        ("yes", "", "node7", "node7", ""),
        ("no", "", "node7", "none", ""),
    ],
)
@pytest.mark.parametrize("by", ["hostname", "SLURMD_NODENAME"])
def test_the_first_node_is_not_asked_for_its_own_name(
    resolves: str, address: str, here: str, master: str, words: str, by: str, tmp_path: Path
) -> None:
    """/etc/hosts of a node names the node itself, and perhaps no other."""
    programs = SLURM | ({"hostname": f"echo {here}"} if by == "hostname" else {})
    more = TWO_NODES | ({by: here} if by != "hostname" else {})
    more |= {"LAUNCHER": "srun", "NODES": "2", "RANKS_PER_NODE": "1"}
    said = told(tmp_path, programs, **more, RESOLVES=resolves, ADDRESS=address)
    assert f", master {master}\n" in said
    assert words in said and ("ranks meet at" in said) == bool(words)


def test_the_launcher_reads_what_it_needs_of_the_flags(tmp_path: Path) -> None:
    """The configuration names the script and the run folder, wherever it is given."""
    (tmp_path / "vgg.yaml").write_text("# All settings of a run of pretrain_vision.py.\n")
    more = {"PROGRAM": "", "RUN_DIR": "", "CONFIG": "other.yaml"}
    script = f"{REPO}/pretrain_vision.py --config vgg.yaml --run-dir runs/vgg --lr 1"
    for flags in (["--config", "vgg.yaml", "--lr", "1"], ["--lr", "1", "--config=vgg.yaml"]):
        shown = told(tmp_path, {}, "--", *flags, "--dry-run", **more)
        assert f"\nexec {tmp_path / 'python'} {script}\n" in shown
        assert "threads" not in shown.splitlines()[-1], "a dry run starts no rank"
    for flags, starts in (("--dry-run true", False), ("--dry-run=false", True)):
        shown = told(tmp_path, {}, "--", *flags.split(), "--lr", "1", PROGRAM="train.py")
        assert ("threads" in shown.splitlines()[-1]) == starts and "--dry-run" not in shown


def test_help_of_the_program_starts_no_rank(tmp_path: Path) -> None:
    program = {"python": 'echo "asked $*"', "sbatch": "echo submitted"}
    shown = told(tmp_path, program, "--", "--lr", "1", "--help", LAUNCHER="sbatch")
    assert shown == f"asked {REPO}/pretrain_gpt.py --lr 1 --help\n"


def test_one_rank_in_a_step_of_several_tasks_waits_for_no_other(tmp_path: Path) -> None:
    program = {"python": 'echo "tasks ${SLURM_STEP_NUM_TASKS-none} ${PMI_SIZE-none}"'}
    step = {"SLURM_STEP_NUM_TASKS": "4", "PMI_SIZE": "4", "PMI_RANK": "0"}
    assert "tasks none none" in told(tmp_path, program, LAUNCHER="local", **step)
