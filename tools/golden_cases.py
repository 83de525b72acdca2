"""The runs that `golden.py` compares. Imports nothing of the program.

Every gradient path on every axis of the grid, and every other mechanism once.
"""

from __future__ import annotations

from dataclasses import dataclass

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 60 "
    "--make-vocab-size-divisible-by 4 --mock-data"
)
RUN = (
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 20 --lr 1e-3 --min-lr 1e-4 "
    "--lr-warmup-iters 2 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 "
    "--log-interval 20 --device cpu"
)
BUCKETS = "--ddp-bucket-size 6000"
"""Gives several buckets; the offloaded optimizer has its own flag."""


@dataclass(frozen=True, kw_only=True)
class GoldenCase:
    """A run of `ranks` ranks with these flags in addition to those of every run.

    `mpi` starts the ranks with mpiexec. `leave_at` ends a first start by `--exit-interval` after
    that step, and `kill_at` ends it by SIGKILL once that step's checkpoint is committed; a second
    start resumes the run and trains to the end.
    """

    name: str
    ranks: int = 1
    flags: str = ""
    mpi: bool = False
    leave_at: int | None = None
    kill_at: int | None = None

    @property
    def command_line(self) -> str:
        """The flags of `pretrain_gpt.py` for this run, without those of the second start."""
        buckets = "" if "--optimizer-cpu-offload" in self.flags else BUCKETS
        return f"{MODEL} {RUN} {buckets} {self.flags}"


_RADIUS = "--grad-path radius --radius-interval 4 --radius-start-iter 2"
_SAMO = "--samo-sparsity 0.5"
PATHS = {
    "dense": "",
    "samo": f"--grad-path samo {_SAMO}",
    "radius": _RADIUS,
    "radius rolling": f"{_RADIUS} --radius-schedule rolling",
    "samo+radius": f"--grad-path samo+radius {_SAMO} --radius-interval 4 --radius-start-iter 2",
    "topk": "--grad-path topk --topk-density 0.1 --topk-start-iter 2",
    "powersgd": "--grad-path powersgd --powersgd-rank 2 --powersgd-start-iter 2",
    "lowrank+sparse": "--grad-path lowrank+sparse --lowrank-rank 2 --lowrank-start-iter 2",
    "roundrobin": "--grad-path roundrobin --roundrobin-interval 4 --roundrobin-start-iter 2",
    "demo": "--grad-path demo --demo-chunk 8 --demo-k 4 --demo-start-iter 2 "
    "--optimizer sgd --sgd-momentum 0 --clip-grad 0",
    "diloco": "--grad-path diloco --local-steps 4",
}
GRIDS = {
    "1": (1, ""),
    "DP 2": (2, ""),
    "TP 2": (2, "--tensor-model-parallel-size 2"),
    "PP 2": (2, "--pipeline-model-parallel-size 2"),
}
_PP = GRIDS["PP 2"][1]
_OFFLOAD = "--bf16 --optimizer-cpu-offload --offload-bucket-size 3000"
SINGLE = (
    GoldenCase(name="bf16", ranks=2, flags="--bf16"),
    GoldenCase(name="fp16", ranks=2, flags="--fp16 --initial-loss-scale 65536"),
    GoldenCase(name="ZeRO-1", ranks=2, flags="--use-distributed-optimizer"),
    GoldenCase(name="ZeRO-1, int8", ranks=2, flags="--use-distributed-optimizer --grad-wire int8"),
    GoldenCase(
        name="diloco, topk",
        ranks=2,
        flags=f"{PATHS['diloco']} --outer-compression topk --outer-topk-chunk 512",
    ),
    GoldenCase(name="radius best", ranks=2, flags=f"{_RADIUS} --radius-preset best"),
    GoldenCase(
        name="radius best, int4",
        ranks=2,
        flags=f"{_RADIUS} --radius-preset best --grad-wire int4",
    ),
    GoldenCase(name="nodes", ranks=4, flags="--dp-inner-size 2"),
    GoldenCase(name="offload", ranks=2, flags=f"{_OFFLOAD} --clip-grad 0"),
    GoldenCase(name="offload, clipped", ranks=2, flags=f"{_OFFLOAD} --clip-grad 0.5"),
    GoldenCase(name="radius seeded", ranks=2, flags=f"{_RADIUS} --radius-select seeded"),
    GoldenCase(
        name="interleaved", ranks=2, flags=f"{_PP} --num-layers-per-virtual-pipeline-stage 1"
    ),
    GoldenCase(name="sequence-parallel", ranks=2, flags=f"{GRIDS['TP 2'][1]} --sequence-parallel"),
    GoldenCase(name="recompute", flags="--recompute-granularity full --recompute-method uniform"),
    GoldenCase(name="dropout", ranks=2, flags="--attention-dropout 0.1 --hidden-dropout 0.1"),
    GoldenCase(
        name="early-bird",
        ranks=2,
        flags=f"{PATHS['samo']} --samo-pruning early-bird --samo-early-bird-interval 2 "
        "--samo-early-bird-distance 1",
    ),
    GoldenCase(name="DSR", ranks=2, flags=f"{PATHS['samo']} --dsr-interval 3"),
    GoldenCase(name="evaluation", flags="--eval-iters 2 --eval-interval 10"),
    GoldenCase(
        name="llama",
        flags="--bf16 --swiglu --normalization RMSNorm --position-embedding-type rope "
        "--untie-embeddings-and-output-weights --disable-bias-linear "
        "--group-query-attention --num-query-groups 2",
    ),
    GoldenCase(name="resumed", ranks=2, flags=_RADIUS, leave_at=10),
    GoldenCase(name="killed", ranks=2, flags=f"{_RADIUS} --save-interval 5", kill_at=10),
    GoldenCase(
        name="message-driven",
        ranks=2,
        flags=f"{_PP} --pipeline-schedule message-driven",
        mpi=True,
    ),
)
CASES = (
    *(
        GoldenCase(name=f"{path}, {grid}", ranks=ranks, flags=f"{flags} {axis}".strip())
        for path, flags in PATHS.items()
        for grid, (ranks, axis) in GRIDS.items()
    ),
    *SINGLE,
)
