"""The GPU benchmark runs on a CPU, at a size that measures nothing."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from tools.bench.gpu.step import OURS, PATHS, SMOKE, measure, table

REPO = Path(__file__).resolve().parents[2]


def test_section_writes_what_the_table_reads(tmp_path: Path) -> None:
    found = measure(
        "step2b",
        SMOKE,
        device=torch.device("cpu"),
        steps=2,
        peak_tflops=1.0,
        out=tmp_path,
        compiled=False,
    )
    assert json.loads((tmp_path / "step2b.json").read_text()) == json.loads(json.dumps(found))
    ours, plain = found["contenders"][OURS], found["contenders"]["plain PyTorch"]
    assert set(ours["phases"]) == {"forward", "backward", "agreement and norm", "optimizer"}
    assert 0 < ours["mfu"] < 1
    assert abs(ours["losses"][0] - plain["losses"][0]) < 0.2
    assert "| step2b | ours |" in table(tmp_path)


@pytest.mark.push
def test_gradient_paths_are_compared_with_dense_gradients(tmp_path: Path) -> None:
    device = torch.device("cpu")
    found = measure("paths355m", SMOKE, device=device, steps=2, peak_tflops=1.0, out=tmp_path)
    assert list(found["contenders"]) == [OURS, *PATHS]
    shown = table(tmp_path)
    assert "| paths355m | ours | " in shown and "1.000" in shown and "aim" not in shown
    losses = {name: one["losses"][1] for name, one in found["contenders"].items()}
    assert len({*losses.values()}) == len(losses), "every path has begun"
    assert all(f"| paths355m | {name} |" in table(tmp_path) for name in PATHS)


@pytest.mark.push
def test_script_refuses_an_unknown_section(tmp_path: Path) -> None:
    done = subprocess.run(
        [REPO / "tools" / "bench" / "gpu.sh", "nonsense"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "one of pipeline tests" in done.stderr
