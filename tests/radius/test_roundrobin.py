"""Round-robin gradients against the plain formulas: parts of rows in turns, the rest waits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.data_parallel.bucket import GradBucket, ParamInfo
from megatron.data_parallel.exchange import Exchange
from megatron.data_parallel.reducer import StepContext
from megatron.parallel.groups import Group, ProcessGroups
from megatron.parallel.tensor_shard import TensorShard
from radius.baselines.roundrobin import WAITED, RoundRobinReducer, part_of
from tests.contract.harness import PathCase, Toy, copies, gradients
from tests.radius.functional_ranks import bucket_of, equals_dense, fill, infos_of, random
from tests.ranks import Ranks

SHAPES = {"first": (13, 7), "few": (2, 5), "third": (9, 2, 4)}
INTERVAL = 4
ALONE = Group((0,), 0)


def rows_of(name: str, t: int) -> slice:
    """The rows that update t sends, as the module's docstring says."""
    rows, part = SHAPES[name][0], t % INTERVAL
    return slice(rows * part // INTERVAL, rows * (part + 1) // INTERVAL)


def one_step(
    reducer: RoundRobinReducer, bucket: GradBucket, mine: dict, *, t: int, scale: float, ok: bool
) -> dict[str, Any]:
    """The mean and c of the sent entries, in a bucket of NaN elsewhere; commit if `ok`."""
    fill(bucket, {name: gradient * scale for name, gradient in mine.items()})
    reduced = reducer.reduce(bucket, StepContext(t=t, loss_scale=scale)).wait()
    assert reduced.index is not None and reduced.unselected == "frozen"
    positions = torch.empty(reduced.index.numel, dtype=torch.int64)
    reduced.index.gather(torch.arange(bucket.numel), positions)
    mean = torch.full((bucket.numel,), math.nan)
    mean[positions] = reduced.values.float() / scale
    counts = torch.full((bucket.numel,), math.nan)
    given = reduced.steps_accumulated
    counts[positions] = torch.ones(len(positions)) if given is None else given
    reducer.commit(bucket, None) if ok else reducer.abort(bucket)
    views = {name: where.of(mean).view(SHAPES[name]) for name, where in bucket.slices.items()}
    return {
        "mean": views,
        "counts": {n: s.of(counts).view(SHAPES[n]) for n, s in bucket.slices.items()},
        "kept": copies(reducer.state_tensors()),
        "stats": reducer.stats(full=True),
    }


def on_rank_steps(groups: ProcessGroups, dtype: torch.dtype, scale: float) -> list[dict]:
    infos = infos_of(SHAPES)
    reducer = RoundRobinReducer(infos, Exchange(groups.dp), interval=INTERVAL)
    reducer.attach([bucket := bucket_of(infos, dtype=dtype)])
    found = []
    for step in range(10):
        mine = random(SHAPES, step, groups.dp.rank, dtype=dtype)
        found.append(one_step(reducer, bucket, mine, t=step + 1, scale=scale, ok=True))
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float32, 1.0), (torch.float32, 1024.0), (torch.bfloat16, 1.0), (torch.float16, 64.0)],
)
def test_steps_follow_the_formulas(
    ranks: Ranks, world: int, dtype: torch.dtype, scale: float
) -> None:
    by_rank = ranks.run(world, on_rank_steps, dtype, scale)
    tolerance = 1e-5 if dtype == torch.float32 else 6e-2
    kept = {(r, n): torch.zeros(shape) for r in range(world) for n, shape in SHAPES.items()}
    for step in range(10):
        t, sent_entries = step + 1, 0
        for name, shape in SHAPES.items():
            rows, mean = rows_of(name, t), torch.zeros(())
            sent_entries += len(range(shape[0])[rows]) * math.prod(shape[1:])
            for rank, found in enumerate(by_rank):
                offered = kept[rank, name] + random(SHAPES, step, rank, dtype=dtype)[name]
                sent = (offered[rows] * scale).to(dtype).float() / scale
                mean = mean + sent / world
                offered[rows] -= sent
                kept[rank, name] = offered
                residual = found[step]["kept"][name].view(shape)
                torch.testing.assert_close(residual, offered, rtol=1e-6, atol=1e-6)
            for found in by_rank:
                got, counts = found[step]["mean"][name], found[step]["counts"][name]
                torch.testing.assert_close(got[rows], mean, rtol=tolerance, atol=tolerance)
                assert counts[rows].eq(min(t, INTERVAL)).all()
                got[rows] = math.nan
                assert got.isnan().all(), "nothing else was sent"
        for found in by_rank:
            stats = found[step]["stats"]
            ring = 2 * (world - 1) / world * dtype.itemsize
            assert stats.bytes_sent == pytest.approx(ring * sent_entries, abs=1)
            assert stats.density == sent_entries / sum(map(math.prod, SHAPES.values()))


