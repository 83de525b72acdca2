"""Which gradient path loses least for the bytes that it sends?

    python -m tools.bench.loss_by_bytes.run --text-folder TEXT    runs what has no row yet
    python -m tools.bench.loss_by_bytes.run --report              page, numbers and picture

The runs of `study.py`, made as `tools.bench.convergence.run` does its own, at the size of `PLAN`.
"""

from __future__ import annotations

import sys
from dataclasses import asdict

from tools.bench.convergence.run import main
from tools.bench.loss_by_bytes.page import LOSS_BY_BYTES
from tools.bench.loss_by_bytes.study import PLAN

if __name__ == "__main__":
    size = [text for k, v in asdict(PLAN).items() for text in (f"--{k.replace('_', '-')}", str(v))]
    sys.exit(main([*size, *sys.argv[1:]], study=LOSS_BY_BYTES, description=__doc__))
