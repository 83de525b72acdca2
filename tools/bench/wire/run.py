"""What do gradients in 16, 8 and 4 bits save of a training step on a slow network?

    python -m tools.bench.wire.run --out FOLDER    two and four ranks, 800 and 200 Mbit/s; as root

Runs `tools.bench.gradient_path.run --set wire` with emulated computing, and takes its flags.
"""

from __future__ import annotations

import sys

from tools.bench.gradient_path.run import main

NETWORKS = ("--worlds", "2", "4", "--rates", "800mbit", "200mbit")

if __name__ == "__main__":
    emulated = ["--set", "wire", "--protocols", "emulated", "--no-memory"]
    sys.exit(main([*emulated, *NETWORKS, *sys.argv[1:]]))
