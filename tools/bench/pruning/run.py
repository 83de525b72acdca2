"""The cost of a pruned network in loss, by the way it was pruned.

    python -m tools.bench.pruning.run --text-folder TEXT --jobs 2    runs what has no row yet
    python -m tools.bench.pruning.run --report                       page, numbers and picture

The runs of `study.py`, made and reported as `tools.bench.convergence.run` does its own; dense runs
that are in `--work` are taken as they are.
"""

from __future__ import annotations

import sys

from tools.bench.convergence.run import main
from tools.bench.pruning.page import PRUNING

if __name__ == "__main__":
    sys.exit(main(study=PRUNING))
