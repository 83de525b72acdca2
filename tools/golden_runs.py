"""Run golden cases in one tree and print what they computed.

Started by `golden.py` as `python golden_runs.py TREE CASES_JSON`. TREE may be another commit, so
this file uses only `pretrain_gpt.main`, its flags and its files. Standard output is one line of
JSON per case: {"name": ..., "losses": [...], "tensors": {name: sha256}}.

This process imports torch once and computes nothing itself. Except under mpiexec, the ranks of a
case are forks of it, so that a run takes one second instead of four for its imports.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SECONDS = 300.0
"""Longest time that a run may take, in seconds."""
PORTS = range(10000, 30000)
"""Where a port is chosen from, below those that the kernel gives to outgoing connections."""
PRELOADED = (
    "torch.distributed", "safetensors.torch", "yaml", "megatron.training", "megatron.model.gpt",
    "megatron.checkpoint.checkpointer",
)  # fmt: skip


class Failed(Exception):
    """A run ended with an unexpected exit code, or did not end."""


def main(arguments: Sequence[str]) -> int:
    """Run every case and return the exit code."""
    tree, cases = Path(arguments[0]).resolve(), json.loads(arguments[1])
    os.chdir(tree)
    sys.path[0] = str(tree)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # The pictures of a report take longer to draw than the losses to compute.
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
    importlib.import_module("pretrain_gpt")
    code = 0
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="golden") as folder:
            try:
                found = run_case(case, Path(folder))
            except Failed as error:
                found, code = {"name": case["name"], "error": str(error)}, 1
            print(json.dumps(found), file=answers, flush=True)
    return code


def run_case(case: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Train one case to its end in `folder`, and return its name, losses and tensors.

    Raises:
        Failed: The run failed or did not end in time.
    """
    run_dir, log = folder / "run", folder / "log"
    argv = [*case["flags"].split(), "--run-dir", str(run_dir)]
    start = _with_mpi if case["mpi"] else _forked
    if case["leave_at"] is not None:
        start([*argv, "--exit-interval", str(case["leave_at"])], case["ranks"], log)
    if case["kill_at"] is not None:
        committed = run_dir / "checkpoints" / f"step_{case['kill_at']:08d}"
        _forked(argv, case["ranks"], log, kill_when=committed)
    start(argv, case["ranks"], log)
    return {"name": case["name"], "losses": _losses(run_dir), "tensors": _tensors(run_dir)}


def free_port() -> int:
    """Return one of `PORTS` that is free; the function of `megatron.launch`, which TREE may lack.

    Raises:
        Failed: None of a hundred ports drawn from them could be bound.
    """
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise Failed(f"no free port was found from {PORTS[0]} to {PORTS[-1]}")


def _forked(argv: Sequence[str], ranks: int, log: Path, *, kill_when: Path | None = None) -> None:
    port = free_port()
    sys.stdout.flush()
    sys.stderr.flush()
    children: dict[int, int] = {}
    for rank in range(ranks):
        child = os.fork()
        if not child:
            _be_rank(argv, rank, ranks, port, log)
        children[child] = rank
    codes: dict[int, int] = {}
    limit = time.monotonic() + SECONDS
    killed = failed = late = False
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            codes[children.pop(child)] = os.waitstatus_to_exitcode(status)
            continue
        if not (killed or failed or late):
            killed = kill_when is not None and kill_when.exists()
            # The others would wait for a rank that failed.
            failed = any(codes.values())
            late = time.monotonic() > limit
            if killed or failed or late:
                for one in children:
                    os.kill(one, signal.SIGKILL)
        time.sleep(0.01)
    if late:
        raise Failed(f"not through after {SECONDS:.0f} s\n{_end(log)}")
    if any(codes.values()) and not killed:
        raise Failed(f"exit codes by rank: {dict(sorted(codes.items()))}\n{_end(log)}")
    if kill_when is not None and not killed:
        raise Failed(f"ended before it was killed\n{_end(log)}")


def _be_rank(argv: Sequence[str], rank: int, ranks: int, port: int, log: Path) -> None:
    """Train as one rank, then end this process."""
    code = 1
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        if ranks > 1:
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
        code = importlib.import_module("pretrain_gpt").main(list(argv))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _with_mpi(argv: Sequence[str], ranks: int, log: Path) -> None:
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if mpiexec is None:
        raise Failed("mpiexec is not installed")
    command = [mpiexec, "-n", str(ranks), sys.executable, "pretrain_gpt.py", *argv]
    with log.open("a") as file:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            timeout=SECONDS,
            check=False,
        )
    if done.returncode:
        raise Failed(f"exit code {done.returncode}\n{_end(log)}")


def _end(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-3000:] if log.exists() else ""


def _losses(run_dir: Path) -> list[float]:
    """Return the loss of each step, in order; if a step was repeated, the later loss."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "lm_loss" in row]
    by_step = {row["iteration"]: row["lm_loss"] for row in rows}
    return [by_step[step] for step in sorted(by_step)]


def _tensors(run_dir: Path) -> dict[str, str]:
    """Return a SHA-256 for every tensor in the last checkpoint, over dtype, shape and bytes."""
    from safetensors import safe_open

    folder = max((run_dir / "checkpoints").glob("step_*[0-9]"))
    found: dict[str, str] = {}
    for file in sorted(folder.rglob("*.safetensors")):
        with safe_open(file, framework="pt") as held:
            for key in held.keys():  # noqa: SIM118, not a mapping
                tensor = held.get_tensor(key).contiguous()
                head = f"{tensor.dtype} {list(tensor.shape)} ".encode()
                octets = tensor.reshape(-1).view(_bytes_of(tensor)).numpy().tobytes()
                found[f"{file.name} {key}"] = hashlib.sha256(head + octets).hexdigest()
    return found


def _bytes_of(tensor: Any) -> Any:
    import torch

    return tensor.dtype if tensor.dtype == torch.bool else torch.uint8


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