def test_a_dropped_step_is_sent_again_and_counts_for_nothing() -> None:
    infos, found = infos_of(SHAPES), []
    for drops in (False, True):
        reducer = RoundRobinReducer(infos, Exchange(ALONE), interval=INTERVAL)
        reducer.attach([bucket := bucket_of(infos)])
        for t in range(1, 7):
            if drops:
                bad = {name: tensor * math.nan for name, tensor in random(SHAPES, t).items()}
                one_step(reducer, bucket, bad, t=t, scale=1.0, ok=False)
            last = one_step(reducer, bucket, random(SHAPES, t), t=t, scale=1.0, ok=True)
        found.append(last)
    for name in SHAPES:
        for kind in ("mean", "counts"):
            one, other = (each[kind][name].nan_to_num(-1.0) for each in found)
            assert torch.equal(one, other)
        assert torch.equal(found[0]["kept"][name], found[1]["kept"][name])


def test_steps_that_are_counted_from_1_again_still_have_their_c() -> None:
    """The case of `--no-load-optim`: residuals are loaded, t is not."""
    infos = infos_of(SHAPES)
    first, second = (RoundRobinReducer(infos, Exchange(ALONE), interval=INTERVAL) for _ in range(2))
    first.attach([bucket := bucket_of(infos)])
    for t in range(1, 7):
        one_step(first, bucket, random(SHAPES, t), t=t, scale=1.0, ok=True)
    second.attach([other := bucket_of(infos)])
    shared = copies(first.shared_tensors())
    assert shared[WAITED].tolist() == [2, 1, 0, 3]
    second.load_state_tensors(copies(first.state_tensors()), shared)
    counted = []
    for t in range(1, 6):
        step = one_step(second, other, random(SHAPES, t), t=t, scale=1.0, ok=True)
        counted.append(step["counts"]["first"][rows_of("first", t)].unique().tolist())
    # Parts 1, 2, 3, 0, 1 had waited for 1, 0, 3 and 2 steps.
    assert counted == [[2.0], [2.0], [6.0], [6.0], [4.0]]


@pytest.mark.parametrize("interval", [1, 3, 8, 40])
@pytest.mark.parametrize(
    ("shape", "axis", "blocks"),
    [((24, 5), 0, 1), ((24, 5), 0, 2), ((7, 12), 1, 3), ((10, 6), 0, 1)],
)
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_parts_are_rows_of_the_whole_tensor(
    interval: int, shape: tuple[int, ...], axis: int, blocks: int, tp: int
) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    for rank in range(tp):
        shard = TensorShard.evenly(shape, axis=axis, rank=rank, ranks=tp, blocks=blocks)
        leaf = torch.nn.Parameter(torch.zeros(shard.local_shape))
        info = ParamInfo(name="a", leaves=(leaf,), logical_shape=shape, tp_shard=shard)
        here, end = shard.of(whole).view(-1), 0
        for part in range(interval):
            start, stop = part_of(info, part, interval)
            assert start == end
            end = stop
            rows = range(shape[0] * part // interval, shape[0] * (part + 1) // interval)
            assert {int(entry) // shape[1] for entry in here[start:stop]} <= set(rows)
        assert end == here.numel()


def on_rank_frozen(groups: ProcessGroups) -> list[tuple[bool, bool]]:
    toy = Toy(groups, PathCase("roundrobin", {"roundrobin_interval": 3}), lr=0.1, weight_decay=0.5)
    found = []
    for number in range(5):
        before = toy.state()
        toy.step([gradients(number, groups.dp.rank)])
        after, rows, part = toy.state(), 48, (number + 1) % 3
        waits = torch.ones(rows, dtype=torch.bool)
        waits[rows * part // 3 : rows * (part + 1) // 3] = False
        old, new = before["first.weight"], after["first.weight"]
        shrunk = old * (1 - 0.1 * 0.5)
        frozen = torch.allclose(new[waits], shrunk[waits], rtol=1e-6)
        moved = not torch.isclose(new[~waits], shrunk[~waits], rtol=1e-3).all(1).any()
        for kind in ("exp_avg", "exp_avg_sq"):
            moments = [s[f"{kind}/first.weight"].view(rows, -1) for s in (before, after)]
            frozen &= torch.equal(moments[0][waits], moments[1][waits])
            moved &= bool((moments[0][~waits] != moments[1][~waits]).any(1).all())
        found.append((frozen, moved))
    return found


def test_rows_that_wait_only_decay(ranks: Ranks) -> None:
    assert ranks.run(2, on_rank_frozen) == [[(True, True)] * 5] * 2


def on_rank_limit(groups: ProcessGroups) -> list[bool]:
    infos = infos_of(SHAPES)
    reducer = RoundRobinReducer(infos, Exchange(groups.dp), interval=1)
    return equals_dense(groups.dp, reducer, infos, SHAPES)


@pytest.mark.parametrize("world", [1, 2])
def test_interval_1_is_the_dense_path(ranks: Ranks, world: int) -> None:
    assert ranks.run(world, on_rank_limit) == [[True] * 4] * world
