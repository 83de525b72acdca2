"""The common style of the benchmarks' figures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def plain_axes(axes: Any) -> None:
    """Draw a faint grid behind the curves and no frame."""
    axes.grid(color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Any, path: Path) -> None:
    """Write a PNG atomically."""
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png")
    os.replace(temporary, path)
