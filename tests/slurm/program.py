"""pretrain_gpt.py for jobs of tests: FIRST_FAULT strikes in a job's first start alone.

A warning that comes before the run can note it is left to the next one: these jobs are so short
that Slurm, which looks at limits twice a minute, may send it at once.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent

if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if "FIRST_FAULT" in os.environ and "SLURM_RESTART_COUNT" not in os.environ:
        os.environ["SPARSETRON_FAULT"] = os.environ["FIRST_FAULT"]
    sys.modules["matplotlib"] = None  # type: ignore[assignment] # takes seconds, for a picture
    sys.path.insert(0, str(REPO))

    from tests.faults.program import main

    main()
