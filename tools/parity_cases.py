"""The cases of the parity self-test. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROUNDING, SELECTED = 1e-5, 1e-4
"""Largest difference relative to a tensor's largest entry.

The first is for sums in another order, the second for selected entries.
"""
MODEL = "4 layers x 64, 8 heads, 4 query groups, vocabulary 97"
_MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --vocab-size 97 "
    "--group-query-attention --num-query-groups 4 --make-vocab-size-divisible-by 8 --mock-data"
)
_RUN = (
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 8 "
    "--optimizer sgd --sgd-momentum 0.9 --lr 0.05 --min-lr 0.05 --clip-grad 1.0 "
    "--ddp-bucket-size 20000 --eval-iters 0 --log-interval 1000 --device cpu"
)


@dataclass(frozen=True, kw_only=True)
class ParityGrid:
    """Sizes of the grid; `virtual_layers`: layers per model chunk of an interleaved stage."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    virtual_layers: int | None = None

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    @property
    def flags(self) -> list[str]:
        """The flags of `pretrain_gpt.py` for this grid."""
        flags = ["--tensor-model-parallel-size", str(self.tp)]
        flags += ["--pipeline-model-parallel-size", str(self.pp)]
        flags += ["--sequence-parallel"] * self.sequence_parallel
        if self.virtual_layers is not None:
            flags += ["--num-layers-per-virtual-pipeline-stage", str(self.virtual_layers)]
        return flags

    def __str__(self) -> str:
        more = ", sequence parallel" * self.sequence_parallel
        if self.virtual_layers is not None:
            more += f", interleaved by {self.virtual_layers}"
        return f"TP {self.tp} x PP {self.pp} x DP {self.dp}{more}"


@dataclass(frozen=True, kw_only=True)
class ParityCase:
    """A gradient path with its flags and number of steps.

    `limit` is the tolerance of losses and weights. The first gradient is compared to `ROUNDING` in
    every case: it has all entries, or the same ones on both grids.
    """

    name: str
    path: str
    flags: str = ""
    steps: int = 3
    limit: float = ROUNDING


_RADIUS = "--radius-interval 3 --radius-start-iter 2"
_HALF = "--samo-sparsity 0.5 --samo-pruning"
CASES = (
    ParityCase(name="dense", path="dense"),
    ParityCase(name="samo, sparsity 0", path="samo", flags="--samo-sparsity 0"),
    ParityCase(name="samo, 0.5 by magnitude", path="samo", flags=f"{_HALF} magnitude"),
    ParityCase(name="radius, density 1", path="radius", flags=f"--radius-density 1 {_RADIUS}"),
    ParityCase(
        name="radius, density 0.4",
        path="radius",
        flags=f"--radius-density 0.4 {_RADIUS}",
        steps=12,
        limit=SELECTED,
    ),
    ParityCase(
        name="samo+radius, 0 and 1",
        path="samo+radius",
        flags=f"--samo-sparsity 0 --radius-density 1 {_RADIUS}",
    ),
    ParityCase(
        name="samo+radius, 0.5 and 0.4",
        path="samo+radius",
        flags=f"{_HALF} random --radius-density 0.4 {_RADIUS}",
        steps=12,
        limit=SELECTED,
    ),
)


def flags_of(case: ParityCase, grid: ParityGrid, extra: Sequence[str] = ()) -> list[str]:
    """Return the flags of a case on a grid; `extra` flags override the usual model."""
    flags = [*_MODEL.split(), *_RUN.split(), "--train-iters", str(case.steps)]
    return [*flags, "--grad-path", case.path, *case.flags.split(), *grid.flags, *extra]
