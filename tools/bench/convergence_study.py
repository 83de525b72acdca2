"""Which runs a convergence study is made of, and the command line of each. No torch.

Dense runs come first; every other run leaves the dense run of its seed and beta2 at a checkpoint,
so that what it gains or loses against it is the gradient path's doing alone. At data-parallel size
1 a path that is linear in the gradient gives the numbers of any size (DESIGN 2.2, contract 11);
baselines that are not run their four ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config import ModelConfig
from megatron.errors import ConfigError
from megatron.model.flops import parameter_count

REFERENCE_STEPS = 2000
"""Intervals of a study are given for this many steps, and shrink with the run."""
LEAST_STEPS = 200
"""The shortest interval of the study is 10, which is then one step."""
MOST_RUNS = 40
SEEDS = (1, 2, 3)
START, EARLY = 0.2, 0.05
INTERVAL = 50
LAYERS, HIDDEN, HEADS, VOCABULARY = 4, 256, 4, 8192
CLIP = 1.0

Flag = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The size that all runs of a study share. `tokens` is those of a step, `valid_tokens` those
    of the one evaluation at the end."""

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
        """Sequences in a step."""
        return self.tokens // self.sequence

    def scaled(self, interval: int) -> int:
        """An interval of `REFERENCE_STEPS` steps in one of this length."""
        return max(1, interval * self.steps // REFERENCE_STEPS)

    def start_step(self, share: float) -> int:
        """First step of the path after `share` of the run: a multiple of every interval."""
        return round(share * self.steps)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run. `variant` names what is compared, without seed and beta2; `start` is the share of
    the run after which the path takes over, None for a dense run; `interval` is given for
    `REFERENCE_STEPS`; `flags` are the path's own, without the leading dashes."""

    variant: str
    seed: int
    beta2: float = 0.999
    start: float | None = None
    path: str = "dense"
    interval: int | None = None
    flags: tuple[Flag, ...] = ()
    ranks: int = 1

    @property
    def name(self) -> str:
        """Folder of the run and key of its row."""
        return f"{self.group}-seed{self.seed}"

    @property
    def group(self) -> str:
        """Runs that differ in their seed only share it."""
        beta2 = "" if self.beta2 == 0.999 else f"-beta2_{self.beta2:g}"
        start = "" if self.start in (None, START) else f"-start_{self.start:g}"
        return f"{self.variant}{start}{beta2}"

    @property
    def is_dense(self) -> bool:
        """Whether others leave from it."""
        return self.start is None


def study() -> tuple[Run, ...]:
    """All runs, those first that matter most: a study may be stopped at any of them."""
    runs = [Run(variant="dense", seed=seed) for seed in SEEDS]
    runs += [Run(variant="dense", seed=SEEDS[0], beta2=0.95)]
    for seed in SEEDS:
        runs += [radius(0.1, seed=seed), radius(0.4, seed=seed)]
        runs += [rolling(d, select, seed=seed) for d in (0.1, 0.4) for select in SELECTIONS]
    runs += [radius(0.1, beta2=0.95), *(rolling(0.1, s, beta2=0.95) for s in SELECTIONS)]
    runs += [radius(0.4, start=EARLY), radius(0.1, start=EARLY)]
    runs += [rolling(0.1, select, start=EARLY) for select in SELECTIONS]
    runs += [rolling(0.4, "update", start=EARLY)]
    runs += [radius(0.1, label="no_feedback", more=[("radius-residual", "none")])]
    runs += [
        radius(d, label="by_gradient", more=[("radius-select", "gradient")]) for d in (0.1, 0.4)
    ]
    runs += [radius(0.5), radius(0.4, interval=10), radius(0.4, interval=200)]
    runs += [radius(0.1, interval=10), radius(0.1, interval=200)]
    runs += [baseline("topk", "topk_0.1", [("topk-density", "0.1")])]
    runs += [baseline("powersgd", "powersgd_4", [("powersgd-rank", "4")])]
    assert len(runs) <= MOST_RUNS and len({run.name for run in runs}) == len(runs)
    return tuple(runs)


SELECTIONS = ("update", "seeded")


def radius(
    density: float,
    *,
    seed: int = SEEDS[0],
    beta2: float = 0.999,
    start: float = START,
    interval: int = INTERVAL,
    label: str = "",
    more: Sequence[Flag] = (),
) -> Run:
    """Radius as published, or with one thing changed that `label` names."""
    changed = f"-{label}" if label else ""
    period = "" if interval == INTERVAL else f"-interval_{interval}"
    return Run(
        variant=f"radius_{density:g}{period}{changed}",
        seed=seed,
        beta2=beta2,
        start=start,
        path="radius",
        interval=interval,
        flags=(("radius-density", f"{density:g}"), *more),
    )


def rolling(
    density: float,
    select: str,
    *,
    seed: int = SEEDS[0],
    beta2: float = 0.999,
    start: float = START,
) -> Run:
    """Radius whose tensors are flushed part by part."""
    return Run(
        variant=f"rolling_{density:g}-{select}",
        seed=seed,
        beta2=beta2,
        start=start,
        path="radius",
        interval=INTERVAL,
        flags=(
            ("radius-density", f"{density:g}"),
            ("radius-schedule", "rolling"),
            ("radius-select", select),
        ),
    )


def baseline(path: str, variant: str, flags: Sequence[Flag]) -> Run:
    """A method whose result depends on the number of ranks."""
    return Run(variant=variant, seed=SEEDS[0], start=START, path=path, flags=tuple(flags), ranks=4)


def parameters(plan: Plan) -> int:
    """Parameters of the model."""
    model = ModelConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        seq_length=plan.sequence,
    )
    return parameter_count(model, VOCABULARY)


