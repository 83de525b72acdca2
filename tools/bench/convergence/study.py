"""The parts of a convergence study: the common size, a run, and its command line.

Dense runs come first. Most other runs fork from a checkpoint of the dense run with the same seed
and optimizer, so that only the gradient path explains a difference in loss. At data-parallel size 1
a path that is linear in the gradient gives the numbers of any size (contract 11 of
docs/architecture.md); baselines that are not linear run on four ranks. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

from megatron.errors import ConfigError
from tools.bench.convergence.model import HEADS, SHAPE, Shape, parameters, stored

REFERENCE_STEPS = 2000
"""Number of steps for which a study's intervals are given; they scale with the run."""
LEAST_STEPS = 200
"""At this number of steps the shortest interval of the study, 10, becomes 1."""
SEEDS = (1, 2, 3)
START, EARLY = 0.2, 0.05
"""Shares of a run at which other runs fork."""
DENSE = "dense"
EARLY_BIRD_DISTANCE = 0.1
"""Distance below which masks count as equal."""
CLIP = 1.0
SGD_LR = 0.1
"""Highest learning rate of SGD with momentum."""
SGD = {
    "optimizer": "sgd",
    "lr": f"{SGD_LR:g}",
    "min-lr": f"{SGD_LR / 10:g}",
    "weight-decay": f"{1e-4 / SGD_LR:g}",
}
"""Flags of SGD that differ from AdamW's.

Decay is decoupled, a share lr x decay of the weight per step, and this share is equal in both.
"""

Flag = tuple[str, str]
Optimizer = Literal["adam", "sgd"]
Ticket = Literal["magnitude", "random", "early-bird"]


