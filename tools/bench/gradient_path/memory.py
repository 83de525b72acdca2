"""Peak memory of each gradient path, each in a process of its own.

A process that has run another path would keep its memory.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from tools.bench.common.emulated import Emulation
from tools.bench.common.methods import method
from tools.bench.common.tensors import release, resident
from tools.bench.gradient_path.contenders import emulated_contenders

RANKS = 2
INTERVAL = 3


def peak_memory(names: Sequence[str], emulation: Emulation) -> dict[str, float]:
    """Return the peak growth of resident memory in bytes, mean over two ranks, by method.

    The key `parameters` has the number of parameters of the model.
    """
    # Forks of this process have torch imported, which takes seconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    found: dict[str, float] = {"parameters": emulation.parameters}
    for name in names:
        answers = context.SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            ranks = [
                context.Process(target=_rank, args=(rank, name, emulation, folder, answers))
                for rank in range(RANKS)
            ]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(f"{name}: exit codes {[process.exitcode for process in ranks]}")
        found[name] = sum(answers.get() for _ in ranks) / RANKS
    return found


def _rank(rank: int, name: str, emulation: Emulation, folder: str, answers: Any) -> None:
    torch.set_num_threads(1)
    meeting = (Path(folder) / "store").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
    groups = ProcessGroups.build(ParallelDims(tp=1, dp=RANKS, pp=1), rank=rank)
    for each in (replace(emulation, layers=1, rows=64, columns=64), emulation):
        # A first, tiny model, so that what torch imports on the way is not counted.
        groups.world.barrier()
        grew = _growth(name, each, groups)
    answers.put(grew)
    groups.world.barrier()
    dist.destroy_process_group()


def _growth(name: str, emulation: Emulation, groups: ProcessGroups) -> int:
    kind = method(name, interval=INTERVAL)
    gradients = {kind.dtype: emulation.gradients(seed=groups.world.rank, dtype=kind.dtype)}
    before = resident("VmRSS")
    (contender,) = emulated_contenders([kind], emulation, gradients, groups)
    contender.pace(0.0)
    contender.step()
    # What building it took for a while is given back and forgotten.
    release()
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(2 * INTERVAL - 1):  # dense, a resample, sparse, a resample with a residual
        contender.step()
    return resident("VmHWM") - before
