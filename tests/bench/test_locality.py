"""Tests of gradient locality: the arithmetic, and a short run of a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.errors import ConfigError
from tools.bench.locality.report import KeptShare, LocalityCurve, as_markdown, write_report
from tools.bench.locality.run import KINDS, flags_of, kept_of
from tools.bench.locality.watch import Counter

TINY = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --mock-data "
    "--vocab-size 64 --micro-batch-size 2 --train-iters 4 --lr 1e-3 --eval-iters 0"
).split()


def curve(counts: list[int], steps: int) -> LocalityCurve:
    """Return the curve of an MLP's gradient."""
    return LocalityCurve.of_counts(
        counts, kind="MLP", what="gradient", top=0.2, steps=steps, shared=0.5, from_first=0.25
    )


def test_counter_marks_the_largest_magnitudes() -> None:
    counter = Counter(top=0.25)
    counter.add(torch.tensor([1.0, -9.0, 8.0, 0.0, 2.0, 3.0, 4.0, 5.0]))
    counter.add(torch.tensor([7.0, -9.0, 0.0, 0.0, 2.0, 3.0, 4.0, 5.0]))
    counter.add(torch.tensor([7.0, 0.0, 0.0, 0.0, 2.0, 3.0, 4.0, -8.0]))
    assert counter.counts is not None
    assert counter.counts.tolist() == [2, 2, 1, 0, 0, 0, 0, 1]
    assert counter.shared == [0.5, 0.5] and counter.from_first == 0.0


def test_counter_marks_at_least_one_and_rounds_up() -> None:
    counter = Counter(top=0.01)
    counter.add(torch.arange(150.0))
    assert counter.counts is not None and int(counter.counts.sum()) == 2


def test_frequencies_fall_with_the_percentage_of_entries() -> None:
    found = curve([0, 10, 5, 0, 9, 0, 0, 0, 0, 1], steps=10)
    assert found.percent == (10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 100.0)
    assert found.frequency == (1.0, 0.9, 0.5, 0.1, 0, 0, 0, 0, 0, 0)
    assert (found.always, found.half, found.ever) == (0.2, 0.3, 0.4)


def test_long_curves_are_thinned_and_keep_their_ends() -> None:
    found = curve(list(range(100_001)), steps=100_000)
    assert len(found.percent) < 250
    assert found.frequency[0] == 1.0 and found.frequency[-1] == 0.0 and found.percent[-1] == 100


def test_report_shows_curves_and_what_was_kept(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    kept = [KeptShare(name="radius", shares=((50, 0.4), (100, 0.6)))]
    write_report(tmp_path, [curve([2, 1, 0, 0], 2)], kept, {"steps": 2}, log=lambda text: None)
    text = (tmp_path / "README.md").read_text()
    assert "| MLP | 0.2 | absolute gradient | 25.00% | 50.00% | 50.00% | 50.00% | 25.00% |" in text
    assert "| radius | 2 | 40.0% | 50.0% | 60.0% |" in text
    assert json.loads((tmp_path / "results.json").read_text())["kept"][0]["name"] == "radius"
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert "MLP" not in as_markdown([], kept, {})


def test_kept_shares_come_from_the_metrics_of_a_run(tmp_path: Path) -> None:
    lines = [{"iteration": 1, "lm_loss": 1.0}, {"iteration": 2, "lm_loss": 1.0, "index_kept": 0.75}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert kept_of(tmp_path).shares == ((2, 0.75),)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(lines[0]) + "\n")
    with pytest.raises(ConfigError, match="recorded no index_kept"):
        kept_of(tmp_path)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.yaml"):
        flags_of(tmp_path, at=None)


def test_short_run_is_watched(tmp_path: Path) -> None:
    from tools.bench.locality.watch import watch

    curves, facts = watch([*TINY, "--run-dir", str(tmp_path)], steps=3, tops=[0.1], kinds=KINDS)
    assert {(c.kind, c.what) for c in curves} == {
        (kind, what) for kind in KINDS.values() for what in ("gradient", "update")
    }
    for found in curves:
        assert found.steps == 3 and 0.1 <= found.ever <= 0.31
        assert 0 <= found.shared <= 1
    entries = {c.kind: c.entries for c in curves}
    assert entries == {"MLP": 8 * 32 * 32, "attention": 4 * 32 * 32, "embedding": (64 + 16) * 32}
    assert facts["first step"] == 1
    with pytest.raises(ConfigError, match="the run ends 4 steps after"):
        watch([*TINY, "--run-dir", str(tmp_path)], steps=5, tops=[0.1], kinds=KINDS)
