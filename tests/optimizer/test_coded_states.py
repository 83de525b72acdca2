"""Optimizers with states that are not fp32: bytes, and equal numbers on every kind of rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.data_parallel.bucket import GradBucket
from megatron.data_parallel.gradient_path import PathParts
from megatron.optimizer import bucket_optimizer
from megatron.optimizer.bucket_optimizer import BucketOptimizer, BucketState
from megatron.optimizer.state_formats import StateFormats
from megatron.optimizer.update_rules import SGD
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from samo.layout import CompressedLayout
from tests.contract import harness
from tests.contract.grid import GridToy, on_grid, world_of
from tests.contract.harness import DSR, PATHS, RANDOM, SHAPES, SHORT, PathCase, Toy, gradients, same
from tests.ranks import Ranks
from tools.bench.common.tensors import bytes_of

ALONE = ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=1), rank=0)
DENSE, RADIUS = PathCase("dense"), PathCase("radius", SHORT, lossless=False)
ROLLING = PathCase("radius", SHORT | {"radius_schedule": "rolling"}, lossless=False)
MATRICES = [name for name, shape in SHAPES.items() if len(shape) > 1]
BF16 = StateFormats(main=torch.bfloat16, exp_avg="bf16", exp_avg_sq="bf16")
KAHAN = replace(BF16, rounding="kahan")
INT8 = StateFormats(main=torch.bfloat16, exp_avg="int8", exp_avg_sq="int8")
MOMENTS = StateFormats(exp_avg="bf16", exp_avg_sq="int8")
FP16 = StateFormats(main=torch.float16, exp_avg="fp16", exp_avg_sq="fp16")
FORMATS = {"bf16": BF16, "kahan": KAHAN, "int8": INT8, "moments": MOMENTS, "fp16": FP16}


def toy(formats: StateFormats, case: PathCase = DENSE, **options: Any) -> Toy:
    dtype = torch.float16 if formats.main is torch.float16 else torch.bfloat16
    return Toy(options.pop("groups", ALONE), case, dtype=dtype, formats=formats, **options)


def run(made: Toy, steps: int = 6) -> dict[str, torch.Tensor]:
    for number in range(steps):
        made.step([gradients(number)])
    return made.state()


# ---- bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("formats", "grad_dtype", "each"),
    [
        (BF16, torch.float32, 10),
        (BF16, torch.bfloat16, 8),
        (KAHAN, torch.bfloat16, 10),
        (INT8, torch.bfloat16, 6),
        (replace(INT8, rounding="kahan"), torch.bfloat16, 8),
        (StateFormats(), torch.float32, 18),
        (MOMENTS, torch.float32, 13),
        (replace(INT8, main=torch.float32), torch.bfloat16, 10),
    ],
)
def test_bytes_of_a_matrix_parameter(
    formats: StateFormats, grad_dtype: torch.dtype, each: int
) -> None:
    """Storages of parameters, gradients and states; scales are 4 bytes for 256 entries, each."""
    made = toy(formats, grad_dtype=grad_dtype)
    entries = gaps = scales = 0
    tensors: list[torch.Tensor] = []
    for bucket, state in zip(made.engine.buckets, made.optimizer.states, strict=True):
        if bucket.names[0] not in MATRICES:
            assert state.is_fp32 and bucket.grad.dtype is grad_dtype
            continue
        params = [leaf for name in bucket.names for leaf in made.engine.infos[name].leaves]
        tensors += [bucket.grad, *params, *state.tensors]
        entries += sum(where.numel for where in bucket.slices.values())
        gaps += bucket.numel - sum(where.numel for where in bucket.slices.values())
        blocks = -(-bucket.numel // 256)
        scales += 4 * blocks * ("int8" in (formats.exp_avg, formats.exp_avg_sq))
        scales += 4 * blocks * (formats.exp_avg == formats.exp_avg_sq == "int8")
    assert entries == sum(made.engine.infos[name].param.numel() for name in MATRICES)
    # Gaps lie in all tensors but in parameters that are not views of the master weights.
    of_gaps = gaps * (each - 2 * (formats.main is torch.float32))
    assert sum(bytes_of(tensors).values()) == each * entries + of_gaps + scales


def test_parameters_are_the_main_parameters() -> None:
    made = toy(BF16)
    for bucket, state in zip(made.engine.buckets, made.optimizer.states, strict=True):
        for name, where in bucket.slices.items():
            param = made.engine.infos[name].param
            views = where.of(state.master).data_ptr() == param.data_ptr()
            assert views == (name in MATRICES)


def test_parameters_become_views_before_the_next_states_are_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise all parameters would exist twice at a time, beside all states."""
    allocate, before = BucketOptimizer._allocate, list[int]()

    def watched(self: BucketOptimizer, bucket: GradBucket) -> BucketState:
        for earlier in self.engine.buckets[: bucket.index]:
            if earlier.names[0] in MATRICES:
                master = self.states[earlier.index].master
                params = [self.engine.infos[name].param for name in earlier.names]
                assert {each.untyped_storage().data_ptr() for each in params} == {
                    master.untyped_storage().data_ptr()
                }
                before.append(bucket.index)
        return allocate(self, bucket)

    monkeypatch.setattr(BucketOptimizer, "_allocate", watched)
    toy(BF16)
    assert before, "a matrix comes before other buckets"


