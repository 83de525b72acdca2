"""Puts the report of a run into its folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from megatron.metrics.log_line import timestamp
from megatron.report.page import run_page
from megatron.report.picture import write_picture
from megatron.report.runs import read_run

REPORT = "report.html"
PICTURE = "loss.png"


def write_report(
    run_dir: str | Path,
    *,
    output: str | Path | None = None,
    log: Callable[[str], None] | None = None,
) -> Path:
    """Write report.html and loss.png from what the folder holds, into it or into `output`.

    Returns the former's path.

    Without matplotlib there is no loss.png, and `log` is told so. Raises `ConfigError` where the
    folder holds no metrics, OSError where it cannot be written.
    """
    run = read_run(run_dir)
    folder = run.folder if output is None else Path(output)
    path = folder / REPORT
    replace_text(path, run_page(run, written=timestamp(time.time())))
    if not write_picture(folder / PICTURE, [run], [run.name]) and log is not None:
        log(f"{PICTURE} is left out: matplotlib is not installed (pip install 'sparsetron[log]')")
    return path


def replace_text(path: Path, text: str) -> None:
    """Write a file as a whole, so that a reader sees the old or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8", errors="replace")
    os.replace(temporary, path)
