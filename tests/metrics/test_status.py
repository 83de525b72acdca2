"""status.json: round trip, first cause, attempts, and writers that race."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
from pathlib import Path

import pytest

from megatron.status import ENDED, State, Status, read_status, write_status
from tests.limits import LIMIT


def _failed(rank: int, reason: str, *, code: int = 5, attempt: str = "") -> Status:
    return Status(state="failed", exit_code=code, reason=reason, rank=rank, attempt=attempt)


def test_round_trip(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    status = Status(
        state="left", exit_code=0, left="exit-interval", iteration=7, job_id="12", version="0.1"
    )
    assert write_status(tmp_path / "new", status)
    assert read_status(tmp_path / "new") == status
    assert status.host and status.pid and status.time[:2] == "20"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["status.json"]


def test_first_cause_stays(tmp_path: Path) -> None:
    write_status(tmp_path, Status(state="running"))
    assert write_status(tmp_path, _failed(2, "loss is NaN"))
    assert not write_status(tmp_path, _failed(0, "peer gone\nand more", code=6))
    status = read_status(tmp_path)
    assert status and (status.rank, status.reason, status.exit_code) == (2, "loss is NaN", 5)
    assert status.others == ("rank 0: peer gone",)


def test_cause_replaces_its_own_consequence(tmp_path: Path) -> None:
    write_status(tmp_path, _failed(0, "a collective failed", code=6))
    assert write_status(tmp_path, _failed(2, "loss is NaN"))
    assert not write_status(tmp_path, _failed(1, "a collective failed", code=6))
    status = read_status(tmp_path)
    assert status and (status.rank, status.exit_code) == (2, 5)
    assert status.others == ("rank 0: a collective failed", "rank 1: a collective failed")


def test_next_start_clears_the_failure(tmp_path: Path) -> None:
    write_status(tmp_path, _failed(2, "loss is NaN"))
    write_status(tmp_path, Status(state="running"))
    assert write_status(tmp_path, _failed(1, "no data", code=3))
    status = read_status(tmp_path)
    assert status and status.reason == "no data" and status.others == ()


def test_named_attempts_keep_a_failure_that_came_before_running(tmp_path: Path) -> None:
    write_status(tmp_path, _failed(1, "no data", attempt="a"))
    assert not write_status(tmp_path, Status(state="running", attempt="a"))
    assert not write_status(tmp_path, Status(state="done", attempt="a"))
    status = read_status(tmp_path)
    assert status and status.reason == "no data"
    assert write_status(tmp_path, _failed(0, "other", attempt="b"))
    status = read_status(tmp_path)
    assert status and status.reason == "other" and status.others == ()


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"state": "failed"', "null", '{"others": 3}', "\x00", "[" * 9999]
)
def test_foreign_file_is_no_status_and_gives_way(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    assert read_status(tmp_path) is None
    assert write_status(tmp_path, Status(state="running"))


def test_later_version_may_add_keys(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"state": "done", "exit_code": 0, "new": 1}')
    status = read_status(tmp_path)
    assert status and status.state == "done"


def test_others_do_not_grow_without_end(tmp_path: Path) -> None:
    for rank in range(40):
        write_status(tmp_path, _failed(rank, ""))
    status = read_status(tmp_path)
    assert status and status.rank == 0 and len(status.others) == 16


def _fail(folder: Path, rank: int) -> None:
    write_status(
        folder, _failed(rank, "cause" if rank == 3 else "peer", code=5 if rank == 3 else 6)
    )


@pytest.mark.push
def test_ranks_that_fail_at_once_leave_one_cause(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_fail, args=(tmp_path, rank)) for rank in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=LIMIT)
        assert process.exitcode == 0
    status = read_status(tmp_path)
    assert status and (status.rank, status.reason) == (3, "cause")
    assert len(status.others) == 3


def test_of_two_ranks_that_tell_the_same_one_leads(tmp_path: Path) -> None:
    told = Status(state="failed", exit_code=6, reason="it parts", rank=0, attempt="a")
    assert write_status(tmp_path, told)
    assert not write_status(tmp_path, told), "in one second, as ranks do"


ODD = [None, True, -1, 2**70, 1.5, float("inf"), "x", "\ud800", [], [1], {}, {"steps": "x"}]


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Status)])
def test_a_value_of_a_wrong_type_makes_the_file_unreadable(name: str, tmp_path: Path) -> None:
    """A reader gets the types of the fields or nothing."""
    good = Status(state="left", exit_code=75, iteration=4, attempt="a", others=("b",))
    kinds = {
        "exit_code": int | None, "iteration": int | None, "rank": int, "pid": int,
        "others": tuple, "throughput": dict, "lost": bool,
    }  # fmt: skip
    for value in ODD:
        values = json.loads(json.dumps(dataclasses.asdict(good))) | {name: value}
        (tmp_path / "status.json").write_text(json.dumps(values))
        found = read_status(tmp_path)
        if found is not None:
            held = getattr(found, name)
            assert isinstance(held, kinds.get(name, str))
            assert (type(held) is bool) == (name == "lost")
            dataclasses.replace(found, **{name: held})
            json.dumps(dataclasses.asdict(found), ensure_ascii=False, allow_nan=False).encode()


@pytest.mark.parametrize("state", ENDED)
def test_what_fails_after_the_end_does_not_undo_the_run(tmp_path: Path, state: State) -> None:
    write_status(tmp_path, Status(state=state, exit_code=0, attempt="a"))
    late = Status(state="failed", exit_code=6, reason="a tracker hangs", attempt="a")
    assert not write_status(tmp_path, late)
    found = read_status(tmp_path)
    assert found is not None and (found.state, found.exit_code) == (state, 0)
    assert write_status(tmp_path, dataclasses.replace(late, attempt="b")), "another start"
