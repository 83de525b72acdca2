"""Checks of the variables of NCCL, gloo and CUDA that decide how a run ends; see tools/doctor.sh.

    python tools/doctor_settings.py --device cuda|cpu [--nodes N]

Exit code 2 if settings contradict each other or name a network interface that this machine lacks;
the line of such a setting begins with PROBLEM. For a variable that is not set, a line says what
happens without it. Imports no torch.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.errors import ConfigError  # noqa: E402
from megatron.fault_tolerance.flight_recorder import SETTINGS  # noqa: E402

Finding = tuple[str, bool]
"""What was found of the settings, and whether it is a problem."""
LEAST_HEARTBEAT = 60
"""Seconds: less would end a rank whose watchdog thread waits for a long call of CUDA."""
_OLDER = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_BLOCKING_WAIT": "NCCL_BLOCKING_WAIT",
} | {name: older for name, (older, _) in SETTINGS.items() if older}
"""Names that torch 2.13 reads, and the older names that it still reads."""
_HARMFUL = {
    (
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "0",
    ): "no collective of NCCL times out, so a hang never ends",
    ("TORCH_NCCL_BLOCKING_WAIT", "1"): "the host waits for each collective, which ends all overlap",
    ("TORCH_NCCL_ENABLE_MONITORING", "0"): "no thread is left that dumps the Flight Recorder",
}
_TOLD = {
    (
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "1",
    ): "a run with pipeline stages wants 32, which it sets itself "
    "where the variable is not set; interleaved stages are refused",
    ("CUDA_MODULE_LOADING", "LAZY"): "a run with pipeline stages wants EAGER, which it sets itself "
    "where the variable is not set; interleaved stages are refused",
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", "0"): "torch dumps no record of a hang; ranks that report a "
    "failure still do",
}
_OFF = ("0", "n", "no", "false")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print all findings and return the exit code."""
    parser = argparse.ArgumentParser(prog="doctor_settings.py", allow_abbrev=False)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--nodes", type=int, default=1)
    options = parser.parse_args(arguments)
    found = list(settings(os.environ, device=options.device, nodes=options.nodes))
    for text, is_problem in found:
        print(f"PROBLEM settings: {text}" if is_problem else f"settings     {text}", flush=True)
    return ConfigError.exit_code if any(wrong for _, wrong in found) else 0


def settings(environ: Mapping[str, str], *, device: str, nodes: int) -> Iterator[Finding]:
    """Check the settings of a run on `device` and `nodes`."""
    yield from _interfaces(environ, device=device, nodes=nodes)
    if device != "cuda":
        return
    for name, older in _OLDER.items():
        if name in environ and _normal(environ.get(older, environ[name])) != _normal(environ[name]):
            values = f"{name}={environ[name]} and {older}={environ[older]}"
            yield f"{values}: two names of one setting disagree; unset the older", True
    value = {name: environ.get(name, environ.get(_OLDER.get(name, ""))) for name in _names()}
    for texts, is_problem in ((_HARMFUL, True), (_TOLD, False)):
        for (name, bad), why in texts.items():
            if _normal(value[name]) == _normal(bad):
                advice = "; unset the variable" if is_problem else ""
                yield f"{name}={value[name]}: {why}{advice}", is_problem
    dumps, size = value["TORCH_NCCL_DUMP_ON_TIMEOUT"], value["TORCH_FR_BUFFER_SIZE"]
    if size == "0":
        text = "TORCH_FR_BUFFER_SIZE=0: the Flight Recorder is off, and no hang is explained"
        if _normal(dumps) == "1":
            text += f", against TORCH_NCCL_DUMP_ON_TIMEOUT={dumps}; unset one of them"
        yield text, _normal(dumps) == "1"
    yield from _heartbeat(value["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"])
    unset = [name for name in SETTINGS if value[name] is None]
    if unset:
        yield f"{', '.join(unset)}: not set; a run of several ranks sets them", False


def _names() -> Iterator[str]:
    yield from SETTINGS
    yield from (name for name, _ in (*_HARMFUL, *_TOLD))
    yield "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"


def _normal(value: str | None) -> str | None:
    """Return a switch of torch as 0 or 1, and other values in capitals."""
    if value is None:
        return None
    lower = value.strip().lower()
    if lower in _OFF:
        return "0"
    return "1" if lower in ("1", "y", "yes", "true") else lower.upper()


def _heartbeat(seconds: str | None) -> Iterator[Finding]:
    name = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
    if seconds is not None and (not seconds.isdecimal() or int(seconds) < LEAST_HEARTBEAT):
        why = f"must be a whole number of seconds, {LEAST_HEARTBEAT} or more"
        yield f"{name}={seconds}: {why}; less ends ranks that wait for a call of CUDA", True


def _interfaces(environ: Mapping[str, str], *, device: str, nodes: int) -> Iterator[Finding]:
    here = sorted(name for _, name in socket.if_nameindex())
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")[: 1 + (device == "cuda")]:
        wanted = environ.get(name)
        if not wanted:
            if nodes > 1:
                library = name.partition("_")[0].lower().replace("nccl", "NCCL")
                yield f"{name} is not set: {library} chooses among {', '.join(here)}", False
        elif not _matches(wanted, here, by_prefix=name.startswith("NCCL")):
            yield f"{name}={wanted}: no such interface here; there are {', '.join(here)}", True


def _matches(wanted: str, here: Sequence[str], *, by_prefix: bool) -> bool:
    """Return whether the setting leaves an interface; NCCL takes prefixes, =exact and ^excluded."""
    if not by_prefix:
        return all(name in here for name in wanted.split(","))
    marks = wanted[: len(wanted) - len(wanted.lstrip("^="))]
    names = wanted[len(marks) :].split(",")
    hit = [
        one for one in here if any(one == n if "=" in marks else one.startswith(n) for n in names)
    ]
    return len(hit) < len(here) if "^" in marks else bool(hit)


if __name__ == "__main__":
    sys.exit(main())
