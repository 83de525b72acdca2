"""Peak resident memory of a training run, minus that of a process that has imported torch.

    python -m tools.bench.samo_memory.peak_rss FILE FLAGS...

does what `pretrain_gpt.py FLAGS...` does and writes bytes to FILE, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.bench.common.tensors import resident  # imports torch


def main(arguments: Sequence[str]) -> int:
    """Run one training run and return its exit code."""
    before = resident("VmRSS")
    from pretrain_gpt import main as train

    file, *flags = arguments
    code = train(flags)
    grew = {"before": before, "peak": resident("VmHWM")}
    Path(file).write_text(json.dumps(grew), encoding="utf-8")
    return code


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # torch's threads sometimes abort the interpreter while it shuts down.
    sys.stdout.flush()
    os._exit(code)
