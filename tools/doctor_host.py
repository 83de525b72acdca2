"""Checks of one machine for a run: versions, host name, disk and clock; part of tools/doctor.sh.

    python tools/doctor_host.py RUN_DIR [--nodes N]

Exit code 2 if there is a problem; each is a line that begins with PROBLEM. Imports no torch.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.errors import ConfigError  # noqa: E402
from megatron.fault_tolerance.run_lock import STALE_SECONDS  # noqa: E402
from megatron.metrics.log_line import duration  # noqa: E402

NEEDED = {"torch": (2, 9), "numpy": (1, 26), "safetensors": (0, 4), "pyyaml": (6, 0), "tqdm": (4,)}
OPTIONAL = ("mpi4py", "triton", "transformers", "tokenizers", "matplotlib")
SHARED_DISKS = (
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "panfs", "orangefs",
    "wekafs", "9p", "virtiofs", "glusterfs", "afs", "pvfs2", "fuse.ceph", "fuse.glusterfs",
    "fuse.juicefs",
)  # fmt: skip
PROBE_BYTES = 16 * 2**20
LEAST_FREE = 2**30
CHECKPOINT_BYTES = 12 * 124_439_808
"""Weights and Adam's moments of configs/gpt_124m.yaml in fp32."""
MPI_LIBRARY = "from mpi4py import MPI; print(MPI.Get_library_version().splitlines()[0])"

Finding = tuple[str, str, bool]
"""An area, what was found there, and whether that is a problem."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print all findings and return the exit code."""
    parser = argparse.ArgumentParser(prog="doctor_host.py", allow_abbrev=False)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--nodes", type=int, default=1)
    options = parser.parse_args(arguments)
    wrong = False
    checks = (versions(), network(options.nodes), disk(options.run_dir, options.nodes))
    for check in checks:
        for area, text, is_problem in check:
            print(f"PROBLEM {area}: {text}" if is_problem else f"{area:<12} {text}", flush=True)
            wrong = wrong or is_problem
    return ConfigError.exit_code if wrong else 0


def versions() -> Iterator[Finding]:
    """Check Python, packages, the MPI library and Slurm."""
    old = sys.version_info < (3, 11)
    python = f"python {platform.python_version()} on {platform.machine()}, {os.cpu_count()} CPUs"
    yield "versions", python + ("; 3.11 or newer is needed" if old else ""), old
    found = []
    for package, least in NEEDED.items():
        version = _version(package)
        if version is None or _numbers(version) < least:
            have = "is not installed" if version is None else f"is {version}"
            wanted = ".".join(map(str, least))
            yield "versions", f"{package} {have}; needed is {wanted} or newer", True
        else:
            found.append(f"{package} {version}")
    found += [f"{name} {version}" for name in OPTIONAL if (version := _version(name))]
    yield "versions", ", ".join(found), False
    if _version("mpi4py") is not None:
        # In a process of its own: an MPI that cannot start aborts its process.
        answer = _answer([sys.executable, "-c", MPI_LIBRARY])
        yield "versions", f"MPI library: {answer or 'mpi4py is here, but finds none'}", False
    slurm = _answer(["srun", "--version"]) if shutil.which("srun") else None
    yield "versions", f"Slurm: {slurm or 'none here'}", False


def network(nodes: int) -> Iterator[Finding]:
    """Check the address of this host's name, to which ranks on other nodes connect."""
    name = socket.gethostname()
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        text = f"{name} does not resolve ({error}); set MASTER_ADDR and GLOO_SOCKET_IFNAME"
        yield "network", text, nodes > 1
        return
    local = all(address.startswith("127.") or address == "::1" for address in found)
    text = f"{name} resolves to {', '.join(found)}"
    if local and nodes > 1:
        text += ", which other nodes cannot reach; set MASTER_ADDR and GLOO_SOCKET_IFNAME"
    yield "network", text, local and nodes > 1


def disk(run_dir: Path, nodes: int) -> Iterator[Finding]:
    """Check space, speed, type, locks and clock of the disk of the run folder."""
    probe = run_dir / f".doctor.{socket.gethostname()}.{os.getpid()}"
    with ExitStack() as stack:
        try:
            made = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
            run_dir.mkdir(parents=True, exist_ok=True, mode=0o750)
            for folder in reversed(made):
                stack.callback(_remove_if_empty, folder)
            free = shutil.disk_usage(run_dir).free
            yield "disk", f"{run_dir.resolve()}: {free / 2**30:.1f} GiB free", free < LEAST_FREE
            stack.callback(probe.unlink, missing_ok=True)
            began = time.perf_counter()
            locks, ahead = _write(probe)
            seconds = time.perf_counter() - began
        except OSError as error:
            text = f"{error.filename or run_dir}: cannot be written: {error.strerror}"
            yield "disk", text, True
            return
    rate = PROBE_BYTES / seconds
    yield (
        "disk",
        f"{PROBE_BYTES >> 20} MiB written and synced in {seconds:.2f} s, {rate / 2**20:.0f} MiB/s: "
        f"a checkpoint of GPT-124M, {CHECKPOINT_BYTES / 2**30:.1f} GiB, takes "
        f"{duration(CHECKPOINT_BYTES / rate)} by one process",
        False,
    )
    kind = _kind(run_dir)
    shared = kind in SHARED_DISKS
    text = f"{kind}: {'shared by nodes' if shared else 'of this machine alone, as far as it tells'}"
    if nodes > 1 and not shared:
        text += f"; {nodes} nodes need a run folder that all of them see"
    yield "disk", text, nodes > 1 and not shared
    if not locks:
        yield "disk", "has no file locks: only files tell who holds a run folder", False
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    text = f"{now}; the disk's is {ahead:+.1f} s off"
    yield "clock", text, abs(ahead) > STALE_SECONDS / 2


def _write(probe: Path) -> tuple[bool, float]:
    """Write and sync a file; return whether it can be locked, and how far its time is ahead."""
    block = os.urandom(2**20)
    with open(probe, "xb") as file:
        for _ in range(PROBE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        ahead = os.fstat(file.fileno()).st_mtime - time.time()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False, ahead
    return True, ahead


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return


def _kind(folder: Path) -> str:
    """Return the type of the file system, by the longest mount point above the folder."""
    path, best, kind = str(folder.resolve()), "", "unknown"
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return kind
    for line in mounts.splitlines():
        _, point, found, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        below = path == point or path.startswith(point.rstrip("/") + "/")
        if below and len(point) >= len(best):
            best, kind = point, found
    return kind


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.partition("+")[0].split(".")
    return tuple(int(part) for part in parts if part.isdigit())


def _answer(command: Sequence[str]) -> str | None:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = answer.stdout.strip().splitlines()
    return lines[0] if answer.returncode == 0 and lines else None


if __name__ == "__main__":
    sys.exit(main())
