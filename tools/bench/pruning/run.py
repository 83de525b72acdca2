"""Measure what pruning costs in validation loss, for each way to choose the pruned entries.

    python -m tools.bench.pruning.run --text-folder TEXT --jobs 2      run what has no result yet
    python -m tools.bench.pruning.run --report                         write tables and plots
    python -m tools.bench.pruning.run --text-folder TEXT --measure     estimate the total time
    python -m tools.bench.pruning.run --list                           list the runs

The runs of `study.py` are made and reported by `tools.bench.convergence.run`, whose `--help`
describes the model, the data and how a study is resumed. Finished dense runs in WORK are reused.
"""

from __future__ import annotations

import sys

from tools.bench.convergence.run import main
from tools.bench.pruning.page import PRUNING

if __name__ == "__main__":
    sys.exit(main(study=PRUNING, description=__doc__))
