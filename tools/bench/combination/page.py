"""The page of the combination study."""

from pathlib import Path
from collections.abc import Sequence
from tools.bench.convergence.rows import Row


def write(out: Path | None, rows: Sequence[Row]) -> None:
    """Write nothing yet."""
