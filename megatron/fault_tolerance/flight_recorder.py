"""torch's Flight Recorder: its settings, the dumps of a run that hangs, and what the dumps say.

Every process group records its latest collectives. Torch dumps the record of NCCL when a collective
times out; a rank of a run that fails dumps the record of gloo, which torch does not. A rank that
fails does not ask for that of NCCL: the call can wait for the device, and holds the interpreter.

    RUN/logs/nccl_trace_rank_N, gloo_trace_rank_N     pickles; torch's own reader takes them too
    RUN/logs/earlier/                                 those of the start before, moved by the next

A dump is read without torch, and builds no objects: a pickle that names a class is refused.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
import sys
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, groupby
from pathlib import Path
from typing import Any

FOLDER = "logs"
EARLIER = "earlier"
"""Name of the folder in `FOLDER` of the dumps that the latest start has found."""
MOST_READ = 256
"""Maximum number of dumps that a start reads, 20 ms each, while the other ranks wait."""
SETTINGS = {
    # The name of torch 2.13, its older name, and the value that a run sets.
    "TORCH_FR_BUFFER_SIZE": ("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": ("", "1"),
    "TORCH_FR_DUMP_TEMP_FILE": ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", f"{FOLDER}/nccl_trace_rank_"),
}
_GLOO = "_dump_fr_trace"
"""Function of torch's private module that returns the record of gloo as a pickle."""
_NAME = re.compile(r"(nccl|gloo)_trace_rank_([0-9]{1,6})")
_PART = ".part"
_MOST_BYTES = 1 << 28
_MOST_SPANS = 8
_DAMAGE = (pickle.UnpicklingError, EOFError, LookupError, ValueError, TypeError, AttributeError,
           ArithmeticError, MemoryError, RecursionError)  # fmt: skip


def set_recorder_variables(run_dir: Path, environ: MutableMapping[str, str] | None = None) -> None:
    """Set the variables of the Flight Recorder that the user has not set, under either name.

    Call before a process group is made: torch reads the variables once. As in `set_cuda_variables`,
    every rank sets its own, since a variable of the launcher's shell need not reach other nodes.
    """
    env = os.environ if environ is None else environ
    for name, (older, value) in SETTINGS.items():
        if name not in env and older not in env:
            env[name] = f"{run_dir.absolute()}/{value}" if name.endswith("FILE") else value


