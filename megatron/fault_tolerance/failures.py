"""Report of a failed rank: the first cause, once, in status.json and on stderr; an exit code."""

from __future__ import annotations

import dataclasses
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from megatron.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    PeerError,
    SparsetronError,
)
from megatron.fault_tolerance.flight_recorder import write_dump
from megatron.fault_tolerance.heartbeat import Heartbeat
from megatron.fault_tolerance.root_cause import RootCause, line
from megatron.fault_tolerance.run_lock import LOCK, RunFolderInUse
from megatron.launch import Launch
from megatron.run_dir import signed
from megatron.status import ENDED, EndedStatus, Status, read_status

EXIT_UNEXPECTED = 1
SECONDS_TO_SPEAK = 2.0
"""Seconds that other ranks stay, so that no launcher ends rank 0 before it has reported."""
_COLLECTIVE = (
    "gloo", "NCCL", "ProcessGroup", "Connection reset", "Broken pipe", "Application timeout",
    "Timed out waiting", "Socket Timeout",
)  # fmt: skip
"""Texts by which errors of torch.distributed are recognised; they have no type of their own."""
_REFUSALS = tuple(kind.exit_code for kind in (ConfigError, DataError, CheckpointError))
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory")


@dataclass(kw_only=True)
class Failures:
    """The reporter of this rank's failure; its fields are filled in while the run starts."""

    argv: Sequence[str]
    launch: Launch | None = None
    run_dir: Path | None = None
    attempt: str = ""
    near: Sequence[int] = ()
    nodes: Sequence[str] = ()
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    before: EndedStatus | None = field(default=None, init=False)
    """status.json before this start, of a run that was done or had left."""
    has_begun: bool = field(default=False, init=False)
    """Whether the run has begun to train or to evaluate."""
    debug: bool = field(init=False)
    """Whether tracebacks are printed; until the settings are known, as the command line says."""
    only_checks: bool = field(init=False)
    """True for a dry run, which leaves status.json as the last run has written it."""
    reason: str = field(default="", init=False)
    """The user's mistake that ended this rank, in one line."""
    _began: float = field(default_factory=time.time, init=False)
    _code: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.debug = _is_asked("--debug", self.argv)
        self.only_checks = _is_asked("--dry-run", self.argv)

    def causes(self) -> RootCause:
        """Return the record of this start's failures. `run_dir` and `launch` must be set."""
        assert self.run_dir is not None and self.launch is not None
        return RootCause(
            run_dir=self.run_dir,
            attempt=self.attempt,
            rank=self.launch.rank,
            world_size=self.launch.world_size,
            signed=signed(Status(state="failed")),
            near=self.near,
            nodes=self.nodes,
        )

    def report(self, error: BaseException) -> int:
        """Report the error that ended this rank, or its first cause, and return the exit code.

        Consequences of a failure that a peer has reported, and errors that rank 0 reports for all
        ranks, are left out. A second call only returns the exit code.
        """
        if self._code is None:
            self._code = self._report(error)
            if self._code == PeerError.exit_code and self.attempt:
                causes = self.causes()
                write_dump(causes.run_dir, causes.rank)
        return self._code

    def refuses(self, error: BaseException) -> bool:
        """Return whether the error refuses a start that has not begun: a user's mistake."""
        return not self.has_begun and isinstance(error, ConfigError | DataError | CheckpointError)

    def report_interrupt(self, code: int) -> int:
        """Report that the user ended the start of the run, and return `code`, the exit code."""
        status = self._mine("interrupted while starting", code=code)
        opened = read_status(self.run_dir) if self.attempt and self.run_dir is not None else None
        if opened is not None and opened.attempt == self.attempt:
            self.causes().tell(status)
        else:
            print(status.reason, file=sys.stderr, flush=True)
        return code

    def _report(self, error: BaseException) -> int:
        rank = self.launch.rank if self.launch is not None else 0
        if self.debug:
            traceback.print_exception(error, file=sys.stderr)
        if _is_collective(error):
            said = str(error).splitlines()[0].partition(" This is typically")[0]
            error = PeerError(f"a collective failed: {said}")
        if isinstance(error, SparsetronError):
            self.reason = " ".join(str(error).split())
        if isinstance(error, RunFolderInUse):
            # The folder belongs to another run, where a search for a cause would leave its result.
            if rank and error.shared:
                # Ranks that have met wait for rank 0 when they part.
                time.sleep(0 if self.attempt else SECONDS_TO_SPEAK)
            else:
                print(error, file=sys.stderr, flush=True)
            return error.exit_code
        parted = self.causes().parted() if self.attempt else None
        if parted is not None:
            # A desynchronised collective explains any error here, since ranks got each other's
            # numbers.
            if self.causes().known() is None:
                self._tell(parted)
            return PeerError.exit_code
        if not isinstance(error, SparsetronError):
            return self._report_unexpected(error)
        if rank and (error.shared or self.run_dir is None):
            # Every rank raises the same error from a flag or an agreement, so rank 0 reports it.
            # The others wait, because a launcher ends all ranks when the first one exits.
            if not error.shared:
                time.sleep(SECONDS_TO_SPEAK)
                if self.launch is not None and self.launch.local_rank == 0:
                    # Rank 0 has not ended this process: this node alone may have the error.
                    print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
            return error.exit_code
        if isinstance(error, PeerError) and not error.shared and self.attempt:
            blamed = self.causes().blame(self.heartbeat, str(error))
            if blamed is not None:
                self._tell(blamed)
        else:
            self._tell(self._mine(str(error), code=error.exit_code))
        return error.exit_code

    def _report_unexpected(self, error: BaseException) -> int:
        """Report an unexpected error, a bug or a fault of the machine, by its traceback."""
        text = "".join(traceback.format_exception(error))
        known = self.causes().known() if self.attempt else None
        if known is None:
            print(text, file=sys.stderr, flush=True)
        reason = f"{type(error).__name__}: {error}".strip()
        if isinstance(error, MemoryError) or any(mark in str(error) for mark in _OUT_OF_MEMORY):
            reason += "; lower --micro-batch-size or give --recompute-granularity full"
        mine = self._mine(reason, code=EXIT_UNEXPECTED)
        self._tell(dataclasses.replace(mine, traceback=text))
        return EXIT_UNEXPECTED

    def _mine(self, reason: str, *, code: int) -> Status:
        started = self.heartbeat.phase != "start"
        rank = self.launch.rank if self.launch is not None else 0
        return Status(
            state="failed",
            exit_code=code,
            reason=reason,
            rank=rank,
            node=self.nodes[rank] if self.nodes else "",
            iteration=self.heartbeat.step if started else None,
            phase=self.heartbeat.phase if started else "",
        )

    def _tell(self, status: Status) -> None:
        self.heartbeat.at("leaving")
        launch = self.launch or Launch(
            launcher="none", rank=0, world_size=1, local_rank=0, local_world_size=1
        )
        folder = self.run_dir or _run_dir_in(self.argv)
        if folder is None or self.only_checks or not self._may_write(folder):
            where = f"rank {launch.rank}: " if launch.world_size > 1 else ""
            print(f"{where}{status.reason}", file=sys.stderr, flush=True)
            return
        # The ranks may not have agreed on a name for this start yet. Then the failure takes the
        # name under which another rank has reported a failure since this start began.
        old = read_status(folder)
        fresh = old is not None and old.state == "failed" and _seconds(old.time) >= self._began
        refused = not self.has_begun and status.exit_code in _REFUSALS
        if refused and (self.before or (old is not None and old.state in ENDED)):
            # A start that is refused leaves the status of the run that trained.
            if self.before:
                with suppress(OSError):
                    self.before.restore(folder, attempt=self.attempt)
            print(line(status, launch.world_size), file=sys.stderr, flush=True)
            return
        attempt = self.attempt or (old.attempt if old is not None and fresh else uuid4().hex[:12])
        causes = RootCause(
            run_dir=folder,
            attempt=attempt,
            rank=launch.rank,
            world_size=launch.world_size,
            signed=signed(status),
        )
        causes.tell(status)

    def _may_write(self, folder: Path) -> bool:
        """Return whether the folder exists and no other run holds it."""
        try:
            return folder.is_dir() and (bool(self.attempt) or not (folder / LOCK).exists())
        except (OSError, ValueError):
            return False  # permission denied, a loop of links, or not a path


def _is_collective(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in _COLLECTIVE)


def _seconds(stamp: str) -> float:
    from datetime import datetime

    try:
        return datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return 0.0


def _is_asked(name: str, argv: Sequence[str]) -> bool:
    """Return whether a command line that could not be parsed has this flag, alone or with true."""
    asked = False
    for flag, following in zip(argv, [*argv[1:], "--"], strict=False):
        if flag == name:
            asked = following == "true" or following.startswith("--")
        elif flag.startswith(f"{name}="):
            asked = flag == f"{name}=true"
    return asked


def _run_dir_in(argv: Sequence[str]) -> Path | None:
    """Return the run folder named in a command line that could not be parsed."""
    for flag, following in zip(argv, [*argv[1:], ""], strict=False):
        name, equals, value = flag.partition("=")
        if name == "--run-dir":
            given = value if equals else following
            return Path(given) if given else None  # Path("") is the current folder
    return None
