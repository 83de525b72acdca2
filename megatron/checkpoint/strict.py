"""Reading JSON with nothing taken on trust: every helper raises `ValueError` naming the place."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from typing import Any

LARGEST = 2**62
MOST_AXES = 16


def strict_json(data: bytes) -> Any:
    """Decode JSON; raises `ValueError` for duplicate keys and for numbers that are not finite."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) != len(items):
            seen: set[str] = set()
            twice = next(name for name, _ in items if name in seen or seen.add(name))
            raise ValueError(f"key {show(twice)} occurs twice")
        return result

    def number(literal: str) -> float:
        value = float(literal)
        if not math.isfinite(value):
            raise ValueError(f"{show(literal)} is not a finite number")
        return value

    return json.loads(
        data.decode(), object_pairs_hook=pairs, parse_float=number, parse_constant=number
    )


def check_json(value: Any, where: str) -> None:
    """Raise `ValueError` naming the first place that JSON would not give back as it was."""
    if isinstance(value, dict):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where}: key {show(key)} is not text")
            check_json(entry, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for number, entry in enumerate(value):
            check_json(entry, f"{where}[{number}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}: {value} is not a finite number")
    elif not isinstance(value, str | int | float | None):
        raise ValueError(f"{where}: {type(value).__name__} has no JSON form")


def show(value: Any) -> str:
    """A value for an error line: ASCII, quoted, at most 80 characters."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def one_line(error: BaseException) -> str:
    """The message of an error on one line of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else f"{text[:397]}..."


def fields(
    value: Any, where: str, required: Collection[str], optional: Collection[str] = ()
) -> None:
    """Check that a value is an object with these keys and no others."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: must be an object")
    for key in required:
        if key not in value:
            raise ValueError(f"{where}.{key}: missing")
    for key in value:
        if key not in required and key not in optional:
            raise ValueError(f"{where}: unknown key {show(key)}")


def named(value: Any, where: str, read: Any) -> dict[str, Any]:
    """Read an object of any keys, each entry through `read(entry, where)`."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: must be an object")
    return {key: read(entry, f"{where}[{show(key)}]") for key, entry in value.items()}


def integer(value: Any, where: str, low: int = 0) -> int:
    """A whole number from `low` to 2**62; true and false are not numbers."""
    if type(value) is not int or not low <= value <= LARGEST:
        raise ValueError(f"{where}: must be a whole number from {low} to 2**62, not {show(value)}")
    return value


def integers(value: Any, where: str) -> tuple[int, ...]:
    """A list of whole numbers, one per axis."""
    if not isinstance(value, list) or len(value) > MOST_AXES:
        raise ValueError(f"{where}: must be a list of at most {MOST_AXES} whole numbers")
    return tuple(integer(entry, where) for entry in value)


def text(value: Any, where: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise ValueError(f"{where}: must be text, not {show(value)}")
    return value
