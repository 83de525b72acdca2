"""Tests of the Flight Recorder's settings, and of the line on dumps of torch's format 2.10.

The dumps of real ranks that hang are tested in tests/faults/test_ranks_that_fail.py.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.fault_tolerance import flight_recorder
from megatron.fault_tolerance.flight_recorder import (
    EARLIER,
    FOLDER,
    clear_dumps,
    explain,
    set_recorder_variables,
    write_dump,
)

OWN = {
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_FR_DUMP_TEMP_FILE": "/r/logs/nccl_trace_rank_",
}


@pytest.mark.parametrize("users", ["", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"])
def test_settings_of_the_user_win_under_either_name(users: str) -> None:
    environ = {users: "7"} if users else {}
    replaced = "TORCH_FR_BUFFER_SIZE" if "BUFFER" in users else users
    set_recorder_variables(Path("/r"), environ)
    assert environ == {**{k: v for k, v in OWN.items() if k != replaced}, **environ}
    assert len(environ) == 3 and (not users or environ[users] == "7")


def entry(number: int, *, name: str = "all_reduce", group: str = "dp of 0", **more: Any) -> dict:
    """Return a record as torch 2.13 writes it, without the fields that nobody reads."""
    return {
        "record_id": number,
        "process_group": ("3", group),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": 1000 * number,
        "input_sizes": [[number, 4]],
        "input_dtypes": ["BFloat16"],
        "state": "completed",
        "is_p2p": False,
    } | more


def dump(
    run: Path,
    rank: int,
    entries: Sequence[dict],
    *,
    members: str = "0,1,2",
    backend: str = "nccl",
) -> Path:
    path = run / FOLDER / f"{backend}_trace_rank_{rank}"
    path.parent.mkdir(exist_ok=True)
    groups = {"3": {"name": "3", "desc": "dp of 0", "ranks": f"[{members}]"}}
    whole = {"version": "2.10", "pg_config": groups, "entries": list(entries)}
    path.write_bytes(pickle.dumps(whole, protocol=2))
    return path


def test_ranks_that_lag_are_named_and_the_oldest_wait_counts(tmp_path: Path) -> None:
    late = entry(9, group="pp of 0", state="started", time_created_ns=9_000_000)
    dump(tmp_path, 0, [entry(1), entry(2, state="started"), late])
    dump(tmp_path, 1, [entry(1), entry(8, group="pp of 0")])
    dump(tmp_path, 2, [entry(1), entry(2, state="scheduled")])
    line = "nccl all_reduce 2 of dp of 0, [2, 4] BFloat16: ranks 0, 2 wait, rank 1 lags behind it"
    assert explain(tmp_path) == line
    assert explain(tmp_path, 5) == f"{line}; ranks 3-4 left no dump"
    # A rank that never called the group lags as well.
    dump(tmp_path, 1, [])
    assert explain(tmp_path).startswith(line.replace("2 of dp", "1 of dp").replace("[2,", "[1,"))
    assert clear_dumps(tmp_path, nccl=False).startswith("nccl all_reduce 1 of dp of 0")
    assert explain(tmp_path, 5) == ""


def test_a_start_reads_a_bounded_number_of_dumps_and_keeps_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks wait meanwhile, and a world of thousands leaves as many dumps."""
    read: list[str] = []
    plain = flight_recorder.read_dump

    def counted(path: Path) -> Any:
        read.append(path.name)
        return plain(path)

    monkeypatch.setattr(flight_recorder, "MOST_READ", 4)
    monkeypatch.setattr(flight_recorder, "read_dump", counted)
    for rank in range(7):
        dump(tmp_path, rank, [entry(1), entry(2, state="started")], members="0-6")
    said = clear_dumps(tmp_path, nccl=True)
    names = [f"nccl_trace_rank_{rank}" for rank in range(7)]
    assert read == names[::2] and "ranks 0, 2, 4, 6 wait, no rank lags" in said
    assert f"(4 of 7 dumps were read; all are in {tmp_path / FOLDER / EARLIER})" in said
    assert sorted(path.name for path in (tmp_path / FOLDER / EARLIER).iterdir()) == names
    assert clear_dumps(tmp_path, nccl=True) == ""
    dump(tmp_path, 0, [entry(1)])
    clear_dumps(tmp_path, nccl=True)
    assert [path.name for path in (tmp_path / FOLDER / EARLIER).iterdir()] == names[:1]


def test_messages_and_a_collective_that_all_ranks_are_in(tmp_path: Path) -> None:
    sent = entry(0, name="send 0->1", p2p_seq_id=5, is_p2p=True, state="started")
    dump(tmp_path, 0, [sent], members="")
    dump(tmp_path, 1, [entry(0, name="recv 1<-0", p2p_seq_id=4, is_p2p=True)], members="")
    assert "nccl send 0->1 5 of dp of 0" in explain(tmp_path)
    assert explain(tmp_path).endswith("rank 0 waits, rank 1 lags behind it")
    for rank in range(2):
        dump(tmp_path, rank, [entry(1), entry(2, state="started")], members="0,1")
    assert explain(tmp_path).endswith("[2, 4] BFloat16: ranks 0-1 wait, no rank lags")
    for rank in range(2):
        dump(tmp_path, rank, [entry(1)], members="0,1")
    assert explain(tmp_path) == "ranks 0-1 dumped, and no rank lags"
    for rank in range(2):
        dump(tmp_path, rank, [entry(1)], members="0,1", backend="gloo")
    assert explain(tmp_path).endswith("that are recorded; gloo's messages are not")


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("/tmp/flight-recorder-must-not-make-this",)


def test_damaged_dumps_are_one_line_and_run_no_code(tmp_path: Path) -> None:
    whole = dump(tmp_path, 0, [entry(1)]).read_bytes()
    damaged = [whole[: len(whole) // 2], b"", b"\x80\x02]q\x00.", pickle.dumps({"entries": [1]})]
    damaged += [
        pickle.dumps(Harmful()),
        pickle.dumps({"entries": [entry(1) | {"collective_seq_id": "x"}]}),
    ]
    damaged.append(pickle.dumps({"entries": [{"process_group": "x"}], "pg_config": []}))
    for rank, data in enumerate(damaged, start=1):
        (tmp_path / FOLDER / f"nccl_trace_rank_{rank}").write_bytes(data)
    said = "rank 0 dumped, and no rank lags; ranks 1-7: the dump is damaged or cut short"
    assert explain(tmp_path) == said
    (tmp_path / FOLDER / "nccl_trace_rank_0").unlink()
    assert explain(tmp_path).startswith("no readable dump; ranks 1-")
    assert not Path("/tmp/flight-recorder-must-not-make-this").exists()


def test_a_dump_of_torch_stays(tmp_path: Path) -> None:
    """A rank writes gloo's record, which torch does not, and leaves NCCL's to torch."""
    import torch  # noqa: F401  the dump asks a loaded torch alone

    nccl = dump(tmp_path, 0, [entry(1)])
    before = nccl.read_bytes()
    write_dump(tmp_path, 0)
    assert nccl.read_bytes() == before and (nccl.parent / "gloo_trace_rank_0").exists()
    assert "rank 0" in explain(tmp_path) and "damaged" not in explain(tmp_path)
