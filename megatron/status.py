"""status.json of a run folder: the state of a run or the cause of its end.

People and launchers read it. Launchers change exit codes (torchrun turns every code into 1), so
this file is the authority. It is replaced as a whole, and the first cause of several failures stays
in it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args

from megatron.errors import PeerError
from megatron.regular_file import open_regular, read_regular

STATUS = "status.json"

State = Literal["running", "done", "failed", "left"]
ENDED = ("done", "left")
"""States of a run that ended as it should."""
MAX_OTHERS = 16
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_BLOCK = 4096


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


def node_name() -> str:
    """Return Slurm's name of this node, "" outside of Slurm."""
    return os.environ.get("SLURMD_NODENAME", "")


@dataclass(frozen=True, kw_only=True)
class Status:
    """The state of a run, as one process knows it.

    Attributes:
        state: running; done (all steps); left (saved and stopped early); failed.
        exit_code: None while running.
        reason: First cause of a failure, seen by `rank` in `phase`.
        node: Slurm's name of the node of `rank`; empty outside of Slurm.
        lost: Whether the process of `rank` vanished, or stopped, without a report of its own.
        left: Why the run stopped early, such as "exit-interval".
        next_command: Always empty: `tools/status.py` computes the command, and the key stays for
            readers of the file.
        attempt: Name of this start, the same on all its ranks. Without one, "running" marks a
            start.
        others: Later failures, one line each.
        throughput: Means over the steps of this start (`metrics.throughput.Throughput`), empty
            before the end.
    """

    state: State
    exit_code: int | None = None
    reason: str = ""
    rank: int = 0
    node: str = ""
    lost: bool = False
    iteration: int | None = None
    phase: str = ""
    left: str = ""
    next_command: str = ""
    traceback: str = ""
    attempt: str = ""
    job_id: str = ""
    version: str = ""
    time: str = field(default_factory=_now)
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    others: tuple[str, ...] = ()
    throughput: dict[str, float | None] = field(default_factory=dict[str, float | None])

    @property
    def place(self) -> str:
        """The rank, with its node in a Slurm job: "rank 1 on nid0123"."""
        return f"rank {self.rank}" + (f" on {self.node}" if self.node else "")


def write_status(run_dir: str | Path, status: Status) -> bool:
    """Replace status.json; any rank may call it, at any time.

    A failure in the file stays: a later failure of the same attempt is appended to its `others`,
    and no other status of a named attempt replaces it. The exception is a failure that blames a
    peer (exit code 6), which is a consequence: it gives way to a failure that does not.

    Returns:
        Whether `status` is now the file's main content.

    Raises:
        OSError: The file cannot be written.
    """
    path = Path(run_dir) / STATUS
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        old = read_status(run_dir)
        leads = old is None or _leads(old, status)
        merged = status if old is None else _merge(old, status, leads=leads)
        text = json.dumps(asdict(merged), indent=1) + "\n"
        try:
            replace_text(path, text)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            _overwrite(path, text)
    return leads


def read_status(run_dir: str | Path) -> Status | None:
    """Return the status of a run folder; None if the file is absent or malformed.

    Every returned value has the type of its field.
    """
    try:
        values = json.loads(read_regular(Path(run_dir) / STATUS))
        known: dict[str, Any] = {f.name: values[f.name] for f in fields(Status) if f.name in values}
        if not all(_fits(name, value) for name, value in known.items()):
            return None
        return Status(**{**known, "others": tuple(known.get("others", ()))})
    except (OSError, ValueError, TypeError, RecursionError):
        return None


@dataclass(frozen=True)
class EndedStatus:
    """status.json of a run that is done or has left: its text, and when it was written."""

    text: str
    modified: int

    @classmethod
    def read(cls, run_dir: str | Path) -> EndedStatus | None:
        """Return the file's content if the run has ended so, else None."""
        path, status = Path(run_dir) / STATUS, read_status(run_dir)
        if status is None or status.state not in ENDED:
            return None
        with suppress(OSError):
            return cls(read_regular(path).decode(), path.stat().st_mtime_ns)
        return None

    def restore(self, run_dir: str | Path, *, attempt: str) -> None:
        """Write the file again if it says "running" of `attempt`. Raises `OSError`.

        It keeps its time: `scripts/launch.sh` takes a newer file for the end of its own start.
        """
        path = Path(run_dir) / STATUS
        with _locked(path.parent):
            now = read_status(run_dir)
            if now is not None and (now.state, now.attempt) == ("running", attempt):
                replace_text(path, self.text)
                os.utime(path, ns=(self.modified, self.modified))


def _fits(name: str, value: object) -> bool:
    """Return whether a value of the file fits the field of that name."""
    match name:
        case "state":
            return value in get_args(State)
        case "lost":
            return isinstance(value, bool)
        case "exit_code" | "iteration":
            return value is None or _is_count(value)
        case "rank" | "pid":
            return _is_count(value)
        case "others":
            return isinstance(value, list) and all(map(_is_text, value))
        case "throughput":
            return isinstance(value, dict) and all(map(_is_figure, value.values()))
        case _:
            return _is_text(value)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_figure(value: object) -> bool:
    return value is None or isinstance(value, int | float) and abs(value) < 1e300


def _is_text(value: object) -> bool:
    # JSON can hold a lone surrogate, which cannot be written to a file or terminal.
    return isinstance(value, str) and not any("\ud800" <= mark <= "\udfff" for mark in value)


def _leads(old: Status, new: Status) -> bool:
    """Return whether the new status becomes the main content.

    Two ranks may report the failure of a third one in the same second: only the first report leads.
    What fails after the end of a run, such as closing a tracker, does not undo the run.
    """
    same = old.attempt == new.attempt
    if old.state in ENDED and new.state == "failed":
        return not (same and new.attempt)
    if old.state != "failed":
        return True
    if new.state != "failed":
        return not (same and new.attempt)
    return not same or old.exit_code == PeerError.exit_code != new.exit_code


def _merge(old: Status, new: Status, *, leads: bool) -> Status:
    first, later = (new, old) if leads else (old, new)
    if old.state != "failed" or new.state != "failed" or old.attempt != new.attempt:
        return first
    line = f"rank {later.rank}: {later.reason}".splitlines()[0]
    values = {f.name: getattr(first, f.name) for f in fields(Status)}
    return Status(**{**values, "others": (*old.others, line)[:MAX_OTHERS]})


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    # Ranks fail within milliseconds of each other. Some network file systems have no locks; there
    # the order of two writers may be lost, but never the file.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _overwrite(path: Path, text: str) -> None:
    """Overwrite the old file in place, since a full disk has no blocks for a new one.

    Raises `OSError` if the text needs more blocks than the file has.
    """
    data = text.encode()
    with open(open_regular(path, os.O_RDWR), "rb+", buffering=0) as file:
        if len(data) > max(os.fstat(file.fileno()).st_size, _BLOCK):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        file.write(data)
        file.truncate(len(data))


def replace_text(path: Path, text: str) -> None:
    """Replace a small file atomically, so that a reader sees the old or the new text.

    Raises OSError.
    """
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
