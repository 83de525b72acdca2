"""A lock that allows one run at a time in a run folder: a second start is refused at once.

The lock is a file that names its holder. Where disk and hosts support it, the kernel's lock on the
file (`flock`) shows within milliseconds whether the holder is alive. Elsewhere the contents decide:
the holder is dead if its process on this host is gone, if its Slurm job was restarted since, or if
it runs on another host and has not touched the file for `STALE_SECONDS`. Without `flock`, two
starts that take over the same stale lock in the same milliseconds may both get it. Imports neither
torch nor numpy.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from megatron.errors import ConfigError

LOCK = "run.lock"
HEARTBEAT_SECONDS = 20.0
STALE_SECONDS = 120.0
"""Seconds of silence after which a holder on another host is considered dead."""
_TRIES = 8
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class RunFolderInUse(ConfigError):
    """Another start holds the run folder, so nothing in the folder may be written."""

    shared = True


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that holds a run folder.

    `started` is the process's start in clock ticks since `boot`, which tells it from a later
    process with the same pid. `job` and `restarts` are Slurm's.
    """

    host: str
    pid: int
    boot: str
    started: int
    job: str = ""
    restarts: int = 0

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}"


class RunLock:
    """The lock of a run folder, held from `take` to `release` or to the end of the process."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor
        self._over = threading.Event()
        threading.Thread(target=self._beat, name="run-lock", daemon=True).start()

    @classmethod
    def take(
        cls, run_dir: Path, *, job: Mapping[str, str], log: Callable[[str], None]
    ) -> RunLock | None:
        """Lock an existing run folder. `job` has Slurm's variables, as far as they are set.

        A lock whose holder is gone is taken over, with a note in the log.

        Returns:
            The lock; None, with a note in the log, if the disk has no hard links, which it needs.

        Raises:
            RunFolderInUse: Another process holds the folder; the error names the process.
            OSError: The lock file cannot be written.
        """
        path = run_dir / LOCK
        mine = _myself(job)
        for _ in range(_TRIES):
            try:
                descriptor = _create(path, mine)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                log(f"{path}: {error.strerror}: nothing keeps a second run out of this folder")
                return None
            if descriptor is not None:
                return cls(path, descriptor)
            if (gone := _clear(path, mine)) is not None:
                log(f"run folder taken over from {gone}, which is gone")
        raise RunFolderInUse(f"{path}: changes hands all the time; start one run at a time")

    def release(self) -> None:
        """Release the folder and remove the lock file."""
        self._over.set()
        with contextlib.suppress(OSError):
            if _same_file(self._path, self._descriptor):
                self._path.unlink()
        os.close(self._descriptor)

    def _beat(self) -> None:
        while not self._over.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self._path)


def check_free(run_dir: Path) -> None:
    """Raise `RunFolderInUse` if the kernel's lock shows that another process holds the folder.

    Nothing is changed, and a missing or stale lock is no error here, so every rank of a start on
    one host may call this function before it spends seconds on getting ready.
    """
    path = run_dir / LOCK
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not _try_lock(descriptor, fcntl.LOCK_SH):
            raise _in_use(path, _read(descriptor))
    finally:
        os.close(descriptor)


def _in_use(path: Path, holder: Holder | None) -> RunFolderInUse:
    name = holder if holder is not None else "an unknown process"
    return RunFolderInUse(
        f"{path.parent}: in use by {name}; wait for it, or give another --run-dir or --save"
    )


def _create(path: Path, mine: Holder) -> int | None:
    """Create the lock file and return its descriptor; None if the file exists.

    The file gets its name by a link, so that it always has contents and the kernel's lock.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, json.dumps(asdict(mine)).encode() + b"\n")
        os.link(draft, path)
        return descriptor
    except FileExistsError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    finally:
        draft.unlink()


def _clear(path: Path, mine: Holder) -> str | None:
    """Remove a lock whose holder is gone and return the holder; None if the lock disappeared.

    Raises `RunFolderInUse`.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        holder = _read(descriptor)
        if not _try_lock(descriptor) or not _is_gone(path, descriptor, holder, mine):
            raise _in_use(path, holder)
        # A process takes over a lock only while it has the kernel's lock on the file that it read.
        if not _same_file(path, descriptor):
            return None
        path.unlink()
        return str(holder) if holder is not None else "an unknown process"
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Return False if another process has the kernel's lock, else True.

    True also on disks without such locks.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def _is_gone(path: Path, descriptor: int, holder: Holder | None, mine: Holder) -> bool:
    if holder is not None and holder.host == mine.host:
        return (holder.boot, holder.started) != (mine.boot, _started(holder.pid))
    if holder is not None and holder.job and holder.job == mine.job:
        if holder.restarts < mine.restarts:
            return True
    return _now_of(path.parent) - os.fstat(descriptor).st_mtime > STALE_SECONDS


def _now_of(folder: Path) -> float:
    """Return the time by the clock that stamps files in the folder, possibly another host's."""
    probe = folder / f".{LOCK}.{secrets.token_hex(4)}"
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
        probe.unlink()


def _read(descriptor: int) -> Holder | None:
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
        holder = Holder(**found)
    except (ValueError, TypeError, RecursionError):
        return None
    kinds = {"str": str, "int": int}
    fits = all(isinstance(getattr(holder, f.name), kinds[str(f.type)]) for f in fields(Holder))
    return holder if fits else None


def _same_file(path: Path, descriptor: int) -> bool:
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    opened = os.fstat(descriptor)
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def _myself(job: Mapping[str, str]) -> Holder:
    pid = os.getpid()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    restarts = job.get("SLURM_RESTART_COUNT", "")
    return Holder(
        host=socket.gethostname(),
        pid=pid,
        boot=boot,
        started=_started(pid),
        job=job.get("SLURM_JOB_ID", ""),
        restarts=int(restarts) if restarts.isdigit() else 0,
    )


def _started(pid: int) -> int:
    """Return the start of a process, in clock ticks since boot.

    -1 if the process does not exist or is a zombie.
    """
    try:
        # The command name is in parentheses and may itself contain spaces and parentheses.
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if values[0] in "ZX" else int(values[19])
