"""Which settings of Radius lose least at equal bytes: density, interval, width, clipping?

    python -m tools.bench.rolling.run --text-folder TEXT    runs what has no row yet
    python -m tools.bench.rolling.run --report              page, numbers and picture

The runs of `study.py`, made as `tools.bench.convergence.run` does its own, at the size of `PLAN`.
"""

from __future__ import annotations

import sys
from dataclasses import asdict

from tools.bench.convergence.run import main
from tools.bench.rolling.page import ROLLING
from tools.bench.rolling.study import PLAN

if __name__ == "__main__":
    size = [text for k, v in asdict(PLAN).items() for text in (f"--{k.replace('_', '-')}", str(v))]
    sys.exit(main([*size, *sys.argv[1:]], study=ROLLING, description=__doc__))
