"""The cost of a training step whose gradients travel in 16, 8 or 4 bits, on slow networks.

    python -m tools.bench.wire.run --protocols emulated --out tools/bench/wire     as root

Runs `tools.bench.gradient_path.run` with the rows of `--grad-wire` and of paths whose numbers are
of 16 bit, and takes its flags.
"""

from __future__ import annotations

import sys

from tools.bench.gradient_path.run import main

if __name__ == "__main__":
    sys.exit(main(["--set", "wire", *sys.argv[1:]]))
