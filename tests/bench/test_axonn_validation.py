"""The AxoNN validation: plain PyTorch is an independent implementation of the same training, and
the page says so only where that is so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config import parse, resolve
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from pretrain_gpt import GRADIENT_PATHS
from tools.bench.axonn_validation import run as axonn_validation
from tools.bench.axonn_validation.page import (
    OURS,
    PLAIN,
    SEEDS,
    STOCK,
    apart,
    as_markdown,
    seed_noise,
    verdicts,
)
from tools.bench.axonn_validation.plain_training import LossCurve, plain_gpt, train
from tools.bench.axonn_validation.run import SMALL, main
from tools.bench.common.contenders import Ours, quiet

STUDY = replace(SMALL, steps=20, warm_up=5)


def test_plain_pytorch_trains_as_our_serial_run(tmp_path: Path) -> None:
    flags = STUDY.flags(micro_batch=2)
    plain = train(flags, micro_batch=STUDY.batch)
    groups = ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=1), rank=0)
    with quiet(tmp_path / "console.txt"):
        ours = Ours(flags, groups, tmp_path / "run")
        losses = [ours.step() for _ in range(STUDY.steps)]
    assert losses == pytest.approx(plain.losses, abs=3e-6)
    assert plain.losses[0] - plain.losses[-1] > 0.05
    assert plain.valid_loss == pytest.approx(plain.losses[-1], abs=0.2)


def test_gradients_may_be_summed_in_parts() -> None:
    study = replace(STUDY, steps=3, warm_up=1)
    whole, parts = (train(study.flags(), micro_batch=size) for size in (8, 1))
    assert whole.losses == pytest.approx(parts.losses, abs=3e-6)
    assert whole.valid_loss == pytest.approx(parts.valid_loss, abs=3e-6)


def test_torch_s_own_norm_is_near_by() -> None:
    exact, stock = (train(STUDY.flags(), micro_batch=8, fp32_norm=each) for each in (False, True))
    assert exact.losses == pytest.approx(stock.losses, abs=1e-3)


def test_another_seed_is_another_run() -> None:
    study = replace(STUDY, steps=1, warm_up=0)
    first, second = (train(study.flags(seed=seed), micro_batch=8).losses[0] for seed in (1, 2))
    assert abs(first - second) > 1e-4


def test_plain_model_gives_the_loss_of_ours() -> None:
    from megatron.model.gpt import GPT

    config = resolve(parse(STUDY.flags(), paths=GRADIENT_PATHS), 1)
    ours = GPT(config.model, vocab_size=50, seed=1234, dtype=torch.float32, device="cpu")
    plain = plain_gpt(config, 50)
    tokens, labels = torch.randint(50, (2, 3, 16), generator=torch.Generator().manual_seed(0))
    expected = ours.loss(tokens, labels) / labels.numel()
    torch.testing.assert_close(plain(tokens, labels), expected)


# ------------------------------------------------------------------------------ the page


def _curves(*, ours: float = 0.0, late: float = 1e-4, valid: float = 0.0) -> dict[str, Any]:
    """Curves of 60 steps; `ours` is added to our losses, `late` to those after 50 of both ours
    and the one with another norm."""
    plain = [8.0 - 0.01 * step for step in range(60)]
    rounded = [loss + late * (step >= 50) for step, loss in enumerate(plain)]
    curves = {
        PLAIN: {"losses": plain, "valid_loss": 7.0},
        OURS: {"losses": [loss + ours for loss in rounded], "valid_loss": 7.0 + valid},
        STOCK: {"losses": rounded, "valid_loss": 7.0001},
    }
    for seed, last in ((1, 7.01), (2, 6.98)):
        curves[SEEDS.format(seed=seed)] = {"losses": plain[::-1], "valid_loss": last}
    return curves


def test_differences_of_a_curve() -> None:
    found = apart(_curves(valid=0.005)[OURS], _curves()[PLAIN])
    assert found.first == 0 and found.most == pytest.approx(1e-4)
    assert found.mean == pytest.approx(1e-4 / 6) and found.valid == pytest.approx(0.005)


def test_noise_is_of_seeds_alone() -> None:
    assert seed_noise(_curves(valid=5.0)) == pytest.approx(0.01527525, rel=1e-5)


def test_claims_hold_and_fail() -> None:
    assert [holds for _, holds in verdicts(_curves())] == [True, True, True]
    assert [holds for _, holds in verdicts(_curves(ours=5e-5))] == [True, False, True]
    assert [holds for _, holds in verdicts(_curves(ours=2e-4, valid=0.02))] == [False] * 3
    page = as_markdown({"curves": _curves(ours=2e-4), "study": vars(replace(SMALL, steps=60))})
    assert page.count("**no**") == 2 and "| 60, validation | 7.000000 |" in page


# ------------------------------------------------------------------------------ the tool


def test_finished_runs_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[bool] = []

    def pretend(flags: list[str], *, fp32_norm: bool, **_: object) -> LossCurve:
        trained.append(fp32_norm)
        return LossCurve(losses=[8.0] * SMALL.steps, valid_loss=7.0)

    monkeypatch.setattr(axonn_validation, "train", pretend)
    monkeypatch.setattr(
        axonn_validation, "_ours", lambda *_: LossCurve(losses=[8.0] * SMALL.steps, valid_loss=7.0)
    )
    first = axonn_validation.measured(SMALL, tmp_path)
    assert trained == [False, True, False, False]
    assert axonn_validation.measured(SMALL, tmp_path) == first and len(trained) == 4
    axonn_validation.measured(replace(SMALL, warm_up=3), tmp_path)
    assert len(trained) == 8


def test_missing_text_is_told_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mpi4py")
    flags = ["--text-folder", str(tmp_path / "none"), "--work", str(tmp_path / "work")]
    assert main(flags) == 2
    assert "--text-folder" in capsys.readouterr().err and not (tmp_path / "work").exists()


@pytest.mark.full
def test_smoke_compares_four_ranks_of_mpiexec_with_plain_pytorch(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="message-driven stages talk over MPI")
    assert main(["--smoke", "--out", str(tmp_path)]) == 0
    curves = json.loads((tmp_path / "results.json").read_text())["curves"]
    assert apart(curves[OURS], curves[PLAIN]).most < 3e-6
    assert abs(apart(curves[OURS], curves[PLAIN]).valid) < 3e-6
    page = (tmp_path / "README.md").read_text()
    assert "in the first 50 steps: yes" in page
    assert main(["--redraw", str(tmp_path)]) == 0
