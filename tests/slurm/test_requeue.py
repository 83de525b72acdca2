"""Tests of which jobs are requeued, with stub jobs of a real Slurm that only choose their ends."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest

from tests.limits import LIMIT
from tests.slurm.harness import HERE, Cluster, SlurmJob

pytestmark = [pytest.mark.push, pytest.mark.waits]


@dataclass(frozen=True, kw_only=True)
class RequeueCase:
    """The plan of a job's starts (see stub.py), and how the job must end.

    The job must end with `code` after `restarts` restarts, and with `words` in its log.
    """

    plan: str
    code: int
    restarts: int
    words: str = ""
    more: tuple[tuple[str, str], ...] = ()


CASES = {
    "advances": RequeueCase(
        plan="75+:SIGUSR1,6+,75+:exit-duration,0",
        code=0,
        restarts=3,
        words="exit code 6 at step 20, from step 10: requeueing",
    ),
    "saves-elsewhere": RequeueCase(
        plan="75+,6+,6+,0 --elsewhere",
        code=0,
        restarts=3,
        words="exit code 6 at step 30, from step 20: requeueing",
    ),
    "stuck": RequeueCase(
        plan="75+,6,6", code=6, restarts=2, words="2 start(s) in a row brought nothing newer"
    ),
    "never-began": RequeueCase(plan="6", code=6, restarts=1, words="the checkpoint of step 0"),
    "limited": RequeueCase(
        plan="75+", code=75, restarts=1, words="MAX_RESTARTS", more=(("MAX_RESTARTS", "1"),)
    ),
    "lost-a-rank": RequeueCase(
        plan="6+!,0", code=0, restarts=1, words="at step 10, from step 0: requeueing without node"
    ),
    "cannot-spare-a-node": RequeueCase(
        plan="6!,0",
        code=0,
        restarts=1,
        words="stays allowed: Slurm would not start the job without it",
        more=(("NODES", "4"),),
    ),
    "told-to-stop": RequeueCase(plan="75+:STOP", code=75, restarts=0, words="told to stop (STOP)"),
    **{
        f"code-{code}": RequeueCase(plan=f"{code}+", code=code, restarts=0, words="no reason")
        for code in (1, 2, 3, 4, 5)
    },
}


@pytest.fixture(scope="module")
def jobs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, SlurmJob]:
    """Run a job for each case; return the jobs after all have ended."""
    folder = tmp_path_factory.mktemp("stubs")
    found = {}
    for name, case in CASES.items():
        more: dict[str, Any] = dict(case.more)
        program = str(HERE / "stub.py")
        found[name] = cluster.submit(folder / name, f"--plan {case.plan}", PROGRAM=program, **more)
    cluster.follow(limit=1.5 * LIMIT)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_job_is_requeued_while_it_advances_and_only_then(
    name: str, jobs: dict[str, SlurmJob]
) -> None:
    case, job = CASES[name], jobs[name]
    state = "FAILED" if case.code else "COMPLETED"
    assert (job.state, job.exit_code, job.restarts) == (state, case.code, case.restarts), job.log
    assert case.words in job.log
    starts = (job.run_dir / "logs" / f"starts-{job.number}").read_text().split()
    assert len(starts) == case.restarts + 1
    # One log for all starts, with one header for each.
    assert job.log.count("(restarted ") == len(starts)
    nodes = re.findall(r"SLURM_JOB_NODELIST=(\S+)", job.log)
    assert (len(set(nodes)) > 1) == (name == "lost-a-rank")
