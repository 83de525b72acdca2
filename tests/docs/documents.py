"""The commands in README.md and the pages under docs/ that a reader would type."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
INDEX = REPO / "docs" / "index.md"
_LISTED = re.findall(r"\]\(([\w./-]+\.md)\)", INDEX.read_text(encoding="utf-8"))
DOCUMENTS = [
    REPO / "README.md",
    *(INDEX.parent / page for page in _LISTED),
    INDEX,
]
"""Pages in reading order; a reader's shell keeps the state that earlier pages left.

The pages of tools/bench are left out: their commands measure for hours.
"""
SHELL, OTHER = ("", "sh", "bash"), ("text", "python", "yaml")
"""Labels of fences that are run, and labels of fences that the shell does not run."""
PROGRAMS = (
    "python", "pip", "pretrain_gpt.py", "touch", "cat", "tail", "squeue", "scancel", "sbatch",
    "srun", "mpiexec", "torchrun",
)  # fmt: skip
"""First words of a command within a sentence, besides the scripts of this repository."""
_FENCE = re.compile(r"^ *```(\w*) *$")
_SPAN = re.compile(r"`([^`\n]+)`")
_SCRIPT = re.compile(r"(scripts|tools|docs)/[\w./-]+\.(sh|py)")
CONTRIBUTING, CHANGELOG = REPO / "CONTRIBUTING.md", REPO / "CHANGELOG.md"
"""Pages for contributors, read after the documents; the changelog has no commands."""


@dataclass(frozen=True)
class Command:
    """One command, on one line, and its place, such as `README.md:12`."""

    text: str
    place: str


def fenced_commands(page: Path) -> list[Command]:
    """Return the commands between fences, in order; raise `ValueError` for other languages."""
    commands: list[Command] = []
    label: str | None = None
    parts: list[str] = []
    first = 0
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = _FENCE.match(line)
        if fence is not None:
            label = fence[1] if label is None else None
            if label is not None and label not in SHELL + OTHER:
                raise ValueError(f"{_place(page, number)}: label {label!r}: not in SHELL or OTHER")
        elif label in SHELL and (parts or (line.strip() and not line.lstrip().startswith("#"))):
            first = first if parts else number
            parts.append(line.strip().removesuffix("\\").strip())
            if not line.rstrip().endswith("\\"):
                commands.append(Command(_without_comment(" ".join(parts)), _place(page, first)))
                parts = []
    if label is not None or parts:
        raise ValueError(f"{page.name}: a fence or a command has no end")
    return commands


def spoken_commands(page: Path) -> list[Command]:
    """Return the commands in sentences and tables, in order and without repetition."""
    found: dict[str, Command] = {}
    fenced = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if _FENCE.match(line):
            fenced = not fenced
        elif not fenced:
            for span in _SPAN.findall(line):
                if _is_command(span):
                    found.setdefault(span, Command(span, _place(page, number)))
    return list(found.values())


def fences(page: Path, label: str) -> list[str]:
    """Return what stands between fences of a language on a page, in order."""
    return re.findall(rf"^```{label}\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)


def python_fences(page: Path) -> list[str]:
    """Return the Python code of a page, in order."""
    return fences(page, "python")


def _is_command(span: str) -> bool:
    words = span.split()
    assigned = [word for word in words if re.match(r"[A-Z_]+=", word)]
    rest = words[len(assigned) :]
    # A program name alone is not a command.
    if not rest or len(words) == 1:
        return False
    return rest[0] in PROGRAMS or _SCRIPT.fullmatch(rest[0]) is not None


def _without_comment(line: str) -> str:
    return re.sub(r"\s+#\s.*$", "", line)


def _place(page: Path, number: int) -> str:
    return f"{page.relative_to(REPO)}:{number}"
