"""Tests of a rank that issues a collective too many or leaves one out.

Every rank ends with exit code 6, and the rank and the place are reported once. gloo itself aborts,
waits for its timeout or mixes the numbers.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import PeerError
from megatron.fault_tolerance.desync import find_parting
from megatron.fault_tolerance.exit_signals import ExitRequest
from megatron.fault_tolerance.heartbeat import CollectiveCall, Heartbeat, calls
from megatron.parallel.groups import ProcessGroups
from tests.faults.starting import TIMEOUT, Ended, environment, losses, start_ranks
from tests.limits import LIMIT
from tests.ranks import Ranks
from tests.training.harness import TINY, make_trainer

STEPS = 10
FLAGS = f"--train-iters {STEPS} --eval-iters 2 --eval-interval 4 {TIMEOUT}"


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the losses of the run without a fault."""
    run_dir = tmp_path_factory.mktemp("in-step") / "run"
    ended = start_ranks(2, run_dir, FLAGS).finish()
    assert ended.codes == [0, 0], ended.all_stderr
    return losses(run_dir)


def check(fault: str, phase: str, ended: Ended) -> None:
    """Check the end of a run whose ranks part in `phase`."""
    rank, step = (int(part) for part in fault.split(":")[1:3])
    assert set(ended.codes) == {6}, (ended.codes, ended.all_stderr)
    status = ended.status
    assert (status["state"], status["exit_code"]) == ("failed", 6), status
    assert (status["rank"], status["iteration"], status["phase"]) == (rank, step, phase), status
    assert "differs from the others at collective" in status["reason"], status
    told = f"rank {rank}, step {step}, {phase}: {status['reason']}"
    assert ended.all_stderr.count(told) == 1, ended.all_stderr
    assert ended.all_stderr.count("differs from the others") == 1, ended.all_stderr


def check_recovery(run_dir: Path, unbroken: dict[int, float], world: int = 2) -> None:
    again = start_ranks(world, run_dir, FLAGS).finish()
    assert set(again.codes) == {0}, again.all_stderr
    # Four ranks add in another order than two.
    assert losses(run_dir) == (unbroken if world == 2 else pytest.approx(unbroken, abs=1e-4))


@pytest.mark.waits
@pytest.mark.push
def test_one_too_many_and_one_left_out(tmp_path: Path) -> None:
    """Two runs at once: gloo aborts the guilty rank of the first, the peer in the second."""
    faults = {"extra-collective:1:6:forward": "forward", "skip-collective:0:6:backward": "backward"}
    started = [
        start_ranks(2, tmp_path / str(number), FLAGS, fault=fault)
        for number, fault in enumerate(faults)
    ]
    ended = [run.finish() for run in started]
    for (fault, phase), run in zip(faults.items(), ended, strict=True):
        check(fault, phase, run)
    assert "gloo::EnforceNotMet" in ended[0].stderr[1]


PHASES = ["data", "forward", "backward", "reduce", "optimizer"]
EXTRA = [(rank, 6, phase, phase) for phase in PHASES for rank in (0, 1)]
NEXT = {"data": "backward", "backward": "backward", "reduce": "reduce", "optimizer": "backward"}
"""Phase of the next all-reduce after each phase."""
SKIPPED = [(rank, 6, phase, where) for phase, where in NEXT.items() for rank in (0, 1)]
RARE = [(0, 8, phase, phase) for phase in ("evaluate", "save")] + [
    (1, 4, phase, phase) for phase in ("evaluate", "save")
]
"""Faults in phases that only some steps have: after similar calls, and the first of a kind."""
MATRIX = [
    *(("extra-collective", *row) for row in [*EXTRA, *RARE]),
    *(("skip-collective", *row) for row in [*SKIPPED, *RARE]),
]


@pytest.mark.waits
@pytest.mark.full
@pytest.mark.parametrize(("kind", "rank", "step", "phase", "where"), MATRIX)
def test_matrix_of_collectives(
    kind: str,
    rank: int,
    step: int,
    phase: str,
    where: str,
    tmp_path: Path,
    unbroken: dict[int, float],
    record_property: Callable[[str, object], None],
) -> None:
    record_property("fault", f"{kind} in {phase}")
    fault = f"{kind}:{rank}:{step}:{phase}"
    ended = start_ranks(2, tmp_path, FLAGS, fault=fault).finish()
    if (kind, phase) == ("skip-collective", "optimizer"):
        fault = f"{kind}:{rank}:{step + 1}:{phase}"  # The next call belongs to the next step.
    check(fault, where, ended)
    record_property("seconds", ended.seconds_after_fault())
    record_property("detected", 1)
    check_recovery(tmp_path, unbroken)
    record_property("recovered", 1)


