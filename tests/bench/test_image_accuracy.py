"""The study of WRN on CIFAR-10's images: its flags are the report's, its page what runs reached."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.config import parse, resolve
from megatron.optimizer.build import learning_rate
from megatron.tasks.vision_config import VisionConfig
from pretrain_gpt import GRADIENT_PATHS
from samo.options import SamoConfig
from tests.data.image_files import write_cifar10
from tools.bench.image_accuracy import settings
from tools.bench.image_accuracy.page import AccuracyRow, by_epoch, row_of, table
from tools.bench.image_accuracy.run import main, train
from tools.bench.image_accuracy.settings import TABLES, ImageRun


def config_of(run: ImageRun) -> VisionConfig:
    flags = run.flags(data="images", run_dir=Path("runs/a"))
    config = parse(flags, paths=GRADIENT_PATHS, task=VisionConfig)
    assert isinstance(config, VisionConfig)
    return resolve(config, 1)


def test_a_whole_run_has_the_reports_settings() -> None:
    dense = config_of(ImageRun(nonzeros=100, epochs=200))
    assert dense.training.train_iters == 100_000 and dense.gradient.grad_path == "dense"
    rate = learning_rate(dense)
    rates = [rate.at(100 * update) for update in (0, 29_999, 30_000, 60_000, 80_000)]
    assert rates == pytest.approx([0.05, 0.05, 0.01, 0.02, 0.004])
    for nonzeros in TABLES["sparse"].keys() - {100}:
        options = config_of(ImageRun(nonzeros=nonzeros, epochs=200)).extensions["samo"]
        assert isinstance(options, SamoConfig)
        row = TABLES["sparse"][nonzeros]
        assert options.dsr_interval == 100 / row["frequency"]
        assert options.dsr_fraction == pytest.approx(row["fraction"] * 20_000 / 1_451_520, rel=1e-6)
        assert options.samo_sparsity == pytest.approx(1 - nonzeros / 100)
        assert options.samo_dense == ("conv0.weight", "fc.weight")


def test_a_short_run_changes_its_rate_at_the_same_shares() -> None:
    config = config_of(ImageRun(nonzeros=30, epochs=5))
    assert config.optimizer.lr_multi_step_iters == (750, 1500, 2000)
    assert config.optimizer.lr == pytest.approx(0.1)
    options = config.extensions["samo"]
    assert isinstance(options, SamoConfig) and options.dsr_interval == 50


def row(nonzeros: int, accuracies: list[float], updates: int = 1250) -> AccuracyRow:
    tests = [(epoch, accuracy, 1.0) for epoch, accuracy in enumerate(accuracies, 1)]
    return AccuracyRow(
        nonzeros=nonzeros, seed=1, updates=updates, total=2500, tests=tests, train_accuracy=0.5
    )


def test_the_page_names_the_best_epoch_and_how_far_a_run_is() -> None:
    rows = [row(100, [0.6, 0.75, 0.7]), row(30, [0.5]), row(10, [], updates=100)]
    lines = table(rows).splitlines()
    assert lines[2] == (
        "| dense | 1 | 2.50 of 5 | 75.00 % (epoch 2) | 70.00 % (epoch 3) | 50.00 % |"
    )
    assert "| 10 % nonzeros, DSR | 1 | 0.20 of 5 | - | - |" in lines[4]
    assert by_epoch(rows).splitlines()[3] == "| 30 % nonzeros, DSR, seed 1 | 50.00 % | - | - |"
    assert by_epoch([]) == "No epoch has ended yet.\n"


@pytest.mark.full
def test_runs_are_started_once_and_make_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Networks and epochs far smaller than the study's, by the study's own program."""
    write_cifar10(tmp_path / "images", records=4)  # 20 images for training
    small = "--num-layers 10 --width-factor 0.5 --micro-batch-size 10 --global-batch-size 10"
    whole = ImageRun.flags

    def shortened(run: ImageRun, **places: object) -> list[str]:
        flags = whole(run, **places)  # type: ignore[arg-type]
        return [*flags, *small.split(), "--train-iters", "4", "--eval-interval", "2"]

    monkeypatch.setattr(ImageRun, "flags", shortened)
    monkeypatch.setattr("tools.bench.image_accuracy.page.UPDATES_OF_EPOCH", 2)
    arguments = ["--data", str(tmp_path / "images"), "--work", str(tmp_path / "work")]
    arguments += ["--out", str(tmp_path / "out"), "--only", "100", "--epochs", "5"]
    assert main(arguments) == 0
    (found,) = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["updates"] == 4 and [epoch for epoch, _, _ in found["tests"]] == [1, 2]
    assert "| dense | 1 |" in (tmp_path / "out" / "README.md").read_text()

    run = ImageRun(nonzeros=100, epochs=5)
    log = (tmp_path / "work" / run.name / "log.txt").read_bytes()
    assert train(run, data=str(tmp_path / "images"), work=tmp_path / "work") == 0
    assert (tmp_path / "work" / run.name / "log.txt").read_bytes() == log, "it was not started"
    assert row_of(ImageRun(nonzeros=30, epochs=5), tmp_path / "absent") is None
    assert settings.UPDATES_OF_EPOCH == 500
