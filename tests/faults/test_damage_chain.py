"""A run that is killed again and again while it saves ends like an undisturbed run, bit by bit."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.starting import losses, send, start_ranks
from tests.limits import LIMIT

pytestmark = [pytest.mark.full, pytest.mark.waits]

FLAGS = (
    "--bf16 --train-iters 80 --save-interval 1 --async-save --keep-last 2 --lr-warmup-iters 40 "
    "--eval-interval 1000"
)
KILLS = 5


def newest(run_dir: Path) -> int:
    names = [path.name for path in (run_dir / "checkpoints").glob("step_????????")]
    return max((int(name.removeprefix("step_")) for name in names), default=0)


@pytest.mark.parametrize("world", [1, 2])
def test_a_chain_of_kills(
    tmp_path: Path, world: int, record_property: Callable[[str, object], None]
) -> None:
    draw = random.Random(world)
    alone = start_ranks(world, tmp_path / "alone", FLAGS).finish()
    assert alone.codes == [0] * world, alone.all_stderr
    run_dir = tmp_path / "killed"
    for _ in range(KILLS):
        before = newest(run_dir)
        started = start_ranks(world, run_dir, FLAGS)
        deadline = time.monotonic() + LIMIT
        while newest(run_dir) < before + 3 and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.05))
        send(started, signal.SIGKILL, *range(world))
        assert started.finish().codes == [-signal.SIGKILL] * world
        assert before + 3 <= newest(run_dir) < 80
    ended = start_ranks(world, run_dir, FLAGS).finish()
    assert ended.codes == [0] * world, ended.all_stderr
    assert losses(run_dir) == losses(tmp_path / "alone") and len(losses(run_dir)) == 80
    steps = sorted(path.name for path in (run_dir / "checkpoints").iterdir() if path.is_dir())
    assert steps == ["step_00000079", "step_00000080"]
    for key, value in (("fault", "chain of kills"), ("trials", KILLS), ("recovered", KILLS)):
        record_property(key, value)
