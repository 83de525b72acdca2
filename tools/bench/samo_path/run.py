"""The cost of a pruned network's training step, on networks of several rates.

    python -m tools.bench.samo_path.run [--out FOLDER]      half an hour; as root
    python -m tools.bench.samo_path.run --cost              compressing and expanding at 124M

Runs `tools.bench.gradient_path.run` with the rows of SAMO, and takes its flags.
"""

from __future__ import annotations

import sys

from tools.bench.gradient_path.run import main

if __name__ == "__main__":
    sys.exit(main(["--set", "samo", *sys.argv[1:]]))
