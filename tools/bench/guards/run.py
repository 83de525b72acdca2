"""The cost of fault tolerance: training steps with it and without it, interleaved in one run.

    python -m tools.bench.guards.run [--rounds N]                       one rank
    torchrun --standalone --nproc-per-node 2 -m tools.bench.guards.run  two

With: phases and collectives are written to the heartbeat file, the watchdog's thread runs, and each
step looks for signals and files. Without: none of these. The comparison of replicas is timed
separately and spread over its default interval. Prints medians and the ratio; the target is below
1.01.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from megatron.config import resolve

FLAGS = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --mock-data "
    "--vocab-size 2048 --micro-batch-size 4 --global-batch-size 8 --train-iters 100000 --lr 1e-4 "
    "--eval-iters 0 --log-interval 100000"
)
STEPS = 4
"""Steps of each kind in a round; a round is one block with and one block without."""


def main() -> int:
    """Measure, print the medians and their ratio, and return exit code 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds

    from megatron.config import parse
    from megatron.fault_tolerance.exit_signals import ExitSignals
    from megatron.fault_tolerance.heartbeat import FOLDER, Heartbeat
    from megatron.fault_tolerance.replicas import compare_replicas
    from megatron.fault_tolerance.root_cause import RootCause
    from megatron.fault_tolerance.watchdog import Watchdog
    from megatron.launch import detect_launch, start, stop
    from megatron.metrics import NullMetrics
    from megatron.pretrain import build_groups, build_trainer
    from megatron.status import Status
    from pretrain_gpt import GPT_TASK, GRADIENT_PATHS

    launch = detect_launch()
    config = resolve(parse(FLAGS.split(), paths=GRADIENT_PATHS), launch.world_size)
    runtime = start(launch, config)
    groups = build_groups(config, launch)
    with tempfile.TemporaryDirectory() as own:
        run_dir = Path(groups.world.all_gather_str(own)[0])
        trainer = build_trainer(
            GPT_TASK, GRADIENT_PATHS, config, runtime, groups, run_dir, NullMetrics(), None
        )
        heartbeat = Heartbeat(run_dir / FOLDER, rank=launch.rank, attempt="bench")
        requests = ExitSignals(run_dir if runtime.is_writer else None)
        causes = RootCause(
            run_dir=run_dir,
            attempt="bench",
            rank=launch.rank,
            world_size=launch.world_size,
            signed=Status(state="running"),
        )
        without_heartbeat, without_requests = Heartbeat(), ExitSignals()
        without_heartbeat.at = lambda phase, step=None: None  # type: ignore[method-assign]

        def guarded() -> list[float]:
            trainer.heartbeat, trainer.requests = heartbeat, requests
            groups.world.calls.tell = heartbeat.called
            end = Watchdog(heartbeat, causes, limit=600.0).watch()
            seconds = [_timed(trainer.train_step) for _ in range(STEPS)]
            end()
            return seconds

        def bare() -> list[float]:
            trainer.heartbeat, trainer.requests = without_heartbeat, without_requests
            groups.world.calls.tell = None
            return [_timed(trainer.train_step) for _ in range(STEPS)]

        guarded()
        bare()
        on, off = [], []
        for number in range(rounds):
            first, second = (guarded, bare) if number % 2 else (bare, guarded)
            one, two = first(), second()
            mine, plain = (one, two) if number % 2 else (two, one)
            on, off = on + mine, off + plain
        checks = [_timed(lambda: compare_replicas(trainer.optimizer, groups, step=1)) for _ in on]

        def calls() -> None:
            for phase in ("data", "forward", "backward", "reduce", "optimizer"):
                heartbeat.at(phase, 1)
            requests.pending()

        alone = statistics.median(_timed(calls) for _ in range(1000))
        heartbeat.close()
        groups.world.barrier()
    stop()
    interval = config.parallel.check_weight_hash_across_dp_replicas_interval or 0
    check = statistics.median(checks) / interval if interval else 0.0
    if launch.rank == 0:
        step, bare_step = statistics.median(on), statistics.median(off)
        print(f"ranks                          {launch.world_size:8d}")
        print(f"step without guards         ms {1e3 * bare_step:8.2f}")
        print(f"step with guards            ms {1e3 * step:8.2f}")
        print(f"replicas compared, per step ms {1e3 * check:8.4f}   (every {interval} steps)")
        print(f"phases and requests, alone  us {1e6 * alone:8.2f}   (a step of one microbatch)")
        ratio = (step + check) / bare_step
        print(f"with / without                 {ratio:8.4f}   (medians of {len(on)} steps each)")
    return 0


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
