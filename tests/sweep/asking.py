"""Cases of the sweep, the worker that runs them, and the law for every answer."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.limits import LIMIT
from tests.sweep.worker import READY

REPO = Path(__file__).resolve().parents[2]
LAUNCHERS = (
    "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "PMI_", "OMPI_", "PALS_", "TORCHELASTIC_",
    "SPARSETRON_FAULT", "MPI_",
)  # fmt: skip
CPU_SECONDS = LIMIT / 12
"""Own CPU seconds after which a command counts as hanging; the slowest command takes two."""
LINE_LENGTH = 12_000
"""Maximum characters of a refusal; a path of 5,000 may occur in it twice."""


@dataclass(frozen=True, kw_only=True)
class SweepCase:
    """One wrong input.

    `kind`: row in the table of counts. `codes`: correct exit codes, with 0 where the input may be
    harmless. `names`: text that a refusal contains. `notes`: number of lines that may precede the
    refusal.
    """

    kind: str
    command: str
    argv: tuple[str, ...]
    codes: tuple[int, ...]
    names: str = ""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: int = 0
    about: str = ""

    def __str__(self) -> str:
        words = [f"{name}={value[:80]!r}" for name, value in self.env.items()]
        words += [self.command, *(a if len(a) < 80 else f"{a[:77]}..." for a in self.argv)]
        return f"[{self.kind}{self.about and f', {self.about}'}] {' '.join(words)!r}"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of a command; `code` is None if the command hung or killed its process."""

    code: int | None
    out: str
    err: str
    why: str = ""


class Worker:
    """A process of `tests.sweep.worker`, which is replaced if it hangs or dies."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ending = False

    def ask(self, case: SweepCase, cwd: Path | None = None) -> Answer:
        """Return the answer to a case, run in `cwd`."""
        if self._process is None:
            self._start()
        request = {
            "command": case.command,
            "argv": case.argv,
            "env": dict(case.env),
            "cwd": str(cwd or self._folder),
        }
        with suppress(BrokenPipeError):
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
        line = self._line()
        if line:
            return Answer(**json.loads(line))
        return Answer(code=None, out="", err="", why=self._end())

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._end()

    def _start(self) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        environment = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
        environment |= {
            "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "COLUMNS": "100",
            "PYTHONPATH": str(REPO), "MALLOC_ARENA_MAX": "1",
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.sweep.worker", str(theirs_in), str(theirs_out)],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            env=environment,
            cwd=REPO,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._requests = os.fdopen(ours_out, "wb")
        self._answers, self._is_ending = ours_in, False
        assert self._line().decode().strip() == READY, "the worker does not start"

    def _line(self) -> bytes:
        """Return a line of the answers; it is empty if the process ends or time runs out."""
        line, deadline, most = b"", time.monotonic() + LIMIT, self._cpu() + CPU_SECONDS
        while not line.endswith(b"\n"):
            if not select.select([self._answers], [], [], 1.0)[0]:
                if time.monotonic() < deadline and self._cpu() < most:
                    continue
                return b""
            part = os.read(self._answers, 1 << 16)
            if not part:
                self._is_ending = True
                return b""
            line += part
        return line

    def _cpu(self) -> float:
        """Return the CPU seconds that the process has used."""
        assert self._process is not None
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return 0.0
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def _end(self) -> str:
        """End the process; return how it ended."""
        process = self._process
        assert process is not None
        self._process = None
        os.close(self._answers)
        with suppress(BrokenPipeError):
            self._requests.close()
        try:
            why = f"its process ended with {process.wait(LIMIT if self._is_ending else 0.5)}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            why = f"no answer in {CPU_SECONDS:.0f} s of computing or {LIMIT:.0f} s"
        return why


def wrong(case: SweepCase, answer: Answer) -> str:
    """Return how an answer breaks the law, or an empty string.

    The exit code must be correct. A refusal is one complete, printable line that names the error.
    Tracebacks, hangs and dead processes are never allowed.
    """
    if answer.code is None:
        return answer.why
    if "Traceback" in answer.err or "panicked" in answer.err:
        return f"traceback, exit code {answer.code}: {_last(answer.err)}"
    if answer.code not in case.codes:
        said = _last(answer.err) if answer.code else "accepted"
        return f"exit code {answer.code}, wanted {case.codes}: {said}"
    if answer.code == 0:
        return ""
    lines = refusal(answer.err)
    if not lines and not case.argv and answer.err.startswith("usage: "):
        return ""  # Without arguments, a command prints its usage.
    if not 1 <= len(lines) <= 1 + case.notes:
        return f"{len(lines)} lines: {' / '.join(lines)[:300]!r}"
    if not lines[-1].isprintable() or len(lines[-1]) > LINE_LENGTH:
        return f"not a line to print: {lines[-1][:200]!r}"
    if case.names and case.names not in lines[-1]:
        return f"does not name {case.names}: {lines[-1][:200]!r}"
    return ""


def refusal(err: str) -> list[str]:
    """Return the lines of a refusal, without the usage that argparse prints first."""
    lines = [line for line in err.split("\n") if line]
    if lines and lines[0].startswith("usage: "):
        rest = iter(lines[1:])
        lines = [line for line in rest if not line.startswith(" ")]
    return lines


def _last(err: str) -> str:
    lines = [line for line in err.splitlines() if line]
    return lines[-1][:300] if lines else "nothing was said"


@dataclass
class Tally:
    """Counts of cases by kind, and the cases that went wrong."""

    asked: Counter[str] = field(default_factory=Counter[str])
    failed: Counter[str] = field(default_factory=Counter[str])
    problems: list[str] = field(default_factory=list[str])
    seconds: float = 0.0

    def ask(self, worker: Worker, case: SweepCase, cwd: Path | None = None) -> Answer:
        """Run a case, check the answer against the law, and count the case."""
        start = time.monotonic()
        answer = worker.ask(case, cwd)
        self.seconds += time.monotonic() - start
        self.asked[case.kind] += 1
        if why := wrong(case, answer):
            self.fail(case.kind, f"{case}: {why}")
        return answer

    def fail(self, kind: str, problem: str) -> None:
        """Count a failure."""
        self.failed[kind] += 1
        self.problems.append(problem)

    @property
    def total(self) -> int:
        """Number of cases that were run."""
        return sum(self.asked.values())

    def table(self, what: str) -> str:
        """Return the counts: a line for all cases, and a line for each kind."""
        width = max(map(len, self.asked))
        rows = [
            f"  {kind.ljust(width)} {count:>5,}"
            + (f"  {self.failed[kind]} wrong" if self.failed[kind] else "")
            for kind, count in self.asked.items()
        ]
        bad = sum(self.failed.values())
        return "\n".join([f"{what}: {self.total:,} in {self.seconds:.0f} s, {bad} wrong", *rows])

    def check(self, least: int = 1) -> None:
        """Fail with every answer that breaks the law, or if too few cases ran."""
        assert self.total >= least
        assert not self.problems, "\n".join([f"{len(self.problems)} wrong", *self.problems])
