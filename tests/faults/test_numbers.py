"""Steps whose numbers are wrong, and replicas that drift apart, in whole runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.errors import NumericsError, SparsetronError
from megatron.fault_tolerance.loss_spikes import WINDOW, is_spike, remember
from megatron.fault_tolerance.replicas import checksum
from megatron.parallel.groups import ProcessGroups
from tests.faults.inject import arm, parse_faults
from tests.ranks import Ranks
from tests.training.harness import TINY, make_trainer, metrics_of


def on_rank(groups: ProcessGroups, flags: str, run_dir: Path, faults: str = "") -> dict[str, Any]:
    """Train with faults; the state that the run ends in, and how it ended."""
    trainer = make_trainer(groups, flags, run_dir)
    if faults:
        arm(trainer, parse_faults(faults))
    error = ""
    try:
        trainer.train()
    except SparsetronError as raised:
        error = f"{type(raised).__name__} {raised.shared} {raised}"
    trainer.metrics.close()
    trainer.engine.detach()
    return {
        "error": error,
        "progress": vars(trainer.progress),
        "applied": trainer.optimizer.applied,
        "state": {f"{kind}/{name}": t.clone() for kind, name, t in trainer.optimizer.tensors()},
    }


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_a_bad_step_is_skipped_everywhere_and_changes_nothing(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    """A run with a bad last step ends like a run without that step; only data advance."""
    flags = f"{TINY} --lr-decay-style cosine --lr-warmup-iters 3 --lr-decay-iters 8"
    faults = f"{kind}:1:6:backward"
    bad = ranks.run(2, on_rank, f"{flags} --train-iters 6", tmp_path / "bad", faults)
    good = ranks.run(2, on_rank, f"{flags} --train-iters 5", tmp_path / "good")
    for broken, whole in zip(bad, good, strict=True):
        assert broken["error"] == "" and broken["applied"] == 5
        assert differing(broken["state"], whole["state"]) == []
        assert broken["progress"]["consumed_samples"] == 6 * 16
        assert broken["progress"]["applied_samples"] == 5 * 16
    assert metrics_of(tmp_path / "bad", "skipped") == [False] * 5 + [True]
    assert metrics_of(tmp_path / "bad")[:5] == metrics_of(tmp_path / "good")
    longer = f"{flags} --train-iters 8"
    ranks.run(2, on_rank, longer, tmp_path / "on", faults)
    ranks.run(2, on_rank, longer, tmp_path / "clean")
    lr, clean = metrics_of(tmp_path / "on", "lr"), metrics_of(tmp_path / "clean", "lr")
    assert lr[6:] == clean[5:7], "the step after the skipped one uses its learning rate"


def test_too_many_in_a_row_end_the_run_and_save_nothing_bad(ranks: Ranks, tmp_path: Path) -> None:
    flags = f"{TINY} --train-iters 20 --lr-decay-iters 20 --save-interval 3 --max-skipped-steps 4"
    found = ranks.run(2, on_rank, flags, tmp_path, "nan:0:5+:backward")
    for rank in found:
        assert rank["error"].startswith("NumericsError True 4 steps in a row were skipped")
        assert "up to step 8" in rank["error"] and rank["applied"] == 4
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir() if p.is_dir())
    assert names == ["step_00000003", "step_00000006"]
    # Started again without the cause, the run continues from there.
    again = ranks.run(2, on_rank, flags, tmp_path)
    assert [rank["error"] for rank in again] == ["", ""] and again[0]["applied"] == 18
    assert metrics_of(tmp_path, "skipped") == [False] * 4 + [True] * 2 + [False] * 14


OVERFLOW = "--lr 3.4e38 --lr-decay-style constant --clip-grad 0"


@pytest.mark.parametrize("world", [1, 2])
def test_a_state_that_is_not_finite_is_never_saved(
    ranks: Ranks, tmp_path: Path, world: int
) -> None:
    flags = f"{TINY} --save-interval 2 --keep-last 2"
    ranks.run(world, on_rank, f"{flags} --exit-interval 5", tmp_path)
    for found in ranks.run(world, on_rank, f"{flags} {OVERFLOW}", tmp_path):
        assert found["error"].startswith("NumericsError True step 6 is not saved: ")
        assert "is not finite" in found["error"] and "status.py" in found["error"]
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*"))
    assert names == ["step_00000004", "step_00000005"]


def test_a_loss_that_is_not_finite_counts_at_any_loss_scale(ranks: Ranks, tmp_path: Path) -> None:
    """The first update makes weights with which every forward overflows in fp16."""
    flags = f"{TINY} --fp16 --initial-loss-scale 64 --max-skipped-steps 3 --train-iters 12"
    (found,) = ranks.run(1, on_rank, f"{flags} --lr 3e4 --clip-grad 0", tmp_path)
    assert found["error"].startswith("NumericsError True 3 steps in a row were skipped, up to st")
    assert found["progress"]["finite_step"] == 1 and found["progress"]["iteration"] == 4


def test_fewer_in_a_row_do_not(ranks: Ranks, tmp_path: Path) -> None:
    faults = "nan:0:2:backward,nan:1:3:backward,inf:0:5:backward,nan:1:6:backward"
    found = ranks.run(2, on_rank, f"{TINY} --max-skipped-steps 3", tmp_path, faults)
    assert [rank["error"] for rank in found] == ["", ""]
    assert sum(metrics_of(tmp_path, "skipped")) == 4


def test_overflows_count_only_at_the_lowest_loss_scale(ranks: Ranks, tmp_path: Path) -> None:
    flags = f"{TINY} --fp16 --initial-loss-scale 16 --hysteresis 1 --max-skipped-steps 3"
    found = ranks.run(1, on_rank, f"{flags} --train-iters 30", tmp_path, "inf:0:1+:backward")
    # 16, 8, 4 and 2 do not count; 1 is the least, and is tried three times.
    assert "up to step 7" in found[0]["error"], found[0]["error"]


@pytest.mark.push
def test_a_loss_spike_is_skipped_if_asked_for(ranks: Ranks, tmp_path: Path) -> None:
    flags = f"{TINY} --global-batch-size 4 --num-layers 1 --train-iters {WINDOW + 6}"
    flags += " --skip-loss-spikes 6"
    step = WINDOW + 3
    found = ranks.run(2, on_rank, flags, tmp_path, f"spike:1:{step}:forward,spike:1:2:forward")
    skipped = metrics_of(tmp_path, "skipped")
    assert [number for number, is_so in enumerate(skipped, 1) if is_so] == [step]
    assert [rank["applied"] for rank in found] == [WINDOW + 5] * 2
    assert differing(found[0]["state"], found[1]["state"]) == []
    assert len(found[0]["progress"]["losses"]) == WINDOW


def test_what_counts_as_a_spike() -> None:
    recent: list[float] = []
    for number in range(WINDOW - 1):
        remember(recent, 2.0 + 0.1 * (-1) ** number)
    assert not is_spike(100.0, recent, sigmas=6.0)
    remember(recent, 2.0)
    assert is_spike(2.7, recent, sigmas=6.0) and not is_spike(2.5, recent, sigmas=6.0)
    assert not is_spike(-9.0, recent, sigmas=6.0)
    for loss in (math.inf, math.nan):
        assert is_spike(loss, recent, sigmas=6.0)
        remember(recent, loss)
        assert is_spike(2.7, recent, sigmas=6.0)
    for _ in range(WINDOW):
        remember(recent, 3.0)
    assert recent == [3.0] * WINDOW


@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_drift_of_one_bit_is_named(ranks: Ranks, tmp_path: Path, precision: str) -> None:
    flags = f"{TINY} {precision} --train-iters 12 --save-interval 4"
    flags += " --check-weight-hash-across-dp-replicas-interval 5"
    found = ranks.run(4, on_rank, flags, tmp_path, "drift:2:9:optimizer")
    for rank in found:
        assert rank["error"].startswith("NumericsError True replicas have drifted apart")
        assert "found after step 10" in rank["error"], rank["error"]
        assert "embedding.word_embeddings.weight on rank 2;" in rank["error"], rank["error"]
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir() if p.is_dir())
    assert names == ["step_00000004", "step_00000008"]


def test_a_drifted_state_is_never_saved(ranks: Ranks, tmp_path: Path) -> None:
    flags = f"{TINY} --train-iters 12 --save-interval 4"
    found = ranks.run(2, on_rank, flags, tmp_path, "drift:1:6:data")
    assert all("found after step 8" in rank["error"] for rank in found)
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir() if p.is_dir())
    assert names == ["step_00000004"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_single_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    values = torch.randn(64).to(dtype)
    whole = checksum(values)
    bits = values.view({2: torch.int16, 4: torch.int32}[values.element_size()])
    for place in range(8 * values.element_size()):
        mask = torch.tensor(1 << place, dtype=torch.int64).to(bits.dtype)
        bits[17] ^= mask
        assert checksum(values) != whole
        bits[17] ^= mask
    assert checksum(values) == whole == checksum(values.flip(0))


def largest_allocation(work: Callable[[], Any]) -> int:
    """Return the bytes of the largest tensor that an operation within `work` allocates."""
    with torch.profiler.profile(profile_memory=True) as profile:
        work()
    return max(event.cpu_memory_usage for event in profile.events() or ())


def test_a_checksum_widens_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.fault_tolerance.replicas._PIECE", 1 << 10)
    values = torch.randn(100_001)
    assert checksum(values) == values.view(torch.int32).long().sum()
    assert largest_allocation(lambda: checksum(values)) <= 8 << 10


def on_rank_norm(groups: ProcessGroups, run_dir: Path) -> tuple[float, float, int]:
    trainer = make_trainer(groups, TINY, run_dir)
    optimizer = trainer.optimizer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron.optimizer.bucket_optimizer.CUDA_CODED_CHUNK", 1 << 10)
        norm = optimizer.params_norm()
        most = largest_allocation(optimizer.params_norm)
    squares = sum(float(state.master.double().square().sum()) for state in optimizer.states)
    trainer.engine.detach()
    trainer.metrics.close()
    return norm, squares**0.5, most


def test_the_norm_of_the_parameters_widens_a_piece_at_a_time(ranks: Ranks, tmp_path: Path) -> None:
    for norm, wanted, most in ranks.run(1, on_rank_norm, tmp_path):
        assert norm == pytest.approx(wanted, rel=1e-14) and most <= 8 << 10


def test_misspelt_faults_are_refused() -> None:
    for text in ("", "kill", "kill:1:3", "kill:x:3:data", "zap:1:3:data", "kill:1:3:lunch"):
        with pytest.raises(SparsetronError, match="SPARSETRON_FAULT"):
            parse_faults(text)


def test_numerics_errors_have_their_code() -> None:
    assert NumericsError.exit_code == 5
