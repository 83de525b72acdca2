"""What one configuration field may be: its sentence of help, its type, choices and range.

A section is a frozen dataclass whose fields come from `option`. Flags, `--help`, the YAML reader
and the range checks are all derived from the `Spec` of a field, so a field is written down once.
"""

from __future__ import annotations

import dataclasses
import math
import types
from dataclasses import MISSING, dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin
from typing import get_type_hints as type_hints

T = TypeVar("T")

_METADATA = "sparsetron"


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A range of numbers; reads as the end of the sentence "must be ..."."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def __contains__(self, value: float) -> bool:
        above_low = value > self.low if self.low_open else value >= self.low
        below_high = value < self.high if self.high_open else value <= self.high
        return above_low and below_high

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"more than {self.low}" if self.low_open else f"at least {self.low}"
        left, right = "(["[not self.low_open], ")]"[not self.high_open]
        return f"in {left}{self.low}, {self.high}{right}"


def at_least(low: float) -> Interval:
    """The numbers from `low` on."""
    return Interval(low=low)


def above(low: float) -> Interval:
    """The numbers greater than `low`."""
    return Interval(low=low, low_open=True)


def between(low: float, high: float) -> Interval:
    """The numbers from `low` to `high`, both included."""
    return Interval(low=low, high=high)


def below_one(low: float = 0) -> Interval:
    """The numbers from `low` up to, not including, 1."""
    return Interval(low=low, high=1, high_open=True)


def option(
    *,
    default: Any = MISSING,
    help: str,
    within: Interval | None = None,
    saved: bool = True,
) -> Any:
    """A field of a section. `help`: one sentence with the unit and what turns it off. `within`:
    legal numbers (of each element, for a tuple). `saved`: whether `to_yaml` writes it."""
    facts = {"help": help, "within": within, "saved": saved}
    return dataclasses.field(default=default, metadata={_METADATA: facts})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option,))
def section(cls: type[T]) -> type[T]:
    """Make a class a section: a frozen dataclass built by keyword."""
    return dataclass(frozen=True, kw_only=True)(cls)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """All that is known of one field. `kind`: int, float, bool or str, of each element where
    `many`; `count`: number of elements, None for one or more."""

    name: str
    section: str
    kind: type
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    within: Interval | None = None
    many: bool = False
    count: int | None = None
    optional: bool = False
    saved: bool = True

    @property
    def flag(self) -> str:
        """The name on the command line."""
        return flag_name(self.name)

    @property
    def required(self) -> bool:
        """Whether the user must give it."""
        return self.default is MISSING


def flag_name(name: str) -> str:
    """`--kebab-case` of a field's name."""
    return "--" + name.replace("_", "-")


@cache
def specs_of(cls: type, section_name: str) -> dict[str, Spec]:
    """The specs of a dataclass by field name, in order. Fields made without `option` are legal and
    have no help; types are int, float, bool, str, Literal or tuples of these, or None."""
    hints = type_hints(cls)
    return {f.name: _spec(f, hints[f.name], section_name) for f in dataclasses.fields(cls)}


def _spec(field: dataclasses.Field[Any], hint: Any, section_name: str) -> Spec:
    facts = field.metadata.get(_METADATA, {})
    hint, optional = _without_none(hint)
    many, count = False, None
    if get_origin(hint) is tuple:
        elements = get_args(hint)
        many, count = True, None if elements[-1] is Ellipsis else len(elements)
        hint = elements[0]
    choices: tuple[str, ...] = ()
    if get_origin(hint) is Literal:
        choices, hint = get_args(hint), str
    assert hint in (int, float, bool, str), f"{field.name}: no flag for the type {hint}"
    return Spec(
        name=field.name,
        section=section_name,
        kind=hint,
        default=field.default,
        help=facts.get("help", ""),
        choices=choices,
        within=facts.get("within"),
        many=many,
        count=count,
        optional=optional,
        saved=facts.get("saved", True),
    )


def _without_none(hint: Any) -> tuple[Any, bool]:
    """The type without `| None`, and whether None was there."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint, False
    (inner,) = (arg for arg in get_args(hint) if arg is not types.NoneType)
    return inner, True
