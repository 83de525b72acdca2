"""The runs of the study of optimizer states in 16 and 8 bits. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tools.bench.convergence.model import Shape
from tools.bench.convergence.study import SEEDS, Flag, StudyPlan, StudyRun, checked

PLAN = StudyPlan(steps=400, tokens=512, sequence=128, valid_tokens=32768)
SHAPE: Shape = (2, 64)
"""Layers and width: 0.6M parameters, most of them in the embedding of 8,192 entries."""
RATES: tuple[Flag, ...] = (("lr", "1e-3"), ("min-lr", "1e-5"))
"""Highest and lowest learning rate."""
LOW_RATES: tuple[Flag, ...] = (("lr", "3e-4"), ("min-lr", "3e-6"))
"""Rates at which more updates are below half a unit in the last place of a bf16 weight."""
FP16: tuple[Flag, ...] = (
    ("initial-loss-scale", "65536"),
    ("accumulate-allreduce-grads-in-fp32", "true"),
)
SUMS: tuple[Flag, ...] = (("grad-reduce-in-bf16", "true"),)
MOST_RUNS = 54
FP32 = "fp32"
"""The variant with fp32 states of bf16 parameters, with which most others are compared."""


@dataclass(frozen=True, kw_only=True)
class StateSetting:
    """Formats of the optimizer's states, compared with fp32 states of the same seed.

    `variant` names the setting in results, `title` on the page. `flags` are those that differ from
    the ones of `reference`, the variant with fp32 states, the same rates and parameters of the same
    format.
    """

    variant: str
    title: str
    flags: tuple[Flag, ...] = ()
    dtype: str = "bf16"
    rates: tuple[Flag, ...] = RATES
    reference: str = FP32

    def run(self, seed: int) -> StudyRun:
        """Return the setting's run with a seed."""
        return StudyRun(
            variant=self.variant,
            seed=seed,
            shape=SHAPE,
            dtype=self.dtype,
            flags=(*self.rates, *self.flags),
        )


def main_params(rounding: str, dtype: str = "bf16") -> tuple[Flag, ...]:
    """Return the flags of 16-bit main parameters."""
    return (("main-params-dtype", dtype), ("main-params-rounding", rounding))


def moments(dtype: str) -> tuple[Flag, ...]:
    """Return the flags of both moments in one format."""
    return (("exp-avg-dtype", dtype), ("exp-avg-sq-dtype", dtype))


SETTINGS = (
    StateSetting(variant=FP32, title="fp32 (reference)"),
    StateSetting(
        variant="main_nearest",
        title="bf16 main parameters, nearest",
        flags=main_params("nearest"),
    ),
    StateSetting(
        variant="main_stochastic",
        title="bf16 main parameters, stochastic",
        flags=main_params("stochastic"),
    ),
    StateSetting(
        variant="main_kahan",
        title="bf16 main parameters, kahan",
        flags=main_params("kahan"),
    ),
    StateSetting(variant="moments_bf16", title="bf16 moments", flags=moments("bf16")),
    StateSetting(variant="moments_int8", title="int8 moments", flags=moments("int8")),
    StateSetting(
        variant="main_stochastic-moments_int8-grads_bf16",
        title="bf16 main parameters, stochastic; int8 moments; bf16 gradients",
        flags=(*main_params("stochastic"), *moments("int8"), *SUMS),
    ),
    StateSetting(
        variant="main_kahan-moments_int8-grads_bf16",
        title="bf16 main parameters, kahan; int8 moments; bf16 gradients",
        flags=(*main_params("kahan"), *moments("int8"), *SUMS),
    ),
)
IN_FP16 = (
    StateSetting(
        variant="fp16",
        title="fp16 parameters, fp32 states (reference of the next row)",
        flags=FP16,
        dtype="fp16",
        reference="fp16",
    ),
    StateSetting(
        variant="fp16-main_nearest",
        title="fp16 main parameters, nearest",
        flags=(*FP16, *main_params("nearest", "fp16")),
        dtype="fp16",
        reference="fp16",
    ),
)


LOW = "low_rate"
AT_LOW_RATES = tuple(
    replace(
        setting,
        variant=LOW if setting.variant == FP32 else f"{LOW}-{setting.variant}",
        rates=LOW_RATES,
        reference=LOW,
    )
    for setting in SETTINGS
)


def study() -> tuple[StudyRun, ...]:
    """Return all runs, seed by seed, so that a study that is stopped has whole seeds."""
    parts = (SETTINGS, IN_FP16, AT_LOW_RATES)
    runs = [setting.run(seed) for part in parts for seed in SEEDS for setting in part]
    return checked(runs, most=MOST_RUNS)
