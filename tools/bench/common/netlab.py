"""Starts ranks on the loopback or in `netlab.sh`'s emulated network, and counts sent bytes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError

REPO = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).with_name("netlab.sh")
NO_LIMIT = "none"
QUIET = ("OMP_NUM_THREADS=1", "TORCH_CPP_LOG_LEVEL=ERROR")
"""Environment of each rank.

gloo's sockets have no names in a network namespace, and torch warns about each of them.
"""
HEADERS = 66
"""Bytes of Ethernet (14), IP (20) and TCP (32, with timestamps) headers of a packet."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """The network of ranks: a rate as tc writes it, or `NO_LIMIT` for this machine's loopback.

    `node_ranks` ranks share a link, and reach each other without it.
    """

    ranks: int
    rate: str = NO_LIMIT
    delay: str = "0ms"
    node_ranks: int = 1

    def __post_init__(self) -> None:
        if self.rate == NO_LIMIT and self.node_ranks > 1:
            raise ConfigError("a network without links has no nodes; give a rate")

    def __str__(self) -> str:
        rate = "no limit" if self.rate == NO_LIMIT else self.rate
        late = "" if self.delay == "0ms" else f", {self.delay} a link"
        nodes = "" if self.node_ranks == 1 else f" on {self.ranks // self.node_ranks} nodes"
        return f"{self.ranks} ranks{nodes}, {rate}{late}"

    def command(self, program: Sequence[str], *, folder: Path) -> list[str]:
        """Return the command that runs `program` once for each rank, with one thread each.

        `netlab.sh` writes its logs to `folder`.
        """
        if self.rate == NO_LIMIT:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            torchrun += ["--nproc-per-node", str(self.ranks)]
            return ["env", *_environment(), "GLOO_SOCKET_IFNAME=lo", *torchrun, *program]
        here = ["env", *_environment(), sys.executable, *program]
        return [str(SCRIPT), *self._options, "--out", str(folder), "--", *here]

    def mpi_command(self, program: Sequence[str], *, folder: Path) -> list[str]:
        """Return a command like `command` whose ranks are started by mpiexec and can use MPI.

        With emulated links each rank has its own network namespace. Raises `ConfigError` without
        mpiexec.
        """
        mpiexec = find_mpiexec()
        here = ["env", *_environment(), sys.executable, *program]
        if self.rate == NO_LIMIT:
            return ["env", "GLOO_SOCKET_IFNAME=lo", mpiexec, "-n", str(self.ranks), *here]
        options = [*self._options, "--out", str(folder), "--mpiexec", mpiexec]
        return [str(SCRIPT), *options, "--", *here]

    @property
    def _options(self) -> list[str]:
        nodes = ["--ranks", str(self.ranks), "--node-ranks", str(self.node_ranks)]
        return [*nodes, "--rate", self.rate, "--delay", self.delay]

    @property
    def interface(self) -> str | None:
        """The interface with this rank's own counters; None if ranks share one."""
        return None if self.rate == NO_LIMIT else "net0"


def _search_path() -> str:
    """Return a PYTHONPATH with which `python -m tools.bench...` works in any working directory."""
    return os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH", "")]))


def _environment() -> tuple[str, ...]:
    return (*QUIET, f"PYTHONPATH={_search_path()}")


def find_mpiexec() -> str:
    """Return the mpiexec of this environment (the mpi extra), or the first on the path."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.is_file() else shutil.which("mpiexec")
    if found is None:
        raise ConfigError("mpiexec: not found; run: pip install 'sparsetron[mpi]'")
    return found


def run(command: Sequence[str]) -> int:
    """Run a command to its end and return the exit code.

    An interruption lets the command end by itself, so that `netlab.sh` removes its namespaces.
    """
    with subprocess.Popen(command) as process:
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise


def result_of(network: Network, program: Sequence[str], settings: Mapping[str, object]) -> Any:
    """Run a program on every rank, and return what rank 0 writes to result.json.

    The program takes `settings` as JSON, with the `folder` of that file. Raises `ConfigError` if a
    rank fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        here = [*program, json.dumps({**settings, "folder": folder})]
        if code := run(network.command(here, folder=Path(folder) / "network")):
            raise ConfigError(f"{network}: a rank failed with exit code {code}")
        return json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))


def why_not(network: Network) -> str | None:
    """Return the reason, in one line, if this network is not available here; else None."""
    if network.rate == NO_LIMIT:
        return None
    options = ["--ranks", "1", "--rate", network.rate, "--delay", network.delay]
    with tempfile.TemporaryDirectory() as folder:
        command = [str(SCRIPT), *options, "--out", folder, "--", "true"]
        tried = subprocess.run(command, capture_output=True, text=True, timeout=60)
    lines = tried.stderr.strip().splitlines()
    return None if tried.returncode == 0 else lines[-1] if lines else f"exit {tried.returncode}"


@dataclass(frozen=True)
class InterfaceCounters:
    """Counters of bytes and packets sent by an interface."""

    bytes: int
    packets: int

    @classmethod
    def read(cls, interface: str) -> InterfaceCounters:
        """Read the counters of an interface of this rank's network namespace."""
        folder = Path("/sys/class/net") / interface / "statistics"
        return cls(int((folder / "tx_bytes").read_text()), int((folder / "tx_packets").read_text()))

    def payload_since(self, earlier: InterfaceCounters) -> int:
        """Return the bytes sent since `earlier`, without packet headers."""
        return self.bytes - earlier.bytes - HEADERS * (self.packets - earlier.packets)
