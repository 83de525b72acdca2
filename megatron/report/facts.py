"""The figures and tables at the head of a report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from megatron.metrics.log_line import (
    byte_size,
    duration,
    flop_rate,
    memory_size,
    scaled,
    three_digits,
)
from megatron.metrics.logger import COUNTED, LOSS, PER_SECOND
from megatron.metrics.record import perplexity
from megatron.metrics.throughput import shows_papers_metrics
from megatron.report.runs import RunData

_CONFIG_KEYS = (
    "vision_backbone_type", "width_factor", "encoder_layers", "decoder_layers", "embed_dim",
    "num_layers", "hidden_size", "num_attention_heads", "seq_length", "global_batch_size",
    "micro_batch_size", "train_iters", "train_samples", "optimizer", "lr", "lr_decay_style",
    "weight_decay", "fp16", "bf16", "grad_path", "tensor_model_parallel_size",
    "pipeline_model_parallel_size", "seed", "data_path", "tokenizer_type",
)  # fmt: skip
_PATH_PREFIXES = (
    "radius_", "samo_", "dsr_", "topk_", "powersgd_", "lowrank_", "roundrobin_", "demo_"
)  # fmt: skip

RUNS_ON = ("ranks", "nodes", "threads", "backend", "network", "processor")
"""Keys of environment.json that say what the ranks run on."""
_ENVIRONMENT = {"job": "environment variables"}
"""Names of keys of environment.json for readers, where they are not the keys themselves."""


def tiles(run: RunData) -> list[tuple[str, str, str]]:
    """Return the headline figures: (name, figure, remark)."""
    count, peak = len(run.iterations), peak_memory(run)
    speeds = [v for v in run.finite(PER_SECOND) if v > 0]
    loss, steps = logged_loss(run)
    of_steps = f"mean of {steps} steps, " * (steps > 1)
    remark = f"{of_steps}iteration {run.iterations[-1]:,}" if count else ""
    figures = [("training loss", _loss(loss), remark)]
    for kind, name in (("valid", "validation"), ("test", "test")):
        if run.evaluations[kind]:
            loss = run.evaluations[kind][-1][1]
            # Of a task with other means these say more than the exponential of its loss.
            remark = "" if run.means else f"perplexity {perplexity(loss):.4g}"
            figures.append((f"{name} loss", _loss(loss), remark))
            for mean, points in run.means.items():
                value = f"{points[kind][-1][1]:.5g}"
                figures.append((f"{name} {mean.replace('_', ' ')}", value, ""))
    figures += [
        (run.unit, scaled(math.fsum(run.finite(COUNTED))).strip(), f"{count:,} steps"),
        ("training time", training_time(run), "without evaluations"),
        (f"{run.unit}/s", scaled(median(speeds)).strip() if speeds else "-", "median step"),
        ("sent", byte_size(bytes_sent(run)), "one rank, of gradients"),
        ("peak memory", memory_size(peak) if peak else "-", "one rank"),
    ]
    return figures


def training_time(run: RunData) -> str:
    """Return the time of all steps, without evaluations."""
    return duration(math.fsum(run.finite("step_seconds")))


def bytes_sent(run: RunData) -> float:
    """Return the bytes that one rank has sent."""
    return math.fsum(run.finite("bytes_sent"))


def peak_memory(run: RunData) -> float:
    """Return the largest memory of a rank in bytes; 0 if none is known."""
    return max(run.finite("peak_memory_bytes"), default=0.0)


def median_step(run: RunData) -> float:
    """Return the median seconds of a step; 0 if none is known."""
    steps = run.finite("step_seconds")
    return median(steps) if steps else 0.0


def logged_loss(run: RunData) -> tuple[float, int]:
    """Return the loss in the last line of the log, and the steps that the line covers.

    As there (`megatron.metrics.record.summarize`), it is the mean over the applied steps of the
    last log interval of the last start, or over all steps if none was applied.
    """
    interval = run.config.get("log_interval")
    interval = interval if isinstance(interval, int) and interval > 0 else 1
    last = run.iterations[-1] if run.iterations else 0
    first = max((last - 1) // interval * interval, *(i for i in run.loaded if i < last), 0)
    columns = zip(run.iterations, run.steps[LOSS], run.steps["skipped"], strict=True)
    steps = [(loss, skipped) for i, loss, skipped in columns if i > first]
    losses = [loss for loss, skipped in steps if not skipped > 0] or [loss for loss, _ in steps]
    return (sum(losses) / len(losses) if losses else math.nan), len(steps)


def run_table(run: RunData) -> list[tuple[str, str]]:
    """Return the table of events: state, cause, restarts, skips, checkpoints, environment."""
    rows: list[tuple[str, str]] = [("folder", str(run.folder))]
    status = run.status
    if status is not None:
        rows.append(("state", status.state + (f" ({status.left})" if status.left else "")))
        if status.reason:
            rows.append(("first cause", f"rank {status.rank}: {status.reason}"))
        rows += [
            (name, value)
            for name, value in (
                ("host", status.host),
                ("job", status.job_id),
                ("version", status.version),
            )
            if value
        ]
        rows += _throughput(status.throughput)
    skipped = sum(1 for value in run.steps["skipped"] if value > 0)
    rows += [
        ("restarts", str(run.restarts) if run.restarts else "none that redid steps"),
        ("resumed from step", ", ".join(f"{step:,}" for step in run.loaded) or "none"),
        *_earlier_ranks(run),
        ("skipped steps", f"{skipped:,}"),
        ("checkpoints", _checkpoints(run.checkpoints)),
    ]
    if run.unreadable_lines:
        rows.append(("unreadable metrics lines", str(run.unreadable_lines)))
    return rows + [
        (_ENVIRONMENT.get(key, key), value) for key, value in run.environment.items() if value
    ]


def _earlier_ranks(run: RunData) -> list[tuple[str, str]]:
    """Return a row with the ranks of each start, if they changed."""
    if len({ranks for _, ranks in run.starts}) < 2:
        return []
    return [("ranks from step", ", ".join(f"{step:,}: {ranks}" for step, ranks in run.starts))]


def _throughput(means: object) -> list[tuple[str, str]]:
    """Return the throughput of the last start, as far as status.json has numbers."""
    if not isinstance(means, dict):
        return []
    known = {key: value for key, value in means.items() if isinstance(value, int | float)}
    rows: list[tuple[str, str]] = []
    if {"step_seconds", "steps"} <= known.keys():
        seconds = three_digits(known["step_seconds"])
        rows.append(("mean step", f"{seconds} s ({known['steps']:g} of the last start)"))
    # A status of an older version does not name the model's operations.
    of_a_token, share = known.get("flops_per_token", math.inf), known.get("percent_of_peak")
    if "training_days" in known and shows_papers_metrics(of_a_token, share):
        rows.append(
            ("300 billion tokens", f"{three_digits(known['training_days'])} days (AxoNN, Eq. 2)")
        )
    if "flops_per_second" in known:
        peak = "" if share is None else f", {share:.1f}% of its peak"
        unit, _, rate = flop_rate(known["flops_per_second"]).partition(": ")
        forward = "forward twice" if known.get("recomputed", True) else "forward"
        counted = f"{forward} and backward; AxoNN, Eq. 3"
        rows.append(("rate of one rank", f"{rate} {unit}{peak} ({counted})"))
    return rows


def phase_table(run: RunData) -> list[tuple[str, str, str]]:
    """Return rows (phase, milliseconds, share of the step): the median of each timer."""
    timers = {
        "step": run.finite("step_seconds"),
        "waiting for gradients": run.finite("wait_seconds"),
    }
    for name, points in run.phases.items():
        timers[name] = [v for _, v in points if math.isfinite(v)]
    found = {name: median(seconds) for name, seconds in timers.items() if seconds}
    whole = found.get("step", 0.0)
    if whole <= 0:
        return []
    return [(name, f"{1000 * s:.2f}", f"{100 * s / whole:.1f} %") for name, s in found.items()]


def config_table(run: RunData) -> list[tuple[str, str]]:
    """Return the main settings, with those of the gradient path."""
    of_path = [key for key in run.config if key.startswith(_PATH_PREFIXES)]
    return [
        (key.replace("_", " "), _setting(run.config[key]))
        for key in (*_CONFIG_KEYS, *of_path)
        if run.config.get(key) is not None and run.config[key] is not False
    ]


def differing_settings(runs: Sequence[RunData]) -> list[tuple[str, ...]]:
    """Return rows (setting, its value in each run) of settings that differ.

    A run without the setting has a dash. What the ranks run on counts as settings.
    """
    keys = dict.fromkeys(key for run in runs for key in run.config)
    rows = [
        (key.replace("_", " "), *(_setting(run.config.get(key)) for run in runs)) for key in keys
    ]
    rows += [(key, *(run.environment.get(key) or "-" for run in runs)) for key in RUNS_ON]
    return [row for row in rows if len(set(row[1:])) > 1]


def evaluated(run: RunData) -> tuple[str, ...]:
    """Return the names of the values that evaluations report besides the loss.

    They are the task's other means; for a task without any, such as GPT, it is the perplexity.
    """
    return tuple(run.means) or ("perplexity",)


def evaluation_table(run: RunData) -> list[tuple[str, ...]]:
    """Rows (iteration, set, loss, and each of `evaluated`), the newest 20 of each set."""
    rows: list[tuple[str, ...]] = []
    for kind, name in (("valid", "validation"), ("test", "test")):
        others = [dict(points[kind]) for points in run.means.values()]
        for iteration, loss in run.evaluations[kind][-20:]:
            values = [found.get(iteration, math.nan) for found in others] or [perplexity(loss)]
            shown = (f"{value:.5g}" for value in values)
            rows.append((f"{iteration:,}", name, _loss(loss), *shown))
    return rows


def _loss(loss: float) -> str:
    return f"{loss:.4f}"


def _checkpoints(names: list[str]) -> str:
    if len(names) <= 6:
        return ", ".join(names) or "none"
    return f"{len(names)}: {names[0]} ... {', '.join(names[-3:])}"


def _setting(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
