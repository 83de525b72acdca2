"""The files of a benchmark's results: a page, its numbers and a figure.

A folder of `tools/bench` holds README.md, results.json and figure.png. The head of README.md, up to
the line `MARK`, is written by hand and states the finding; the benchmark writes the rest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

PAGE, RESULTS, FIGURE = "README.md", "results.json", "figure.png"
MARK = "<!-- The benchmark writes what follows. -->"


def write_page(
    folder: Path | None,
    *,
    text: str,
    values: object,
    draw: Callable[[Path], object] | None = None,
    part: str = "",
    indent: int | None = 1,
) -> None:
    """Write a page, its numbers and its figure, each file atomically.

    Args:
        folder: Where to write; created if necessary. None writes nothing.
        text: The page, in Markdown. It replaces what follows `MARK` in an existing page, or all of
            a page without `MARK`.
        values: The numbers of the page, as JSON can hold them.
        draw: Writes the figure to a file; returns False if matplotlib is not installed.
        part: Name of a second page of the folder, which has PART.md, PART.json and PART.png.
        indent: Spaces of JSON's indentation; None writes one line.
    """
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / (f"{part}.md" if part else PAGE)
    old = page.read_text(encoding="utf-8") if page.is_file() else ""
    head, mark, _ = old.partition(f"{MARK}\n")
    _write(page, f"{head}{mark}\n{text}" if mark else text)
    _write(folder / (f"{part}.json" if part else RESULTS), json.dumps(values, indent=indent) + "\n")
    figure = folder / (f"{part}.png" if part else FIGURE)
    if draw is not None and draw(figure) is False:
        print(f"{figure.name} is left out: matplotlib is not installed")


def table(
    header: Sequence[str], lines: Iterable[Sequence[str]], *, texts: Sequence[str] | None = None
) -> list[str]:
    """Return the lines of a table in Markdown.

    Columns are numbers, but for those of `texts`, by default the first.
    """
    texts = header[:1] if texts is None else texts
    rule = "|".join("---" if name in texts else "---:" for name in header)
    named, *rest = (f"| {' | '.join(cells)} |" for cells in (header, *lines))
    return [named, f"|{rule}|", *rest]


def read_results(folder: Path, part: str = "") -> Any:
    """Return the numbers that `write_page` wrote. Raises `OSError` if there are none."""
    return json.loads((folder / (f"{part}.json" if part else RESULTS)).read_text(encoding="utf-8"))


def _write(file: Path, text: str) -> None:
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, file)