def dense_of(run: Run) -> Run:
    """The dense run that another leaves from."""
    return Run(variant="dense", seed=run.seed, beta2=run.beta2)


def fork_steps(plan: Plan) -> list[int]:
    """Checkpoints of a dense run that others leave from: the step before each one's start, where
    the path selects for the first time. Every dense run has all, so that runs can be added."""
    return sorted(plan.start_step(share) - 1 for share in (EARLY, START))


def flags_of(run: Run, plan: Plan, *, data: Path, runs_dir: Path) -> list[str]:
    """What `pretrain_gpt.py` is given for a run; `data` holds what `prepare` made."""
    values: dict[str, object] = {
        "num-layers": LAYERS,
        "hidden-size": HIDDEN,
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
        "train-iters": plan.steps,
        "lr": "1e-3",
        "min-lr": "1e-4",
        "lr-decay-style": "cosine",
        "lr-warmup-iters": plan.steps // 50,
        "weight-decay": 0.1,
        "clip-grad": CLIP,
        "adam-beta2": run.beta2,
        "eval-iters": plan.valid_tokens // plan.tokens,
        "eval-interval": plan.steps,
        "log-interval": plan.steps // 20,
        "grad-path": run.path,
        "run-dir": runs_dir / run.name,
    }
    values |= dict(run.flags)
    if run.interval is not None:
        assert run.start is not None
        values["radius-interval"] = plan.scaled(run.interval)
        values["radius-start-iter"] = plan.start_step(run.start)
    if run.start is not None:
        values["load"] = runs_dir / dense_of(run).name
        values["ckpt-step"] = plan.start_step(run.start) - 1
    flags = [text for name, value in values.items() for text in (f"--{name}", str(value))]
    return [*flags, *(["--bf16"] if plan.dtype == "bf16" else [])]


def stages(run: Run, plan: Plan, *, data: Path, runs_dir: Path) -> Iterator[list[str]]:
    """The starts a run still takes: a dense run leaves, saved, at each fork, and goes on.

    Taken lazily: what is there already is looked at when the start's turn comes.
    """
    flags = flags_of(run, plan, data=data, runs_dir=runs_dir)
    if run.is_dense:
        for step in fork_steps(plan):
            if not (runs_dir / run.name / "checkpoints" / f"step_{step:08d}").is_dir():
                yield [*flags, "--exit-interval", str(step)]
    yield flags
