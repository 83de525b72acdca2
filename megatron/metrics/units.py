"""Numbers as people read them."""

from __future__ import annotations

import math


def perplexity(loss: float) -> float:
    """exp(loss), cut off at exp(20) as Megatron does, but NaN where the loss is NaN."""
    return math.nan if math.isnan(loss) else math.exp(min(20.0, loss))


def byte_size(count: float) -> str:
    """A traffic or file size in decimal units: 512 B, 3.10 MB."""
    return f"{count:.0f} B" if count < 1000 else f"{scaled(count)}B"


def memory_size(count: float) -> str:
    """A memory size in binary units: 1.50 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{three_digits(count)} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{three_digits(count)} TiB"


def flop_rate(per_second: float) -> str:
    """A rate of floating-point operations: GFLOP/s, from 1000 of them on TFLOP/s."""
    if per_second < 1e12:
        return f"GFLOP/s: {three_digits(per_second / 1e9)}"
    return f"TFLOP/s: {three_digits(per_second / 1e12)}"


def scaled(value: float) -> str:
    """Three digits and a decimal prefix, the unit to be put behind: 3.10 M."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5:
            return f"{three_digits(value)} {prefix}"
        value /= 1000
    return f"{three_digits(value)} P"


def three_digits(value: float) -> str:
    """A positive number with three significant digits and no exponent below 10^15."""
    if not math.isfinite(value) or value == 0:
        return f"{value:.0f}"
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    if abs(value) >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.01 else f"{value:.2g}"


def duration(seconds: float) -> str:
    """A time span in its two largest units: 3d 04h, 2h 05m, 4m 09s, 12s."""
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
