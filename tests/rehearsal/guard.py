"""Compile `guard.cpp` and load it before torch, which asks only once whether there is CUDA."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")
BUILD = Path(__file__).resolve().parents[2] / "build" / "rehearsal"
TESTED_TORCH = "2.13."


def compiler() -> str | None:
    """Path of the C++ compiler: CXX, or c++."""
    return shutil.which(os.environ.get("CXX", "c++"))


def missing() -> str | None:
    """Return why there can be no rehearsal here, None where there can. Does not import torch."""
    if not version("torch").startswith(TESTED_TORCH):
        return f"the rehearsal is tested with torch {TESTED_TORCH}*, not {version('torch')}"
    if "+cpu" not in version("torch"):
        return "the rehearsal needs a CPU-only build of torch: the device's place must be free"
    if compiler() is None:
        return "the rehearsal needs a C++ compiler: set CXX"
    return None


def build() -> Path:
    """Return the compiled guard; compile it unless that was done for this source and torch."""
    key = sha256(SOURCE.read_bytes() + version("torch").encode()).hexdigest()[:16]
    built = BUILD / f"guard-{key}.so"
    if not built.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        part = built.with_suffix(f".{os.getpid()}")  # two test processes may compile at a time
        root = _torch_folder()
        options = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{root}/include", f"-L{root}/lib"]
        command = [compiler() or "c++", *options, str(SOURCE), "-o", str(part)]
        subprocess.run([*command, "-lc10", "-ltorch_cpu"], check=True)
        part.replace(built)
    return built


def load() -> ctypes.CDLL:
    """Register the guard with torch's libraries, which this loads first."""
    if "torch" in sys.modules:
        raise ImportError("tests.rehearsal.device must be imported before torch")
    for library in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(_torch_folder() / "lib" / library), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(build()))


def _torch_folder() -> Path:
    found = find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent
