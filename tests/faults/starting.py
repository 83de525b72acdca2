"""Real rank processes of `pretrain_gpt.py` with a fault in one rank, and how they ended."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.fault_tolerance.heartbeat import FOLDER, PHASES
from megatron.launch import free_port
from tests import program
from tests.limits import LIMIT, SLOWNESS
from tests.program import REPO, WITHOUT_PICTURES, Program

SCRIPT = str(REPO / "pretrain_gpt.py")
FAULTY_SCRIPT = str(REPO / "tests" / "faults" / "program.py")
"""The entry script with the fault of `environment` in it."""
MARKS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "SLURM_", "PMI_", "OMPI_", "TORCHELASTIC_",
    "SPARSETRON_FAULT",
)  # fmt: skip
FLAGS = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --mock-data "
    "--vocab-size 64 --micro-batch-size 2 --global-batch-size 8 --lr 3e-3 --eval-iters 0 "
    "--log-interval 4 --save-interval 4 --check-weight-hash-across-dp-replicas-interval 4"
)
TIMEOUT = f"--distributed-timeout-minutes {SLOWNESS / 10}"
LONG_TIMEOUT = f"--distributed-timeout-minutes {2 * LIMIT / 60}"
"""A timeout of collectives that outlasts each test.

A rank that ends by itself has noticed the failure of its peer without it.
"""
Process = subprocess.Popen[str] | Program


def environment(fault: str | None = None, **more: str) -> dict[str, str]:
    """Return an environment without launcher variables, with `fault` and `more` added."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(MARKS)}
    env |= {"PYTHONPATH": f"{WITHOUT_PICTURES}:{REPO}", "OMP_NUM_THREADS": "1", **more}
    return env | ({"SPARSETRON_FAULT": fault} if fault else {})


@dataclass
class Started:
    """The processes of one start; `finish` must be called and leaves no process behind."""

    run_dir: Path
    processes: Sequence[Process]

    def wait_for_fault(self, rank: int) -> None:
        """Return once a fault struck on a rank; the line of stderr that reports it is consumed."""
        stderr = self.processes[rank].stderr
        assert stderr is not None
        assert "strikes at" in stderr.readline()

    def finish(self) -> Ended:
        """Wait for all processes to end by themselves; kill those that do not in `LIMIT` seconds.

        Stopped processes are killed once all others have ended, as a launcher would.
        """
        ended: dict[int, float] = {}
        deadline = time.monotonic() + LIMIT
        try:
            while len(ended) < len(self.processes) and time.monotonic() < deadline:
                for rank, process in enumerate(self.processes):
                    if rank not in ended and process.poll() is not None:
                        ended[rank] = time.time()
                waiting = [p for r, p in enumerate(self.processes) if r not in ended]
                if waiting and all(_is_stopped(p.pid) for p in waiting) and ended:
                    break
                time.sleep(0.02)
        finally:
            for process in self.processes:
                if process.poll() is None:
                    process.kill()
        outputs = [process.communicate() for process in self.processes]
        return Ended(
            run_dir=self.run_dir,
            codes=[process.wait() for process in self.processes],
            ended=ended,
            stdout=[out for out, _ in outputs],
            stderr=[err for _, err in outputs],
        )


@dataclass
class Ended:
    """Exit codes, output, and times in seconds since the epoch of processes ended by themselves."""

    run_dir: Path
    codes: list[int]
    ended: dict[int, float]
    stdout: list[str]
    stderr: list[str]

    @property
    def status(self) -> dict[str, Any]:
        """The content of status.json."""
        return json.loads((self.run_dir / "status.json").read_text())

    @property
    def all_stderr(self) -> str:
        """The standard error of all ranks."""
        return "".join(self.stderr)

    def seconds_after_fault(self, but: int | None = None) -> float:
        """Return the seconds from the fault to the end of the last process other than `but`."""
        struck = re.findall(r"strikes at ([0-9.]+)", self.all_stderr)
        ended = [when for rank, when in self.ended.items() if rank != but]
        return max(ended) - float(struck[0])


def start_ranks(
    world: int,
    run_dir: Path,
    flags: str,
    *,
    fault: str | None = None,
    ranks: range | None = None,
    port: int | None = None,
) -> Started:
    """Start ranks as plain processes, as srun does: no launcher ends them.

    They are forks, see `tests.program`.
    """
    port = port or free_port()
    processes: list[Program] = []
    for rank in ranks or range(world):
        env = environment(
            fault,
            RANK=str(rank),
            WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        if world == 1:
            env = environment(fault)
        script = FAULTY_SCRIPT if fault else SCRIPT
        argv = [*FLAGS.split(), *flags.split(), "--run-dir", str(run_dir)]
        processes.append(_fork(script, argv, env))
    return Started(run_dir, processes)


def start_launcher(
    world: int, run_dir: Path, flags: str, *, fault: str | None = None, **more: str
) -> Started:
    """Start `scripts/launch.sh`, which uses torchrun for several ranks.

    `more` are variables of the launcher.
    """
    more |= {"PYTHON": sys.executable, "RUN_DIR": str(run_dir), "RANKS_PER_NODE": str(world)}
    if fault:
        more |= {"PROGRAM": FAULTY_SCRIPT}
    env = environment(fault, **more)
    command = [str(REPO / "scripts" / "launch.sh"), "--", *FLAGS.split(), *flags.split()]
    return Started(run_dir, [_popen(command, env)])


def wait_for_step(run_dir: Path, step: int, phase: str = "") -> None:
    """Return once rank 0 of a run with several ranks has reached `step`, and `phase` if given."""
    from megatron.fault_tolerance import heartbeat

    deadline = time.monotonic() + LIMIT
    path = run_dir / FOLDER / "rank_0"
    while time.monotonic() < deadline:
        if path.exists() and path.stat().st_size:
            _, found, number, _ = heartbeat._BEAT.unpack_from(path.read_bytes(), heartbeat._BEAT_AT)
            if found >= step and phase in ("", PHASES[number]):
                return
        time.sleep(0.02)
    raise TimeoutError(f"{run_dir}: did not come to step {step} {phase}")


def losses(run_dir: Path) -> dict[int, float]:
    """Return the loss of each step in metrics.jsonl; assert that every step is there once."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    found = [(line["iteration"], line["lm_loss"]) for line in lines if "lm_loss" in line]
    assert len(dict(found)) == len(found)
    return dict(found)


def alive(pids: list[int]) -> list[int]:
    """Return the given processes that still run."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def send(started: Started, number: signal.Signals, *ranks: int) -> None:
    """Send a signal to some ranks."""
    for rank in ranks:
        started.processes[rank].send_signal(number)


def _popen(command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/"
    )


def _fork(script: str, argv: list[str], env: dict[str, str]) -> Program:
    return program.start(script, argv, env=env, cwd="/")


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
