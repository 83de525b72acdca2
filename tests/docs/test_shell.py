"""Tests that a command which takes its shell with it leaves one for the commands after it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.shell import Shell, ShellLost
from tests.limits import LIMIT

FIRST = """\
mkdir sub && cd sub
export EXPORTED='two words' && PLAIN=3 && LIST=(a 'b c')
says() { echo "$EXPORTED $PLAIN ${LIST[1]} in ${PWD##*/}"; }
"""
SAID = "two words 3 b c in sub\n"


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    (tmp_path / "notes").mkdir()
    made = Shell(tmp_path, notes=tmp_path / "notes", environment={"PATH": os.environ["PATH"]})
    yield made
    made.close()


def test_a_command_leaves_its_state_to_the_next(shell: Shell) -> None:
    assert shell.run(FIRST, limit=LIMIT).code == 0
    assert shell.run("says", limit=LIMIT).output == SAID
    assert shell.run("(exit 7)", limit=LIMIT).code == 7


@pytest.mark.parametrize(
    ("command", "limit", "why"),
    [
        ("echo begun; cd /; sleep 1000", 0.5, "no end after 0.5 s"),
        ("echo begun; cd /; exit 3", LIMIT, "the shell ended"),
        ("echo begun; cd /; kill -KILL $$", LIMIT, "the shell ended"),
    ],
)
def test_the_next_command_gets_a_shell_with_the_state_before(
    shell: Shell, command: str, limit: float, why: str
) -> None:
    shell.run(FIRST, limit=LIMIT)
    first = shell.run("echo $$", limit=LIMIT).output
    with pytest.raises(ShellLost, match=why):
        shell.run(command, limit=limit)
    assert not Path(f"/proc/{first.strip()}").exists()
    assert shell.run("says", limit=LIMIT).output == SAID
    assert shell.run("echo $$", limit=LIMIT).output != first
