"""The learning rates of a pruned network at p = 0.9: which is best for each way to prune?

    python -m tools.bench.pruning_rates.run --text-folder TEXT    runs what has no row yet
    python -m tools.bench.pruning_rates.run --report              page, numbers and picture

The runs of `study.py`, made as `tools.bench.convergence.run` does its own, at the size of `PLAN`.
"""

from __future__ import annotations

import sys
from dataclasses import asdict

from tools.bench.convergence.run import main
from tools.bench.pruning_rates.page import RATES
from tools.bench.pruning_rates.study import PLAN

if __name__ == "__main__":
    size = [text for k, v in asdict(PLAN).items() for text in (f"--{k.replace('_', '-')}", str(v))]
    sys.exit(main([*size, *sys.argv[1:]], study=RATES))
