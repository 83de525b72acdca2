"""Every command answers a wrong input with one line and the exit code of its class."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.sweep.asking import SweepCase, Tally, Worker
from tests.sweep.field_cases import BASE, flag_cases, largest_cases, yaml_cases
from tests.sweep.samples import Samples
from tests.sweep.tool_cases import tool_cases

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits memory as Linux does"),
    pytest.mark.push,
]
Record = Callable[[str, object], None]


def ask_all(
    what: str, cases: Iterable[SweepCase], worker: Worker, record: Record, least: int
) -> None:
    tally = Tally()
    for case in cases:
        tally.ask(worker, case)
    record("counts", tally.table(f"wrong inputs, {what}"))
    tally.check(least)


def test_flags_of_every_field(worker: Worker, record_property: Record) -> None:
    good = SweepCase(kind="all good", command="pretrain_gpt", argv=BASE, codes=(0,))
    cases = [good, *flag_cases(), *largest_cases()]
    ask_all("flags", cases, worker, record_property, least=1500)


def test_keys_of_every_field(worker: Worker, tmp_path: Path, record_property: Record) -> None:
    ask_all("YAML keys", yaml_cases(tmp_path), worker, record_property, least=1000)


def test_every_tool(
    worker: Worker, samples: Samples, tmp_path: Path, record_property: Record
) -> None:
    ask_all("by hand", tool_cases(tmp_path, samples), worker, record_property, least=1000)
