"""Tests that docs/paper-to-code.md lists every numbered item of the papers and names real code."""

from __future__ import annotations

import ast
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.docs.documents import REPO

PAGE = REPO / "docs" / "paper-to-code.md"
ROMAN = ("I", "II")
NUMBERED: dict[str, dict[str, int]] = {
    "Radius": {"Eq.": 4, "Algorithm": 2, "Table": 7, "Figure": 7},
    "SAMO": {"Eq.": 11, "Algorithm": 0, "Table": 2, "Figure": 8},
    "AxoNN": {"Eq.": 3, "Algorithm": 2, "Table": 2, "Figure": 11},
    "Low-Memory Training": {"Eq.": 0, "Algorithm": 0, "Table": 9, "Figure": 10},
}
"""Highest numbers in each paper, read from its text."""
ROMAN_TABLES = ("SAMO", "AxoNN")
STATUSES = ("built", "measured", "computed", "not run", "not built")


@dataclass(frozen=True)
class PaperRow:
    """One row of a paper's table; `paper` is the heading above the row."""

    paper: str
    item: str
    status: str
    where: str
    notes: str

    @property
    def is_claim(self) -> bool:
        """Return whether the row is a statement without a number."""
        return self.item.startswith("claim")


def _rows() -> Iterator[PaperRow]:
    paper = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            paper = line.removeprefix("## ")
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if paper in NUMBERED and line.startswith("|") and cells[0] not in ("item", "---"):
            item, _, status, where, notes = cells
            yield PaperRow(paper, item, status, where, notes)


ROWS = list(_rows())


def _id(row: PaperRow) -> str:
    return f"{row.paper}, {row.item}"


def _expected(paper: str) -> list[str]:
    found: list[str] = []
    for kind, count in NUMBERED[paper].items():
        romans = kind == "Table" and paper in ROMAN_TABLES
        found += [f"{kind} {ROMAN[i] if romans else i + 1}" for i in range(count)]
    return found


@pytest.mark.parametrize("paper", NUMBERED)
def test_every_numbered_item_has_one_row(paper: str) -> None:
    items = [row.item for row in ROWS if row.paper == paper and not row.is_claim]
    assert items == _expected(paper)


def test_the_summary_counts_the_rows() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for paper in NUMBERED:
        counts = Counter(row.status for row in ROWS if row.paper == paper and not row.is_claim)
        cells = [str(n) for n in (counts.total(), *(counts[status] for status in STATUSES))]
        assert f"| {paper} | {' | '.join(cells)} |" in text
    total = Counter(row.status for row in ROWS if not row.is_claim)
    opening = " ".join(text.split("\n\n|")[0].split())
    built, measured, computed, not_run, not_built = (total[status] for status in STATUSES)
    for phrase in (
        f"number {total.total()} items",
        f"implements {built} of them",
        f"measures {measured},",
        f"computes {computed},",
        f"exists for {not_run} ",
        f"{not_built} are not built",
    ):
        assert phrase in opening


@pytest.mark.parametrize("row", ROWS, ids=_id)
def test_a_row_names_a_target_or_a_reason(row: PaperRow) -> None:
    assert row.status in STATUSES
    assert (row.status == "not built") == (row.where == "not built")
    if row.status == "not built":
        assert row.notes
        return
    targets = _targets(row.where)
    assert targets
    for path, names in targets:
        file = REPO / path
        assert file.exists(), path
        missing = [name for name in names if name not in _defined(path)]
        assert not missing, f"{path}: {missing}"


HANDS_ON = {
    "tools/bench/samo_path/run.py": "tools/bench/gradient_path/run.py",
    "tools/bench/samo_vision/run.py": "tools/bench/gradient_path/run.py",
}
"""Programs that pass flags on, and the programs that know the flags."""


def test_commands_have_the_flags_they_are_given() -> None:
    fences = re.findall(r"```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    commands = [shlex.split(line) for fence in fences for line in fence.splitlines()]
    assert commands
    for python, *words in commands:
        assert python == "python"
        if words[0] == "-m":
            words = [f"{words[1].replace('.', '/')}.py", *words[2:]]
        script, *arguments = words
        script = HANDS_ON.get(script, script)
        source = ast.parse((REPO / script).read_text(encoding="utf-8"))
        # A flag that occurs only in a docstring is not a flag of the script.
        known = {n.value for n in ast.walk(source) if isinstance(n, ast.Constant)}
        for argument in arguments:
            assert not argument.startswith("--") or argument in known, f"{script} {argument}"
            assert not argument.startswith(("configs/", "docs/")) or (REPO / argument).exists()


def _targets(cell: str) -> list[tuple[str, list[str]]]:
    """Return the paths of a cell, in backticks or links, each with the names in parentheses."""
    code = re.findall(r"`([\w./-]+)`(?: \(([\w., ]+)\))?", cell)
    found = [(path, [n.strip() for n in names.split(",") if n.strip()]) for path, names in code]
    linked = re.findall(r"\]\(([\w./-]+)\)", cell)
    rest = re.sub(r"`[\w./-]+`(?: \([\w., ]+\))?|\[[^]]+\]\([^)]+\)|,| ", "", cell)
    assert not rest, f"neither a path nor a link: {rest}"
    return found + [(f"docs/{page}", []) for page in linked]


def _defined(path: str) -> set[str]:
    """Return the functions, classes, methods (`Class.method`) and names assigned in a module."""
    if not path.endswith(".py"):
        return set()
    found: set[str] = set()
    for node in ast.parse((REPO / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            members = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {f"{node.name}.{member.name}" for member in members}
        if isinstance(node, ast.Assign):
            found |= {each.id for each in node.targets if isinstance(each, ast.Name)}
    return found
