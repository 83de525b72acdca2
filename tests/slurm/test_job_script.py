"""Tests of the job that LAUNCHER=sbatch writes and refuses; most of them need no Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import LIMIT
from tests.slurm.harness import CANARY, OURS, REPO, Cluster, SlurmJob

pytestmark = pytest.mark.push

LAUNCH = REPO / "scripts" / "launch.sh"
FLAGS = ("--mock-data", "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4")
SITES = {  # launcher's own defaults of each machine that has Slurm
    "perlmutter": ("--ntasks-per-node=4", "--cpus-per-task=32", "--constraint=gpu"),
    "frontier": ("--ntasks-per-node=8", "--cpus-per-task=7"),
    "vista": ("--ntasks-per-node=1", "--cpus-per-task=72"),
}


def dry(
    cwd: Path, *arguments: str, flags: tuple[str, ...] = (), **more: str
) -> subprocess.CompletedProcess[str]:
    """Run `launch.sh --dry-run` for a toy model on a machine whose Slurm does not answer."""
    silent = cwd / "bin"
    silent.mkdir(exist_ok=True)
    for name in ("sbatch", "scontrol"):
        (silent / name).write_text("#!/bin/sh\nexit 1\n")
        (silent / name).chmod(0o755)
    env = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
    # Flags of a custom program are not tried out, which would take most of the time.
    env |= {
        "PYTHON": sys.executable,
        "LAUNCHER": "sbatch",
        "PROGRAM": str(REPO / "pretrain_gpt.py"),
    }
    env |= {"PATH": f"{silent}:{os.environ['PATH']}"}
    toy = ("--seq-length", "32", "--vocab-size", "96", "--micro-batch-size", "1", "--lr", "1e-3")
    command = [str(LAUNCH), "--dry-run", *arguments, "--", *FLAGS, *toy]
    command += ["--global-batch-size", "64", "--train-iters", "2", *flags]
    return subprocess.run(
        command, env=env | more, cwd=cwd, capture_output=True, text=True, timeout=LIMIT
    )


def headers(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if "#SBATCH" in line]


def test_a_job_script_is_complete_and_alone_on_stdout(tmp_path: Path) -> None:
    shown = dry(
        tmp_path, "--account=m1", "--partition=all", NODES="2", RANKS_PER_NODE="4",
        CPUS_PER_TASK="3", TIME="1-2:30", RUN_DIR="runs/a",
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    log = f"'{tmp_path.resolve()}/runs/a/logs/%x-%j.log'"
    assert headers(shown.stdout) == [
        "--job-name=a", "--nodes=2", "--ntasks-per-node=4", "--time=1-2:30",
        "--signal=B:USR1@300", "--requeue", "--open-mode=append", f"--output={log}",
        f"--error={log}", "--cpus-per-task=3", "--account=m1", "--partition=all",
    ]  # fmt: skip
    assert shown.stdout.startswith("#!/usr/bin/env bash\n#SBATCH ")
    parsed = subprocess.run(["bash", "-n"], input=shown.stdout, capture_output=True, text=True)
    assert (parsed.returncode, parsed.stderr) == (0, "")
    # Slurm makes no folder for a log; a dry run writes nothing else.
    assert list((tmp_path / "runs").rglob("*")) == [tmp_path / "runs/a", tmp_path / "runs/a/logs"]
    assert f"logs to {tmp_path.resolve()}/runs/a/logs/a-JOB.log" in shown.stderr


def test_a_log_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    shown = dry(tmp_path, RUN_DIR="runs/a", TIME="60")
    assert shown.returncode == 0 and "#SBATCH" in shown.stdout
    assert f"{tmp_path.resolve()}/runs/a/logs cannot be made here" in shown.stderr


@pytest.mark.waits
def test_a_printed_script_can_be_submitted_from_any_folder(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The commands are `launch.sh --dry-run > job.sh; sbatch job.sh`.

    The log is written where the script says.
    """
    run_dir = tmp_path / "runs" / "by-hand"
    flags = ("--", "--plan", "0")
    stub = str(REPO / "tests" / "slurm" / "stub.py")
    shown = cluster.launch("--dry-run", *flags, RUN_DIR=str(run_dir), PROGRAM=stub)
    assert shown.returncode == 0, shown.stderr
    script = tmp_path / "job.sh"
    script.write_text(shown.stdout)
    answer = cluster.call("sbatch", "--parsable", "--chdir=/", str(script))
    assert answer.returncode == 0, answer.stderr
    job = SlurmJob(run_dir, answer.stdout.strip())
    cluster.jobs.append(job)
    cluster.follow(limit=LIMIT)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job
    assert f"job {job.number} (restarted 0 times)" in job.log


