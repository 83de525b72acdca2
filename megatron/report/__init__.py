"""Reports from run folders: report.html with charts inside, and loss.png.

Needs no torch and no network. `write_report` may be called at any time, also during a run;
`write_comparison` overlays several runs, and `compare` finds where two runs differ.
"""

from __future__ import annotations

from megatron.report.comparison import Comparison, compare, write_comparison
from megatron.report.runs import RunData, read_run
from megatron.report.writing import write_report

__all__ = ["Comparison", "RunData", "compare", "read_run", "write_comparison", "write_report"]
