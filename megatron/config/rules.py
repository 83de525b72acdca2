"""The forms of rules over several settings, for the shared sections, tasks and gradient paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron.config.fields import show


class SettingValues(Protocol):
    """A configuration, as far as a message needs it."""

    def values(self) -> Mapping[str, object]:
        """Return all settings by field name."""
        ...


@dataclass(frozen=True, kw_only=True)
class RefusedPair:
    """Settings that exclude each other.

    `name` names the settings in the user's words, `holds` tells whether a configuration has them
    all, `reason` says why they exclude each other, and `instead` what to do.
    """

    name: str
    holds: Callable[[Any], object]
    reason: str
    instead: str

    def message(self, config: SettingValues) -> str:
        """Return the line of the error, with the values of the fields that the name mentions."""
        known = config.values()
        words = dict.fromkeys(word.strip(",") for word in self.name.split())
        values = [f"{word} is {show(known[word])}" for word in words if word in known]
        return f"{self.name}: {self.reason} ({', '.join(values)}); {self.instead}"


def refused_pair(
    name: str, holds: Callable[[Any], object], reason: str, instead: str
) -> RefusedPair:
    """Return a `RefusedPair` from positional arguments, for the rows of a table."""
    return RefusedPair(name=name, holds=holds, reason=reason, instead=instead)


Alternatives = Sequence[Sequence[str]]
"""Settings that replace each other: each item has the fields of one way to say the same."""


class PathOptions:
    """A value of `--grad-path`, as far as the configuration is concerned.

    A path overrides `name`, and of the rest what it needs.
    """

    name: str
    """The value of the flag."""
    sections: Mapping[str, type] = {}
    """Sections of the configuration file by name: frozen dataclasses with one flag per field. Paths
    may share a section."""
    refused_pairs: Sequence[RefusedPair] = ()
    """Settings that exclude each other on this path, in addition to those that exclude each other
    everywhere. `--help-compat` prints these pairs; `parse` checks them before `check`."""
    alternatives: Sequence[Alternatives] = ()
    """Settings of this path that replace each other: a flag overrides the others in the file."""
    presets: Mapping[str, Mapping[str, Mapping[str, Any]]] = {}
    """For settings of this path by name: values of other settings that each value implies, unless
    a flag or the file gives them."""

    def check(self, config: Any) -> None:
        """Raise `ConfigError` for settings that this path does not support."""


Complaint = str | None
"""The error of a rule that a configuration breaks: fields with their values, rule, way out."""

Notice = str | None
"""A line about a legal configuration that may not be what the user meant."""


def nearest_multiples(value: int, step: int) -> str:
    """Return the multiples of `step` around `value` without 0, as in "8, 12"."""
    below = value // step * step
    return ", ".join(str(legal) for legal in (below, below + step) if legal > 0)
