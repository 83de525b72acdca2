"""Choose the length of the two runs of scripts/quickstart.sh, and settings that depend on it.

    python tools/quickstart_steps.py RUN_DIR [--steps N | --timed RUN]

Prints steps, steps between evaluations, Radius's interval, and the estimated seconds of training of
both runs (0 if not measured). Runs that exist in RUN_DIR keep their number of steps, unless
`--steps` changes it, and their interval, which must not change. Otherwise the number of steps
follows from the pace of a short run, `--timed`; without `--timed` it is printed as 0.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.errors import ConfigError, SparsetronError  # noqa: E402
from megatron.report import read_run  # noqa: E402

SECONDS = 160.0
"""Seconds of training of both runs together: three minutes minus two starts."""
LEAST_STEPS = 350
"""With fewer steps, the validation losses may not fall below 60 % of the first."""
MOST_STEPS = 1200
"""About one pass over the data, as in configs/gpt_tiny.yaml."""
ROUNDED_TO = 50
INTERVAL = 25
"""The paper resamples every 200 of 300,000 steps; short runs need a shorter interval."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="quickstart_steps.py", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("folder", type=Path, metavar="RUN_DIR", help="folder of the two runs")
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--steps", type=int, metavar="N", help="number of steps")
    given.add_argument("--timed", type=Path, metavar="RUN", help="run that shows the pace")
    options = parser.parse_args(arguments)
    seconds = 0.0
    try:
        steps = options.steps or kept(options.folder / "dense", "train_iters")
        if options.timed is not None and not steps:
            pace = seconds_of_a_step(options.timed)
            steps = affordable_steps(pace)
            seconds = 2 * steps * pace
        interval = kept(options.folder / "radius", "radius_interval") or radius_interval(steps)
    except SparsetronError as error:
        print(f"quickstart_steps.py: {error}", file=sys.stderr)
        return error.exit_code
    print(steps, evaluation_interval(steps), interval, round(seconds))
    return 0


def affordable_steps(step_seconds: float) -> int:
    """Return the number of steps with which both runs take `SECONDS`.

    The number is limited to a useful minimum and to about one pass over the data.
    """
    steps = int(SECONDS / (2 * step_seconds)) // ROUNDED_TO * ROUNDED_TO
    return min(max(steps, LEAST_STEPS), MOST_STEPS)


def evaluation_interval(steps: int) -> int:
    """Return about a sixth of the run, if possible such that the last step is evaluated."""
    return next((steps // n for n in range(6, 20) if steps % n == 0), max(1, steps // 6))


def radius_interval(steps: int) -> int:
    """Return `INTERVAL`, or a quarter of a run that is too short for it."""
    return min(INTERVAL, max(1, steps // 4))


def seconds_of_a_step(folder: Path) -> float:
    """Return the median step time without the first two steps, which warm everything up."""
    seconds = [s for s in read_run(folder).steps["step_seconds"][2:] if math.isfinite(s) and s > 0]
    if not seconds:
        raise ConfigError(f"{folder}: holds no step that tells the pace; give more than two steps")
    return median(seconds)


def kept(folder: Path, setting: str) -> int:
    """Return a setting of an existing run, 0 if there is none."""
    try:
        value = read_run(folder).config.get(setting)
    except ConfigError:
        return 0
    return value if isinstance(value, int) else 0


if __name__ == "__main__":
    sys.exit(main())
