"""Tests of ZeRO-1: the optimizer states that it shards, and results that must not change."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.checkpoint.store import Checkpoint, LocalShard, save_checkpoint
from megatron.data_parallel import engine
from megatron.data_parallel.all_reduce import AllReduceReducer
from megatron.data_parallel.bucket import GradBucket, ParamInfo, Slice
from megatron.data_parallel.bucket_plan import mean_traffic, shard_length
from megatron.data_parallel.encoded_wire import EncodedWire
from megatron.data_parallel.engine import GradientEngine
from megatron.data_parallel.exchange import Exchange
from megatron.data_parallel.gradient_path import PathParts
from megatron.data_parallel.layout import DenseLayout
from megatron.data_parallel.mean_reducer import mean_reducer
from megatron.data_parallel.reduce_scatter import ReduceScatterReducer
from megatron.data_parallel.reducer import StepContext
from megatron.errors import NumericsError
from megatron.fault_tolerance.replicas import compare_replicas
from megatron.optimizer.bucket_optimizer import BucketOptimizer
from megatron.optimizer.distributed_optimizer import StateSlice, fill, pieces
from megatron.optimizer.update_rules import SGD, AdamW
from megatron.parallel.groups import ProcessGroups
from megatron.parallel.tensor_shard import TensorShard
from megatron.sparse import selection
from pretrain_gpt import GRADIENT_PATHS
from samo.layout import CompressedLayout
from tests.contract.grid import GridToy
from tests.contract.harness import (
    EARLY_BIRD,
    FEW,
    RANDOM,
    SHAPES,
    SHORT,
    PathCase,
    Toy,
    config_of,
    gradients,
    same,
)
from tests.planner.shapes import rank_of
from tests.ranks import Ranks, grid

DENSE = PathCase("dense")
SAMO = PathCase("samo", RANDOM)
TICKET = PathCase("samo", EARLY_BIRD | {"samo_early_bird_interval": 1})
"""An early-bird ticket that is pruned after its fifth update."""
RADIUS = PathCase("radius", SHORT)
OFFSETS = PathCase("radius", SHORT | FEW)
"""An index whose entries lie far apart is a list of offsets."""
DRAWN_ROLLING = PathCase(
    "radius", SHORT | {"radius_schedule": "rolling", "radius_select": "seeded"}
)
FP32: dict[str, Any] = {"dtype": torch.float32, "grad_dtype": torch.float32}
BF16: dict[str, Any] = {"dtype": torch.bfloat16, "grad_dtype": torch.float32}
BF16_REDUCED = {"dtype": torch.bfloat16, "grad_dtype": torch.bfloat16}
FP16 = {"dtype": torch.float16, "grad_dtype": torch.float16}


def sharded(case: PathCase) -> PathCase:
    return replace(case, sharded=True)


def test_slices_of_all_ranks_are_all_of_a_parameter() -> None:
    slices = {"a": Slice(0, 100), "b": Slice(128, 5), "c": Slice(192, 300)}
    found: dict[str, list[Slice]] = {name: [] for name in slices}
    for rank in range(4):
        bucket = GradBucket(
            index=0,
            slices=slices,
            grad=torch.zeros(512),
            weight_decay=True,
            tied=False,
            tp_sharded=False,
        )
        group = SimpleNamespace(size=4, rank=rank)
        ReduceScatterReducer(Exchange(group)).attach([bucket], DenseLayout())  # type: ignore[arg-type]
        assert bucket.kept == Slice(128 * rank, 128) and bucket.numel == 512
        for name in slices:
            found[name].append(bucket.kept_of(name))
    assert found["a"] == [Slice(0, 100), Slice(100, 0), Slice(100, 0), Slice(100, 0)]
    assert found["b"] == [Slice(0, 0), Slice(0, 5), Slice(5, 0), Slice(5, 0)]
    assert found["c"] == [Slice(0, 0), Slice(0, 64), Slice(64, 128), Slice(192, 108)]
    assert [shard_length(numel, 4) for numel in (64, 256, 320)] == [64, 64, 128]


def on_rank_empty(groups: ProcessGroups, wire: str) -> tuple[int, int]:
    """Reduce an empty bucket over a wire; return the entries of the mean, and the bytes sent."""
    exchange = Exchange(groups.dp, EncodedWire(wire, groups.second_dp))
    reducer = ReduceScatterReducer(exchange, feedback={"w": 0})
    bucket = GradBucket(
        index=0,
        slices={"w": Slice(0, 0)},
        grad=torch.zeros(0),
        weight_decay=True,
        tied=False,
        tp_sharded=False,
    )
    reducer.attach([bucket], DenseLayout())
    mean = reducer.reduce(bucket, StepContext(t=1)).wait()
    reducer.commit(bucket, None)
    return mean.values.numel(), reducer.stats().bytes_sent


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8", "int4"])
def test_nothing_is_sent_of_an_empty_bucket(ranks: Ranks, wire: str) -> None:
    """A tensor-parallel rank may store no entry of the parameters of a bucket."""
    assert ranks.run(2, on_rank_empty, wire) == [(0, 0)] * 2
    planned = mean_traffic(
        rank_of({"w": (0, 1)}, ranks=2),
        steps=1,
        grad_bytes=4,
        param_bytes=2,
        sharded=True,
        wire=wire,
    )
    assert [each.bytes_sent(2) for each in planned] == [0]


def on_rank_choice(groups: ProcessGroups) -> list[str]:
    infos = Toy(groups, DENSE).infos
    asked = config_of(sharded(DENSE))
    found = [GRADIENT_PATHS["dense"].build(asked, infos, groups).reducer]
    plain = mean_reducer(config_of(DENSE), [], Exchange(groups.dp), groups)
    return [type(r).__name__ for r in (*found, plain)]


def test_the_flag_chooses_the_reducer(ranks: Ranks) -> None:
    plain, shards = AllReduceReducer.__name__, ReduceScatterReducer.__name__
    assert ranks.run(2, on_rank_choice) == [[shards, plain]] * 2
    assert ranks.run(1, on_rank_choice) == [[plain, plain]], "there is nothing to share"


# ---- the trajectory -----------------------------------------------------------------------------


def on_rank_trajectory(
    groups: ProcessGroups, case: PathCase, kinds: dict[str, Any], options: dict[str, Any]
) -> dict[str, list]:
    """Run eight steps unsharded and sharded; one rank has a NaN in the fourth step."""
    scatter, clip, rule = options.get("scatter"), options.get("clip", 0.5), options.get("rule")
    pair = Toy(groups, case, **kinds), Toy(groups, sharded(case), scatter=scatter, **kinds)
    scale = 64.0 if kinds["dtype"] is torch.float16 else 1.0
    found: dict[str, list] = {"differ": [], "far": [], "norms": [], "zeros": [], "changed": []}
    if rule is not None:
        for toy in pair:
            toy.optimizer = BucketOptimizer(toy.engine, rule)
    # Values are written over memory that still holds the gradients of later chunks.
    pair[1].optimizer._chunk = 64
    for number in range(8):
        mine = [gradients(number, micro, groups.dp.rank) for micro in range(2)]
        if number == 3 and groups.dp.rank == groups.dp.size - 1:
            mine[1]["second.weight"][1, 1] = float("nan")
        before = pair[1].state() if number == 3 else {}
        steps = []
        for toy in pair:
            toy.backward(mine, loss_scale=scale)
            steps.append(toy.finish(clip_norm=clip))
        if steps[0].ok:
            found["zeros"].append(
                [t.engine.count_zeros(s) for t, s in zip(pair, steps, strict=True)]
            )
        for toy, step in zip(pair, steps, strict=True):
            toy.apply(step)
        states = [toy.state() for toy in pair]
        if number == 3:
            assert not steps[0].ok and not steps[1].ok
            found["changed"] = same(before, states[1])
        found["differ"] += same(*states)
        found["far"] += [
            name
            for name, one in states[0].items()
            if not torch.allclose(one.float(), states[1][name].float(), rtol=1e-5, atol=1e-6)
        ]
        found["norms"].append([step.norm for step in steps])
        found["norms"].append([toy.optimizer.params_norm() for toy in pair])
    return found


@pytest.mark.turns
@pytest.mark.push
@pytest.mark.parametrize(
    ("case", "kinds", "options"),
    [
        (DENSE, FP32, {}),
        (DENSE, BF16, {"rule": SGD(momentum=0.9)}),
        (DENSE, FP16, {}),
        (SAMO, BF16, {"rule": SGD(momentum=0.9, nesterov=True, coupled=True)}),
        (SAMO, BF16_REDUCED, {}),
        (TICKET, BF16, {}),
        (RADIUS, FP32, {}),
        (RADIUS, FP32, {"clip": 0.0}),
        (RADIUS, BF16, {"rule": SGD(momentum=0.9)}),
        (RADIUS, BF16_REDUCED, {}),
        (OFFSETS, FP32, {}),
        (PathCase("radius", SHORT | {"radius_residual": "none"}), BF16, {}),
        (PathCase("radius", SHORT | {"radius_select": "gradient"}), FP32, {}),
        (PathCase("radius", {"radius_density": 1.0}), FP32, {}),
        (PathCase("samo+radius", RANDOM | SHORT), BF16, {}),
    ],
)
@pytest.mark.parametrize("world", [2, 4])
def test_no_bit_of_a_run_changes(
    ranks: Ranks, world: int, case: PathCase, kinds: dict, options: dict
) -> None:
    for found in ranks.run(world, on_rank_trajectory, case, kinds, options):
        assert found["differ"] == found["changed"] == []
        finite = [pair for pair in found["norms"] if pair[0] == pair[0]]
        assert len(finite) == 15 and all(a == pytest.approx(b, rel=1e-14) for a, b in finite)
        assert all(plain == ours for plain, ours in found["zeros"])


@pytest.mark.parametrize(
    ("world", "case", "kinds", "clip"),
    [
        (2, DENSE, FP32, 0.0),
        (2, SAMO, BF16, 0.0),
        (2, SAMO, FP16, 0.0),
        (4, TICKET, FP32, 0.5),
    ],
)
def test_scattered_parts_make_the_same_run(
    ranks: Ranks, world: int, case: PathCase, kinds: dict, clip: float
) -> None:
    """Sums of two are equal to the last bit; the norm and longer sums differ by rounding."""
    for found in ranks.run(world, on_rank_trajectory, case, kinds, {"scatter": True, "clip": clip}):
        assert found["changed"] == found["far"] == []
        if world == 2 and not clip:
            assert found["differ"] == []
        finite = [pair for pair in found["norms"] if pair[0] == pair[0]]
        assert len(finite) == 15 and all(a == pytest.approx(b, rel=1e-6) for a, b in finite)
        assert all(plain == ours for plain, ours in found["zeros"])


# ---- selection ----------------------------------------------------------------------------------


def on_rank_selected(groups: ProcessGroups, case: PathCase, together: int) -> list[Any]:
    """Run Radius on TP 2 x DP 2, unsharded and sharded; return what differs in any step."""
    on_pairs = grid(groups, tp=2)
    pair = GridToy(on_pairs, case), GridToy(on_pairs, sharded(case))
    found: list[Any] = []
    before, selection.TOGETHER = selection.TOGETHER, together
    try:
        for number in range(13):
            for toy in pair:
                toy.step(toy.share(number), clip_norm=1.0)
            plain, ours = (toy.engine.stats(full=True) for toy in pair)
            assert plain.extra == ours.extra and plain.density == ours.density
            for each in ("whole_tensors", "weights"):
                one, other = ([state[-1] for state in getattr(t.optimizer, each)()] for t in pair)
                found += [
                    n for n, (a, b) in enumerate(zip(one, other, strict=True)) if (a != b).any()
                ]
            found += same(pair[0].shared(), pair[1].shared())
            found += same(pair[0].own(), pair[1].own())
    finally:
        selection.TOGETHER = before
    assert any(name.startswith("index/") for name in pair[1].shared())
    return found


@pytest.mark.turns
@pytest.mark.parametrize("together", [0, 1 << 17], ids=["counted", "sent whole"])
@pytest.mark.parametrize("case", [RADIUS, OFFSETS], ids=["bitmap", "offsets"])
def test_owners_of_shards_select_what_all_would(
    ranks: Ranks, case: PathCase, together: int
) -> None:
    """Tensors are shared by tensor-parallel ranks, too, or lie in the shard of one rank."""
    assert ranks.run(4, on_rank_selected, case, together) == [[]] * 4


def on_rank_lent(groups: ProcessGroups) -> dict[bool, dict[bool, bool]]:
    found = {}
    for density in (1.0, 0.4):
        case = PathCase("radius", SHORT | {"radius_density": density}, sharded=True)
        toy = Toy(groups, case, **BF16)
        lends = {bucket.matrix: bucket.lends_grad for bucket in toy.engine.buckets}
        found[density == 1.0] = lends
    return found


def test_gradients_that_hold_a_residual_are_not_lent(ranks: Ranks) -> None:
    """Without a residual, states are sharded as on the dense path, without other memory."""
    expected = {True: {True: True, False: True}, False: {True: False, False: True}}
    assert ranks.run(2, on_rank_lent) == [expected] * 2


# ---- bytes --------------------------------------------------------------------------------------


def on_rank_bytes(groups: ProcessGroups, scatter: bool, cap: int) -> dict[str, int]:
    toy = Toy(groups, sharded(SAMO), cap=cap, scatter=scatter, **BF16)
    toy.engine.stats()
    toy.step([gradients(0)])
    states = toy.optimizer.states
    return {
        "sent": toy.engine.stats().bytes_sent,
        "states": sum(t.nbytes for state in states for t in (state.master, *state.moments)),
        "own memory": sum(
            t.untyped_storage().nbytes() for s in states for t in (s.master, *s.moments)
        ),
        "gradients": sum(b.grad.untyped_storage().nbytes() for b in toy.engine.buckets),
        "parameters": sum(info.param.untyped_storage().nbytes() for info in toy.infos),
        "entries": sum(bucket.numel for bucket in toy.engine.buckets),
        "buckets": len(toy.engine.buckets),
    }


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_bytes_kept_and_sent(ranks: Ranks, world: int, scatter: bool) -> None:
    """A 16-bit model with fp32 gradients keeps 2 + 4 + 12 / ranks bytes per stored entry.

    Pruned entries keep 2 bytes. By the ring model, the ranks send half an all-reduce of the
    gradients, or a whole one without `scatter`, and half an all-reduce of the 16-bit values.
    """
    for found in ranks.run(world, on_rank_bytes, scatter, 1 << 20):
        padding = 64 * world * found["buckets"]
        entries = found["entries"]
        assert 0 <= world * found["states"] - 12 * entries <= 12 * padding
        assert found["own memory"] == found["states"], "nothing larger is kept alive"
        assert 0 <= found["gradients"] - 4 * entries <= 4 * padding
        assert found["parameters"] == sum(2 * torch.Size(s).numel() for s in SHAPES.values())
        share, halves = (world - 1) / world, 1 if scatter else 2
        expected = share * (halves * 4 + 2) * entries
        assert 0 <= found["sent"] - expected <= 6 * padding


def on_rank_zeros(groups: ProcessGroups) -> list[bool]:
    toy = Toy(groups, sharded(SAMO))
    for _, _, flat in toy.optimizer.tensors():
        flat.fill_(-0.0)
    return [bool(whole.signbit().all()) for _, _, whole in toy.optimizer.whole_tensors()]


def test_states_are_put_together_bit_by_bit(ranks: Ranks) -> None:
    assert all(all(signs) for signs in ranks.run(2, on_rank_zeros))


# ---- replicas -----------------------------------------------------------------------------------


def on_rank_drift(groups: ProcessGroups) -> str:
    toy = Toy(groups, sharded(SAMO))
    toy.step([gradients(0, groups.dp.rank)])
    compare_replicas(toy.optimizer, groups, step=1)
    if groups.dp.rank == 1:
        param = next(info.param for info in toy.infos if info.name == "first.bias")
        param.detach().view(torch.int32)[3] ^= 1
    try:
        compare_replicas(toy.optimizer, groups, step=1)
    except NumericsError as error:
        return str(error)
    return ""


def test_a_flipped_bit_of_what_the_model_reads_is_named(ranks: Ranks) -> None:
    for text in ranks.run(4, on_rank_drift):
        assert "first.bias (torch.float32) on rank 1;" in text


# ---- checkpoints --------------------------------------------------------------------------------


def shard_of(
    kind: str, info: ParamInfo, piece: StateSlice, mask: torch.Tensor | None
) -> LocalShard:
    return LocalShard(
        f"{kind}/{info.name}",
        piece.values,
        info.logical_shape,
        piece.start,
        piece.stop,
        flat=piece.flat,
        mask=None if mask is None else f"mask/{info.name}",
    )


def on_rank_save(groups: ProcessGroups, case: PathCase, folder: Path) -> dict[str, torch.Tensor]:
    toy = Toy(groups, case)
    for number in range(3):
        toy.step([gradients(number, groups.dp.rank)])
    shards = []
    for kind, name, flat in toy.optimizer.tensors():
        info, mask = toy.engine.infos[name], toy.engine.layout.mask(name)
        if case.sharded or groups.dp.rank == 0:
            found = pieces(toy.engine, name, flat)
            shards += [shard_of(kind, info, piece, mask) for piece in found]
        if kind == "param" and mask is not None and groups.dp.rank == 0:
            shape = info.logical_shape
            zeros = (0,) * len(shape)
            shards.append(LocalShard(f"mask/{name}", mask.view(shape), shape, zeros, shape))
    save_checkpoint(
        folder,
        step=3,
        tensors=shards,
        state={},
        rank=groups.world.rank,
        world=groups.world.size,
        gather=groups.world.all_gather_str,
    )
    return toy.state()


def on_rank_load(groups: ProcessGroups, case: PathCase, folder: Path) -> dict[str, torch.Tensor]:
    toy = Toy(groups, case)
    with Checkpoint.open(folder / "step_00000003") as saved:
        for kind, name, flat in toy.optimizer.tensors():
            fill(toy.engine, name, flat, saved.read(f"{kind}/{name}"))
    toy.optimizer.finish_load()
    return toy.state()


@pytest.mark.parametrize("case", [DENSE, SAMO], ids=lambda case: case.name)
def test_states_are_read_by_another_number_of_ranks(
    ranks: Ranks, case: PathCase, tmp_path: Path
) -> None:
    saved = ranks.run(4, on_rank_save, sharded(case), tmp_path / "a")
    for world, other in [(2, sharded(case)), (2, case), (4, sharded(case))]:
        for found in ranks.run(world, on_rank_load, other, tmp_path / "a"):
            assert same(saved[0], found) == []
    plain = ranks.run(2, on_rank_save, case, tmp_path / "b")
    for found in ranks.run(4, on_rank_load, sharded(case), tmp_path / "b"):
        assert same(plain[0], found) == []


CUT_SHAPES = {"gate_up": (2 * 22, 24), "down": (24, 22), "vocabulary": (11, 24), "norm": (24,)}


def on_rank_cut(groups: ProcessGroups, folder: Path, *, pruned: bool) -> None:
    """Save on TP 2 x DP 2, with uneven shares and padding rows; read what every rank has."""
    on_grid = grid(groups, tp=2)
    generator = torch.Generator().manual_seed(5)
    wholes = {n: torch.randn(shape, generator=generator) for n, shape in CUT_SHAPES.items()}
    masks = {
        n: torch.rand(whole.shape, generator=generator) > 0.6
        for n, whole in wholes.items()
        if pruned and n != "norm"
    }
    along = {"gate_up": (0, 2), "down": (1, 1), "vocabulary": (0, 1)}
    infos, local_masks = [], {}
    for name, whole in wholes.items():
        shard, local = None, whole
        if name in along:
            axis, blocks = along[name]
            shard = TensorShard.evenly(
                whole.shape, axis=axis, rank=on_grid.tp.rank, ranks=2, blocks=blocks
            )
            local = shard.of(whole)
        if name in masks and shard is not None:
            local_masks[name] = shard.of(masks[name]).view(-1)
        if name == "vocabulary":
            local = torch.cat([local, local.new_zeros(8 - len(local), 24)])
            if name in local_masks:
                wider = torch.zeros(local.numel(), dtype=torch.bool)
                wider[: local_masks[name].numel()] = local_masks[name]
                local_masks[name] = wider
        leaf = torch.nn.Parameter(local.clone())
        infos.append(
            ParamInfo(name=name, leaves=(leaf,), logical_shape=whole.shape, tp_shard=shard)
        )
    parts = PathParts(
        layout=CompressedLayout(local_masks) if pruned else DenseLayout(),
        reducer=ReduceScatterReducer(Exchange(on_grid.dp)),
    )
    engine = GradientEngine(infos, parts, on_grid, cap=1 << 20, grad_dtype=torch.float32)
    optimizer = BucketOptimizer(engine, AdamW(beta1=0.9, beta2=0.99, eps=1e-8))
    assert optimizer.params_norm() == pytest.approx(
        sum(float((w * masks.get(n, 1)).double().square().sum()) for n, w in wholes.items()) ** 0.5,
        rel=1e-12,
    )
    shards = []
    for kind, name, flat in optimizer.tensors():
        info = engine.infos[name]
        if info.tp_shard is None and on_grid.tp.rank:
            continue
        found = pieces(engine, name, flat)
        shards += [shard_of(kind, info, piece, masks.get(name)) for piece in found]
    if groups.world.rank == 0:
        zeros = {n: (0,) * m.dim() for n, m in masks.items()}
        shards += [
            LocalShard(f"mask/{n}", m, tuple(m.shape), zeros[n], tuple(m.shape))
            for n, m in masks.items()
        ]
    save_checkpoint(
        folder,
        step=1,
        tensors=shards,
        state={},
        rank=groups.world.rank,
        world=4,
        gather=groups.world.all_gather_str,
    )
    with Checkpoint.open(folder / "step_00000001") as saved:
        for name, whole in wholes.items():
            assert torch.equal(saved.read(f"param/{name}"), whole * masks.get(name, 1))
        before = {(kind, name): flat.clone() for kind, name, flat in optimizer.tensors()}
        for kind, name, flat in optimizer.tensors():
            flat.fill_(7.0)
            info, logical = engine.infos[name], saved.read(f"{kind}/{name}")
            fill(
                engine, name, flat, logical if info.tp_shard is None else info.tp_shard.of(logical)
            )
            assert torch.equal(flat, before[kind, name])


@pytest.mark.parametrize("pruned", [False, True])
def test_shards_of_cut_tensors_are_saved_and_read(
    ranks: Ranks, tmp_path: Path, pruned: bool
) -> None:
    ranks.run(4, _on_rank_cut_pruned if pruned else _on_rank_cut_whole, tmp_path)


def _on_rank_cut_pruned(groups: ProcessGroups, folder: Path) -> None:
    on_rank_cut(groups, folder, pruned=True)


def _on_rank_cut_whole(groups: ProcessGroups, folder: Path) -> None:
    on_rank_cut(groups, folder, pruned=False)


def on_rank_that_rewires(groups: ProcessGroups, case: PathCase) -> list[int]:
    made = Toy(groups, case, **FP32)
    old = [weakref.ref(bucket) for bucket in made.engine.buckets]
    usual, alive = engine._allocate, []

    def allocate(*args: Any) -> GradBucket:
        gc.collect()
        alive.append(sum(bucket() is not None for bucket in old))
        return usual(*args)

    engine._allocate = allocate
    try:
        for number in range(6):
            made.step([gradients(number)])
    finally:
        engine._allocate = usual
    return alive


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_old_buckets_are_freed_before_new_ones_are_allocated(ranks: Ranks, sharded: bool) -> None:
    for alive in ranks.run(2, on_rank_that_rewires, replace(TICKET, sharded=sharded)):
        assert alive and not any(alive)
