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
    """`name` says which settings, in the user's words; `holds` whether a configuration has both.

    `reason` why not; `instead` the way out.
    """

    name: str
    holds: Callable[[Any], object]
    reason: str
    instead: str

    def message(self, config: SettingValues) -> str:
        """The error's line, with the values of the fields that the name mentions."""
        known = config.values()
        words = [word.strip(",") for word in self.name.split()]
        values = [f"{word} is {show(known[word])}" for word in words if word in known]
        return f"{self.name}: {self.reason} ({', '.join(values)}); {self.instead}"


def refused_pair(
    name: str, holds: Callable[[Any], object], reason: str, instead: str
) -> RefusedPair:
    """Return a `RefusedPair`, as the rows of a table are written."""
    return RefusedPair(name=name, holds=holds, reason=reason, instead=instead)


Alternatives = Sequence[Sequence[str]]
"""Settings of which a run has one: each item is one way, by the fields that say it."""

Complaint = str | None
"""The error of a rule that a configuration breaks: fields with their values, rule, way out."""

Notice = str | None
"""A line about a legal configuration that may not be what the user meant."""


def nearest_multiples(value: int, step: int) -> str:
    """The multiples of `step` around `value`, 0 left out: "8, 12"."""
    below = value // step * step
    return ", ".join(str(legal) for legal in (below, below + step) if legal > 0)