def test_shards_are_parts_of_the_parameters(ranks: Ranks) -> None:
    ranks.run(2, on_rank_with_a_part)


def on_rank_with_a_part(groups: ProcessGroups) -> None:
    made = toy(BF16, PathCase("dense", sharded=True), groups=groups)
    for bucket, state in zip(made.engine.buckets, made.optimizer.states, strict=True):
        params = [made.engine.infos[name].param for name in bucket.names]
        storages = {param.untyped_storage().data_ptr() for param in params}
        assert (storages == {state.master.untyped_storage().data_ptr()}) == (
            bucket.names[0] in MATRICES
        )


# ---- equal numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS.keys())
def test_chunks_change_no_bit(monkeypatch: pytest.MonkeyPatch, formats: StateFormats) -> None:
    whole = run(toy(formats))
    monkeypatch.setattr(bucket_optimizer, "coded_chunk", lambda *args: 256)
    assert same(whole, run(toy(formats))) == []


@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS.keys())
@pytest.mark.parametrize("case", [DENSE, PathCase("samo", RANDOM | DSR)], ids=["dense", "rewired"])
def test_offloaded_states_change_no_bit(case: PathCase, formats: StateFormats) -> None:
    assert same(run(toy(formats, case)), run(toy(formats, replace(case, offloaded=True)))) == []


@pytest.mark.parametrize("formats", [BF16, INT8], ids=["bf16", "int8"])
def test_offloaded_chunks_shorter_than_a_block_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, formats: StateFormats
) -> None:
    """16-bit gradients are widened in scratch memory, which must be as long as a block."""
    monkeypatch.setattr(harness, "OFFLOAD_BUCKET", 200)
    made = toy(formats, replace(DENSE, offloaded=True), grad_dtype=torch.bfloat16)
    assert (made.optimizer._chunk, made.optimizer._coded_chunk) == (64, 256)
    assert made.optimizer._scratch.numel() == 256
    scratch = made.optimizer._scratch.data_ptr()
    assert same(run(toy(formats, grad_dtype=torch.bfloat16)), run(made)) == []
    assert made.optimizer._scratch.data_ptr() == scratch


def on_rank_of_dp(groups: ProcessGroups, formats: StateFormats, sharded: bool) -> Any:
    case = PathCase("dense", sharded=sharded)
    made = toy(formats, case, groups=groups, scatter=False)
    # Every rank has the same gradients, so that their mean is what one rank has.
    return run(made)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS.keys())
def test_data_parallel_ranks_draw_what_one_rank_draws(
    ranks: Ranks, world: int, formats: StateFormats
) -> None:
    alone = run(toy(formats))
    for sharded in (False, True):
        for found in ranks.run(world, on_rank_of_dp, formats, sharded):
            assert same(alone, found) == []


def on_rank_of_grid(
    groups: ProcessGroups, grid: str, pruned: bool, formats: StateFormats
) -> dict[tuple[str, Any], torch.Tensor]:
    """Return this rank's boxes of all states, by name and corners."""
    made = GridToy(
        on_grid(groups, grid), DENSE, pruned=pruned, dtype=torch.bfloat16, formats=formats
    )
    for number in range(4):
        made.step(made.share(number))
    found = {}
    for kind, name, stored in made.optimizer.whole_tensors():
        info = made.engine.infos[name]
        part = made.whole(name, stored).view(info.local_shape)
        boxes = [(((0,) * part.dim(), info.logical_shape),) * 2]
        for whole, at in boxes if info.tp_shard is None else info.tp_shard.boxes():
            inside = part[tuple(slice(a, b) for a, b in zip(*at, strict=True))]
            found[f"{kind}/{name}", whole] = inside.clone()
    return found


