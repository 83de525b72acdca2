"""Configuration fields: declaration, strict conversion from text, and ranges.

A section is a frozen dataclass whose fields come from `option`. Flags, `--help`, the YAML reader
and the range checks are all derived from the `FieldSpec` of a field, so a field
is declared once. `convert` reads a value in the same strict way from a flag and from the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, TypeVar, Union, cast, dataclass_transform, get_args, get_origin
from typing import get_type_hints as type_hints

from megatron.errors import ConfigError

T = TypeVar("T")

_METADATA = "sparsetron"


@dataclass(frozen=True, kw_only=True)
class ValueRange:
    """A range of numbers; its text completes the sentence "must be ..."."""

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


def at_least(low: float) -> ValueRange:
    """Return the range of numbers from `low` on."""
    return ValueRange(low=low)


def above(low: float) -> ValueRange:
    """Return the range of numbers greater than `low`."""
    return ValueRange(low=low, low_open=True)


def between(low: float, high: float) -> ValueRange:
    """Return the range of numbers from `low` to `high`, both included."""
    return ValueRange(low=low, high=high)


def below_one(low: float = 0) -> ValueRange:
    """Return the range of numbers from `low` up to, but not including, 1."""
    return ValueRange(low=low, high=1, high_open=True)


def option(
    *,
    default: Any = MISSING,
    help: str,
    within: ValueRange | None = None,
    saved: bool = True,
) -> Any:
    """Declare a field of a section.

    Args:
        help: One sentence, with the unit and the value that turns the feature off.
        within: Legal numbers (of each element, for a tuple).
        saved: Whether `to_yaml` writes the field.
    """
    facts = {"help": help, "within": within, "saved": saved}
    return dataclasses.field(default=default, metadata={_METADATA: facts})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option,))
def section(cls: type[T]) -> type[T]:
    """Make a class a section: a frozen dataclass built by keyword."""
    return dataclass(frozen=True, kw_only=True)(cls)


@dataclass(frozen=True, kw_only=True)
class FieldSpec:
    """The declaration of one field.

    `kind` is int, float, bool or str, of each element if `many`. `count` is the number of elements,
    None for one or more.
    """

    name: str
    section: str
    kind: type
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    within: ValueRange | None = None
    many: bool = False
    count: int | None = None
    optional: bool = False
    saved: bool = True

    @property
    def flag(self) -> str:
        """Name on the command line."""
        return flag_name(self.name)

    @property
    def required(self) -> bool:
        """True if the user must give a value."""
        return self.default is MISSING

    def accepts(self, value: Any) -> bool:
        """Return whether the field can have a value that JSON brings."""
        if value is None:
            return self.optional
        if not self.many:
            return self._accepts_one(value)
        items = cast("list[Any]", value) if isinstance(value, list) else []
        return len(items) == (self.count or len(items) or 1) and all(map(self._accepts_one, items))

    def _accepts_one(self, value: Any) -> bool:
        if self.kind is float and type(value) is int:
            value = float(value)
        return type(value) is self.kind and (self.within is None or value in self.within)


def whole_number(text: str) -> int:
    """Read the value of a tool's flag: decimal digits alone; the `type` of an argparse argument.

    Raises `argparse.ArgumentTypeError`. `int` would read digits of other scripts, and numbers that
    no loop can count to.
    """
    value, why = _integer(_ANY_INTEGER, Scalar(text), False)
    if why:
        raise argparse.ArgumentTypeError(f"{show(text)} {why}")
    return value


def flag_name(name: str) -> str:
    """Return the `--kebab-case` form of a field's name."""
    return "--" + name.replace("_", "-")


@cache
def specs_of(cls: type, section_name: str) -> dict[str, FieldSpec]:
    """Return the specs of a dataclass by field name, in order.

    Fields made without `option` are legal and have no help. Types are int, float, bool, str,
    Literal or tuples of these, or None.
    """
    hints = type_hints(cls)
    return {f.name: _spec(f, hints[f.name], section_name) for f in dataclasses.fields(cls)}


