"""Tests of how commands are found on a page, and of the shell that they are typed into."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs import documents
from tests.docs.cases import PageCase
from tests.docs.documents import fenced_commands, spoken_commands
from tests.docs.shell import Shell, ShellLost

PAGE = """\
`python` runs `tools/report.py RUN`; twice: `tools/report.py RUN`.

```
# a comment
first --flag \\
  'and more'     # why
second
```
```text
a tree of files
```
| `STEPS=3 scripts/quickstart.sh` | `LAUNCHER={a,b}` | `--load RUN` |
"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(documents, "REPO", tmp_path)
    return tmp_path / "page.md"


def test_commands_are_found_where_they_stand(page: Path) -> None:
    page.write_text(PAGE)
    fenced = [(each.text, each.place) for each in fenced_commands(page)]
    assert fenced == [("first --flag 'and more'", "page.md:5"), ("second", "page.md:7")]
    spoken = [(each.text, each.place) for each in spoken_commands(page)]
    assert spoken == [
        ("tools/report.py RUN", "page.md:1"),
        ("STEPS=3 scripts/quickstart.sh", "page.md:12"),
    ]


@pytest.mark.parametrize("text", ["```console\n$ ls\n```\n", "```\nls\n", "```\nls \\\n```\n"])
def test_no_command_gets_lost(text: str, page: Path) -> None:
    page.write_text(text)
    with pytest.raises(ValueError, match=r"page\.md"):
        fenced_commands(page)


def test_a_case_that_no_longer_fits_is_told() -> None:
    case = PageCase(typed="N=1 {} --few", instead={"=8": "=2"})
    assert case.of("R=8 run") == "N=1 R=2 run --few"
    with pytest.raises(AssertionError, match="=8"):
        case.of("R=4 run")


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    opened = Shell(tmp_path, notes=tmp_path, environment={"PATH": os.environ["PATH"]})
    yield opened
    opened.close()


@pytest.mark.push
def test_a_shell_remembers_and_answers(shell: Shell) -> None:
    shell.run("cd /; word=kept", limit=60)
    answer = shell.run("echo $word; pwd; echo bad >&2; (exit 3)", limit=60)
    assert (answer.code, answer.output) == (3, "kept\n/\nbad\n")
    # A background process does not hold up the shell.
    assert shell.run("sleep 600 & true", limit=60).code == 0
    assert shell.run("cat", limit=60).output == ""


@pytest.mark.push
def test_a_command_that_takes_too_long_ends_the_shell_and_all_in_it(
    shell: Shell, tmp_path: Path
) -> None:
    # A job with its own process group, as launch.sh starts its ranks.
    with pytest.raises(ShellLost, match="told"):
        shell.run("echo told; set -m; sleep 600 & echo $! >pid; wait", limit=5)
    stat = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    # The process that adopts the job may not have reaped it yet.
    assert not stat.exists() or " Z " in stat.read_text()
