"""The study of gradient paths by bytes: its runs are legal, and its page follows from its rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config import parse, resolve
from pretrain_gpt import GRADIENT_PATHS
from tools.bench.common.page_files import PAGE, RESULTS
from tools.bench.convergence.groups import RunGroup
from tools.bench.convergence.report import write_report
from tools.bench.convergence.rows import read_rows
from tools.bench.convergence.study import StudyRun, flags_of
from tools.bench.loss_by_bytes.page import LOSS_BY_BYTES, beaten_by
from tools.bench.loss_by_bytes.study import PLAN, SEEDS, of_seed, study

FOLDER = Path("tools/bench/loss_by_bytes").resolve()


@pytest.mark.parametrize("run", of_seed(SEEDS[0]), ids=lambda run: run.name)
def test_every_run_is_accepted(run: StudyRun) -> None:
    flags = flags_of(run, PLAN, data=Path("data"), runs_dir=Path("runs"))
    config = resolve(parse(flags, paths=GRADIENT_PATHS), run.ranks)
    assert config.gradient.grad_path == run.path
    assert config.total_iterations() == run.length(PLAN)


def group(name: str, payload: float) -> RunGroup:
    return RunGroup(
        name=name,
        variant=name,
        beta2=0.999,
        start=None,
        interval=None,
        ranks=1,
        seeds=(1, 2),
        losses=(),
        gaps=(),
        gap=None,
        error=None,
        error_is_own=True,
        payload=payload,
        largest_payload=payload,
        clipped=0.0,
        failed=0,
    )


def test_a_path_is_beaten_by_less_loss_for_no_more_bytes_beyond_two_errors() -> None:
    groups = [group("wide", 0.5), group("own", 0.2), group("good", 0.2), group("once", 0.1)]
    gaps = {
        "wide": {1: -1.0, 2: -1.0},  # sends more
        "own": {1: 0.10, 2: 0.30},
        "good": {1: 0.04, 2: 0.22},  # lower by 0.06 and 0.08: 0.07 against an error of 0.01
        "once": {1: 0.0},
    }
    assert beaten_by(groups[1], groups, gaps) == ["good"]
    assert beaten_by(groups[2], groups, gaps) == []
    assert beaten_by(groups[3], groups, gaps) is None, "one seed has no error"
    gaps["good"] = {1: 0.04, 2: 0.34}  # lower by 0.06 and higher by 0.04
    assert beaten_by(groups[1], groups, gaps) == []


def test_the_committed_page_follows_from_the_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / PAGE).write_text((FOLDER / PAGE).read_text(encoding="utf-8"), encoding="utf-8")
    write_report(FOLDER / "results.jsonl", tmp_path, LOSS_BY_BYTES, log=lambda _: None)
    for name in (PAGE, RESULTS):
        assert (tmp_path / name).read_text("utf-8") == (FOLDER / name).read_text("utf-8"), name
    rows = {row["name"] for row in read_rows(FOLDER / "results.jsonl")}
    assert rows <= {run.name for run in study()}
