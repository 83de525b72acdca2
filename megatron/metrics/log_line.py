"""Megatron-LM's log line of a step and of an evaluation, and the units that it prints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime

from megatron.metrics.record import Evaluation, LogInterval, Spread, StepRecord, perplexity


def byte_size(count: float) -> str:
    """Format a traffic or file size in decimal units: 512 B, 3.10 MB."""
    return f"{count:.0f} B" if count < 1000 else f"{scaled(count)}B"


def memory_size(count: float) -> str:
    """Format a memory size in binary units: 1.50 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{three_digits(count)} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{three_digits(count)} TiB"


def flop_rate(per_second: float) -> str:
    """Format a rate in GFLOP/s, or in TFLOP/s from 1000 GFLOP/s on."""
    if per_second < 1e12:
        return f"GFLOP/s: {three_digits(per_second / 1e9)}"
    return f"TFLOP/s: {three_digits(per_second / 1e12)}"


def scaled(value: float) -> str:
    """Format a number by three digits and a decimal prefix, to put before a unit: 3.10 M."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5:
            return f"{three_digits(value)} {prefix}"
        value /= 1000
    return f"{three_digits(value)} P"


def three_digits(value: float) -> str:
    """Format a number by three significant digits, or as an integer from 100 on.

    Numbers from 0.01 to 1 have two decimals, smaller ones two significant digits.
    """
    if not math.isfinite(value) or value == 0:
        return f"{value:.0f}"
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    if abs(value) >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.01 else f"{value:.2g}"


def duration(seconds: float) -> str:
    """Format a time span by its two largest units: 3d 04h, 2h 05m, 4m 09s, 12s."""
    if not math.isfinite(seconds):
        return "unknown"
    total = int(round(seconds))
    days, rest = divmod(total, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    if days:
        return f"{days}d {hours:02d}h"
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {rest:02d}s" if minutes else f"{rest}s"


def timestamp(seconds: float) -> str:
    """Format the local wall-clock time to the second."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def format_line(
    last: StepRecord,
    interval: LogInterval,
    *,
    now: float,
    seconds_left: float,
    throughput: bool = False,
    peak_tflops: float | None = None,
) -> str:
    """Return the log line for the interval that ends with step `last`, without a newline.

    `throughput` adds Megatron's field of that name (model TFLOP/s per rank). `peak_tflops`, the
    peak of a rank, adds model FLOPs utilization. `seconds_left` is the estimated time to the end of
    the run.
    """
    rate = interval.flops / interval.seconds / last.world_size if interval.seconds > 0 else 0.0
    fields = [
        f"iteration {last.iteration:8d}/{last.train_iters:8d}",
        f"consumed samples: {last.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {1000 * interval.seconds / interval.steps:.1f}",
    ]
    if throughput:
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {three_digits(rate / 1e12)}")
    fields += [
        f"learning rate: {last.lr:.6E}",
        f"global batch size: {last.global_batch_size:5d}",
        *(f"{name}: {mean:.6E}" for name, mean in interval.means.items()),
        f"loss scale: {last.loss_scale:.1f}",
    ]
    if last.grad_norm is not None:
        fields.append(f"grad norm: {last.grad_norm:.3f}")
    if last.num_zeros is not None:
        fields.append(f"num zeros: {last.num_zeros}")
    if last.params_norm is not None:
        fields.append(f"params norm: {last.params_norm:.3f}")
    fields += [
        f"number of skipped iterations: {interval.skipped:3d}",
        f"number of nan iterations: {interval.nan:3d}",
    ]
    fields += _own_fields(last, interval, rate=rate, peak_tflops=peak_tflops)
    fields.append(_eta(last, now=now, seconds_left=seconds_left))
    return f" [{timestamp(now)}] " + " | ".join(fields) + " |"


def format_brief(last: StepRecord, interval: LogInterval, *, seconds_left: float) -> str:
    """Return the line of an interval for a terminal, in about 100 characters."""
    rate = interval.counted / interval.seconds if interval.seconds > 0 else 0.0
    total = str(last.train_iters)
    fields = [
        f"step {last.iteration:{len(total)}d}/{total}",
        *_brief_means(interval.means),
        f"lr {last.lr:.2e}",
    ]
    if last.grad_norm is not None:
        fields.append(f"grad norm {last.grad_norm:.3f}")
    fields += [
        f"{1000 * interval.seconds / interval.steps:.1f} ms/step",
        f"{scaled(rate)}{last.unit}/s",
    ]
    if interval.skipped:
        fields.append(f"skipped {interval.skipped}")
    done = last.iteration >= last.train_iters
    fields.append("done" if done else f"ETA {duration(seconds_left)}")
    return f" {' | '.join(fields)}"


