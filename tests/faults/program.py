"""Run pretrain_gpt.py with the faults that SPARSETRON_FAULT names, see `tests.faults.inject`."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent


def main() -> None:
    """Run the script in this process, as `__main__`."""
    sys.path[0] = str(REPO)  # as if the script had been started itself
    if faults := os.environ.get("SPARSETRON_FAULT"):
        from tests.faults.inject import arm_every_trainer, parse_faults

        arm_every_trainer(parse_faults(faults))
    runpy.run_path(str(REPO / "pretrain_gpt.py"), run_name="__main__")


if __name__ == "__main__":
    main()
