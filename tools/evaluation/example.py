"""One line of a task: the endings that a model compares, each after its context."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.errors import DataError

Line = Mapping[str, Any]
Reader = Callable[[Line, str], "Example"]
"""Makes an example of a line and of the name of its place in the file."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """A text that is scored after a context, which may be empty."""

    context: str
    text: str

    @property
    def length(self) -> int:
        """Number of characters without outer blanks, by which likelihoods are normalised."""
        return len(self.text.strip())


@dataclass(frozen=True, kw_only=True)
class Example:
    """A line of a task; `answer` is the index of the right ending.

    `credits` gives by measure the worth of choosing each ending, where the answer does not say all.
    `group` names the part of the task to which the line belongs, if the task has parts. `where`
    names file and line in errors.
    """

    where: str
    endings: tuple[Ending, ...]
    answer: int = 0
    credits: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    group: str = ""


def choice_endings(context: str, choices: Iterable[str]) -> tuple[Ending, ...]:
    """Return choices as lm-evaluation-harness scores them: each after its context and a space.

    White space at the end of the context is scored with the choice, since tokenizers join it to
    the word that follows.
    """
    bare = context.rstrip()
    return tuple(Ending(context=bare, text=f"{context[len(bare) :]} {one}") for one in choices)


def joined(context: str, texts: Iterable[str]) -> tuple[Ending, ...]:
    """Return endings with a space between context and text if neither has white space there."""
    # If the space ended the context, tokenizers would split the text differently than in training.
    bare = context.rstrip(" ")
    blank = " " if bare and not bare[-1].isspace() else ""
    return tuple(
        Ending(context=bare, text=one if not blank or one[0].isspace() else blank + one)
        for one in texts
    )


def string_of(line: Line, key: str, where: str) -> str:
    """Return the text under a key, which may be empty; `DataError` if there is none."""
    value = line.get(key)
    if not isinstance(value, str):
        raise DataError(f"{where}: {key}: must be a text, found {value!r:.40}")
    return value


def text_of(line: Line, key: str, where: str) -> str:
    """Return the text under a key; `DataError` if there is none or if it is blank."""
    value = string_of(line, key, where)
    if not value.strip():
        raise DataError(f"{where}: {key}: must be a text, found {value!r:.40}")
    return value


def strings_of(line: Line, key: str, where: str) -> list[str]:
    """Return the list of texts under a key; `DataError` if it is empty or no such list."""
    value = line.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise DataError(f"{where}: {key}: must be a list of texts, found {value!r:.40}")
    return value


def index_of(line: Line, key: str, where: str, *, count: int) -> int:
    """Return the index under a key, from 0 to `count` - 1; `DataError` for any other value."""
    value = line.get(key)
    if type(value) is not int or not 0 <= value < count:
        raise DataError(f"{where}: {key}: {value!r:.40}; must be from 0 to {count - 1}")
    return value


def name_index(value: object, names: Sequence[str], key: str, where: str) -> int:
    """Return the position of a value among names; `DataError` for any other value."""
    found = next((index for index, name in enumerate(names) if name == value), None)
    if found is None:
        raise DataError(f"{where}: {key}: {value!r:.40}; must be one of {', '.join(names)}")
    return found