def _brief_means(means: Mapping[str, float]) -> list[str]:
    """Return the fields of the means, with the loss, the first mean, under the name "loss"."""
    (_, loss), *others = means.items()
    return [f"loss {loss:.4f}", *(f"{name} {mean:.4f}" for name, mean in others)]


def _own_fields(
    last: StepRecord, interval: LogInterval, *, rate: float, peak_tflops: float | None
) -> list[str]:
    unit_rate = interval.counted / interval.seconds if interval.seconds > 0 else 0.0
    fields = [f"{last.unit}/s: {three_digits(unit_rate)}", f"per rank {flop_rate(rate)}"]
    if peak_tflops is not None:
        fields.append(f"MFU: {100 * rate / (peak_tflops * 1e12):.1f}%")
    fields.append(f"sent per step: {byte_size(interval.bytes_per_step)}")
    fields += [
        f"sent per step ({name.removeprefix('bytes_')}): {byte_size(sent)}"
        for name, sent in interval.axis_bytes_per_step.items()
    ]
    if interval.density < 1:
        fields.append(f"density: {interval.density:.4g}")
    fields += [f"{name.replace('_', ' ')}: {value:.4g}" for name, value in interval.path.items()]
    if interval.wait_seconds is not None:
        fields.append(f"waited for gradients (ms): {1000 * interval.wait_seconds:.1f}")
    fields.append(f"peak memory: {memory_size(interval.peak_memory_bytes)}")
    return fields


def _eta(last: StepRecord, *, now: float, seconds_left: float) -> str:
    if last.iteration >= last.train_iters:
        return "ETA: done"
    clock = datetime.fromtimestamp(now + seconds_left).strftime("%Y-%m-%d %H:%M")
    return f"ETA: {duration(seconds_left)} ({clock})"


_EVALUATED = {"valid": "validation", "test": "test"}


def format_evaluation(evaluation: Evaluation) -> str:
    """Return the log line of an evaluation, with the perplexity that Megatron prints."""
    name = _EVALUATED[evaluation.kind]
    fields = [f"validation loss at iteration {evaluation.iteration} on {name} set"]
    for mean, value in evaluation.means.items():
        fields.append(f"{mean} value: {value:.6E}")
        if mean == evaluation.perplexity_of:
            fields.append(f"{mean} PPL: {perplexity(value):.6E}")
    return " | ".join(fields) + " |"


def format_brief_evaluation(evaluation: Evaluation) -> str:
    """Return the line of an evaluation for a terminal."""
    loss, *others = _brief_means(evaluation.means)
    fields = [f"{_EVALUATED[evaluation.kind]} loss at step {evaluation.iteration}: {loss[5:]}"]
    fields += others
    if evaluation.perplexity_of is not None:
        value = evaluation.means[evaluation.perplexity_of]
        fields.append(f"perplexity {perplexity(value):.4g}")
    return ", ".join(fields)


def format_timers(timers: Mapping[str, Spread], *, steps: int, option: str) -> str:
    """Format milliseconds per step of each timer: the maximum, minimum and maximum, or all ranks.

    `option` is max, minmax or all. A pair (min, max) cannot show all ranks and shows both ends.
    """
    titles = {
        "max": "max time across ranks (ms):",
        "minmax": "(min, max) time across ranks (ms):",
        "all": "times across ranks (ms):",
    }
    lines = [titles[option]]
    for name, spread in timers.items():
        values = [1000 * seconds / steps for seconds in spread]
        label = f"    {name} ".ljust(52, ".")
        if option == "all" and not isinstance(spread, tuple):
            lines.append(f"    {name}:")
            lines += [f"     rank {rank:2d}: {value:.2f}" for rank, value in enumerate(values)]
        elif option == "max":
            lines.append(f"{label}: {max(values):.2f}")
        else:
            lines.append(f"{label}: ({min(values):.2f}, {max(values):.2f})")
    return "\n".join(lines)
