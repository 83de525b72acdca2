"""Tests that every command of README.md, docs/ and CONTRIBUTING.md works in a reader's shell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.docs.cases import CASES, COMMAND_LIMIT, NOT_RUN, PRELUDE, PageCase
from tests.docs.documents import (
    CONTRIBUTING,
    DOCUMENTS,
    Command,
    fenced_commands,
    spoken_commands,
)
from tests.docs.shell import Shell, ShellLost
from tests.slurm.harness import Cluster

pytestmark = pytest.mark.push


def commands() -> list[Command]:
    """Return the commands of all documents in order, without commands that a sentence repeats."""
    found: dict[str, Command] = {}
    for page in (*DOCUMENTS, CONTRIBUTING):
        both = [*fenced_commands(page), *spoken_commands(page)]
        for command in sorted(both, key=lambda each: int(each.place.rpartition(":")[2])):
            found.setdefault(command.text, command)
    return list(found.values())


COMMANDS = commands()
ON_PUSH = ("README.md", "docs/extending.md")
"""Pages whose commands `--push` types; `--all` types those of all pages."""


def listed(table: dict[str, PageCase] | dict[str, str], command: Command) -> list[str]:
    """Return the keys of a table that a command starts with; the last, longest key applies."""
    return sorted((key for key in table if command.text.startswith(key)), key=len)


def name_of(command: Command) -> str:
    return f"{command.place} {command.text[:60]}"


def page_of(command: Command) -> str:
    return command.place.partition(":")[0]


def cases_of_commands() -> Iterator[Any]:
    """Yield the commands as parameters of a test; those of most pages have the mark `full`."""
    for command in COMMANDS:
        marks = [] if page_of(command) in ON_PUSH else [pytest.mark.full]
        yield pytest.param(command, id=name_of(command), marks=marks)


@pytest.fixture(scope="module")
def ready(shell: Shell) -> Shell:
    """Return the shell with the functions of the cases defined."""
    assert shell.run(PRELUDE, limit=COMMAND_LIMIT).code == 0
    return shell


@pytest.fixture(scope="module")
def lost() -> dict[str, str]:
    """Return the command of each page that took the shell with it."""
    return {}


@pytest.mark.parametrize("command", list(cases_of_commands()))
def test_a_command_works_as_it_stands(
    command: Command, ready: Shell, slurm: Cluster | None, lost: dict[str, str]
) -> None:
    """After a command that took the shell with it, the rest of its page has no right state."""
    reason = listed(NOT_RUN, command)
    if reason:
        pytest.skip(NOT_RUN[reason[-1]])
    keys = listed(CASES, command)
    case = CASES[keys[-1]] if keys else PageCase()
    if case.slurm and slurm is None:
        pytest.skip("needs Slurm's daemons, and root to start them")
    page = page_of(command)
    if page in lost:
        pytest.skip(f"{lost[page]} took the shell with it, and this command comes after it")
    try:
        answer = ready.run(case.of(command.text), limit=COMMAND_LIMIT)
    except ShellLost:
        lost[page] = name_of(command)
        raise
    assert answer.code == 0, f"{command.place}: {case.of(command.text)}\n{answer.output[-6000:]}"


@pytest.mark.parametrize("table", [CASES, NOT_RUN], ids=["cases", "not run"])
def test_every_entry_is_of_a_command(table: dict[str, PageCase] | dict[str, str]) -> None:
    meant = {listed(table, command)[-1] for command in COMMANDS if listed(table, command)}
    assert set(table) == meant
