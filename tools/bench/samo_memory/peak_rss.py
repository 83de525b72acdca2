"""Peak resident memory and CPU time of a training run, and the memory of an imported torch.

    python -m tools.bench.samo_memory.peak_rss FILE FLAGS...

does what `pretrain_gpt.py FLAGS...` does and writes FILE, as JSON: `before`, the resident bytes of
a process that has imported torch, `peak`, those of the run at its peak, and `cpu_seconds`, the user
and system time of each step in all threads.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tools.bench.common.tensors import resident  # imports torch


def main(arguments: Sequence[str]) -> int:
    """Run one training run and return its exit code."""
    before = resident("VmRSS")
    from pretrain_gpt import main as train

    file, *flags = arguments
    with timed_steps() as seconds:
        code = train(flags)
    found = {"before": before, "peak": resident("VmHWM"), "cpu_seconds": seconds}
    Path(file).write_text(json.dumps(found), encoding="utf-8")
    return code


@contextmanager
def timed_steps() -> Iterator[list[float]]:
    """Collect the CPU seconds of each training step, of all threads, inside the context."""
    from megatron.training import Trainer

    seconds: list[float] = []
    step = Trainer.train_step

    def timed(trainer: Trainer) -> Any:
        began = time.process_time()
        done = step(trainer)
        seconds.append(time.process_time() - began)
        return done

    with patch.object(Trainer, "train_step", timed):
        yield seconds


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # torch's threads sometimes abort the interpreter while it shuts down.
    sys.stdout.flush()
    os._exit(code)
