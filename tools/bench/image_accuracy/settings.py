"""The flags of a run of Sohoni et al.'s WRN study, from configs/tables/wrn28_2_cifar10.yaml.

A run may be shorter than the report's 200 epochs: the learning rate then changes at the same shares
of the run. Rewirings cannot come as often as the shares say, since each one sets the momentum to
zero: their interval is `STRETCH` times as long, but never longer than the report's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from samo.schedule import FRACTION

REPO = Path(__file__).resolve().parents[3]
CONFIG = "configs/wrn28_2_cifar10.yaml"
TABLES: dict[str, Any] = yaml.safe_load(
    (REPO / "configs" / "tables" / "wrn28_2_cifar10.yaml").read_text(encoding="utf-8")
)
UPDATES_OF_EPOCH = TABLES["images"] // TABLES["batch"]
STRETCH = 10


@dataclass(frozen=True, kw_only=True)
class ImageRun:
    """A run on all training images, tested after each epoch.

    Args:
        nonzeros: Per cent of nonzeros of the sparse tensors: a row of tables 6 and 8.
        epochs: Length of the run.
        seed: Seed of initial values, order, augmentation and masks.
    """

    nonzeros: int
    epochs: int
    seed: int = 1

    @property
    def name(self) -> str:
        """The name of the run folder."""
        return f"wrn-{self.nonzeros}-epochs{self.epochs}-seed{self.seed}"

    @property
    def updates(self) -> int:
        """Number of steps."""
        return self.epochs * UPDATES_OF_EPOCH

    def flags(self, *, data: str, run_dir: Path) -> list[str]:
        """Return the flags of `pretrain_vision.py`.

        Args:
            data: The folder of the images.
            run_dir: The run folder.
        """
        found = [
            *("--config", str(REPO / CONFIG), "--data-path", data, "--run-dir", str(run_dir)),
            *("--bf16", "--train-iters", str(self.updates), "--seed", str(self.seed)),
            *("--lr", f"{self._learning_rate:g}", "--lr-multi-step-iters", *self._steps),
            *("--save-interval", "100", "--keep-last", "2"),
            *("--eval-interval", str(UPDATES_OF_EPOCH), "--log-interval", "25"),
        ]
        return found if self.nonzeros == 100 else [*found, *self._sparse]

    @property
    def _scale(self) -> float:
        """Length of the run divided by that of the report's runs."""
        return self.epochs / TABLES["epochs"]

    @property
    def _learning_rate(self) -> float:
        return TABLES["learning_rates"][1] * TABLES["sparse"][self.nonzeros]["learning_rate"]

    @property
    def _steps(self) -> list[str]:
        """Updates after which the learning rate changes."""
        starts = [epoch - 1 for epoch in TABLES["learning_rates"] if epoch > 1]
        return [str(max(1, round(start * UPDATES_OF_EPOCH * self._scale))) for start in starts]

    @property
    def _sparse(self) -> list[str]:
        row = TABLES["sparse"][self.nonzeros]
        interval = TABLES["rewiring_intervals"][1] / row["frequency"]
        shortened = interval * min(1.0, STRETCH * self._scale)
        return [
            *("--grad-path", "samo", "--samo-sparsity", f"{1 - self.nonzeros / 100:g}"),
            *("--samo-pruning", "random", "--samo-dense", *TABLES["dense_tensors"]),
            *("--dsr-interval", str(max(1, round(shortened)))),
            *("--dsr-fraction", f"{row['fraction'] * FRACTION:.8g}"),
        ]
