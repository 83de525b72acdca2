"""CPU seconds of tests: measured, recorded in tests/durations.json, and held to limits.

    pytest --cpu-seconds FILE ...             write what each file of tests took to FILE
    python -m tests.budget FOLDER             add up the parts of a run and hold them to the limits
    python -m tests.budget FOLDER --record    the same, and write tests/durations.json
    python -m tests.budget FOLDER --all       add up; the limits are those of `--push`

A second counts for a test if its process or one that descends from it spent it: ranks, launchers,
tools. FOLDER holds one file a part and calibration.json (tests/calibration.py). Limits are numbers
of calibrations, so that a slower machine has the same limits. Above a limit the program warns,
above twice the limit the exit code is 1.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parent.parent
DURATIONS = REPO / "tests" / "durations.json"
CALIBRATION = "calibration.json"

SUM_LIMIT = 750.0
FILE_LIMIT = 50.0
TEST_LIMIT = 6.0
"""Largest numbers of calibrations of `scripts/test.sh --push`, of a file and of a test."""
LONGER = {
    "tests/contract/test_contracts.py": 100.0,  # every gradient path is held to eleven laws
}
"""Limits of files that need more than `FILE_LIMIT`, and the reason."""
LONGER_TESTS = {
    "tests/docs/test_commands.py": 15.0,  # the quickstart makes an environment and trains twice
    "tests/faults/test_mpi_ranks.py": 15.0,  # two cold starts of four ranks
    "tests/pipeline/test_message_driven_runs.py": 15.0,  # cold starts of ranks by mpiexec
}
"""Limits of the longest tests of files that need more than `TEST_LIMIT`, and the reason."""
SPINNING: frozenset[str] = frozenset()
"""Files whose ranks spin while they wait, so that their seconds grow with the load of the machine:
they have limits of their own and are left out of the sum."""

TICKS = os.sysconf("SC_CLK_TCK")
Took = tuple[float, float, str]
"""CPU seconds of a file and of its longest test, and the name of that test."""


def tree_seconds() -> float:
    """Return the CPU seconds of this process and of all that descend from it, ended or not."""
    todo, ticks = [str(os.getpid())], 0
    while todo:
        process = todo.pop()
        try:
            stat = Path(f"/proc/{process}/stat").read_text()
        except OSError:
            continue  # It ended; its parent has its seconds.
        ticks += sum(map(int, stat.rpartition(")")[2].split()[11:15]))
        todo += _children(process)
    return ticks / TICKS


def _children(process: str) -> Iterator[str]:
    try:
        for task in os.listdir(f"/proc/{process}/task"):
            yield from Path(f"/proc/{process}/task/{task}/children").read_text().split()
    except OSError:
        return


@dataclass(eq=False)
class Meter:
    """A plugin of pytest that measures each test and writes what all workers of xdist measured."""

    file: Path
    files: dict[str, Took] = field(default_factory=dict)
    collection: float = 0.0
    before: float = 0.0
    began: float = field(default_factory=time.monotonic)

    def lap(self) -> float:
        """Return the CPU seconds since the last call."""
        before, self.before = self.before, tree_seconds()
        # The seconds of a process that its parent did not wait for are lost.
        return max(0.0, self.before - before)

    def add(self, files: Mapping[str, Took]) -> None:
        """Add what a worker measured."""
        for name, (seconds, longest, test) in files.items():
            old = self.files.get(name, (0.0, 0.0, ""))
            self.files[name] = (old[0] + seconds, *max(old[1:], (longest, test)))

    def pytest_collection_finish(self) -> None:
        self.lap()
        self.collection = round(time.monotonic() - self.began, 1)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        answer = yield
        seconds = self.lap()
        file, _, test = item.nodeid.partition("::")
        self.add({file: (seconds, seconds, test)})
        return answer

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        files, collection = getattr(node, "workeroutput", {}).get("cpu_seconds", ({}, 0.0))
        self.add(files)
        self.collection = max(self.collection, collection)

    @pytest.hookimpl(trylast=True)  # in the controller of xdist, after all workers
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["cpu_seconds"] = (self.files, self.collection)
        else:
            record = {"collection": self.collection, "files": self.files}
            self.file.write_text(json.dumps(record), encoding="utf-8")


@dataclass
class Run:
    """CPU seconds of a run of `scripts/test.sh`, by file, and those of its calibration."""

    calibration: float
    files: dict[str, Took]

    @classmethod
    def of_parts(cls, folder: Path) -> Run:
        """Add up the parts of a run."""
        run = cls(json.loads((folder / CALIBRATION).read_text())["cpu"], {})
        for part in sorted(folder.glob("*.json")):
            if part.name != CALIBRATION:
                record = json.loads(part.read_text())
                run.files |= record["files"]
                print(f"{part.stem}: {record['collection']:.0f} s of collection")
        return run

    @classmethod
    def recorded(cls) -> Run:
        """Return the run of tests/durations.json."""
        return cls(**json.loads(DURATIONS.read_text()))

    @property
    def counted(self) -> float:
        """The sum of the files without spinning ranks, in seconds."""
        return sum(took[0] for name, took in self.files.items() if name not in SPINNING)

    def record(self) -> None:
        """Write tests/durations.json, one line a file."""
        rows = [
            f"{json.dumps(name)}: {json.dumps([round(took[0], 1), round(took[1], 1), took[2]])}"
            for name, took in sorted(self.files.items())
        ]
        files = ",\n".join(rows)
        text = f'{{"calibration": {self.calibration}, "files": {{\n{files}\n}}}}\n'
        DURATIONS.write_text(text, encoding="utf-8")

    def shares(self) -> Iterator[tuple[float, str]]:
        """Yield each sum with a limit: the part of its limit, and what it is."""
        yield self._share("all tests", self.counted, SUM_LIMIT)
        for name, (seconds, longest, test) in self.files.items():
            limit = LONGER.get(name, FILE_LIMIT)
            yield self._share(name, seconds, limit)
            yield self._share(f"{name}::{test}", longest, LONGER_TESTS.get(name, TEST_LIMIT))

    def _share(self, name: str, seconds: float, limit: float) -> tuple[float, str]:
        units = seconds / self.calibration
        return units / limit, f"{name}: {units:.1f} calibrations of CPU time, at most {limit:g}"

    def by_folder(self) -> str:
        """Return a table of the CPU minutes of each folder of tests."""
        minutes: dict[str, float] = {}
        for name, took in self.files.items():
            folder = name.split("/")[1]
            minutes[folder] = minutes.get(folder, 0.0) + took[0] / 60
        rows = sorted(minutes.items(), key=lambda row: -row[1])
        lines = [
            f"{name:<28}{value:7.2f}" for name, value in [*rows, ("all", sum(minutes.values()))]
        ]
        return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Add up a run, hold it to the limits and return the exit code."""
    folder, *options = arguments or ["."]
    if not (Path(folder) / CALIBRATION).is_file():
        print(
            f"{folder}: holds no {CALIBRATION}; give the folder of a run's parts", file=sys.stderr
        )
        return 2
    run = Run.of_parts(Path(folder))
    print(f"CPU minutes by folder ({run.calibration} s are a calibration):\n{run.by_folder()}")
    worst = 0.0
    for share, text in sorted(run.shares(), reverse=True) if "--all" not in options else ():
        if share > 1:
            print(f"{'over twice the limit' if share > 2 else 'warning'}: {text}")
            worst = max(worst, share)
    if "--record" in options:
        run.record()
    return int(worst > 2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