def _spec(field: dataclasses.Field[Any], hint: Any, section_name: str) -> FieldSpec:
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
    return FieldSpec(
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
    """Return the type without `| None`, and whether None was part of it."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint, False
    (inner,) = (arg for arg in get_args(hint) if arg is not types.NoneType)
    return inner, True


_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.?(nan|inf|infinity)", re.IGNORECASE)
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

LARGEST_INTEGER = 2**63 - 1
LARGEST_NUMBER = (2 - 2**-23) * 2.0**127
"""Largest finite number in fp32, in which losses, rates and weights are computed."""
UNREAD_TOKENIZERS = {
    "TikTokenizer": "tiktoken files are not read; convert_tiktoken_to_fast of "
    "transformers.integrations.tiktoken writes a tokenizer.json of one, for HuggingFaceTokenizer",
}
"""Values of Megatron-LM's `--tokenizer-type` that are refused here, with the way out."""

_SHOWN = 60
"""Maximum number of characters of a value in a message."""


@dataclass(frozen=True)
class Scalar:
    """A value as written; a `quoted` value is text whatever it looks like."""

    text: str
    quoted: bool = False

    @property
    def is_null(self) -> bool:
        """True if YAML's core schema reads it as null."""
        return not self.quoted and self.text in ("", "~", "null", "Null", "NULL")

    @property
    def is_text(self) -> bool:
        """True if YAML's core schema reads it as text."""
        plain = self.text in ("true", "false") or _NUMBER.fullmatch(self.text)
        return self.quoted or not (plain or self.is_null)


@dataclass(frozen=True, kw_only=True)
class GivenValue:
    """A value that the user gave for a field, with its origin: "--lr", "gpt.yaml:3: lr"."""

    origin: str
    value: Scalar | tuple[Scalar, ...]
    from_file: bool = False


_WORDS = {"True": "true", "False": "false", "None": "none"}


def show(value: object) -> str:
    """Return a value for a message: quoted if text, on one line, of bounded length."""
    text = repr(value) if isinstance(value, str) else _WORDS.get(repr(value), str(value))
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def show_plain(text: str) -> str:
    """Return text without quotes where that cannot be misread."""
    return text if len(text) <= _SHOWN and re.fullmatch(r"[!-~]+", text) else show(text)


def show_path(path: str) -> str:
    """Return a path in full; one that is empty, unprintable or overlong is shown as by `show`."""
    return path if path and path.isprintable() and len(path) < 4096 else show(path)


def nearest(
    name: str, known: Iterable[str], synonyms: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return "; did you mean X?" for a name close to a known one or to a synonym, else ""."""
    matches = difflib.get_close_matches(name, [*known, *synonyms], n=1)
    return f"; did you mean {synonyms.get(matches[0], matches[0])}?" if matches else ""


def convert(spec: FieldSpec, given: GivenValue) -> Any:
    """Return the typed value. Raises `ConfigError`; ranges are checked later, on the whole."""
    if spec.optional and _stands_for_none(given):
        return None
    if not spec.many:
        if not isinstance(given.value, Scalar):
            raise ConfigError(f"{given.origin}: a list; must be one value, {_wanted(spec)}")
        return _convert_one(spec, given.value, given)
    items = (given.value,) if isinstance(given.value, Scalar) else given.value
    if not items or (spec.count and len(items) != spec.count):
        wanted = spec.count or "at least 1"
        raise ConfigError(f"{given.origin}: {len(items)} values given; must be {wanted}")
    return tuple(_convert_one(spec, item, given) for item in items)


def _stands_for_none(given: GivenValue) -> bool:
    """Return whether a value is null in the file or "none" on the command line."""
    if given.from_file:
        return isinstance(given.value, Scalar) and given.value.is_null
    return given.value in (Scalar("none"), (Scalar("none"),))


def _wanted(spec: FieldSpec) -> str:
    """Return the type, or the choices, in words."""
    if spec.choices:
        return "one of " + ", ".join(spec.choices)
    return _KINDS[spec.kind][0]


def _convert_one(spec: FieldSpec, scalar: Scalar, given: GivenValue) -> Any:
    value, why = _KINDS[spec.kind][1](spec, scalar, given.from_file)
    if why:
        shown = show(scalar.text) if scalar.quoted or scalar.text == "" else show_plain(scalar.text)
        raise ConfigError(f"{given.origin}: {shown} {why}")
    return value


_Converted = tuple[Any, str]
"""A value, or a complaint that ends a sentence about the text."""


def _integer(spec: FieldSpec, scalar: Scalar, from_file: bool) -> _Converted:
    if scalar.quoted:
        return None, f"is quoted text; must be an integer{_unquote(_INTEGER, scalar)}"
    if not _INTEGER.fullmatch(scalar.text):
        return None, "is not an integer; write decimal digits alone, such as 1000"
    if len(scalar.text) > 20 or abs(int(scalar.text)) > LARGEST_INTEGER:
        return None, f"is too large; must be at most {LARGEST_INTEGER}"
    return int(scalar.text), ""


def _number(spec: FieldSpec, scalar: Scalar, from_file: bool) -> _Converted:
    if scalar.quoted:
        return None, f"is quoted text; must be a number{_unquote(_NUMBER, scalar)}"
    if _NOT_FINITE.fullmatch(scalar.text):
        return None, "is not finite; must be a finite number"
    if not _NUMBER.fullmatch(scalar.text):
        hint = "10% is 0.1" if scalar.text.endswith("%") else "write it as 0.001 or 1e-3"
        return None, f"is not a number; {hint}"
    value = float(scalar.text)
    if abs(value) > LARGEST_NUMBER:
        return None, f"is too large; must be at most {LARGEST_NUMBER:.2g}, as numbers in fp32 are"
    return value, ""


def _unquote(pattern: re.Pattern[str], scalar: Scalar) -> str:
    return "; remove the quotes" if pattern.fullmatch(scalar.text) else ""


def _boolean(spec: FieldSpec, scalar: Scalar, from_file: bool) -> _Converted:
    if scalar.quoted or scalar.text not in ("true", "false"):
        return None, "is neither true nor false; write one of these, without quotes"
    return scalar.text == "true", ""


def _text(spec: FieldSpec, scalar: Scalar, from_file: bool) -> _Converted:
    # A blend's weights stand between its paths, so elements of lists may look like numbers.
    if from_file and not spec.many and not scalar.is_text:
        return None, "is not text" + (
            f"; must be {_wanted(spec)}" if spec.choices else "; put it in quotes"
        )
    if not scalar.text or scalar.is_null and from_file:
        return None, "is empty; give a value or leave it out"
    if _UNPRINTABLE.search(scalar.text):
        return None, "has a control character or line break; remove it"
    if spec.choices and scalar.text not in spec.choices:
        hint = nearest(scalar.text, spec.choices)
        if scalar.text in UNREAD_TOKENIZERS:
            hint = f"; {UNREAD_TOKENIZERS[scalar.text]}"
        return None, f"is not known; must be {_wanted(spec)}{hint}"
    return scalar.text, ""


_KINDS = {
    int: ("an integer", _integer),
    float: ("a number", _number),
    bool: ("true or false", _boolean),
    str: ("text", _text),
}


_ANY_INTEGER = FieldSpec(name="", section="", kind=int, default=None, help="")


def check_range(spec: FieldSpec, value: Any, origin: str) -> None:
    """Raise `ConfigError` unless each number is in the field's range."""
    if spec.within is None or value is None:
        return
    for item in value if spec.many else (value,):
        if item not in spec.within:
            raise ConfigError(f"{origin}: {item} is out of range; must be {spec.within}")


def origin_of(name: str, givens: Mapping[str, GivenValue]) -> str:
    """Return the origin of a field's value for a message; its name if it is a default."""
    return givens[name].origin if name in givens else name


RULE = "--split wants three numbers >= 0, not all 0, for train, valid and test, as in 969,30,1"


def split_shares(text: str) -> list[float]:
    """Read the shares of train, valid and test, in any scale.

    Raises `ConfigError` unless the text has three numbers >= 0, not all 0, separated by commas.
    (Megatron reads "-1,1,1" as "1,1,1" and pads "900,50" with a zero.)
    """
    items = [item.strip() for item in text.split(",")]
    if not all(map(_NUMBER.fullmatch, items)):
        raise ConfigError(f"split {text!r}: not numbers; {RULE}")
    shares = [float(item) for item in items]
    if len(shares) != 3:
        raise ConfigError(f"split {text!r}: {len(shares)} numbers; {RULE}")
    if not all(share >= 0 for share in shares) or not 0 < sum(shares) < math.inf:
        raise ConfigError(f"split {text!r}: {RULE}")
    return shares