@pytest.mark.waits
def test_ranks_of_a_job_without_the_users_environment_have_that_of_the_launcher(
    cluster: Cluster, tmp_path: Path
) -> None:
    program = tmp_path / "show.py"
    program.write_text("import os; print('threads', os.environ.get('OMP_NUM_THREADS'))\n")
    job = cluster.submit(
        tmp_path / "run",
        "--seed 1",
        sbatch=("--export=NONE",),
        PROGRAM=str(program),
        OMP_NUM_THREADS="3",
    )
    cluster.follow(limit=LIMIT)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job
    (rank,) = (tmp_path / "run" / "logs").glob(f"run-{job.number}-0.log")
    assert "threads 3" in rank.read_text()


@pytest.mark.parametrize("site", SITES)
def test_a_site_brings_its_ranks_and_cores(site: str, tmp_path: Path) -> None:
    shown = dry(tmp_path, SITE=site, NODES="2", LAUNCHER="", TIME="60")
    assert shown.returncode == 0, shown.stderr
    assert set(SITES[site]) <= set(headers(shown.stdout))
    # Inside the job, the same site starts ranks instead of submitting again.
    inside = dry(tmp_path, SITE=site, NODES="2", LAUNCHER="", SLURM_JOB_ID="1")
    assert inside.returncode == 0 and "\nexec srun " in inside.stdout, inside.stderr
    assert r"--cpu-bind=verbose\,cores" in inside.stdout


