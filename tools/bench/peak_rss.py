"""Peak resident memory of a training run, less what a process with torch has anyway.

    python tools/bench/peak_rss.py FILE FLAGS...

does what `pretrain_gpt.py FLAGS...` does and writes bytes to FILE, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench.tensors import resident  # noqa: E402  (imports torch)


def main(arguments: Sequence[str]) -> int:
    """Run one training run; its exit code."""
    before = resident("VmRSS")
    from pretrain_gpt import main as train

    file, *flags = arguments
    code = train(flags)
    grew = {"before": before, "peak": resident("VmHWM")}
    Path(file).write_text(json.dumps(grew), encoding="utf-8")
    return code


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # torch's own threads sometimes abort an interpreter that takes itself apart.
    sys.stdout.flush()
    os._exit(code)
