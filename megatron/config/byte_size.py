"""Sizes of memory as a user writes them: 2GB, 1.5GiB."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal

from megatron.errors import ConfigError

UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
"""Bytes of each unit; the case of letters counts, since Gb are bits."""
_SIZE = re.compile(rf"([0-9]{{1,9}}(?:\.[0-9]{{1,9}})?)({'|'.join(UNITS)})")


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as 2GB, 500MB, 1.5GB (powers of 10) or 2GiB (of 2).

    Raises:
        ConfigError: The text is no size, or less than a byte.
    """
    match = _SIZE.fullmatch(text)
    size = int(Decimal(match[1]) * UNITS[match[2]]) if match else 0
    if size < 1:
        raise ConfigError(
            f"{text!r} is no size of memory; give a number and one of {', '.join(UNITS)}, as in "
            "2GB or 1.5GiB"
        )
    return size


def show_bytes(count: int) -> str:
    """Return a size of at least `count` bytes that `parse_bytes` reads, in a unit of 10^n bytes.

    It is rounded up to a thousandth of the unit.
    """
    unit = next((unit for unit in ("TB", "GB", "MB") if count >= UNITS[unit]), "kB")
    size = (Decimal(count) / UNITS[unit]).quantize(Decimal("0.001"), rounding=ROUND_CEILING)
    return f"{size.normalize():f}{unit}"
