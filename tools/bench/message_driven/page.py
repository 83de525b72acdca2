"""The page of the benchmark of message-driven pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.bench.message_driven.uneven_stage import (
    JITTER,
    PROFILES,
    SIGMA,
    SLOW,
    SLOW_FACTOR,
    SLOW_STAGE,
)

_ABOUT = {
    SLOW: f"passes of stage {SLOW_STAGE} take {SLOW_FACTOR:g} times as long",
    JITTER: f"each pass takes a log-normal factor of mean 1 and sigma {SIGMA:g} as long, drawn "
    "anew each round, the same for all contenders and on paper",
}


def as_markdown(found: Mapping[str, Any]) -> str:
    """Return the tables with their explanation."""
    rows = found["rows"]
    passes = " and ".join(f"{1e3 * seconds:.0f}" for seconds in found["passes"])
    lines = [
        "![What stages do when](figure.png)",
        "",
        *_equality(found["equality"]),
        "## Waiting",
        "",
        f"Passes that sleep {passes} ms a stage, one process a stage on {found['cores']} cores "
        f"(load {found['load_before']:.1f} before), contenders in turn. "
        + "; ".join(f"{name}: {text}" for name, text in _ABOUT.items())
        + ". Step: median over rounds, of the slowest rank; ratio: to 1F1B over gloo in the same "
        "round; paper: the step where only passes (and, on links, messages) take time, and the "
        "same ratio there; idle / busy: of each stage; held: most microbatches in flight on a "
        "stage. p: stages, m: microbatches. MPI called once: threads pause after each call of "
        "MPI, not after 16. A row without a step is only on paper: 1F1B's order "
        "with two more forwards at first tells what the limit does from what messages do. Links "
        "let 128 KB pass at once, which paper does not know of.",
        "",
    ]
    networks = list(dict.fromkeys(row["network"] for row in rows))
    for network in networks:
        lines += _table(network, [row for row in rows if row["network"] == network])
    if found["left_out"]:
        lines += [f"Not measured: {line}." for line in found["left_out"]]
    return "\n".join(lines).rstrip() + "\n"


def _equality(equality: Mapping[str, Any]) -> list[str]:
    if not equality:
        return []
    lines = ["## The same numbers", "", "A GPT with dropout, mock data, clipping and AdamW.", ""]
    lines += [
        "| stages | steps | losses bitwise equal | sha256 of the weights, 1F1B | message-driven |",
        "|---:|---:|---|---|---|",
    ]
    for stages, both in equality.items():
        plain, driven = both["1f1b"], both["message-driven"]
        same = "yes" if plain["losses"] == driven["losses"] else "**no**"
        weights = " | ".join(each["weights"][:16] for each in (plain, driven))
        lines.append(f"| {stages} | {len(plain['losses'])} | {same} | {weights} |")
    return [*lines, ""]


def _table(network: str, rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"### {network}",
        "",
        "| stages | m | contender | step, ms | ratio | paper, ms | ratio | idle / busy | held |",
        "|---|---:|---|---:|---:|---:|---:|---|---:|",
    ]
    for profile in PROFILES:
        for row in (row for row in rows if row["profile"] == profile):
            step = ratio = bubbles = held = ""
            if row["seconds"] is not None:
                step, ratio = f"{1e3 * row['seconds']:.0f}", f"{row['ratio']:.3f}"
                bubbles = " ".join(f"{bubble:.2f}" for bubble in row["bubbles"])
                held = row["in_flight"]
            lines.append(
                f"| {profile} | {row['microbatches']} | {row['contender']} | {step} | {ratio} | "
                f"{1e3 * row['paper']:.0f} | {row['paper_ratio']:.3f} | {bubbles} | {held} |"
            )
    return [*lines, ""]
