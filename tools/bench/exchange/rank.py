"""One rank of the benchmark: ways to exchange rows take turns.

Started once for each rank by `run.py`, with its settings as JSON. Rank 0 writes the seconds of each
way in each round to `result.json` in the given folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import Group, ProcessGroups

# torch 2.13 renamed the function and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
GATHER, BROADCASTS, GLOO_GATHER = "all-gather", "by broadcasts", "by gloo's all-gather"
TO_ALL, GLOO_TO_ALL = "all-to-all", "by gloo's all-to-all"
Ways = Mapping[str, Callable[[], object]]


def main(arguments: Sequence[str]) -> int:
    """Run one rank with the settings in `arguments`."""
    settings = json.loads(arguments[0])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = ProcessGroups.build(ParallelDims(tp=1, dp=ranks, pp=1), rank=rank).dp
    mine = torch.arange(ranks * settings["row"], dtype=torch.float32).view(ranks, -1) + rank
    out = torch.zeros_like(mine)
    ways = {**gathers(group, mine, out), **exchanges(group, mine, out)}
    check(group, ways, mine, out)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(settings["rounds"] + 1):
        for name, way in ways.items():
            group.barrier()
            began = perf_counter()
            way()
            group.barrier()  # the slowest rank counts
            if number:
                seconds[name].append(perf_counter() - began)
    if rank == 0:
        text = json.dumps(seconds)
        (Path(settings["folder"]) / "result.json").write_text(text, encoding="utf-8")
    dist.destroy_process_group()
    return 0


def gathers(group: Group, mine: torch.Tensor, out: torch.Tensor) -> Ways:
    """Return ways to gather the first row of every rank."""
    own = mine[0]

    def by_broadcasts() -> None:
        out[group.rank].copy_(own)
        parts = [group.broadcast(row, rank, async_op=True) for rank, row in enumerate(out)]
        for part in parts:
            assert part is not None, "several ranks"
            part.wait()

    return {
        GATHER: lambda: group.all_gather(out, own),
        BROADCASTS: by_broadcasts,
        GLOO_GATHER: lambda: _all_gather(out.view(-1), own, group=group.handle),
    }


def exchanges(group: Group, mine: torch.Tensor, out: torch.Tensor) -> Ways:
    """Return ways to send row i of every rank to rank i."""
    return {
        TO_ALL: lambda: group.all_to_all(out, mine),
        GLOO_TO_ALL: lambda: dist.all_to_all_single(out, mine, group=group.handle),
    }


def check(group: Group, ways: Ways, mine: torch.Tensor, out: torch.Tensor) -> None:
    """Check that all ways deliver the same rows."""
    by_rank = torch.arange(group.size, dtype=mine.dtype).unsqueeze(1) - group.rank
    for name, way in ways.items():
        out.zero_()
        way()
        row = mine[group.rank] if name in (TO_ALL, GLOO_TO_ALL) else mine[0]
        assert torch.equal(out, row + by_rank), name


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