@pytest.mark.push
@pytest.mark.parametrize("pruned", [False, True], ids=["dense", "pruned"])
@pytest.mark.parametrize("grid", ["TP2", "TP4", "TP2xDP2", "PP2xDP2", "TP2xPP2"])
def test_grids_draw_what_one_rank_draws(ranks: Ranks, grid: str, pruned: bool) -> None:
    (alone,) = ranks.run(1, on_rank_of_grid, "1", pruned, BF16)
    whole = {name: value for (name, _), value in alone.items()}
    seen = set()
    for found in ranks.run(world_of(grid), on_rank_of_grid, grid, pruned, BF16):
        for (name, box), part in found.items():
            seen.add(name)
            cut = tuple(slice(a, b) for a, b in zip(*box, strict=True))
            assert torch.equal(part, whole[name][cut]), (name, box)
    assert seen == whole.keys()


@pytest.mark.parametrize("formats", [BF16, KAHAN], ids=["bf16", "kahan"])
def test_entries_of_a_pruned_network_draw_what_they_draw_in_a_dense_one(
    formats: StateFormats,
) -> None:
    pruned = toy(formats, PathCase("samo", RANDOM), weight_decay=0.0)
    masks = {name: pruned.exists(name) for name in MATRICES}
    dense = toy(formats, weight_decay=0.0)
    for number in range(6):
        wanted = gradients(number)
        pruned.step([wanted])
        kept = {
            name: wanted[name] * masks[name].view(SHAPES[name]) if name in masks else wanted[name]
            for name in wanted
        }
        dense.step([kept])
    for info, other in zip(pruned.infos, dense.infos, strict=True):
        mask = masks.get(info.name, torch.ones(info.param.numel(), dtype=torch.bool))
        one, two = info.param.detach().view(-1)[mask], other.param.detach().view(-1)[mask]
        assert torch.equal(one, two), info.name


@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS.keys())
def test_a_mask_that_prunes_nothing_changes_no_bit(formats: StateFormats) -> None:
    dense, samo = toy(formats), toy(formats)
    masks = {
        name: torch.ones(samo.engine.infos[name].param.numel(), dtype=torch.bool)
        for name in MATRICES
    }
    parts = PathParts(layout=CompressedLayout(masks, cut=MATRICES), reducer=samo.engine.reducer)
    samo.engine.rebucket(parts.layout)
    samo.optimizer = BucketOptimizer(samo.engine, samo.optimizer.rule, formats=formats)
    assert same(run(dense), run(samo)) == []


def test_seed_and_step_choose_the_bits() -> None:
    one, other = run(toy(BF16)), run(toy(replace(BF16, seed=1)))
    assert set(same(one, other)) >= {name for name in MATRICES}


# ---- gradient paths and rules -------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", [case for case in PATHS if "radius" in case.name or case.name == "topk"], ids=str
)
def test_chunks_that_are_read_and_written_make_the_update_of_whole_buckets(
    monkeypatch: pytest.MonkeyPatch, case: PathCase
) -> None:
    """With fp32 states nothing is rounded, so that the two ways of updating must agree."""
    usual = Toy(ALONE, case)
    expected = run(usual, 13)
    monkeypatch.setattr(BucketState, "is_fp32", False)
    read = run(Toy(ALONE, case), 13)
    for name, tensor in expected.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(read[name], tensor, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(read[name], tensor), name


@pytest.mark.parametrize(
    ("case", "formats"),
    [
        pytest.param(case, formats, id=f"{case}-{name}")
        for case in (RADIUS, ROLLING, PathCase("samo+radius", RANDOM | SHORT))
        for name, formats in FORMATS.items()
        # The path refuses int8 moments with the rolling schedule.
        if case is not ROLLING or "int8" not in (formats.exp_avg, formats.exp_avg_sq)
    ],
)
def test_sparse_gradients_lead_near_the_fp32_weights(case: PathCase, formats: StateFormats) -> None:
    exact = run(Toy(ALONE, case), 10)
    found = run(toy(formats, case), 10)
    for name in MATRICES:
        distance = (found[name].float() - exact[name]).abs()
        # Ten updates of the learning rate 0.01, of which a selection may shift some.
        assert distance.isfinite().all() and distance.mean() < 0.03, name


@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS.keys())
def test_momentum_of_sgd_has_the_format_of_the_first_moment(formats: StateFormats) -> None:
    exact = Toy(ALONE, DENSE, rule=SGD(momentum=0.9), lr=0.01)
    made = toy(formats, rule=SGD(momentum=0.9), lr=0.01)
    one, other = run(exact), run(made)
    for name in MATRICES:
        torch.testing.assert_close(
            other[f"momentum/{name}"], one[f"momentum/{name}"], rtol=0.05, atol=0.1
        )
        torch.testing.assert_close(other[name].float(), one[name], rtol=0.02, atol=0.02)


def test_default_formats_store_fp32() -> None:
    made = Toy(ALONE, DENSE)
    assert all(state.is_fp32 and not state.params for state in made.optimizer.states)
    assert all(bucket.alignment == 64 for bucket in made.engine.buckets)