@pytest.mark.waits
@pytest.mark.full
@pytest.mark.parametrize("kind", ["extra-collective", "skip-collective"])
@pytest.mark.parametrize("phase", ["backward", "reduce", "evaluate"])
def test_matrix_of_collectives_of_four(
    kind: str,
    phase: str,
    tmp_path: Path,
    unbroken: dict[int, float],
    record_property: Callable[[str, object], None],
) -> None:
    """Most of the four ranks agree, so nothing has to be guessed."""
    record_property("fault", f"{kind}, one of four ranks")
    flags = FLAGS.replace("--eval-interval 4", "--eval-interval 3")
    fault = f"{kind}:2:3:{phase}"
    ended = start_ranks(4, tmp_path, flags, fault=fault).finish()
    check(fault, phase, ended)
    record_property("seconds", ended.seconds_after_fault())
    record_property("detected", 1)
    check_recovery(tmp_path, unbroken, world=4)
    record_property("recovered", 1)


def on_rank_evaluation(groups: ProcessGroups, run_dir: Path) -> str:
    trainer = make_trainer(groups, TINY, run_dir)
    assert trainer._agree_on(ExitRequest.STOP, tag=2) is ExitRequest.STOP
    with pytest.raises(PeerError) as caught:
        trainer._agree_on(ExitRequest.NONE, tag=3 + groups.world.rank)
    trainer.metrics.close()
    trainer.engine.detach()
    return str(caught.value)


def test_a_rank_one_batch_ahead_in_an_evaluation_is_noticed(ranks: Ranks, tmp_path: Path) -> None:
    for text in ranks.run(2, on_rank_evaluation, tmp_path):
        assert "out of step" in text and "between 3 and 4" in text


# ---- who parts from whom ------------------------------------------------------------------------

STEP = [("backward", "avg of 768"), ("backward", "avg of 768"), ("reduce", "vote"), ("reduce", "s")]


def _log(steps: int, size: int, evaluated: int) -> list[CollectiveCall]:
    """Return the calls of a rank in a sound run of `steps` steps with `size` kinds of buckets."""
    plan = []
    for step in range(1, steps + 1):
        of_step = [("backward", f"avg of {number // 2}") for number in range(size)] + STEP[2:]
        if step % evaluated == 0:
            of_step += [("evaluate", "vote 0"), ("evaluate", "vote 1"), ("evaluate", "s")]
        plan += [(step, *what) for what in of_step]
    return [
        CollectiveCall(number=number, step=step, phase=phase, what=what)
        for number, (step, phase, what) in enumerate(plan, 1)
    ]


def _numbered(log: list[CollectiveCall]) -> list[CollectiveCall]:
    return [replace(call, number=number) for number, call in enumerate(log, 1)]


@given(
    ranks=st.integers(2, 5),
    odd=st.integers(0, 4),
    size=st.integers(1, 6),
    evaluated=st.integers(2, 4),
    at=st.integers(0, 10**6),
    left_out=st.booleans(),
)
def test_the_odd_rank_is_found(
    ranks: int, odd: int, size: int, evaluated: int, at: int, left_out: bool
) -> None:
    odd %= ranks
    whole = _log(12, size, evaluated)
    # Two precedents of everything before the fault, and enough calls after it.
    start = next(i for i, call in enumerate(whole) if call.step == 2 * evaluated + 1)
    at = start + at % (len(whole) - start - size - 6)
    log = list(whole)
    if left_out:
        del log[at]
    else:
        log.insert(at, replace(whole[at - 1], what="max of 4"))
    logs = {rank: whole[: at + size + 4] for rank in range(ranks)}
    logs[odd] = _numbered(log)[: at + size + 4]
    parting = find_parting(logs)
    assert parting is not None and parting.rank == odd, parting
    assert parting.place.step in (whole[at].step, whole[at - 1].step)
    # In a row of equal calls, a call that is left out shows at the end of the row.
    assert at + 1 <= parting.odd.number <= at + 3


def test_ranks_that_are_only_later_do_not_part() -> None:
    whole = _log(9, 3, 4)
    logs = {0: whole, 1: whole[:-7], 2: whole[5:-2], 3: []}
    assert find_parting(logs) is None and find_parting({}) is None


def test_calls_outlive_their_rank_and_only_the_latest_are_kept(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, rank=3, attempt="a")
    for number in range(1, 301):
        heartbeat.at("reduce", number // 3)
        heartbeat.called(number, f"sum of {number} float32")
    found = calls(tmp_path, attempt="a", ranks=[2, 3])
    assert list(found) == [3] and [call.number for call in found[3]] == list(range(173, 301))
    assert found[3][-1] == CollectiveCall(
        number=300, step=100, phase="reduce", what="sum of 300 float32"
    )
    assert calls(tmp_path, attempt="b", ranks=[3]) == {}


@pytest.mark.waits
@pytest.mark.push
def test_a_process_that_cxx_ends_tells_why_and_leaves_with_6() -> None:
    text = (
        "import ctypes, threading\n"
        "from megatron.fault_tolerance.watchdog import before_abort\n"
        "before_abort(lambda: print('told'))\n"
        "end = ctypes.CDLL('libstdc++.so.6')['_ZSt9terminatev']\n"
        "thread = threading.Thread(target=end)\n"
        "thread.start(); thread.join()\n"
    )
    command = [sys.executable, "-X", "faulthandler", "-c", text]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout) == (6, "told\n"), done.stderr
    assert "terminate called" in done.stderr and "Fatal Python error" not in done.stderr
