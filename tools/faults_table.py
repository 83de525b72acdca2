"""Print a table of a run of tests/faults: faults, trials, and outcomes.

    python tools/faults_table.py RESULTS.xml

pytest writes RESULTS.xml. A test may record the properties `fault` (its row; by default the name of
the test), `trials` (by default 1), `detected` and `recovered` (by default all trials if the test
passed, else 0) and `seconds` (from the fault to the end of the other ranks). A row has the sums of
its tests, and their longest time.
"""

from __future__ import annotations

import argparse
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.data.local_file import require_regular  # noqa: E402
from megatron.errors import ConfigError, DataError, SparsetronError  # noqa: E402

_COLUMNS = ("fault", "trials", "detected", "recovered", "longest s")


@dataclass
class FaultTableRow:
    """Sums over the tests of one fault; `seconds` is the longest, None if not measured."""

    trials: int = 0
    detected: int = 0
    recovered: int = 0
    seconds: float | None = None


def read_rows(path: str) -> dict[str, FaultTableRow]:
    """Return rows by fault, in the order of the tests, without skipped tests.

    Raises `ParseError` or `ValueError` for a file of another kind.
    """
    rows: dict[str, FaultTableRow] = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        if case.find("skipped") is not None:
            continue
        passed = case.find("failure") is None and case.find("error") is None
        found = {p.get("name", ""): p.get("value", "") for p in case.iter("property")}
        name = re.sub(r"\[.*", "", case.get("name", "")).removeprefix("test_").replace("_", " ")
        row = rows.setdefault(found.get("fault", name), FaultTableRow())
        trials = int(found.get("trials", 1))
        row.trials += trials
        row.detected += int(found.get("detected", trials if passed else 0))
        row.recovered += int(found.get("recovered", trials if passed else 0))
        if "seconds" in found:
            row.seconds = max(row.seconds or 0.0, float(found["seconds"]))
    return rows


def format_table(rows: dict[str, FaultTableRow]) -> str:
    """Return the table as text: headings, rows, and a last line with the sums."""
    lines: list[Sequence[str]] = [_COLUMNS]
    for name, row in rows.items():
        seconds = "" if row.seconds is None else f"{row.seconds:.1f}"
        lines.append((name, str(row.trials), str(row.detected), str(row.recovered), seconds))
    sums = [sum(getattr(row, key) for row in rows.values()) for key in _COLUMNS[1:4]]
    lines.append(("all", *map(str, sums), ""))
    widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS))]
    return "\n".join(
        line[0].ljust(widths[0])
        + "".join(f"  {cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))
        for line in lines
    )


def main(argv: Sequence[str]) -> int:
    """Print the table and return the exit code.

    2 for wrong usage or a file that is missing or cannot be opened, 3 for another kind of file.
    """
    parser = argparse.ArgumentParser(
        prog="faults_table.py", description="Table of a run of tests/faults.", allow_abbrev=False
    )
    parser.add_argument("results", metavar="RESULTS.xml", help="pytest's --junitxml file")
    path = parser.parse_args(argv).results
    try:
        print(format_table(_rows(path)))
    except SparsetronError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _rows(path: str) -> dict[str, FaultTableRow]:
    try:
        if Path(path).exists():
            require_regular(path)
        return read_rows(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (ElementTree.ParseError, ValueError) as error:
        raise DataError(f"{path}: is not a --junitxml file of pytest: {error}") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
