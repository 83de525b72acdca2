"""A small study file, changed by tests, and rows of runs that were never made."""

from __future__ import annotations

from pathlib import Path

from tools.studies.rows import StudyRow

TEXT = """\
title: Does the width of values cost loss?
flags:
  num-layers: 1
  hidden-size: 16
  num-attention-heads: 2
  seq-length: 16
  mock-data: true
  global-batch-size: 4
  lr: 1.0e-3
  eval-iters: 1
  log-interval: 5
tokens: 640
seeds: [1, 2]
baseline: dense
pairs: [[dense_int4, dense_bf16]]
runs:
  dense: {}
  "dense_{grad-wire}":
    grid: {grad-wire: [bf16, int4]}
    fork: {run: dense, step: 4}
    ranks: 2
"""
NAMES = [
    f"{group}-seed{seed}" for seed in (1, 2) for group in ("dense", "dense_bf16", "dense_int4")
]


def write_study(folder: Path, *changes: tuple[str, str]) -> Path:
    """Write the study with each (old, new) text replaced."""
    text = TEXT
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    path = folder / "study.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def row(
    group: str,
    seed: int,
    loss: float | None,
    *,
    sent: float = 100.0,
    settings: str = "0",
    seconds: float = 1.0,
) -> StudyRow:
    """Return the row of a run that ended with `loss`."""
    return StudyRow(
        name=f"{group}-seed{seed}",
        group=group,
        seed=seed,
        ranks=2,
        data_parallel=2,
        settings=settings,
        exit_code=0 if loss is not None else 5,
        steps=10,
        valid_loss=loss,
        train_loss=loss,
        bytes=sent,
        most_bytes=sent,
        density=1.0,
        clipped=0.5,
        step_seconds=seconds,
        seconds=10 * seconds,
        peak_memory=1e6,
        curve=[(5, 6.0), (10, 5.0)],
        commit="abc",
        processor="a processor",
    )
