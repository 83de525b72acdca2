"""The page of the AxoNN validation: differences of losses from plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

PLAIN = "PyTorch"
OURS = "message-driven, 2 x 2"
STOCK = "PyTorch, clip_grad_norm_"
SEEDS = "PyTorch, seed {seed}"
EQUAL, EQUAL_STEPS = 1e-4, 50
"""Maximum difference of the training losses of the first steps."""
AS_ROUNDING = 2.0
"""Maximum ratio of our difference to that of plain PyTorch with another norm."""


@dataclass(frozen=True, kw_only=True)
class Apart:
    """The distance of a loss curve from plain PyTorch's.

    `first` and `most` are the largest absolute differences of the first `EQUAL_STEPS` steps and of
    all steps, and `mean` the mean one. `valid` is the signed difference of the validation losses.
    """

    first: float
    most: float
    mean: float
    valid: float


def apart(curve: Mapping[str, Any], plain: Mapping[str, Any]) -> Apart:
    """Return the distance of a run from plain PyTorch's."""
    differences = [abs(a - b) for a, b in zip(curve["losses"], plain["losses"], strict=True)]
    return Apart(
        first=max(differences[:EQUAL_STEPS]),
        most=max(differences),
        mean=fmean(differences),
        valid=curve["valid_loss"] - plain["valid_loss"],
    )


def seed_noise(curves: Mapping[str, Any]) -> float:
    """Return the standard deviation over seeds of plain PyTorch's last validation loss."""
    return stdev(c["valid_loss"] for name, c in curves.items() if name not in (OURS, STOCK))


def verdicts(curves: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Return the claims of Figure 10 in a form that can fail, and whether each holds."""
    ours, rounding = (apart(curves[name], curves[PLAIN]) for name in (OURS, STOCK))
    noise = seed_noise(curves)
    return [
        (
            f"training losses equal to {EQUAL:g} in the first {EQUAL_STEPS} steps",
            ours.first < EQUAL,
        ),
        (
            f"mean difference over all steps at most {AS_ROUNDING:g} times that of plain PyTorch "
            f"with the norm of clip_grad_norm_ ({ours.mean:.1e} and {rounding.mean:.1e})",
            ours.mean <= AS_ROUNDING * rounding.mean,
        ),
        (
            f"last validation losses closer than their standard deviation over seeds "
            f"({abs(ours.valid):.1e} and {noise:.1e})",
            abs(ours.valid) < noise,
        ),
    ]


def as_markdown(found: Mapping[str, Any]) -> str:
    """Return the page."""
    curves, study = found["curves"], found["study"]
    steps = study["steps"]
    shown = sorted({1, min(EQUAL_STEPS, steps), steps // 3, 2 * steps // 3, steps} - {0})
    runs = [PLAIN, OURS, STOCK]
    lines = [
        f"GPT of {study['layers']} layers x {study['hidden']}, {study['heads']} heads, fp32, no "
        f"dropout; {steps} steps of {study['batch']} x {study['sequence']} tokens, AdamW, clipping "
        f"at 1, learning rate 1e-3 to 1e-4 (cosine, {study['warm_up']} steps of warm-up), as in "
        "[One run on three grids](../grids/README.md). Plain PyTorch: stock modules, optimizer and "
        "loop in one process (`plain_training.py`), from our first weights, on our samples. "
        "Message-driven: G_inter = 2 x G_data = 2, four ranks under mpiexec, microbatches of one "
        "sample. Plain PyTorch clips by a norm found in fp64; `clip_grad_norm_` finds it in fp32, "
        "too small by 3e-5 on a CPU, which shows what so little makes of a run. Seeds: other "
        "weights, other samples.",
        "",
        "![Losses, and their differences from plain PyTorch](figure.png)",
        "",
        f"| step | {' | '.join(runs)} |",
        "|---:|" + "---:|" * len(runs),
    ]
    for step in shown:
        losses = " | ".join(f"{curves[name]['losses'][step - 1]:.6f}" for name in runs)
        lines.append(f"| {step}, training | {losses} |")
    losses = " | ".join(f"{curves[name]['valid_loss']:.6f}" for name in runs)
    lines += [f"| {steps}, validation | {losses} |", "", *_differences(curves)]
    lines += [f"- {text}: {'yes' if holds else '**no**'}" for text, holds in verdicts(curves)]
    return "\n".join(lines) + "\n"


def _differences(curves: Mapping[str, Any]) -> Sequence[str]:
    lines = [
        f"| less {PLAIN} | largest, first {EQUAL_STEPS} steps | largest | mean | validation |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, curve in curves.items():
        if name != PLAIN:
            d = apart(curve, curves[PLAIN])
            lines.append(
                f"| {name} | {d.first:.1e} | {d.most:.1e} | {d.mean:.1e} | {d.valid:+.1e} |"
            )
    return [*lines, ""]
