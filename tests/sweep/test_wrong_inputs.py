"""Every command answers a wrong input with one line and the exit code of its class."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.sweep.asking import Case, Tally, Worker
from tests.sweep.field_cases import BASE, flag_cases, largest_cases, yaml_cases
from tests.sweep.samples import Samples
from tests.sweep.tool_cases import tool_cases

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits memory as Linux does"),
]


@pytest.fixture(scope="module")
def tally() -> Tally:
    return Tally()


def ask_all(
    cases: Iterable[Case], worker: Worker, tally: Tally, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ask, print the counts, and fail with every answer that breaks the law."""
    before, known = tally.total, len(tally.problems)
    for case in cases:
        tally.ask(worker, case)
    with capsys.disabled():
        print(f"\n{tally.table('wrong inputs')}")
    assert tally.total > before
    problems = tally.problems[known:]
    assert not problems, "\n".join([f"{len(problems)} wrong answers:", *problems])


def test_flags_of_every_field(
    worker: Worker, tally: Tally, capsys: pytest.CaptureFixture[str]
) -> None:
    good = Case(kind="flag: all good", command="pretrain_gpt", argv=BASE, codes=(0,))
    ask_all([good, *flag_cases(), *largest_cases()], worker, tally, capsys)


def test_keys_of_every_field(
    worker: Worker, tally: Tally, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask_all(yaml_cases(tmp_path), worker, tally, capsys)


def test_every_tool(
    worker: Worker,
    tally: Tally,
    samples: Samples,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ask_all(tool_cases(tmp_path, samples), worker, tally, capsys)
    assert tally.total >= 500
