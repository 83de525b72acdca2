"""One rank of `tools/doctor.sh`: reports its host, and runs all-reduces over every kind of group.

scripts/launch.sh starts it in place of pretrain_gpt.py. A failure is written to status.json of the
run folder, where the first cause stays, as in a run.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.config import parse  # noqa: E402
from megatron.errors import ConfigError, PeerError, SparsetronError  # noqa: E402
from megatron.launch import Launch, Runtime, detect_launch, start, stop, unused_gpus  # noqa: E402
from megatron.parallel.dims import ParallelDims  # noqa: E402
from megatron.status import Status, write_status  # noqa: E402
from pretrain_gpt import GRADIENT_PATHS  # noqa: E402

if TYPE_CHECKING:
    from megatron.parallel.groups import Group

TIMEOUT_MINUTES = 1
FLAGS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 "
    f"--train-iters 1 --lr 1 --mock-data --distributed-timeout-minutes {TIMEOUT_MINUTES}"
)
ENTRIES = 4 * 2**20
"""fp32 entries of the timed message."""
ROUNDS = 5
CLOCK_SECONDS = 5.0
"""Maximum difference of clocks, in seconds.

With a larger one, logs of several hosts are hard to read together.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks and return the exit code."""
    parser = argparse.ArgumentParser(prog="doctor_ranks.py", allow_abbrev=False)
    parser.add_argument("--run-dir", type=Path, required=True)
    run_dir = parser.parse_args(arguments).run_dir
    place, rank = ["finding out how it was started"], 0
    try:
        launch = detect_launch()
        rank = launch.rank
        place[0] = "choosing the device"
        # Before the ranks meet, which fails for another reason if only some of them have GPUs.
        if (unused := unused_gpus()) is not None:
            raise ConfigError(f"{socket.gethostname()}: {unused}")
        place[0] = "joining the ranks"
        runtime = start(launch, parse(FLAGS.split(), paths=GRADIENT_PATHS))
        check(launch, runtime, place)
        stop()
    except (SparsetronError, RuntimeError, ValueError) as error:
        code = error.exit_code if isinstance(error, SparsetronError) else PeerError.exit_code
        reason = f"{place[0]}: {str(error).splitlines()[0]}"
        run_dir.mkdir(parents=True, exist_ok=True)
        write_status(run_dir, Status(state="failed", exit_code=code, reason=reason, rank=rank))
        print(reason, file=sys.stderr)
        return code
    return 0


def check(launch: Launch, runtime: Runtime, place: list[str]) -> None:
    """Run every check that needs other ranks; `place` receives the name of the current check."""
    import torch

    from megatron.parallel.groups import ProcessGroups

    sums = 0
    for dims in grids(launch.world_size):
        place[0] = f"making the groups of {dims}"
        timeout = timedelta(minutes=TIMEOUT_MINUTES)
        groups = ProcessGroups.build(dims, rank=launch.rank, timeout=timeout)
        if not sums:
            place[0] = "exchanging host names"
            _tell_ranks(launch, runtime, groups.world.all_gather_str)
        for name in ("world", "tp", "dp", "pp", "embedding"):
            group = getattr(groups, name)
            place[0] = f"all-reduce over {name} of {dims}"
            value = torch.full((8,), group.rank + 1.0, device=runtime.device)
            group.all_reduce(value, torch.distributed.ReduceOp.SUM)
            wanted = group.size * (group.size + 1) / 2
            if not bool((value == wanted).all()):
                raise PeerError(f"the sum is {value[0].item():g}, must be {wanted:g}")
            sums += group.size > 1
    if launch.world_size > 1:
        place[0] = "measuring the bandwidth"
        text = _bandwidth(groups.world, runtime)
        if launch.rank == 0:
            print(f"collectives  {sums} all-reduces over {runtime.backend} are right; {text}")
    elif launch.rank == 0:
        print("collectives  one rank: none to check; set RANKS_PER_NODE")


def grids(world: int) -> Iterator[ParallelDims]:
    """Yield grids for the checks: data-parallel, and with an even number of ranks TP 2 and PP 2."""
    yield ParallelDims(tp=1, dp=world, pp=1)
    if world % 2 == 0:
        yield ParallelDims(tp=2, dp=world // 2, pp=1)
        yield ParallelDims(tp=1, dp=world // 2, pp=2)


def _tell_ranks(
    launch: Launch, runtime: Runtime, all_gather_str: Callable[[str], list[str]]
) -> None:
    all_gather_str("")  # so that all ranks read their clocks at the same time
    mine = [socket.gethostname(), str(runtime.device), time.time()]
    everyone = [json.loads(text) for text in all_gather_str(json.dumps(mine))]
    if launch.rank:
        return
    hosts = {host: [d for h, d, _ in everyone if h == host] for host, _, _ in everyone}
    print(f"ranks        {len(everyone)}, started by {launch.launcher}, on {len(hosts)} host(s)")
    for host, devices in hosts.items():
        print(f"ranks        {host}: {', '.join(devices)}")
    clocks = [clock for _, _, clock in everyone]
    apart = max(clocks) - min(clocks)
    text = f"those of all ranks are within {apart:.2f} s"
    print(f"clock        {text}" + (" (set them by NTP)" if apart > CLOCK_SECONDS else ""))


def _bandwidth(world: Group, runtime: Runtime) -> str:
    """Time all-reduces, and return a text with the median and the rate at which a rank sends.

    The rate counts the bytes of a ring algorithm. Collective over the world.
    """
    import torch

    tensor = torch.zeros(ENTRIES, device=runtime.device)
    seconds = []
    for _ in range(ROUNDS + 1):
        world.barrier()
        began = time.perf_counter()
        world.all_reduce(tensor, torch.distributed.ReduceOp.SUM)
        if runtime.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds[1:])
    sent = 2 * (world.size - 1) / world.size * tensor.nbytes
    return (
        f"{tensor.nbytes >> 20} MiB in {1000 * median:.1f} ms, "
        f"{sent / median / 1e9:.2f} GB/s sent by a rank"
    )


if __name__ == "__main__":
    sys.exit(main())
