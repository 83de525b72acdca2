"""The findings of a rehearsal, each with the lines of the program that caused it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]

Place = tuple[tuple[str, int, str], ...]
"""File, line and function of some frames, the innermost first."""


@dataclass(frozen=True)
class Finding:
    kind: str
    what: str
    where: Place

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}, at {told(self.where)}"


class Findings:
    """The list of findings since the last `take`, in order."""

    def __init__(self) -> None:
        self._found: list[Finding] = []

    def note(self, kind: str, what: str) -> None:
        self._found.append(Finding(kind, what, place(depth=4)))

    def take(self) -> list[Finding]:
        found, self._found = self._found, []
        return found


def place(depth: int) -> Place:
    """Return the innermost `depth` frames of the program, without torch and the rehearsal."""
    frames: list[tuple[str, int, str]] = []
    frame = sys._getframe(1)
    while frame is not None and len(frames) < depth:
        code = frame.f_code
        name = _short(code.co_filename)
        if name is not None:
            frames.append((name, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(frames)


def source(finding: Finding) -> str:
    """Name a finding by file and function, which are more stable than line numbers."""
    file, _, function = finding.where[0]
    return f"{file} {function}: {finding.what}"


def told(where: Place) -> str:
    """Write a place as a line of text."""
    return " < ".join(f"{file}:{line} {name}" for file, line, name in where) or "a torch thread"


@cache
def _short(filename: str) -> str | None:
    """Return the path in the repository, or None for files outside the program."""
    path = Path(filename)
    if not path.is_relative_to(REPO):
        return None
    name = path.relative_to(REPO).as_posix()
    skipped = ("tests/rehearsal/", ".venv/", "build/")
    return None if name.startswith(skipped) or "site-packages" in name else name
