"""Tests of the benchmark of message-driven pipelines: its arithmetic, and a small run over MPI."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.pipeline.schedule import Kind, Operation, one_f_one_b
from tools.bench.common.netlab import SCRIPT, Network, why_not
from tools.bench.message_driven.page import as_markdown
from tools.bench.message_driven.plot import panels_of
from tools.bench.message_driven.rows import EmulationRow, rows_of
from tools.bench.message_driven.run import main
from tools.bench.message_driven.uneven_stage import (
    BALANCED,
    CONTENDERS,
    DRIVEN,
    JITTER,
    ONLY_ON_PAPER,
    PROFILES,
    REFERENCE,
    SLOW,
    UnevenContender,
    factor_of,
)

EMULATION = EmulationRow(
    forward=1.0,
    backward=2.0,
    shape=(1, 250, 1000),
    profiles=(BALANCED, SLOW),
    microbatches=[4],
    rounds=1,
)
NEXT_DOOR = Network(ranks=2)
FORWARD, BACKWARD = Operation(Kind.FORWARD, 0), Operation(Kind.BACKWARD, 0)


def _step(seconds: float, *, number: int = 0, **case: Any) -> dict[str, Any]:
    passes = [["forward", 0, 5.0, 6.0], ["forward", 1, 6.0, 7.0], ["backward", 0, 8.0, 10.0]]
    case = {"profile": BALANCED, "contender": REFERENCE, "microbatches": 4} | case
    return {"seconds": seconds, "round": number, "passes": [passes, passes], **case}


def _steps(**seconds: float) -> list[dict[str, Any]]:
    return [
        _step(seconds.get(contender.name, 20.0), profile=profile, contender=contender.name)
        for profile in PROFILES
        for contender in CONTENDERS
    ]


# ------------------------------------------------------------------------------ on paper


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (2, 8), (4, 3), (4, 16)])
def test_an_order_of_none_ahead_is_that_of_1f1b(stages: int, microbatches: int) -> None:
    seconds = {"forward": 1, "backward": 2}
    fixed = UnevenContender(name="fixed").on_paper(
        stages, microbatches, factor=factor_of(BALANCED, 0), **seconds
    )
    orders = [[each.operation for each in rank] for rank in fixed.ranks]
    assert orders == [one_f_one_b(stage, stages, microbatches) for stage in range(stages)]


def test_two_ahead_hold_two_more() -> None:
    even = factor_of(BALANCED, 0)
    played = ONLY_ON_PAPER.on_paper(4, 16, factor=even, forward=1, backward=2)
    assert [played.in_flight(rank) for rank in range(4)] == [6, 5, 4, 3]
    assert all(len(passes) == 32 for passes in played.ranks)


def test_passes_take_the_same_times_whoever_runs_them() -> None:
    assert factor_of(SLOW, 3)(1, FORWARD) == 1.5 and factor_of(SLOW, 3)(0, FORWARD) == 1
    jitter = factor_of(JITTER, 3)
    assert jitter(1, FORWARD) == factor_of(JITTER, 3)(1, FORWARD)
    drawn = {jitter(1, FORWARD), jitter(0, FORWARD), jitter(1, BACKWARD)}
    assert len(drawn | {factor_of(JITTER, 4)(1, FORWARD)}) == 4


def test_a_message_takes_its_bytes_over_the_rate_and_two_links() -> None:
    fast, slow = (Network(ranks=2, rate=rate, delay="1ms") for rate in ("1gbit", "200mbit"))
    assert EMULATION.transfer(fast) == pytest.approx(0.008 + 0.002)
    assert EMULATION.transfer(slow) == pytest.approx(0.040 + 0.002)
    assert EMULATION.transfer(NEXT_DOOR) == 0


# ------------------------------------------------------------------------------ what is told


def test_rows_hold_idle_over_busy_time_and_ratios_within_a_round() -> None:
    rows = rows_of(NEXT_DOOR, EMULATION, _steps(**{DRIVEN: 15.0}))
    assert len(rows) == 2 * (len(CONTENDERS) + 1)
    found = {(row["profile"], row["contender"]): row for row in rows}
    even, slow = found[BALANCED, DRIVEN], found[SLOW, DRIVEN]
    assert (even["seconds"], even["ratio"], even["in_flight"]) == (15.0, 0.75, 2)
    assert even["bubbles"] == [0.25, 0.25]  # each is busy for 4 x (1 + 2)
    assert slow["bubbles"] == pytest.approx([0.25, 15 / 18 - 1])
    # 1F1B: the passes of a microbatch on each of both stages, then 3 on the slower one
    assert found[BALANCED, REFERENCE]["paper"] == 15 and even["paper_ratio"] == 1
    assert found[SLOW, REFERENCE]["paper"] == 3 + 4 * 4.5
    assert found[BALANCED, ONLY_ON_PAPER.name]["seconds"] is None


def test_page_says_where_schedules_part() -> None:
    both = {"1f1b": {"losses": [7.0, 6.5], "weights": "a" * 64}}
    both["message-driven"] = {"losses": [7.0, 6.5000001], "weights": "b" * 64}
    rows = rows_of(NEXT_DOOR, EMULATION, _steps())
    left_out = ["2 ranks, 1gbit: needs root"]
    found = {"rows": rows, "equality": {"2": both}, "cores": 2, "load_before": 0.5, "passes": [1]}
    page = as_markdown(found | {"left_out": left_out})
    assert "| 2 | 2 | **no** | aaaaaaaaaaaaaaaa | bbbbbbbbbbbbbbbb |" in page
    assert "| slow stage | 4 | message-driven | 20000 | 1.000 |" in page
    assert "Not measured: 2 ranks, 1gbit: needs root." in page
    both["message-driven"] = both["1f1b"]
    assert "**no**" not in as_markdown(found | {"left_out": left_out})


def test_pictures_show_both_contenders_in_the_round_of_the_median_ratio() -> None:
    steps = []
    for number, driven in enumerate([5.0, 9.0, 7.0]):
        for profile in PROFILES:
            steps.append(_step(10.0, number=number, profile=profile))
            steps.append(_step(driven, number=number, profile=profile, contender=DRIVEN))
            steps[-1]["passes"] = [[["forward", number, 3.0, 4.0]]] * 2
    panels = panels_of(steps, 4)
    assert panels[BALANCED][DRIVEN] == [[["forward", 2, 0.0, 1000.0]]] * 2
    assert panels[BALANCED][REFERENCE][0][-1] == ["backward", 0, 3000.0, 5000.0]


# ------------------------------------------------------------------------------ with MPI


@pytest.mark.full
def test_smoke_trains_alike_measures_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="message-driven stages talk over MPI")
    assert main(["--smoke", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    plain, driven = (found["equality"]["2"][name] for name in ("1f1b", "message-driven"))
    assert plain == driven and len(plain["losses"]) == 2 and plain["losses"][0] > 6
    rows = {(row["profile"], row["contender"]): row for row in found["rows"]}
    names = [contender.name for contender in (*CONTENDERS, ONLY_ON_PAPER)]
    assert list(rows) == [(profile, name) for profile in PROFILES for name in names]
    for (profile, name), row in rows.items():
        assert name == ONLY_ON_PAPER.name or row["seconds"] > row["paper"] > 0, profile
    assert rows[BALANCED, REFERENCE]["in_flight"] == 2
    assert rows[BALANCED, f"{DRIVEN}, limit p + 2"]["in_flight"] == 4
    page = (tmp_path / "README.md").read_text()
    (tmp_path / "README.md").unlink()
    assert main(["--redraw", str(tmp_path)]) == 0
    assert (tmp_path / "README.md").read_text() == page


@pytest.mark.push
def test_ranks_of_mpiexec_meet_over_the_links_of_their_namespaces(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if (reason := why_not(Network(ranks=2, rate="100mbit"))) is not None:
        pytest.skip(reason)
    program = tmp_path / "send.py"
    program.write_text(
        "import os\nfrom mpi4py import MPI\nrank = MPI.COMM_WORLD.Get_rank()\n"
        "assert 'RANK' not in os.environ and os.environ['MASTER_ADDR'] == '10.77.0.1'\n"
        "data = bytearray(1 << 20)\n"
        "(MPI.COMM_WORLD.Send if rank == 0 else MPI.COMM_WORLD.Recv)([data, MPI.BYTE], 1 - rank)\n"
    )
    network = Network(ranks=2, rate="100mbit")
    command = network.mpi_command([str(program)], folder=tmp_path / "out")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    sent = json.loads((tmp_path / "out" / "counters.json").read_text())["after"]
    assert 1 << 20 < sent[0]["bytes"] < 1.2 * (1 << 20) and sent[1]["bytes"] < 1 << 18


@pytest.mark.push
def test_a_rank_that_fails_ends_mpiexec_and_its_namespaces(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if (reason := why_not(Network(ranks=2, rate="100mbit"))) is not None:
        pytest.skip(reason)
    program = tmp_path / "fail.py"
    program.write_text(
        "import time\nfrom mpi4py import MPI\n"
        "MPI.COMM_WORLD.Barrier()\n"
        # Of a hundred ranks that exit without a word, mpiexec overlooks one.
        "MPI.COMM_WORLD.Abort(7) if MPI.COMM_WORLD.Get_rank() == 1 else time.sleep(600)\n"
    )
    command = Network(ranks=2, rate="100mbit").mpi_command([str(program)], folder=tmp_path)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        said = process.communicate(timeout=120)[1]
    finally:
        process.terminate()  # netlab.sh then ends mpiexec, for which a plain wait may be endless
        process.communicate(timeout=60)
    assert process.returncode == 7 and "mpiexec ended with exit code 7" in said
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert f"netlab-{process.pid}-" not in names.stdout


@pytest.mark.push
def test_mpiexec_must_be_a_program() -> None:
    command = [str(SCRIPT), "--mpiexec", f"{sys.executable}-not", "true"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 2 and "no such program" in found.stderr
