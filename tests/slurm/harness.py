"""A Slurm cluster of the tests' own, and jobs on it that are followed to their end."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.fault_tolerance import heartbeat
from megatron.launch import PORTS
from tests.limits import LIMIT

REPO = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).parent
OURS = (
    "LAUNCHER", "NODES", "RANKS_PER_NODE", "CONFIG", "GRAD_PATH", "RUN_DIR", "TIME", "SITE",
    "CPUS_PER_TASK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "SLURM", "SBATCH", "PMI_",
    "OMPI_", "TORCHELASTIC_", "SPARSETRON_FAULT",
)  # fmt: skip
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}
STARTS = 5
"""Number of times that the daemons are started, if their ports are in use."""
CANARY = "canary-5e0c1b"
"""A secret in the environment of every job, which no file of any run may contain."""


@dataclass
class SlurmJob:
    """A submitted job.

    `then` is called once the run has reached step `at`. The other fields are Slurm's latest report.
    """

    run_dir: Path
    number: str
    at: int = 0
    then: Callable[[SlurmJob], None] | None = None
    state: str = "PENDING"
    reason: str = ""
    restarts: int = 0
    exit_code: int = 0

    @property
    def log(self) -> str:
        """The job's log."""
        return (self.run_dir / "logs" / f"{self.run_dir.name}-{self.number}.log").read_text()

    @property
    def step(self) -> int:
        """The step that rank 0 has reached."""
        path = self.run_dir / heartbeat.FOLDER / "rank_0"
        if not path.exists() or not path.stat().st_size:
            return 0
        return heartbeat._BEAT.unpack_from(path.read_bytes(), heartbeat._BEAT_AT)[1]


@dataclass
class Cluster:
    """The daemons in `folder`; `jobs` are the jobs submitted so far."""

    folder: Path
    jobs: list[SlurmJob] = field(default_factory=list)
    hurried: set[str] = field(default_factory=set)

    def start(self) -> None:
        """Start the daemons, again with other ports if another program took the ports first.

        Raises `RuntimeError` with the daemons' messages if the start fails.
        """
        for left in reversed(range(STARTS)):
            settings = [str(free_ports(5)), str(int(LIMIT / 2))]
            command = [HERE / "cluster.sh", "start", self.folder, *settings]
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
            if done.returncode == 0:
                return
            if done.returncode != errno.EADDRINUSE or not left:
                raise RuntimeError(done.stderr)
            self._end_daemons()
            shutil.rmtree(self.folder)
            self.folder.mkdir()

    def stop(self) -> None:
        """End all jobs and daemons."""
        self.call("scancel", "--user=root", "--signal=KILL", "--full")
        self.call("scancel", "--user=root")
        self._end_daemons()

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment of a user of this Slurm, with `more` added."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
        env |= {"SLURM_CONF": str(self.folder / "slurm.conf"), "PYTHON": sys.executable}
        return env | {"OMP_NUM_THREADS": "1", "WANDB_API_KEY": CANARY, **more}

    def call(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a Slurm command."""
        return subprocess.run(
            command, env=self.environment(), capture_output=True, text=True, timeout=LIMIT
        )

    def launch(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run scripts/launch.sh with LAUNCHER=sbatch."""
        return subprocess.run(
            [str(REPO / "scripts" / "launch.sh"), *arguments],
            env=self.environment(LAUNCHER="sbatch", **more),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            cwd=self.folder,
        )

    def submit(
        self,
        run_dir: Path,
        flags: str,
        *,
        sbatch: Sequence[str] = (),
        at: int = 0,
        then: Callable[[SlurmJob], None] | None = None,
        **more: str,
    ) -> SlurmJob:
        """Submit a run; `more` are variables of launch.sh."""
        answer = self.launch(*sbatch, "--", *flags.split(), RUN_DIR=str(run_dir), **more)
        assert answer.returncode == 0, answer.stderr
        job = SlurmJob(run_dir, answer.stdout.strip(), at=at, then=then)
        assert job.number.isdigit(), answer.stdout
        self.jobs.append(job)
        return job

    def follow(self, *, limit: float) -> None:
        """Return once all jobs have ended, or after `limit` seconds."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline and not all(job.state in ENDED for job in self.jobs):
            self._look()
            for job in self.jobs:
                self._tend(job)
            time.sleep(0.2)

    def _end_daemons(self) -> None:
        subprocess.run([HERE / "cluster.sh", "stop", self.folder], timeout=LIMIT, check=True)

    def _look(self) -> None:
        table = self.call("scontrol", "--oneliner", "show", "job").stdout
        rows = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in table.splitlines()]
        known = {row["JobId"]: row for row in rows if "JobId" in row}
        for job in self.jobs:
            row = known[job.number]
            job.state, job.reason = row["JobState"], row["Reason"]
            job.restarts = int(row["Restarts"])
            job.exit_code = int(row["ExitCode"].partition(":")[0])

    def _tend(self, job: SlurmJob) -> None:
        if job.state == "PENDING" and job.restarts:
            # Slurm delays a requeued job by two minutes. Two seconds are enough: a start in the
            # second of the last end is refused. The next start gets an hour, so that it is not
            # warned at once.
            waits = job.reason == "BeginTime" and job.number not in self.hurried
            if waits and not is_ending(job):
                update = ("update", f"JobId={job.number}", "StartTime=now+2", "TimeLimit=60")
                answer = self.call("scontrol", *update)
                if answer.returncode == 0:
                    self.hurried.add(job.number)
        elif job.state == "RUNNING":
            self.hurried.discard(job.number)
        if job.state == "RUNNING" and job.then is not None and job.step >= job.at:
            act, job.then = job.then, None
            act(job)


def is_ending(job: SlurmJob) -> bool:
    """Return whether a step of the job is still running, as on a node marked as lost.

    If the job were requeued at the moment its step ends, Slurm would keep the node busy forever.
    """
    title = f"slurmstepd: [{job.number}.".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cmdline").read_bytes().startswith(title):
                return True
        except OSError:
            continue  # the process has ended
    return False


def free_ports(count: int) -> int:
    """Return the first of `count` consecutive free ports, below the kernel's ephemeral ports."""
    for first in random.SystemRandom().sample(range(PORTS.start, PORTS.stop - count + 1), 100):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("", port))
        except OSError:
            continue
        return first
    raise RuntimeError("no free ports")
