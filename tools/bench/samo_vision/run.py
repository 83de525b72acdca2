"""The cost of a pruned image network's training step, on networks of several rates.

    python -m tools.bench.samo_vision.run [--out FOLDER]    everything, three hours; as root, 14 GB
    python -m tools.bench.samo_vision.run --protocols emulated --worlds 2 --rates 800mbit
                                                            both networks on one, eight minutes
    python -m tools.bench.samo_vision.run --again FOLDER --out FOLDER --rates 200mbit ...
                                                            adds to a report, or measures again

Runs `tools.bench.gradient_path.run --set samo-vision`, and takes its flags.
"""

from __future__ import annotations

import sys

from tools.bench.gradient_path.run import main

if __name__ == "__main__":
    sys.exit(main(["--set", "samo-vision", *sys.argv[1:]]))
