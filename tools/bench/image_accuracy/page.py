"""The page of the accuracies that runs have reached."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.errors import ConfigError
from megatron.report import read_run
from tools.bench.common.page_files import write_page
from tools.bench.image_accuracy.settings import TABLES, UPDATES_OF_EPOCH, ImageRun


@dataclass(frozen=True, kw_only=True)
class AccuracyRow:
    """The state of one run.

    `updates` of `total` steps were made. `tests` are (epoch, accuracy, loss) on the test images.
    `train_accuracy` is the mean over the last steps, as many as an epoch has, on augmented images.
    """

    nonzeros: int
    seed: int
    updates: int
    total: int
    tests: list[tuple[int, float, float]]
    train_accuracy: float

    @property
    def best(self) -> tuple[float, int] | None:
        """The best accuracy and its epoch; None before the first test."""
        return max(((accuracy, epoch) for epoch, accuracy, _ in self.tests), default=None)

    @property
    def label(self) -> str:
        """The name of the row."""
        return "dense" if self.nonzeros == 100 else f"{self.nonzeros} % nonzeros, DSR"


def row_of(run: ImageRun, folder: Path) -> AccuracyRow | None:
    """Return the row of a run folder; None if no step was recorded."""
    try:
        data = read_run(folder)
    except ConfigError:
        return None
    if not data.iterations:
        return None
    losses = dict(data.evaluations.get("valid", ()))
    # A run is known to have accuracies once it has been tested.
    accuracies = data.means.get("accuracy", {"train": data.path.get("accuracy", [])})
    tests = [(i // UPDATES_OF_EPOCH, a, losses[i]) for i, a in accuracies.get("valid", ())]
    last = [accuracy for _, accuracy in accuracies["train"][-UPDATES_OF_EPOCH:]]
    return AccuracyRow(
        nonzeros=run.nonzeros,
        seed=run.seed,
        updates=data.iterations[-1],
        total=run.updates,
        tests=tests,
        train_accuracy=sum(last) / len(last),
    )


def table(rows: Sequence[AccuracyRow]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [
        "| run | seed | epochs made | test accuracy, best epoch | last epoch tested | train, last "
        "500 steps |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        made = f"{row.updates / UPDATES_OF_EPOCH:.2f} of {row.total // UPDATES_OF_EPOCH}"
        best, last = "-", "-"
        if row.best is not None:
            accuracy, epoch = row.best
            best = f"{100 * accuracy:.2f} % (epoch {epoch})"
            last = f"{100 * row.tests[-1][1]:.2f} % (epoch {row.tests[-1][0]})"
        cells = [row.label, str(row.seed), made, best, last, f"{100 * row.train_accuracy:.2f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def by_epoch(rows: Sequence[AccuracyRow]) -> str:
    """Return the test accuracies of all epochs as a table in Markdown."""
    epochs = sorted({epoch for row in rows for epoch, _, _ in row.tests})
    if not epochs:
        return "No epoch has ended yet.\n"
    lines = [
        f"| test accuracy after epoch | {' | '.join(map(str, epochs))} |",
        f"|---|{'---:|' * len(epochs)}",
    ]
    for row in rows:
        found = {epoch: f"{100 * accuracy:.2f} %" for epoch, accuracy, _ in row.tests}
        cells = [found.get(epoch, "-") for epoch in epochs]
        lines.append(f"| {row.label}, seed {row.seed} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write(out: Path | None, rows: Sequence[AccuracyRow]) -> None:
    """Print the page's tables; with `out`, write README.md, results.json and figure.png there."""
    text = f"{table(rows)}\n{by_epoch(rows)}"
    print(text)
    values = [dataclasses.asdict(row) for row in rows]
    write_page(out, text=text, values=values, draw=lambda file: _draw(file, rows))


def _draw(file: Path, rows: Sequence[AccuracyRow]) -> bool:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    from tools.bench.common.figures import plain_axes, save

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for row in rows:
        points = [(epoch, 100 * accuracy) for epoch, accuracy, _ in row.tests]
        label = f"{row.label}, seed {row.seed}"
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=label)
    axes.set_xlabel(f"epoch of {TABLES['images']:,} images")
    axes.set_ylabel("test accuracy, %")
    axes.legend(frameon=False)
    plain_axes(axes)
    save(figure, file)
    return True