@pytest.mark.parametrize(
    ("visible", "ranks"),
    [
        (None, 4),
        ("0", 1),
        ("2,3", 2),
        ("GPU-8f6d, GPU-11aa,MIG-77c1", 3),
        ("1,-1,2", 1),
        ("", 1),
        ("NoDevFiles", 1),
    ],
)
def test_a_rank_is_started_for_each_visible_gpu(
    visible: str | None, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nfor i in 0 1 2 3; do echo GPU $i: H100; done\n")
    tool.chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    shown = dry(tmp_path, LAUNCHER="")
    assert f"1 node(s) x {ranks} rank(s)" in shown.stderr, shown.stderr


def test_a_login_node_without_gpus_asks_for_the_ranks_of_a_node(tmp_path: Path) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    asks = "set RANKS_PER_NODE to the GPUs of a node"
    shown = dry(tmp_path, NODES="2")
    assert "--ntasks-per-node=1" in headers(shown.stdout)
    assert asks in shown.stderr and "--gpus-per-node=RANKS_PER_NODE" in shown.stderr
    for name, value in (("RANKS_PER_NODE", "1"), ("SITE", "vista"), ("LAUNCHER", "srun")):
        assert asks not in dry(tmp_path, flags=(), **{"NODES": "2", name: value}).stderr
    assert asks not in dry(tmp_path, NODES="2", flags=("--device", "cpu")).stderr


@pytest.mark.parametrize(
    ("version", "flags"),
    [
        ("HYDRA build details:", "-n 6 -ppn 3 -disable-auto-cleanup sh -c "),
        ("mpiexec (OpenRTE) 4.1.6", "-n 6 --map-by ppr:3:node "),
        ("mpiexec (Open MPI) 5.0.5", "-n 6 --map-by ppr:3:node "),
        ("PALS 1.2", f"-n 6 {sys.executable} "),
    ],
)
def test_mpiexec_is_told_the_ranks_of_a_node(version: str, flags: str, tmp_path: Path) -> None:
    program = tmp_path / "mpirun"
    program.write_text(f"#!/bin/sh\necho '{version}'\n")
    program.chmod(0o755)
    shown = dry(tmp_path, LAUNCHER="mpiexec", MPIEXEC=str(program), NODES="2", RANKS_PER_NODE="3")
    assert shown.returncode == 0, shown.stderr
    assert f"\nexec {program} {flags}" in shown.stdout


def test_the_scheduler_of_summit_is_another(tmp_path: Path) -> None:
    shown = dry(tmp_path, SITE="summit", NODES="2", LAUNCHER="")
    assert shown.returncode == 0, shown.stderr
    assert "\nexec jsrun -n 12 --rs_per_host 6 " in shown.stdout


@pytest.mark.parametrize(
    ("limit", "save", "lead"),
    [
        ("1", "", 15),  # a quarter of the limit
        ("2:00", "", 30),
        ("30", "", 300),  # 60 + 2 x 120
        ("0-1", "", 300),
        ("12:00:00", "600", 1260),
    ],
)
def test_the_warning_leaves_time_to_save(limit: str, save: str, lead: int, tmp_path: Path) -> None:
    shown = dry(tmp_path, TIME=limit, SAVE_SECONDS=save)
    assert f"--signal=B:USR1@{lead}" in headers(shown.stdout), shown.stderr


def test_hostile_names_stay_names(tmp_path: Path) -> None:
    hostile = "a b; touch canary; $(touch canary) `touch canary` 'x' \"y\""
    folder = tmp_path / "$(touch canary) b; touch canary"
    shown = dry(
        tmp_path, flags=("--wandb-exp-name", hostile), RUN_DIR=str(folder / "run"), NODES="2",
        WANDB_API_KEY=CANARY, PROGRAM="",
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    assert CANARY not in shown.stdout + shown.stderr
    # Arguments of job.sh, printed by a stand-in for job.sh.
    script = shown.stdout.replace(str(REPO / "scripts" / "job.sh"), "printf '%s\\0'")
    script = script.replace("exec printf", "printf")
    told = subprocess.run(["bash"], input=script, capture_output=True, text=True, cwd=tmp_path)
    assert told.stdout.split("\0")[-3:-1] == ["--wandb-exp-name", hostile]
    assert not list(tmp_path.rglob("canary"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RUN_DIR", "a'b/run"),
        ("RUN_DIR", "a\nb/run"),
        ("RUN_DIR", "50%/run"),
        ("JOB_NAME", "a b; rm -rf x"),
        ("JOB_NAME", "$(id)"),
        ("JOB_NAME", "-x"),
        ("JOB_NAME", "x" * 101),
        ("TIME", "soon"),
        ("TIME", "1;id"),
        ("TIME", "0"),
        ("SAVE_SECONDS", "3600"),
        ("SAVE_SECONDS", "x[$(id)]"),
        ("CPUS_PER_TASK", "2; id"),
        ("MAX_RESTARTS", "-1"),
        ("STEP_LAUNCHER", "ssh"),
    ],
)
def test_what_a_header_cannot_hold_is_refused(name: str, value: str, tmp_path: Path) -> None:
    refused = dry(tmp_path, flags=(), **{name: value})
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"{name}={value}" in refused.stderr


@pytest.mark.parametrize("flag", ["--comment=a b", "--wrap=$(id)", "-p", "account=x", "--x='y"])
def test_flags_for_sbatch_are_plain(flag: str, tmp_path: Path) -> None:
    refused = dry(tmp_path, flag)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert flag in refused.stderr
    assert "only LAUNCHER=sbatch" in dry(tmp_path, "--account=x", LAUNCHER="local").stderr


def test_a_flag_for_sbatch_with_a_blank_is_told_how_it_is_written(tmp_path: Path) -> None:
    refused = dry(tmp_path, "--requeue", "--partition", "gpu")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--partition gpu: flags of sbatch are written --partition=gpu;" in refused.stderr


@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        ("--time=4", "TIME"),
        ("--nodes=4", "NODES"),
        ("--ntasks=4", "RANKS_PER_NODE"),
        ("--cpus-per-task=4", "CPUS_PER_TASK"),
        ("--job-name=a", "JOB_NAME"),
        ("--signal=USR1@9", "SAVE_SECONDS"),
        ("--error=log", "RUN_DIR"),
        ("--array=0-3", "tools/study.py"),
    ],
)
def test_flags_of_the_header_are_set_by_their_variables(
    flag: str, instead: str, tmp_path: Path
) -> None:
    refused = dry(tmp_path, flag)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"{flag}: " in refused.stderr and instead in refused.stderr
    assert dry(tmp_path, "--time-min=4", "--requeue").returncode == 0


@pytest.mark.parametrize(
    ("more", "wanted"), [((), False), (("--pipeline-schedule", "message-driven"), True)]
)
def test_srun_brings_mpi_where_the_pipeline_needs_it(
    more: tuple[str, ...], wanted: bool, tmp_path: Path
) -> None:
    pipeline = ("--pipeline-model-parallel-size", "2", *more)
    shown = dry(
        tmp_path, LAUNCHER="srun", NODES="2", RANKS_PER_NODE="1", flags=pipeline, PROGRAM=""
    )
    assert shown.returncode == 0, shown.stderr
    assert ("--mpi=pmi2" in shown.stdout) == wanted
    assert "--kill-on-bad-exit=1 --wait=60" in shown.stdout


@pytest.mark.waits
def test_slurm_is_asked_whether_it_would_take_the_job(cluster: Cluster) -> None:
    flags = ("--", "--mock-data", "--vocab-size", "96", "--global-batch-size", "160")
    config = str(REPO / "configs" / "gpt_tiny.yaml")
    for nodes, code, words in (("4", 0, "to start at"), ("5", 2, "Slurm would not take this job")):
        shown = cluster.launch("--dry-run", *flags, CONFIG=config, NODES=nodes)
        assert shown.returncode == code, shown.stderr
        assert words in shown.stderr and f"#SBATCH --nodes={nodes}\n" in shown.stdout
