"""Tests that message-driven runs over real MPI equal 1F1B in every bit."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.parallel.groups import ProcessGroups
from megatron.pipeline.message_driven import WAIT
from tests.faults.starting import SCRIPT, environment, losses
from tests.limits import LIMIT
from tests.pipeline.grids import SMALL, train_by_hand
from tests.ranks import Ranks, grid
from tests.tiers import sampled
from tests.training.harness import make_trainer, metrics_of

pytestmark = pytest.mark.push

SCHEDULE = "--pipeline-schedule message-driven"
DRY = "--attention-dropout 0 --hidden-dropout 0"
WET = "--attention-dropout 0.1 --hidden-dropout 0.1"
UNTIED = "--untie-embeddings-and-output-weights"
RADIUS = "--radius-density 0.4 --radius-interval 2 --radius-start-iter 0"
PRUNED = "--samo-sparsity 0.5 --samo-pruning random"
CLIP = 0.1
OVERFLOWS = 2**20
"""A loss scale at which gradients overflow; at a quarter of it they do not."""
CASES = {
    # Stages, ranks of each, flags for both schedules, limits (0: the default).
    "pp2-dp2": (2, 1, WET, (0, 3)),
    "pp2-dp2-bf16-recomputed": (2, 1, f"{WET} --bf16 --recompute-granularity full", (1,)),
    "pp4-uneven": (4, 1, f"{DRY} --num-layers 5", (1, 0, 6)),
    "pp4-untied-recomputed": (4, 1, f"{WET} {UNTIED} --recompute-granularity full", (5,)),
    "tp2-pp2-sequence-cut": (2, 2, f"{WET} --sequence-parallel", (0, 1)),
    "tp2-pp2-untied-bf16": (2, 2, f"{WET} {UNTIED} --bf16", (4,)),
    "samo": (2, 1, f"{WET} --grad-path samo {PRUNED}", (0,)),
    "radius": (2, 1, f"{WET} --grad-path radius {RADIUS}", (0,)),
    "samo+radius": (2, 1, f"{WET} --grad-path samo+radius {PRUNED} {RADIUS}", (3,)),
    "topk": (2, 1, f"{WET} --grad-path topk --topk-density 0.1 --topk-start-iter 0", (0,)),
    "powersgd": (2, 1, f"{WET} --grad-path powersgd --powersgd-rank 2", (3,)),
    "lowrank+sparse": (2, 1, f"{WET} --grad-path lowrank+sparse --lowrank-rank 2", (0,)),
    "roundrobin": (2, 1, f"{WET} --grad-path roundrobin --roundrobin-interval 2", (3,)),
    "demo": (2, 1, f"{WET} --grad-path demo --demo-k 8 --demo-sign false", (0,)),
}
"""Cases of 4 ranks, 2 of which are data-parallel where `pp` times `tp` is 2."""
ON_PUSH = ("pp2-dp2", "pp4-uneven", "tp2-pp2-sequence-cut", "samo+radius", "powersgd")
WORLD = 4
RUN = (
    f"{WET} --train-iters 6 --optimizer adam --lr 3e-3 --bf16 --eval-iters 0 "
    f"--grad-path radius {RADIUS}"
)


def flags_of(limit: int) -> str:
    return f"{SCHEDULE} --pipeline-limit {limit}" if limit else SCHEDULE


def both_ways(
    groups: ProcessGroups, flags: str, pp: int, tp: int, limits: tuple[int, ...], run_dir: Path
) -> tuple[dict[str, Any], list[str]]:
    """Return what a rank finds under 1F1B, and the differences under the other schedule."""
    flags += f" --clip-grad {CLIP}"
    usual = train_by_hand(groups, flags, pp, run_dir / "1f1b", tp)
    weights = usual.pop("params")
    assert WAIT not in usual["timers"]
    differing = []
    for limit in limits:
        driven = f"{flags} {flags_of(limit)}"
        found = train_by_hand(groups, driven, pp, run_dir / str(limit), tp)
        assert WAIT in found["timers"], "another schedule ran"
        found["timers"].discard(WAIT)
        masters = found.pop("params")
        assert masters.keys() == weights.keys()
        names = [name for name in weights if not torch.equal(masters[name], weights[name])]
        names += [name for name in usual if found[name] != usual[name]]
        differing += [f"{name} with limit {limit}" for name in names]
    return usual, differing


def compare(
    mpi_ranks: Ranks, case: tuple[int, int, str, tuple[int, ...]], run_dir: Path
) -> list[dict[str, Any]]:
    """Return what the ranks find; assert that it is equal bit by bit under both schedules."""
    pp, tp, flags, limits = case
    results = mpi_ranks.run(WORLD, both_ways, flags, pp, tp, limits, run_dir)
    for rank, (found, differing) in enumerate(results):
        assert not differing, f"rank {rank}"
        assert found["kept"] == 0 and len(set(found["losses"])) == 3
        assert all(sent["bytes_pp"] > 0 for sent in found["sent"])
    valid = metrics_of(run_dir / "1f1b", "valid_loss")
    assert valid and all(metrics_of(run_dir / str(n), "valid_loss") == valid for n in limits)
    return [found for found, _ in results]


@pytest.mark.parametrize("case", sampled(CASES, ON_PUSH))
def test_every_bit_is_that_of_1f1b(mpi_ranks: Ranks, tmp_path: Path, case: str) -> None:
    found = compare(mpi_ranks, CASES[case], tmp_path)
    assert all(each["skipped"] == [False] * 3 for each in found)
    assert min(found[0]["norms"]) > CLIP, "or nothing was clipped"


def test_a_scale_that_overflows_skips_the_same_steps(mpi_ranks: Ranks, tmp_path: Path) -> None:
    flags = f"{WET} --fp16 --initial-loss-scale {OVERFLOWS} --hysteresis 1"
    found = compare(mpi_ranks, (2, 1, flags, (3,)), tmp_path)
    assert [each["skipped"] for each in found] == [[True, True, False]] * WORLD
    assert len({repr(each["norms"]) for each in found}) == 1


def launched(run_dir: Path, flags: str, *, over: str) -> dict[int, float]:
    """Return the losses of a whole run that `mpiexec` or `torchrun` starts."""
    found = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    starts = {
        "mpiexec": [found or "mpiexec", "-n", str(WORLD), sys.executable],
        "torchrun": [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(WORLD),
        ],
    }  # fmt: skip
    command = [*starts[over], SCRIPT, *flags.split(), "--run-dir", str(run_dir)]
    done = subprocess.run(
        command, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return losses(run_dir)


def written(run_dir: Path) -> dict[str, str]:
    """Return the SHA-256 of each tensor file in the run's last checkpoint."""
    files = sorted((run_dir / "checkpoints" / "step_00000006").glob("**/*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def run_on_ranks(groups: ProcessGroups, flags: str, run_dir: Path) -> None:
    trainer = make_trainer(grid(groups, pp=2), flags, run_dir)
    trainer.train()
    trainer.metrics.close()
    trainer.engine.detach()
    trainer.pipeline.transport.close()
    groups.world.barrier()


def test_runs_go_on_bit_by_bit_under_either_schedule(mpi_ranks: Ranks, tmp_path: Path) -> None:
    """The run leaves after 3 of 6 steps and is resumed by mpiexec and by torchrun."""
    flags = f"{SMALL} {RUN} --pipeline-model-parallel-size 2"
    driven, half = f"{flags} {SCHEDULE}", tmp_path / "half"
    mpi_ranks.run(WORLD, run_on_ranks, driven, tmp_path / "whole")
    mpi_ranks.run(WORLD, run_on_ranks, f"{driven} --exit-interval 3", half)
    whole, first = losses(tmp_path / "whole"), losses(half)
    assert len(whole) == 6 and first == {step: whole[step] for step in (1, 2, 3)}
    shutil.copytree(half, tmp_path / "1f1b")
    assert launched(half, driven, over="mpiexec") == whole
    assert "message-driven" in (half / "log.txt").read_text()
    assert launched(tmp_path / "1f1b", flags, over="torchrun") == whole
    assert len(written(half)) == WORLD
    assert written(half) == written(tmp_path / "whole") == written(tmp_path / "1f1b")
