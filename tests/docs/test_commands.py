"""Tests that every command of README.md, docs/ and CONTRIBUTING.md works in a reader's shell."""

from __future__ import annotations

import pytest

from tests.docs.cases import CASES, LIMIT, NOT_RUN, PRELUDE, PageCase
from tests.docs.documents import (
    CONTRIBUTING,
    DOCUMENTS,
    Command,
    fenced_commands,
    spoken_commands,
)
from tests.docs.shell import Shell
from tests.slurm.harness import Cluster


def commands() -> list[Command]:
    """Return the commands of all documents in order, without commands that a sentence repeats."""
    found: dict[str, Command] = {}
    for page in (*DOCUMENTS, CONTRIBUTING):
        both = [*fenced_commands(page), *spoken_commands(page)]
        for command in sorted(both, key=lambda each: int(each.place.rpartition(":")[2])):
            found.setdefault(command.text, command)
    return list(found.values())


COMMANDS = commands()


def listed(table: dict[str, PageCase] | dict[str, str], command: Command) -> list[str]:
    """Return the keys of a table that a command starts with; the last, longest key applies."""
    return sorted((key for key in table if command.text.startswith(key)), key=len)


def name_of(command: Command) -> str:
    return f"{command.place} {command.text[:60]}"


@pytest.fixture(scope="module")
def ready(shell: Shell) -> Shell:
    """Return the shell with the functions of the cases defined."""
    assert shell.run(PRELUDE, limit=LIMIT).code == 0
    return shell


@pytest.mark.parametrize("command", COMMANDS, ids=name_of)
def test_a_command_works_as_it_stands(
    command: Command, ready: Shell, slurm: Cluster | None
) -> None:
    reason = listed(NOT_RUN, command)
    if reason:
        pytest.skip(NOT_RUN[reason[-1]])
    keys = listed(CASES, command)
    case = CASES[keys[-1]] if keys else PageCase()
    if case.slurm and slurm is None:
        pytest.skip("needs Slurm's daemons, and root to start them")
    answer = ready.run(case.of(command.text), limit=LIMIT)
    assert answer.code == 0, f"{command.place}: {case.of(command.text)}\n{answer.output[-6000:]}"


@pytest.mark.parametrize("table", [CASES, NOT_RUN], ids=["cases", "not run"])
def test_every_entry_is_of_a_command(table: dict[str, PageCase] | dict[str, str]) -> None:
    meant = {listed(table, command)[-1] for command in COMMANDS if listed(table, command)}
    assert set(table) == meant
