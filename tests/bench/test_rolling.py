"""The study of settings of Radius: all send equal bytes, and its page follows from its rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config import parse, resolve
from pretrain_gpt import GRADIENT_PATHS
from tools.bench.common.page_files import PAGE, RESULTS
from tools.bench.convergence.report import write_report
from tools.bench.convergence.rows import read_rows
from tools.bench.convergence.study import REFERENCE_STEPS, StudyRun, flags_of
from tools.bench.rolling.page import ROLLING
from tools.bench.rolling.study import BUDGET, PLAN, study

FOLDER = Path("tools/bench/rolling").resolve()
STUDY = study()


@pytest.mark.parametrize("run", STUDY, ids=lambda run: run.name)
def test_every_run_is_accepted_and_sends_the_budget(run: StudyRun) -> None:
    flags = flags_of(run, PLAN, data=Path("data"), runs_dir=Path("runs"))
    config = resolve(parse(flags, paths=GRADIENT_PATHS), run.ranks)
    if run.is_dense:
        return
    radius = config.extensions["radius"]
    assert run.interval is not None
    interval = run.interval * PLAN.steps // REFERENCE_STEPS
    assert radius.radius_interval == interval  # type: ignore[attr-defined]
    density = radius.radius_density  # type: ignore[attr-defined]
    width = {None: 4, "bf16": 2}[config.gradient.grad_wire]
    sent = (density + (1 - density) / interval) * width / 4
    assert sent == pytest.approx(float(BUDGET), rel=1e-3)


def test_the_committed_page_follows_from_the_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / PAGE).write_text((FOLDER / PAGE).read_text(encoding="utf-8"), encoding="utf-8")
    write_report(FOLDER / "results.jsonl", tmp_path, ROLLING, log=lambda _: None)
    for name in (PAGE, RESULTS):
        assert (tmp_path / name).read_text("utf-8") == (FOLDER / name).read_text("utf-8"), name
    assert {row["name"] for row in read_rows(FOLDER / "results.jsonl")} <= {r.name for r in STUDY}
