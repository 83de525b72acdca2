"""A measurement as files: a page, what it was made of, and a picture."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_page(
    folder: Path | None,
    stem: str,
    *,
    text: str,
    found: dict[str, Any],
    draw: Callable[[Path], bool],
) -> None:
    """Print a page and, where there is a folder for it, write it with its numbers and its picture.
    `draw`: writes that to a file, False where there is nothing to draw with."""
    print(text)
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.md").write_text(text, encoding="utf-8")
    (folder / f"{stem}.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
    if not draw(folder / f"{stem}.png"):
        print(f"{stem}.png is left out: matplotlib is not installed")