def clear_dumps(run_dir: Path, *, nccl: bool) -> str:
    """Move the dumps of the previous start to `EARLIER`, and return what they say, "" without any.

    A job that goes back to the queue starts again unattended, so the new start reports what the
    dumps say. It reads at most `MOST_READ` of them. With `nccl`, the folder is created, as torch
    does not create it for the dumps of NCCL.
    """
    folder = run_dir / FOLDER
    if nccl:
        folder.mkdir(exist_ok=True, mode=0o750)
    for part in folder.glob(f"*_trace_rank_*{_PART}"):
        if _NAME.fullmatch(part.name.removesuffix(_PART)):
            part.unlink(missing_ok=True)
    found = _dumps(folder)
    if not found:
        return ""
    aside = folder / EARLIER
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(exist_ok=True, mode=0o750)
    dumps = [path.replace(aside / path.name) for path in found]
    # Ranks that lag may be anywhere, so that dumps are left out evenly.
    read = dumps[:: -(-len(dumps) // MOST_READ)]
    most = f" ({len(read)} of {len(dumps)} dumps were read; all are in {aside})"
    return _explain(read) + most * (len(read) < len(dumps))


def write_dump(run_dir: Path, rank: int) -> None:
    """Write the record of gloo. Errors are passed over."""
    torch = sys.modules.get("torch._C._distributed_c10d")
    path = run_dir / FOLDER / f"gloo_trace_rank_{rank}"
    if not hasattr(torch, _GLOO):
        return
    with suppress(OSError, RuntimeError):
        # Without stacks, whose symbols take seconds.
        trace = getattr(torch, _GLOO)(True, False, False)
        path.parent.mkdir(exist_ok=True, mode=0o750)
        part = path.with_name(f"{path.name}{_PART}")
        part.write_bytes(trace)
        part.replace(path)


@dataclass(frozen=True)
class Recorded:
    """A collective or message in a dump: its count `number` over `group`, and its start in ns."""

    backend: str
    group: str
    is_message: bool
    number: int
    name: str
    sizes: str
    since: int
    is_open: bool

    def __str__(self) -> str:
        return f"{self.backend} {self.name} {self.number} of {self.group}, {self.sizes}"


@dataclass
class _Line:
    """The records of one group: a record of each number, last and first open number by rank."""

    records: dict[int, Recorded] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    opened: dict[int, int] = field(default_factory=dict)

    def add(self, rank: int, one: Recorded) -> None:
        earlier = self.records.get(one.number)
        if earlier is None or one.since < earlier.since:
            self.records[one.number] = one
        self.last[rank] = max(one.number, self.last.get(rank, 0))
        if one.is_open:
            self.opened[rank] = min(one.number, self.opened.get(rank, one.number))

    def stuck(self) -> tuple[Recorded, set[int], set[int]] | None:
        """Return the record that ranks wait in, these ranks, and the ranks that lag behind it."""
        number = min(self.last.values()) + 1
        if number > max(self.last.values()):
            number = min(self.opened.values(), default=0)
        if number not in self.records:
            return None
        behind = {rank for rank, last in self.last.items() if last < number}
        waiting = self.opened if not behind else self.last
        return self.records[number], set(waiting) - behind, behind


def explain(run_dir: Path, ranks: int | None = None) -> str:
    """Return one line on the dumps in a run folder: where ranks wait, and which ranks lag.

    `ranks` is the size of the world, if known. The text is empty if there is no dump.
    """
    return _explain(_dumps(run_dir / FOLDER), ranks)


def _explain(paths: Sequence[Path], ranks: int | None = None) -> str:
    lines: dict[tuple[str, str, bool], _Line] = {}
    readable: set[int] = set()
    damaged: set[int] = set()
    for path in paths:
        backend, rank = path.name.split("_")[0], int(path.name.rpartition("_")[2])
        try:
            members, records = read_dump(path)
        except (OSError, *_DAMAGE):
            damaged.add(rank)
            continue
        readable.add(rank)
        for one in records:
            key = one.backend, one.group, one.is_message
            line = lines.setdefault(key, _Line())
            line.add(rank, one)
        for group in members:
            # A rank that never called a group lags behind the ranks that did.
            lines.setdefault((backend, group, False), _Line()).last.setdefault(rank, 0)
    if not readable | damaged:
        return ""
    found = [stuck for line in lines.values() if (stuck := line.stuck()) is not None]
    # Ranks that wait for a lagging rank make others wait for them, later.
    first = min(found, key=lambda one: (not one[2], one[0].since), default=None)
    text = f"{_named(readable)} dumped, and no rank lags" if readable else "no readable dump"
    if readable and any(backend == "gloo" for backend, _, _ in lines):
        # Rows and activations travel as messages there, of which torch keeps no record.
        text += " in the collectives that are recorded; gloo's messages are not"
    if first is not None:
        record, waiting, behind = first
        lag = f"{_named(behind)} lag{_s(behind)} behind it" if behind else "no rank lags"
        text = f"{record}: {_named(waiting)} wait{_s(waiting)}, {lag}"
    missing = set(range(ranks or 0)) - readable - damaged
    text += f"; {_named(damaged)}: the dump is damaged or cut short" * bool(damaged)
    return text + f"; {_named(missing)} left no dump" * bool(missing)


def read_dump(path: Path) -> tuple[list[str], list[Recorded]]:
    """Return the groups that a dump lists, and its records.

    Raises one of pickle's errors, ValueError, LookupError, TypeError or AttributeError for a file
    that is no dump.
    """
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path}: too large for a dump")
    data = _Plain(io.BytesIO(path.read_bytes())).load()
    backend = path.name.split("_")[0]
    groups = data.get("pg_config", {}).values()
    members = [_group(one["desc"], one["name"]) for one in groups if one["ranks"] not in ("", "[]")]
    return members, [_recorded(backend, entry) for entry in data["entries"]]


def _recorded(backend: str, entry: Mapping[str, Any]) -> Recorded:
    group, about = entry["process_group"]
    inputs = zip(entry["input_sizes"], entry["input_dtypes"], strict=True)
    return Recorded(
        backend=backend,
        group=_group(about, group),
        is_message=bool(entry["is_p2p"]),
        number=int(entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]),
        name=str(entry["profiling_name"]).partition(":")[2],
        sizes=" and ".join(f"{list(map(int, size))} {dtype}" for size, dtype in inputs),
        since=int(entry["time_created_ns"]),
        # gloo does not record when a collective ends.
        is_open=backend == "nccl" and entry["state"] != "completed",
    )


class _Plain(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"names {module_name}.{global_name}, as no dump does")


def _dumps(folder: Path) -> list[Path]:
    paths = sorted(folder.glob("*_trace_rank_*"))
    return [path for path in paths if _NAME.fullmatch(path.name)]


def _group(about: str, name: str) -> str:
    """Return the axis that `ProcessGroups` gave torch for a group, or torch's name for it."""
    if about == "default_pg":
        return "world"
    return about if about not in ("", "undefined") else f"group {name}"


def _named(ranks: Collection[int]) -> str:
    """Return ranks as text, such as `rank 3` or `ranks 0-2, 5`."""
    counter = count()
    spans = [
        list(span) for _, span in groupby(sorted(ranks), key=lambda rank: rank - next(counter))
    ]
    texts = [str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans]
    more = ", ..." if len(texts) > _MOST_SPANS else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(texts[:_MOST_SPANS])}{more}"


def _s(ranks: Collection[int]) -> str:
    return "s" if len(ranks) == 1 else ""
