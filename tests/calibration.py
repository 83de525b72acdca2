"""The speed of this machine at present: CPU and wall seconds of a fixed piece of work.

    python -m tests.calibration FILE

The work is what most tests do: import torch, then many small tensor operations and some Python. It
uses no code of the program, so that a program that becomes slower is not excused. FILE receives
{"cpu": seconds, "wall": seconds}; standard output is the number of times that the machine is slower
than the one on which `tests.limits.LIMIT` was chosen, at least 1.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

USUAL_WALL_SECONDS = 4.0
"""Wall seconds of the work on two idle cores of 2.0 GHz with AVX2."""
STEPS = 2500


def main(arguments: list[str]) -> int:
    """Do the work, write its seconds and print the factor."""
    start = time.monotonic() - time.process_time()
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        network(torch.full((16, 32), step / STEPS)).square().mean().backward()
        optimizer.step()
        json.loads(
            json.dumps({"step": step, "shapes": [list(p.shape) for p in network.parameters()]})
        )
    cpu, wall = time.process_time(), time.monotonic() - start
    Path(arguments[0]).write_text(json.dumps({"cpu": round(cpu, 2), "wall": round(wall, 2)}))
    print(f"{max(1.0, wall / USUAL_WALL_SECONDS):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
