"""The configuration file: YAML's core schema, read as events with nothing constructed.

PyYAML's own loaders turn `no` into False, `012` into 10 and `1e-4` into text, keep the last of two
equal keys and forget where a key stood. Here scalars stay text, with their line, until the type of
the field is known (`values.convert`).
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron.config.values import Scalar, show, show_path, show_plain
from megatron.errors import ConfigError

SIZE_LIMIT = 1 << 20
"""Bytes."""

EVENT_LIMIT = 20_000
"""PyYAML needs seconds for a long list of nothing."""

Value = Scalar | tuple[Scalar, ...]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A key of the file with its value. `section`: the key it is nested under, None at the top."""

    key: str
    section: str | None
    line: int
    value: Value


def read_entries(path: str) -> list[Entry]:
    """All fields of the file, in order. Raises `ConfigError` with file and line."""
    return _Reader(path, _read_text(path)).document()


def _read_text(path: str) -> str:
    """The file's text, without byte-order mark. Only a regular file of sane size is opened."""
    try:
        facts = Path(path).stat()
        if stat.S_ISDIR(facts.st_mode):
            raise ConfigError(f"{show_path(path)}: a directory; --config wants a YAML file")
        if not stat.S_ISREG(facts.st_mode):
            raise ConfigError(f"{show_path(path)}: not a regular file; --config wants a YAML file")
        if facts.st_size > SIZE_LIMIT:
            raise ConfigError(
                f"{show_path(path)}: {facts.st_size} bytes; must be at most {SIZE_LIMIT}"
            )
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{show_path(path)}: cannot read the configuration ({reason}); looked in {Path.cwd()}"
        ) from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{show_path(path)}: byte {error.start} is not UTF-8 text; --config wants a YAML file"
        ) from None


class _Reader:
    """Walks the events of a file: a mapping of fields and of sections, which map fields."""

    def __init__(self, path: str, text: str) -> None:
        self._path = show_path(path)
        self._text = text
        self._events = self._stream()
        self._fields: dict[str, int] = {}

    def document(self) -> list[Entry]:
        """The one document's entries."""
        next(self._events)
        if isinstance(next(self._events), yaml.StreamEndEvent):
            raise ConfigError(f"{self._path}: empty; give at least the required fields")
        top = next(self._events)
        if isinstance(top, yaml.ScalarEvent) and not top.value:
            raise ConfigError(f"{self._path}: empty; give at least the required fields")
        if not isinstance(top, yaml.MappingStartEvent):
            raise self._error(top, "not a mapping; write lines such as num_layers: 12")
        entries = list(self._mapping(None))
        next(self._events)
        after = next(self._events)
        if not isinstance(after, yaml.StreamEndEvent):
            raise self._error(after, "a second document; a configuration is one document")
        return entries

    def _stream(self) -> Iterator[Any]:
        """PyYAML's events, with its errors made ours and what only hides things refused."""
        try:
            for count, event in enumerate(_events(self._text)):
                if count > EVENT_LIMIT:
                    raise self._error(event, f"more than {EVENT_LIMIT} keys and values; shorten it")
                if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                    raise self._error(event, "anchors and aliases are not read; write it out")
                if getattr(event, "tag", None):
                    raise self._error(event, f"tag {show(event.tag)} is not read; remove it")
                yield event
        except yaml.MarkedYAMLError as error:
            line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
            problem = " ".join((error.problem or "cannot be read").split())
            hint = "; use spaces" if r"'\t'" in problem else ""
            raise ConfigError(f"{self._path}{line}: not YAML: {problem}{hint}") from None
        except yaml.YAMLError as error:
            problem = getattr(error, "reason", "cannot be read")
            raise ConfigError(
                f"{self._path}: not YAML: {problem} at character {getattr(error, 'position', 0)}"
            ) from None
        except (ValueError, OverflowError) as error:
            raise ConfigError(f"{self._path}: not YAML: {show(str(error))}") from None

    def _mapping(self, section: str | None) -> Iterator[Entry]:
        """Entries up to the mapping's end; at the top, a nested mapping is a section."""
        lines: dict[str, int] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key, line = self._key(event), event.start_mark.line + 1
            self._refuse_repeat(key, line, lines)
            value = next(self._events)
            if not isinstance(value, yaml.MappingStartEvent):
                self._refuse_repeat(key, line, self._fields)
                yield Entry(key=key, section=section, line=line, value=self._value(key, value))
            elif section is None:
                yield from self._mapping(key)
            else:
                raise self._error(value, f"{show_plain(key)}: a mapping; must be a value or a list")

    def _key(self, event: Any) -> str:
        if not isinstance(event, yaml.ScalarEvent):
            raise self._error(event, "a key is a list or a mapping; must be a name")
        return event.value

    def _refuse_repeat(self, key: str, line: int, lines: dict[str, int]) -> None:
        if key in lines:
            raise ConfigError(
                f"{self._path}:{line}: {show_plain(key)} is given twice, first in line "
                f"{lines[key]}; remove one"
            )
        lines[key] = line

    def _value(self, key: str, event: Any) -> Value:
        if isinstance(event, yaml.ScalarEvent):
            return _scalar(event)
        items: list[Scalar] = []
        while not isinstance(item := next(self._events), yaml.SequenceEndEvent):
            if not isinstance(item, yaml.ScalarEvent):
                raise self._error(item, f"{show_plain(key)}: a list holds values only")
            items.append(_scalar(item))
        return tuple(items)

    def _error(self, event: Any, problem: str) -> ConfigError:
        return ConfigError(f"{self._path}:{event.start_mark.line + 1}: {problem}")


def _events(text: str) -> Iterator[Any]:
    return yaml.parse(text, Loader=yaml.SafeLoader)  # pyright: ignore


def _scalar(event: yaml.ScalarEvent) -> Scalar:
    return Scalar(event.value, quoted=bool(event.style))
