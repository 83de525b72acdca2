"""Docstrings begin with the noun or the verb that they are about."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
ENTRIES = tuple(path.name for path in sorted(REPO.glob("pretrain_*.py")))
TOPS = (*ENTRIES, "megatron", "radius", "samo", "tools", "tests", "docs/examples")
OPENERS = re.compile(r"(Of|By|That|Those|Both|The same|As|See)\b")
"""First words after which the subject of a sentence is missing or elsewhere."""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring, of modules, classes, functions and constants."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                if isinstance(text := statement.value.value, str):
                    yield statement.lineno, text.strip()


def badly_opened(source: str) -> list[int]:
    """Return the lines of docstrings that begin with one of `OPENERS`."""
    return [line for line, text in docstrings(source) if OPENERS.match(text)]


def test_a_bad_opener_is_found() -> None:
    source = (
        'A = 1\n"""Of a bucket."""\ndef f():\n    """Official."""\ndef g():\n    """See f."""\n'
    )
    assert badly_opened(source) == [2, 6]


def test_docstrings_open_with_their_subject() -> None:
    found = []
    for top in TOPS:
        path = REPO / top
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            lines = badly_opened(file.read_text(encoding="utf-8"))
            found += [f"{file.relative_to(REPO)}:{line}" for line in lines]
    assert found == []
