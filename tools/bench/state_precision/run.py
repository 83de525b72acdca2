"""Losses of a small GPT with optimizer states in 16 and 8 bits, beside fp32 states.

    python -m tools.bench.state_precision.run --text-folder TEXT    runs what has no row yet
    python -m tools.bench.state_precision.run --report              page, numbers and picture

The runs of `study.py`, made as `tools.bench.convergence.run` does its own, at the size of `PLAN`.
"""

from __future__ import annotations

import sys
from dataclasses import asdict

from tools.bench.convergence.run import main
from tools.bench.state_precision.page import STATES
from tools.bench.state_precision.study import PLAN

if __name__ == "__main__":
    size = [text for k, v in asdict(PLAN).items() for text in (f"--{k.replace('_', '-')}", str(v))]
    sys.exit(main([*size, *sys.argv[1:]], study=STATES))
