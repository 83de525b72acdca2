"""The result of a finished run: one JSON line, so that a report needs no run folders."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError, DataError
from megatron.metrics.logger import LOSS
from megatron.report.runs import RunData, read_run
from megatron.status import replace_text
from tools.studies.declaration import FlagValue

POINTS = 100
"""Most points of a loss curve; each is the mean over an equal share of the run's steps."""
TAIL = 20
"""The training loss at the end is the mean over this part, 1 / TAIL, of the steps."""
LATER: Mapping[str, Any] = {"scores": {}, "flags": {}, "torch": "", "cores": 0}
"""Keys that rows of earlier versions lack, with the values that such rows get."""


@dataclass(frozen=True, kw_only=True)
class StudyRow:
    """The result of a run.

    Attributes:
        name, group, seed, ranks: Name, group, seed and number of ranks of the declared run.
        data_parallel: Data-parallel size of the run.
        settings: Digest of all that decides the result (`Commands.digest`).
        exit_code: 0, or 5 if the numbers went wrong.
        steps: Steps taken, including those of the run that it continues.
        valid_loss: Loss of the last evaluation, nats; None if there was none at the last step.
        train_loss: Mean loss of the last twentieth of the steps.
        bytes: Bytes that a rank sends along the data-parallel axis in a step, mean of the steps
            of this run; `most_bytes` is the largest. 0 on one rank.
        density: Share of the entries that a step sends, mean of the steps of this run.
        clipped: Share of the steps whose gradient norm was above the limit.
        step_seconds: Median seconds of a step; `seconds` is the sum of all steps.
        peak_memory: Largest peak memory of rank 0, in bytes.
        curve: (last step, mean training loss) of each part of the run.
        commit, processor: Where the run was made.
        scores: Figures of the trained model that the study asks for, by name.
        flags: Flags of the run with those that the study sets, without the folders of the run;
            `{data}` stands for the folder of the data (`Commands.declared`).
        torch: Version of torch.
        cores: Cores that all runs of the start shared.
        lacking: Keys of `LATER` that the line of an older row does not have.

    Rows of an earlier format, which were converted, have no `step_seconds`, `peak_memory`, `commit`
    and `processor`, and those of several ranks no `density`.
    """

    name: str
    group: str
    seed: int
    ranks: int
    data_parallel: int
    settings: str
    exit_code: int
    steps: int
    valid_loss: float | None
    train_loss: float | None
    bytes: float
    most_bytes: float
    density: float | None
    clipped: float
    step_seconds: float | None
    seconds: float
    peak_memory: float | None
    curve: Sequence[tuple[int, float]]
    commit: str
    processor: str
    scores: Mapping[str, float] = field(default_factory=dict)
    flags: Mapping[str, FlagValue] = field(default_factory=dict)
    torch: str = ""
    cores: int = 0
    lacking: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """The row as JSON, with the SHA-256 of everything before it.

        The line of an older row stays as it was, since its SHA-256 may be cited elsewhere.
        """
        content = asdict(self)
        for key in content.pop("lacking"):
            del content[key]
        return json.dumps({**content, "sha256": digest(content)})


def digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a row without its own digest."""
    kept = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def row_of(
    folder: Path,
    *,
    name: str,
    group: str,
    seed: int,
    ranks: int,
    data_parallel: int,
    settings: str,
    exit_code: int,
    first_step: int,
    clip: float,
    scores: Mapping[str, float],
    flags: Mapping[str, FlagValue],
    cores: int,
) -> StudyRow:
    """Return the row of the run in `folder`, whose steps before `first_step` are another run's.

    `clip` is the limit of the gradient norm, 0 for none. Raises `DataError` if no step is recorded,
    or a number is missing in all of them.
    """
    run = read_run(folder)
    own = [place for place, step in enumerate(run.iterations) if step >= first_step]
    if not own:
        raise DataError(f"{folder}: records no step of the run; remove the folder")

    def column(key: str) -> list[float]:
        values = [run.steps[key][place] for place in own]
        finite = [value for value in values if math.isfinite(value)]
        if not finite and key != "grad_norm":
            raise DataError(f"{folder}: no step records {key}; remove the folder")
        return finite

    last = run.iterations[-1]
    losses = [loss for loss in run.steps[LOSS][-max(1, last // TAIL) :] if math.isfinite(loss)]
    valid = [loss for step, loss in run.evaluations["valid"] if step == last]
    norms = column("grad_norm")
    clipped = sum(norm > clip for norm in norms) if clip else 0
    seconds = column("step_seconds")
    return StudyRow(
        name=name,
        group=group,
        seed=seed,
        ranks=ranks,
        data_parallel=data_parallel,
        settings=settings,
        exit_code=exit_code,
        steps=last,
        valid_loss=valid[-1] if valid and exit_code == 0 and math.isfinite(valid[-1]) else None,
        train_loss=round(statistics.fmean(losses), 5) if losses else None,
        bytes=round(statistics.fmean(column("bytes_sent"))),
        most_bytes=max(column("bytes_sent")),
        density=round(statistics.fmean(column("density")), 6),
        clipped=round(clipped / max(1, len(norms)), 4),
        step_seconds=round(statistics.median(seconds), 5),
        seconds=round(math.fsum(seconds), 1),
        peak_memory=max(column("peak_memory_bytes")),
        curve=curve(run),
        commit=str(run.environment.get("commit", "")),
        processor=str(run.environment.get("processor", "")),
        scores=scores,
        flags=flags,
        torch=_version("torch", run.environment.get("packages", "")),
        cores=cores,
    )


def _version(package: str, packages: str) -> str:
    """Return the version of a package in the list of a run's environment; "" if it has none."""
    named = (each.partition(" ") for each in packages.split(", "))
    return next((version for name, _, version in named if name == package), "")


def curve(run: RunData) -> list[tuple[int, float]]:
    """Return the mean training loss of each of at most `POINTS` equal parts of a run."""
    width = -(-len(run.iterations) // POINTS)
    points: list[tuple[int, float]] = []
    for first in range(0, len(run.iterations), width):
        part = run.steps[LOSS][first : first + width]
        mean = statistics.fmean(part)
        if math.isfinite(mean):
            points.append((run.iterations[first + len(part) - 1], round(mean, 5)))
    return points


# ---- files -----------------------------------------------------------------------------------


def write_row(path: Path, row: StudyRow) -> None:
    """Write a row to a file of its own, atomically: runs of a Slurm array end at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, row.line + "\n")


def read_rows(path: Path) -> list[StudyRow]:
    """Return the rows of a file of results; none without a file.

    Raises `ConfigError` for a line that is no row or whose digest is wrong, and for a second row of
    a run.
    """
    if not path.exists():
        return []
    found: dict[str, StudyRow] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            row = _row(f"{path}:{number}", line)
            if row.name in found:
                raise ConfigError(f"{path}:{number}: a second row of {row.name}; remove one")
            found[row.name] = row
    return list(found.values())


@contextmanager
def adding_to(path: Path) -> Iterator[None]:
    """Keep other processes from adding rows to a file of results, between its read and its write.

    Where the disk has no locks, rows of two processes that end at once may still be lost; their
    own files keep them, and the next start adds them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the file: a write replaces the file, and a lock on the old one would hold nobody off.
    with open(path.with_name(f".{path.name}.lock"), "a") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_rows(path: Path, rows: Iterable[StudyRow]) -> None:
    """Replace a file of results, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, "".join(row.line + "\n" for row in rows))


def _row(where: str, line: bytes) -> StudyRow:
    try:
        content = dict(json.loads(line))
        known = {each.name for each in fields(StudyRow)} - {"lacking"}
        if digest(content) != content["sha256"]:
            raise ConfigError(f"{where}: the row was changed: its sha256 is another")
        lacking = tuple(key for key in LATER if key not in content)
        content = {**LATER, **content}
        return StudyRow(**{key: content[key] for key in known}, lacking=lacking)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{where}: no row of a study: {error!r}") from None
