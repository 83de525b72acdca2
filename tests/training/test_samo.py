"""`--grad-path samo` in whole runs: exact resume, what is saved, tickets from a dense run, and the
way back to a dense one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.checkpoint.store import Checkpoint
from megatron.config import parse
from megatron.errors import ConfigError
from megatron.parallel.groups import ProcessGroups
from pretrain_gpt import GRADIENT_PATHS
from samo.mask import save_masks
from tests.pipeline.grids import grid
from tests.ranks import Ranks
from tests.tiers import sampled
from tests.training.harness import NO_DROPOUT, TINY, make_trainer, metrics_of, train
from tests.training.test_radius import on_rank_refused
from tests.training.test_resume import check_left_and_resumed

pytestmark = pytest.mark.push

SAMO = "--train-iters 9 --grad-path samo --samo-sparsity 0.8 --eval-interval 100 --log-interval 1"
EARLY_BIRD = (
    "--samo-pruning early-bird --samo-early-bird-interval 1 --samo-early-bird-distance 1 "
    "--samo-sparsity 0.5"
)
"""Draws its ticket after update 5."""
DSR = "--samo-pruning random --dsr-interval 1 --dsr-fraction 0.05"
RADIUS = "--radius-density 0.3 --radius-interval 3 --radius-start-iter 2"


def flags(*more: str) -> str:
    return " ".join([TINY, SAMO, *more])


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        "",
        "--bf16 --samo-pruning random --samo-keep-embeddings",
        f"{EARLY_BIRD} --bf16",
        f"{DSR} --dsr-until 9 --dsr-threshold 0.01",
        f"{DSR} --dsr-reset-moments new --bf16",
        f"--grad-path samo+radius {RADIUS}",
        f"--grad-path samo+radius {RADIUS} --radius-schedule rolling --bf16",
        f"--grad-path samo+radius {RADIUS} {EARLY_BIRD} --radius-start-iter 0",
        "--fp16 --initial-loss-scale 65536 --samo-scope global",
        "--optimizer sgd --bf16 --grad-reduce-in-bf16",
    ],
)
def test_left_and_resumed_is_uninterrupted(ranks: Ranks, tmp_path: Path, options: str) -> None:
    """Dropout is on."""
    check_left_and_resumed(ranks, 2, flags(options), (4, 5, 7), tmp_path)


def test_nothing_pruned_is_the_dense_run_bit_by_bit(ranks: Ranks, tmp_path: Path) -> None:
    long = f"{TINY} --train-iters 50 --bf16 --global-batch-size 8"
    (dense, _) = ranks.run(2, train, long, tmp_path / "dense")
    pruned = f"{long} --grad-path samo --samo-sparsity 0"
    (found, _) = ranks.run(2, train, pruned, tmp_path / "samo")
    assert found["state"].keys() == dense["state"].keys()
    for name, state in dense["state"].items():
        assert torch.equal(found["state"][name], state), name
    assert metrics_of(tmp_path / "dense") == metrics_of(tmp_path / "samo")


def test_a_checkpoint_holds_each_mask_once_and_what_exists(ranks: Ranks, tmp_path: Path) -> None:
    """Three states of four bytes for what exists, a bit for every entry that may not."""
    (found, _) = ranks.run(2, train, flags("--samo-pruning random --bf16"), tmp_path)
    folder = tmp_path / "checkpoints" / "step_00000009"
    with Checkpoint.open(folder) as saved:
        masks = saved.names("mask/")
        assert len(masks) == 10
        logical = sum(saved.read(name).numel() for name in saved.names("param/"))
        stored = 0
        for name in saved.names("param/"):
            mask = f"mask/{name.removeprefix('param/')}"
            weight = saved.read(name)
            if mask not in masks:
                stored += weight.numel()
                continue
            exists = saved.read(mask)
            stored += int(exists.sum())
            assert not weight[~exists].any()
            assert saved.mask(f"exp_avg/{name.removeprefix('param/')}") == mask
            param = found["params"][name.removeprefix("param/")].reshape(-1)[: weight.numel()]
            assert torch.equal(param.view(weight.shape), weight.bfloat16())
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert 12 * stored + logical / 8 <= size < 1.05 * (12 * stored + logical / 8) + 16384


def test_a_dense_warm_up_is_pruned_by_its_weights(ranks: Ranks, tmp_path: Path) -> None:
    dense = TINY.replace("--train-iters 8", "--train-iters 4")
    (before,) = ranks.run(1, train, dense, tmp_path / "dense")
    load = f"--load {tmp_path / 'dense'} --train-iters 4"
    trainer_of = flags(load, "--train-iters 5")
    (moments,) = ranks.run(1, on_rank_start, trainer_of, tmp_path / "samo")
    for name, (mask, states) in moments.items():
        for kind, stored in states.items():
            was = before["state"][f"{kind}/{name}"]
            assert torch.equal(stored, was if mask is None else was[mask]), (kind, name)
        if mask is not None:
            weight = before["state"][f"param/{name}"].abs()
            assert weight[mask].min() >= weight[~mask].max()
            assert int(mask.sum()) == 96 * 32 - 96 * 32 * 8 // 10 or "word" not in name
    assert "gradient path samo starts here" in (tmp_path / "samo" / "log.txt").read_text()


def on_rank_start(groups: ProcessGroups, line: str, run_dir: Path) -> dict:
    """Masks and states that a run starts with, by name."""
    trainer = make_trainer(groups, line, run_dir)
    found: dict[str, tuple[torch.Tensor | None, dict[str, torch.Tensor]]] = {}
    for kind, name, flat in trainer.optimizer.tensors():
        found.setdefault(name, (trainer.engine.layout.mask(name), {}))[1][kind] = flat.clone()
    trainer.engine.detach()
    trainer.metrics.close()
    return found


def test_a_pruned_network_may_be_trained_on_densely(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(1, train, flags("--exit-interval 5"), tmp_path / "samo")
    dense = f"{TINY} --train-iters 9 --load {tmp_path / 'samo'}"
    (said,) = ranks.run(1, on_rank_refused, dense, tmp_path / "dense")
    assert "gradient.grad_path: 'samo' there, 'dense' here" in said
    (found,) = ranks.run(1, train, f"{dense} --reset-grad-state", tmp_path / "dense")
    assert found["iteration"] == 9
    assert all(int((param == 0).sum()) < param.numel() / 2 for param in found["params"].values())


def test_another_sparsity_takes_a_flag(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(1, train, flags("--exit-interval 5"), tmp_path / "samo")
    sparser = flags(f"--samo-sparsity 0.95 --load {tmp_path / 'samo'}")
    (said,) = ranks.run(1, on_rank_refused, sparser, tmp_path / "sparser")
    assert "samo.samo_sparsity: 0.8 there, 0.95 here" in said
    (found,) = ranks.run(1, train, f"{sparser} --reset-grad-state", tmp_path / "sparser")
    matrices = [p for p in found["params"].values() if p.dim() > 1]
    assert sum(int(p.count_nonzero()) for p in matrices) <= 0.06 * sum(p.numel() for p in matrices)


def test_the_log_tells_what_exists_and_when_the_ticket_was_drawn(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(2, train, flags(EARLY_BIRD, "--bf16 --accumulate-allreduce-grads-in-fp32"), tmp_path)
    log = (tmp_path / "log.txt").read_text()
    assert "nothing is pruned yet" in log
    assert log.count("early bird: draw") == 5 and "below 1: the ticket is drawn; " in log
    sent = metrics_of(tmp_path, "bytes_sent")
    assert len(set(sent[:5])) == 1 and len(set(sent[5:])) == 1
    assert 0.5 < sent[5] / sent[0] < 0.55
    assert len(metrics_of(tmp_path, "mask_distance")) == 4


GRIDS = [
    "--samo-scope global --bf16",
    f"{DSR} --dsr-until 9",
    f"{EARLY_BIRD} --samo-scope global",
    f"--grad-path samo+radius {RADIUS}",
]


@pytest.mark.parametrize("options", sampled(GRIDS, GRIDS[1::2]))
def test_a_run_that_changes_its_grid_is_the_run_of_one_rank(
    ranks: Ranks, tmp_path: Path, options: str
) -> None:
    """Four steps on two stages of two tensor-parallel ranks, the rest on two such ranks alone."""
    line = flags(options, NO_DROPOUT, "--swiglu")
    ranks.run(1, train, line, tmp_path / "one")
    left = f"{line} --exit-interval 4"
    assert set(ranks.run(4, on_rank_of_grid, left, tmp_path / "grid", 2, 2)) == {4}
    assert set(ranks.run(2, on_rank_of_grid, line, tmp_path / "grid", 2, 1)) == {9}
    bound = 2e-3 if "--bf16" in options or DSR in options else 1e-5
    found, wanted = metrics_of(tmp_path / "grid"), metrics_of(tmp_path / "one")
    assert len(found) == len(wanted) == 9
    assert found == pytest.approx(wanted, abs=bound)
    masks: list[dict[str, torch.Tensor]] = []
    for run in ("one", "grid"):
        with Checkpoint.open(tmp_path / run / "checkpoints" / "step_00000009") as saved:
            masks.append({name: saved.read(name) for name in saved.names("mask/")})
    assert masks[0].keys() == masks[1].keys() and len(masks[0]) == 10
    stored = [sum(int(mask.sum()) for mask in each.values()) for each in masks]
    assert stored[0] == stored[1]
    # Weights are rounded in another order, and one at a threshold may fall on its other side; a
    # rewiring then grows elsewhere.
    if DSR not in options:
        differing = sum(int((mask ^ masks[1][name]).sum()) for name, mask in masks[0].items())
        assert differing <= (4 if EARLY_BIRD in options else 0)


def on_rank_of_grid(groups: ProcessGroups, line: str, run_dir: Path, tp: int, pp: int) -> int:
    shape = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}"
    trainer = make_trainer(grid(groups, tp=tp, pp=pp), f"{line} {shape}", run_dir)
    trainer.train()
    trainer.engine.detach()
    trainer.metrics.close()
    return trainer.progress.iteration


def test_fewer_ranks_go_on_with_what_had_not_been_sent(ranks: Ranks, tmp_path: Path) -> None:
    options = flags(f"--grad-path samo+radius {RADIUS}", NO_DROPOUT)
    (through, _) = ranks.run(2, train, options, tmp_path / "through")
    ranks.run(2, train, f"{options} --exit-interval 5", tmp_path / "left")
    (resumed,) = ranks.run(1, train, options, tmp_path / "left")
    for name, param in through["params"].items():
        torch.testing.assert_close(resumed["params"][name], param, rtol=1e-4, atol=1e-5)


def test_a_damaged_mask_is_found_and_the_step_before_taken(ranks: Ranks, tmp_path: Path) -> None:
    options = flags("--samo-pruning random --save-interval 4 --exit-interval 8")
    ranks.run(1, train, options, tmp_path)
    folder = tmp_path / "checkpoints" / "step_00000008"
    with Checkpoint.open(folder, verify=False) as saved:
        (part,) = saved.manifest.tensors["mask/layers.0.mlp.dense_h_to_4h.weight"].slices
    file = folder / part.file
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    (found,) = ranks.run(1, train, options, tmp_path)
    assert found["iteration"] == 8
    assert (tmp_path / "checkpoints" / "step_00000008.damaged-1").is_dir()


def test_a_mask_file_that_prunes_nothing_is_the_dense_run(ranks: Ranks, tmp_path: Path) -> None:
    """The vocabulary of 96 is padded to 128."""
    dense = f"{TINY} --bf16"
    (plain,) = ranks.run(1, train, dense, tmp_path / "dense")
    masks = {n: torch.ones_like(p).bool() for n, p in plain["params"].items() if p.dim() > 1}
    words = "embedding.word_embeddings.weight"
    masks[words] = masks[words][:96]
    save_masks(tmp_path / "all.npz", masks)
    file = f"--grad-path samo --samo-pruning file --samo-mask-file {tmp_path / 'all.npz'}"
    (found,) = ranks.run(1, train, f"{dense} {file}", tmp_path / "samo")
    for name, state in plain["state"].items():
        assert torch.equal(found["state"][name], state), name


def on_rank_misused(groups: ProcessGroups, line: str, run_dir: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        make_trainer(groups, line, run_dir)
    return str(caught.value)


def test_dsr_rewires_only_what_a_mask_file_prunes(ranks: Ranks, tmp_path: Path) -> None:
    """A tensor that the file leaves whole is named: a rewired one may be whole for a while."""
    (plain,) = ranks.run(1, train, f"{TINY} --train-iters 1", tmp_path / "dense")
    masks = {
        name: torch.arange(param.numel()).view(param.shape) % 5 == 0
        for name, param in plain["params"].items()
        if param.dim() > 1 and "embedding" not in name
    }
    save_masks(tmp_path / "masks.npz", masks)
    file = f"--samo-pruning file --samo-mask-file {tmp_path / 'masks.npz'}"
    line = flags(f"{file} --dsr-interval 1 --dsr-fraction 0.05 --dsr-threshold 0.01")
    said = ranks.run(2, on_rank_misused, line, tmp_path / "refused")
    assert said[0] == said[1]
    assert "a rewiring would prune embedding.position_embeddings.weight" in said[0]
    assert f"{tmp_path / 'masks.npz'} leaves whole, one of 2 such tensors" in said[0]
    check_left_and_resumed(ranks, 2, f"{line} --samo-keep-embeddings", (4, 7), tmp_path)
    with Checkpoint.open(tmp_path / "left" / "checkpoints" / "step_00000009") as saved:
        assert saved.names("mask/") == tuple(sorted(f"mask/{name}" for name in masks))
        moved = [name for name, old in masks.items() if not saved.read(f"mask/{name}").equal(old)]
    assert moved


def test_finetuning_a_pruned_network_keeps_its_mask(ranks: Ranks, tmp_path: Path) -> None:
    (before,) = ranks.run(1, train, flags("--samo-pruning random"), tmp_path / "samo")
    anew = flags(f"--samo-pruning random --seed 77 --finetune --load {tmp_path / 'samo'}")
    (states,) = ranks.run(1, on_rank_start, anew, tmp_path / "anew")
    for name, (_, stored) in states.items():
        assert torch.equal(stored["param"], before["state"][f"param/{name}"]), name


def test_a_lower_sparsity_than_the_checkpoint_has_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(1, train, flags("--exit-interval 5"), tmp_path / "samo")
    denser = flags(f"--samo-sparsity 0.5 --reset-grad-state --load {tmp_path / 'samo'}")
    (said,) = ranks.run(1, on_rank_config_refused, denser, tmp_path / "denser")
    assert said.startswith("--samo-sparsity: the checkpoint is pruned already, and of ")


@pytest.mark.parametrize(("interval", "radius", "enough"), [(1, 4, 8), (2, 4, 12)])
def test_a_run_too_short_for_radius_after_the_ticket_is_refused(
    interval: int, radius: int, enough: int
) -> None:
    line = flags(f"--grad-path samo+radius {EARLY_BIRD} --samo-early-bird-interval {interval}")
    line += f" --radius-start-iter 0 --radius-interval {radius}"
    parse(f"{line} --train-iters {enough}".split(), paths=GRADIENT_PATHS)
    with pytest.raises(ConfigError, match=f"after step {5 * interval}, and .* begin at; lower"):
        parse(f"{line} --train-iters {enough - 1}".split(), paths=GRADIENT_PATHS)


def on_rank_config_refused(groups: ProcessGroups, line: str, run_dir: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        make_trainer(groups, line, run_dir)
    return str(caught.value)


@pytest.mark.parametrize("path", ["samo", f"samo+radius {RADIUS}"])
def test_another_model_is_refused_before_its_weights_are_looked_at(
    ranks: Ranks, tmp_path: Path, path: str
) -> None:
    ranks.run(1, train, f"{TINY} --exit-interval 2", tmp_path / "dense")
    wider = f"{flags(f'--grad-path {path}')} --hidden-size 64 --load {tmp_path / 'dense'}"
    (said,) = ranks.run(1, on_rank_refused, wider, tmp_path / "wider")
    assert "model.hidden_size: 32 there, 64 here" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--samo-pruning early-bird --samo-early-bird-interval 1", "masks will be drawn, a ticket"),
        (f"{DSR} --dsr-until 6", "dsr_until 6 is before update 7"),
    ],
)
def test_a_start_too_late_for_what_it_waits_for_is_refused(
    ranks: Ranks, tmp_path: Path, options: str, said: str
) -> None:
    ranks.run(1, train, f"{TINY} --exit-interval 6", tmp_path / "dense")
    late = flags(f"{options} --load {tmp_path / 'dense'}")
    (found,) = ranks.run(1, on_rank_refused, late, tmp_path / "late")
    assert "with 3 steps left" in found and said in found


def test_bytes_sent_are_the_shares_of_both(ranks: Ranks, tmp_path: Path) -> None:
    wide = f"{TINY} --hidden-size 128 --train-iters 9 --log-interval 1 --eval-interval 100"
    ranks.run(2, train, wide, tmp_path / "dense")
    dense = metrics_of(tmp_path / "dense", "bytes_sent")[0]
    samo = f"{wide} --grad-path samo --samo-sparsity 0.8 --samo-pruning random"
    ranks.run(2, train, samo, tmp_path / "samo")
    (sent,) = set(metrics_of(tmp_path / "samo", "bytes_sent"))
    assert sent / dense == pytest.approx(0.2, abs=0.012)  # biases and norms stay
    both = f"{samo} --grad-path samo+radius {RADIUS}"
    ranks.run(2, train, both, tmp_path / "both")
    least = min(metrics_of(tmp_path / "both", "bytes_sent"))
    assert least / sent == pytest.approx(0.3, abs=0.03)


def test_adams_step_count_goes_on_where_moments_are_reset(ranks: Ranks, tmp_path: Path) -> None:
    """A moment that a rewiring set to 0 is corrected by the count of all updates, as in torch."""
    options = flags(f"{DSR} --dsr-until 9 --adam-beta1 0.9 --adam-beta2 0.99 --train-iters 9")
    (found,) = ranks.run(1, on_rank_first_after_a_reset, options, tmp_path)
    assert [t for t, _ in found] == [2, 3, 5, 9], "the updates after the rewirings"
    for t, ratio in found:
        # From moments of 0: exp_avg = 0.1 g, exp_avg_sq = 0.01 g^2.
        correction = (1 - 0.99**t) ** 0.5 / (1 - 0.9**t)
        assert ratio == pytest.approx(0.1 / 0.01**0.5 * correction, rel=1e-3)


def on_rank_first_after_a_reset(
    groups: ProcessGroups, line: str, run_dir: Path
) -> list[tuple[int, float]]:
    """Return each update after a rewiring, and the median of its changes over the learning rate."""
    trainer = make_trainer(groups, f"{line} --weight-decay 0 --lr-decay-style constant", run_dir)
    found: list[tuple[int, float]] = []
    for _ in range(9):
        optimizer = trainer.optimizer
        before = {n: t.clone() for kind, n, t in optimizer.tensors() if kind == "param"}
        fresh = optimizer.applied and not any(
            t.any() for kind, _, t in optimizer.tensors() if kind != "param"
        )
        # The rewiring that follows the update would change which entries there are.
        rewire, optimizer.update_masks = optimizer.update_masks, lambda: None
        trainer.train_step()
        if fresh:
            lr = trainer.config.optimizer.lr
            assert lr is not None
            moved = torch.cat(
                [
                    ((t - before[n]) / lr).abs().view(-1)
                    for kind, n, t in optimizer.tensors()
                    if kind == "param"
                ]
            )
            found.append((optimizer.applied, float(moved[moved > 0].median())))
        rewire()
        optimizer.update_masks = rewire
    trainer.engine.detach()
    trainer.metrics.close()
    return found


def test_patterns_keep_tensors_dense_and_unrewired(ranks: Ranks, tmp_path: Path) -> None:
    dense = "--samo-dense *.attention.* *position*"
    (found,) = ranks.run(1, train, flags(f"{DSR} --dsr-until 9", dense), tmp_path)
    with Checkpoint.open(tmp_path / "checkpoints" / "step_00000009") as saved:
        masks = [name.removeprefix("mask/") for name in saved.names("mask/")]
    matrices = {name for name, param in found["params"].items() if param.dim() > 1}
    whole = {name for name in matrices if ".attention." in name or "position" in name}
    assert len(whole) >= 3 and set(masks) == matrices - whole
    for name in whole:
        assert found["params"][name].count_nonzero() > 0.9 * found["params"][name].numel()


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        ("*.atention.*", "samo_dense '*.atention.*': matches none of the 10 tensors"),
        ("*.bias", "samo_dense '*.bias': matches none of the 10 tensors"),
        ("*", "samo_dense *: leaves no tensor to prune; give fewer patterns"),
    ],
)
def test_patterns_that_change_nothing_or_everything_are_refused(
    ranks: Ranks, tmp_path: Path, patterns: str, said: str
) -> None:
    (found,) = ranks.run(1, on_rank_config_refused, flags(f"--samo-dense {patterns}"), tmp_path)
    assert found.startswith(said)
