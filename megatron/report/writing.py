"""Writing of a run's report: report.html, and loss.png; the charts need matplotlib."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megatron.metrics.log_line import timestamp
from megatron.report.charts import loss_chart
from megatron.report.drawing import NEEDS_MATPLOTLIB, can_draw, write_png
from megatron.report.page import run_page
from megatron.report.runs import read_run
from megatron.status import replace_text

REPORT = "report.html"
PICTURE = "loss.png"


def write_report(
    run_dir: str | Path,
    *,
    output: str | Path | None = None,
    log: Callable[[str], None] | None = None,
) -> Path:
    """Write report.html and loss.png of a run folder, into the folder or into `output`.

    Without matplotlib there is no loss.png and no chart, and `log` gets a note. Returns the path of
    report.html. Raises `ConfigError` if the folder has no metrics, OSError if it cannot be written.
    """
    run = read_run(run_dir)
    folder = run.folder if output is None else Path(output)
    path = folder / REPORT
    write_page(path, run_page(run, written=timestamp(time.time())))
    if can_draw():
        write_png(replace(loss_chart(run), title=run.name), folder / PICTURE)
    elif log is not None:
        log(f"{PICTURE} and the charts are left out: {NEEDS_MATPLOTLIB}")
    return path


def write_page(path: Path, page: str) -> None:
    """Write a page atomically; bytes of a file's name that are no text become `?`."""
    replace_text(path, page.encode(errors="replace").decode())
