"""Tests that a model over pipeline stages equals the model on one rank, up to rounding."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.errors import ConfigError
from megatron.parallel.groups import ProcessGroups
from megatron.parallel.tensor_shard import TensorShard
from megatron.pipeline.transport import open_transport
from tests.faults.inject import arm, parse_faults
from tests.pipeline.grids import grid, masters, train_by_hand, trainer_on
from tests.ranks import Ranks
from tests.training.harness import metrics_of

pytestmark = pytest.mark.push

DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
UNTIED = f"{DROPOUT} --untie-embeddings-and-output-weights"
DRY = "--attention-dropout 0 --hidden-dropout 0"
FIVE = f"--num-layers 5 {DRY}"
TURNS = "--num-layers-per-virtual-pipeline-stage"
CASES = {
    "pp2": (2, 2, DROPOUT, ""),
    "pp2-uneven-recomputed": (2, 2, FIVE, "--recompute-granularity full"),
    "pp2-products-kept": (2, 2, DROPOUT, "--recompute-granularity ops"),
    "pp2-in-turns-runs-recomputed": (
        *(2, 2, DROPOUT),
        f"{TURNS} 1 --recompute-granularity every --recompute-num-layers 3",
    ),
    "pp2-first-stage-small": (2, 2, FIVE, "--decoder-first-pipeline-num-layers 1"),
    "pp2-in-turns": (2, 2, DROPOUT, f"{TURNS} 1"),
    "pp2-in-turns-untied": (2, 2, UNTIED, f"{TURNS} 1"),
    "pp4-uneven": (4, 4, FIVE, ""),
    "pp4-untied": (4, 4, UNTIED, ""),
    "dp2-pp2-in-turns": (4, 2, DROPOUT, f"{TURNS} 1"),
    "dp2-pp2": (4, 2, FIVE, ""),
    "tp2-pp2-uneven": (4, 2, FIVE, ""),
    "tp2-pp2-in-turns-sequence-cut": (4, 2, DRY, f"{TURNS} 1 --sequence-parallel"),
}
"""Ranks, stages, model, and how the model is sharded; tp2: two ranks per stage."""


@pytest.fixture(scope="module")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory):
    """Return a function that trains on one rank; it gives the findings and validation losses."""

    @cache
    def run(flags: str) -> tuple[dict[str, Any], list[float]]:
        run_dir = tmp_path_factory.mktemp("alone")
        (found,) = ranks.run(1, train_by_hand, flags, 1, run_dir)
        return found, metrics_of(run_dir, "valid_loss")

    return run


@pytest.mark.parametrize("case", CASES)
def test_stages_find_what_one_rank_finds(ranks: Ranks, tmp_path: Path, alone: Any, case: str):
    world, pp, model, cut = CASES[case]
    whole, valid = alone(model)
    tp = 2 if case.startswith("tp2") else 1
    found = ranks.run(world, train_by_hand, f"{model} {cut}", pp, tmp_path, tp)
    for each in found:
        assert each["losses"] == pytest.approx(whole["losses"], abs=1e-5)
        assert each["norms"] == pytest.approx(whole["norms"], rel=1e-5)
        assert each["params_norms"] == pytest.approx(whole["params_norms"], rel=1e-6)
        assert each["tokens"] == whole["tokens"]
        # The gradient of a key bias is 0 but for rounding, which differs on a sharded model.
        assert each["zeros"] == pytest.approx(whole["zeros"], abs=3 if tp > 1 else 0)
        assert each["losses"] == found[0]["losses"] and each["kept"] == 0
        assert each["timers"] == found[0]["timers"]
    assert metrics_of(tmp_path, "valid_loss") == pytest.approx(valid, abs=1e-5)
    copies: dict[tuple[str, TensorShard | None], list[torch.Tensor]] = {}
    for each in found:
        for name, values in each["params"].items():
            wanted, part = whole["params"][name].view(whole["shapes"][name]), each["cuts"][name]
            wanted = wanted if part is None else part.of(wanted)
            torch.testing.assert_close(values, wanted.view(-1), atol=1e-5, rtol=0)
            copies.setdefault((name, part), []).append(values)
    assert {name for name, _ in copies} == whole["params"].keys()
    for name, (first, *others) in copies.items():  # tied, data-parallel and unsharded parameters
        assert all(torch.equal(first, other) for other in others), name


def test_buckets_leave_while_backward_runs_and_bytes_are_counted(
    ranks: Ranks, tmp_path: Path
) -> None:
    one_way, table = 16 * 32 * 4, 128 * 32 * 4
    for in_turns in (False, True):
        flags = f"{DROPOUT} {f'{TURNS} 1' if in_turns else ''}"
        found = ranks.run(4, train_by_hand, flags, 2, tmp_path / str(in_turns))
        for each in found:
            *_, before, after = each["launched"]
            # Only tied tables wait for the end. Chunks that have finished the step do not wait for
            # the others; no step sends anything before its last backward.
            assert after == each["buckets"] - each["tied"] > 1
            assert (before > 0) == in_turns and each["launched"][0] == 0
            # 4 microbatches. Each of two stages sends one message over each boundary.
            sends = 4 * (3 if in_turns else 1)
            assert all(sent.keys() == {"bytes_pp"} for sent in each["sent"])
            # And half of the tied table both ways, for the sum of its two copies.
            overhead = each["sent"][0]["bytes_pp"] - sends * one_way - each["tied"] * table
            assert 0 < overhead < 100, "other sums over a pipeline are small"
    assert "sent per step (pp): " in (tmp_path / "True" / "log.txt").read_text()


def skipped(groups: ProcessGroups, faults: str, flags: str, run_dir: Path) -> dict[str, Any]:
    trainer = trainer_on(groups, flags, 2, run_dir)
    arm(trainer, parse_faults(faults))
    before, found = masters(trainer), []
    for _ in range(2):
        record, _ = trainer.train_step()
        after = masters(trainer)
        found.append((record.skipped, all(torch.equal(after[n], before[n]) for n in after)))
    trainer.metrics.close()
    trainer.engine.detach()
    return {"steps": found, "loss": record.loss}


@pytest.mark.parametrize("fault", ["nan:0:1:backward", "inf:1:1:backward", "nan:1:1:forward"])
def test_a_bad_gradient_on_any_stage_skips_the_step_on_all(
    ranks: Ranks, tmp_path: Path, fault: str
) -> None:
    for found in ranks.run(2, skipped, fault, f"{TURNS} 1", tmp_path):
        assert found["steps"] == [(True, True), (False, False)]


def refused_fault(groups: ProcessGroups, run_dir: Path) -> str:
    trainer = trainer_on(groups, "", 2, run_dir)
    trainer.engine.detach()
    with pytest.raises(ConfigError) as caught:
        arm(trainer, parse_faults("spike:0:1:forward"))
    return str(caught.value)


def test_a_spike_needs_a_rank_with_a_loss(ranks: Ranks, tmp_path: Path) -> None:
    calm, loud = (
        ranks.run(2, skipped, fault, f"{TURNS} 1", tmp_path / fault[:3])
        for fault in ("slow:0:9:forward", "spike:1:2:forward")
    )
    # One of 8 microbatches of the step counts a hundred times, on every rank.
    assert all(found["loss"] > 10 * calm[0]["loss"] for found in loud)
    for text in ranks.run(2, refused_fault, tmp_path):
        assert "name one from 1 to 1" in text


def on_shapes(groups: ProcessGroups) -> str:
    mine = grid(groups, pp=2)
    shape = (2, 8 + mine.pp.rank, 4)
    with pytest.raises(ConfigError) as caught:
        open_transport(mine, shape=shape, dtype=torch.float32, device=torch.device("cpu"))
    return str(caught.value)


def test_stages_that_would_send_other_shapes_are_told_apart(ranks: Ranks) -> None:
    for text in ranks.run(2, on_shapes):
        assert "rank 1 sends activations of [2, 9, 4] torch.float32, rank 0 of [2, 8, 4]" in text
