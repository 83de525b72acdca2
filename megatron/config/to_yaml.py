"""Writing a configuration so that reading it gives an equal one."""

from __future__ import annotations

import math
import re
import textwrap
from typing import Any, cast

import yaml

from megatron.config.config import Config
from megatron.config.options import specs_of
from megatron.config.values import Scalar

_HEADER = "# All settings of a run; --config with this file and the same flags repeats it.\n"

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS_OF_OLD_YAML = frozenset("y n yes no on off true false null".split())

_TERMINAL_WIDTH = 100
_LONGEST_VALUE = 60


def to_yaml(config: Config) -> str:
    """Every saved setting, by section. Left out are where it runs and writes (`RunConfig`,
    `CheckpointConfig.save`), which are no part of what is computed."""
    return _HEADER + "".join(_section(name, section) for name, section in config.sections.items())


def brief_settings(config: Config) -> str:
    """The saved settings that differ from their defaults, by section, for a terminal."""
    lines: list[str] = []
    for name, section in config.sections.items():
        changed = [
            f"{spec.name} {_shortened(_value(value))}"
            for spec in specs_of(type(section), name).values()
            if spec.saved and (value := getattr(section, spec.name)) != spec.default
        ]
        if changed:
            text = f"  {name}: {', '.join(changed)}"
            lines += textwrap.wrap(text, _TERMINAL_WIDTH, subsequent_indent="    ")
    return "\n".join(lines)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


def _section(name: str, section: object) -> str:
    lines = [
        f"  {spec.name}: {_value(getattr(section, spec.name))}\n"
        for spec in specs_of(type(section), name).values()
        if spec.saved
    ]
    return f"{_text(name)}:\n{''.join(lines)}" if lines else ""


def _value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, cast('tuple[Any, ...]', value)))}]"
    if isinstance(value, float):
        return _number(value)
    return _text(value) if isinstance(value, str) else str(value)


def _number(value: float) -> str:
    """`repr` with a point, without which older YAML takes 1e-05 for text."""
    assert math.isfinite(value)
    digits, e, exponent = repr(value).partition("e")
    return digits + ("" if "." in digits else ".0") + e + exponent


def _text(value: str) -> str:
    plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS_OF_OLD_YAML
    if plain and Scalar(value).is_text:
        return value
    return yaml.dump(value, default_style='"', width=math.inf).strip()