@dataclass(frozen=True, kw_only=True)
class StudyPlan:
    """The size that all runs of a study share.

    `tokens` is the number per step, `valid_tokens` the number of the evaluation at the end.
    """

    steps: int = REFERENCE_STEPS
    tokens: int = 2048
    sequence: int = 128
    valid_tokens: int = 131072
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        if self.tokens % (4 * self.sequence) or self.valid_tokens % self.tokens:
            raise ConfigError(
                f"tokens {self.tokens}: a step must hold a multiple of 4 sequences (of "
                f"{self.sequence}) and divide valid_tokens {self.valid_tokens}; change one of them"
            )
        if self.steps < 1 or self.steps % LEAST_STEPS:
            raise ConfigError(
                f"steps {self.steps}: intervals and starts must be whole steps; give a multiple "
                f"of {LEAST_STEPS}, as 1000 or {REFERENCE_STEPS}"
            )

    @property
    def batch(self) -> int:
        """Sequences per step."""
        return self.tokens // self.sequence

    def scaled(self, interval: int) -> int:
        """Scale an interval given for `REFERENCE_STEPS` steps to this length."""
        return max(1, interval * self.steps // REFERENCE_STEPS)

    def start_step(self, share: float) -> int:
        """Return the path's first step after `share` of the run: a multiple of all intervals."""
        return round(share * self.steps)


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """One run.

    `variant` names what is compared, without seed, beta2 and optimizer. `start` is the share of the
    run after which the path takes over from a dense run, None for a run from the beginning.
    `interval` of Radius, and the intervals in `every`, by flag, are given for `REFERENCE_STEPS`.
    `sparsity` and `ticket` prune the model. `flags` are the path's own, without leading dashes.
    `dtype` of the parameters and the number of `steps` are the plan's if None.
    """

    variant: str
    seed: int
    beta2: float = 0.999
    optimizer: Optimizer = "adam"
    shape: Shape = SHAPE
    start: float | None = None
    path: str = "dense"
    interval: int | None = None
    every: tuple[tuple[str, int], ...] = ()
    sparsity: Fraction | None = None
    ticket: Ticket | None = None
    flags: tuple[Flag, ...] = ()
    ranks: int = 1
    dtype: str | None = None
    steps: int | None = None

    @property
    def name(self) -> str:
        """Folder of the run and key of its row."""
        return f"{self.group}-seed{self.seed}"

    @property
    def group(self) -> str:
        """Name shared by runs that differ in their seed only."""
        beta2 = "" if self.beta2 == 0.999 else f"-beta2_{self.beta2:g}"
        start = "" if self.start in (None, START) else f"-start_{self.start:g}"
        optimizer = "" if self.optimizer == "adam" else f"-{self.optimizer}"
        return f"{self.variant}{start}{beta2}{optimizer}"

    @property
    def is_dense(self) -> bool:
        """Whether other runs fork from this run and are compared with it."""
        return self.variant == DENSE

    def length(self, plan: StudyPlan) -> int:
        """Return the number of steps, at the end of which the learning rate is at its lowest."""
        return plan.steps if self.steps is None else self.steps

    def entries(self, plan: StudyPlan) -> int:
        """Return the number of trained parameters, after pruning."""
        if self.sparsity is None:
            return parameters(plan.sequence, self.shape)
        return stored(plan.sequence, self.sparsity, self.shape)


def dense_of(run: StudyRun) -> StudyRun:
    """Return the dense run from which another forks, or with which it is compared."""
    return StudyRun(variant=DENSE, seed=run.seed, beta2=run.beta2, optimizer=run.optimizer)


def checked(runs: Sequence[StudyRun], *, most: int) -> tuple[StudyRun, ...]:
    """Check and return the runs of a study: a limited number, with distinct names."""
    assert len(runs) <= most and len({run.name for run in runs}) == len(runs)
    return tuple(runs)


def fork_steps(plan: StudyPlan) -> list[int]:
    """Return the checkpoints of a dense run from which other runs fork.

    They are at the step before the first selection of each path. Every dense run has all of them,
    so that runs can be added.
    """
    return sorted(plan.start_step(share) - 1 for share in (EARLY, START))


def flags_of(run: StudyRun, plan: StudyPlan, *, data: Path, runs_dir: Path) -> list[str]:
    """Return the flags of a run for `pretrain_gpt.py`; `data` holds what `prepare` made."""
    steps = run.length(plan)
    values: dict[str, object] = {
        "num-layers": run.shape[0],
        "hidden-size": run.shape[1],
        "num-attention-heads": HEADS,
        "seq-length": plan.sequence,
        "attention-dropout": 0,
        "hidden-dropout": 0,
        "train-data-path": data / "train_text_document",
        "valid-data-path": data / "valid_text_document",
        "tokenizer-type": "HuggingFaceTokenizer",
        "tokenizer-model": data / "tokenizer.json",
        "seed": run.seed,
        "micro-batch-size": plan.batch // run.ranks,
        "global-batch-size": plan.batch,
        "train-iters": steps,
        "lr": "1e-3",
        "min-lr": "1e-4",
        "lr-decay-style": "cosine",
        "lr-warmup-iters": steps // 50,
        "weight-decay": 0.1,
        "clip-grad": CLIP,
        "adam-beta2": run.beta2,
        "eval-iters": plan.valid_tokens // plan.tokens,
        "eval-interval": steps,
        "log-interval": steps // 20,
        "grad-path": run.path,
        "run-dir": runs_dir / run.name,
    }
    values |= SGD if run.optimizer == "sgd" else {}
    if run.sparsity is not None:
        values |= {"samo-sparsity": float(run.sparsity), "samo-pruning": run.ticket}
    if run.ticket == "early-bird":
        values["samo-early-bird-distance"] = EARLY_BIRD_DISTANCE
    values |= dict(run.flags)
    values |= {flag: plan.scaled(interval) for flag, interval in run.every}
    if run.interval is not None:
        assert run.start is not None
        values["radius-interval"] = plan.scaled(run.interval)
        values["radius-start-iter"] = plan.start_step(run.start)
    if run.start is not None:
        values["load"] = runs_dir / dense_of(run).name
        values["ckpt-step"] = plan.start_step(run.start) - 1
    flags = [text for name, value in values.items() for text in (f"--{name}", str(value))]
    dtype = run.dtype or plan.dtype
    return flags if dtype == "fp32" else [*flags, f"--{dtype}"]


def stages(run: StudyRun, plan: StudyPlan, *, data: Path, runs_dir: Path) -> Iterator[list[str]]:
    """Yield the remaining starts of a run: a dense run saves and leaves at each fork, then resumes.

    Evaluated lazily: existing checkpoints are looked up when a start's turn comes.
    """
    if run.is_dense:
        yield from _to_forks(run, plan, fork_steps(plan), data=data, runs_dir=runs_dir)
    yield flags_of(run, plan, data=data, runs_dir=runs_dir)


def trunk_stages(
    run: StudyRun, plan: StudyPlan, *, data: Path, runs_dir: Path
) -> Iterator[list[str]]:
    """Yield the starts of a dense run that make the checkpoints which a fork still lacks.

    The row of the dense run may come from another machine, so that its folder is not here.
    """
    if run.start is not None:
        steps = [step for step in fork_steps(plan) if step < plan.start_step(run.start)]
        yield from _to_forks(dense_of(run), plan, steps, data=data, runs_dir=runs_dir)


def _to_forks(
    dense: StudyRun, plan: StudyPlan, steps: Sequence[int], *, data: Path, runs_dir: Path
) -> Iterator[list[str]]:
    """Yield the starts of a dense run that save a checkpoint at each of `steps`."""
    flags = flags_of(dense, plan, data=data, runs_dir=runs_dir)
    for step in steps:
        if not (runs_dir / dense.name / "checkpoints" / f"step_{step:08d}").is_dir():
            yield [*flags, "--exit-interval", str(step)]
