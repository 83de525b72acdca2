"""Tests of groups: text is sent whole, and ranks fail together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.errors import DataError
from megatron.fault_tolerance.desync import find_parting
from megatron.fault_tolerance.heartbeat import Heartbeat, calls
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import (
    Group,
    ProcessGroups,
    _edges,  # pyright: ignore[reportPrivateUsage]
)
from tests.limits import LIMIT
from tests.ranks import Ranks, grid

TEXTS = ["", "a", "longer text: é, 漢字\n" * 50, "x" * 10_000]


def on_rank_gather(groups: ProcessGroups) -> list[str]:
    return groups.world.all_gather_str(TEXTS[groups.world.rank])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_gather_text_brings_every_rank_every_text(ranks: Ranks, world: int) -> None:
    assert ranks.run(world, on_rank_gather) == [TEXTS[:world]] * world


def on_rank_agreed(groups: ProcessGroups, bad_rank: int) -> str:
    def work() -> int:
        if groups.world.rank == bad_rank:
            raise DataError("corpus.bin: gone")
        return groups.world.rank

    try:
        return f"fine {groups.world.raise_on_all_ranks(work)}"
    except DataError as error:
        return f"{error.exit_code} {error}"


@pytest.mark.parametrize("world", [1, 2, 4])
def test_agreed_raises_on_every_rank_or_on_none(ranks: Ranks, world: int) -> None:
    assert ranks.run(world, on_rank_agreed, world - 1) == ["3 corpus.bin: gone"] * world
    assert ranks.run(world, on_rank_agreed, -1) == [f"fine {r}" for r in range(world)]


def on_rank_outlasting(groups: ProcessGroups, bad_rank: int) -> str:
    rank = groups.world.rank
    asked = []
    largest = groups.max_over_world

    def counted(value: torch.Tensor, *, about: str = "") -> torch.Tensor:
        asked.append(about)
        return largest(value, about=about)

    object.__setattr__(groups, "max_over_world", counted)

    def work() -> int:
        if rank == 0:
            # The other ranks ask meanwhile, and wait in no collective.
            deadline = time.monotonic() + LIMIT / 2
            while len(asked) < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
        if rank == bad_rank:
            raise DataError("corpus.bin: gone")
        return rank

    try:
        answer = f"fine {groups.world.raise_on_all_ranks(lambda: groups.run_beyond_timeout(work))}"
    except DataError as error:
        answer = f"{error.exit_code} {error}"
    return answer if len(asked) >= 3 else f"{answer}, asked {len(asked)} times"


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_ask_each_other_while_a_long_work_goes_on(ranks: Ranks, world: int) -> None:
    assert ranks.run(world, on_rank_outlasting, -1) == [f"fine {r}" for r in range(world)]
    assert ranks.run(world, on_rank_outlasting, world - 1) == ["3 corpus.bin: gone"] * world


def on_rank_max(groups: ProcessGroups, tp: int) -> list[float]:
    value = torch.tensor([float(groups.world.rank), -float(groups.world.rank)])
    return grid(groups, tp=tp).max_over_world(value, about="vote").tolist()


@pytest.mark.parametrize("tp", [1, 2])
def test_the_largest_on_any_rank_is_found_along_the_axes(ranks: Ranks, tp: int) -> None:
    assert ranks.run(4, on_rank_max, tp) == [[3.0, 0.0]] * 4


def on_rank_sum(groups: ProcessGroups) -> list[float]:
    value = torch.tensor([float(groups.dp.rank + 1)])
    groups.dp.all_reduce(value, dist.ReduceOp.SUM)
    alone = torch.tensor([5.0])
    assert groups.tp.size == 1 and groups.tp.all_reduce(alone, dist.ReduceOp.SUM) is None
    return [value.item(), alone.item()]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_group_of_one_is_a_no_op(ranks: Ranks, world: int) -> None:
    assert ranks.run(world, on_rank_sum) == [[world * (world + 1) / 2, 5.0]] * world


def in_flight(group: Group, number: int, dtype: torch.dtype) -> Callable[[], list[torch.Tensor]]:
    """Start two all-gathers and an all-to-all of values that differ by number and rank."""
    rank, size = group.rank, group.size
    base = torch.tensor([number, rank], dtype=dtype)
    gathered, in_place = base.new_zeros(size, 2), base.new_zeros(2 * size)
    in_place.view(size, 2)[rank] = base
    rows = torch.stack([torch.tensor([number + rank, to], dtype=dtype) for to in range(size)])
    swapped = torch.zeros_like(rows)
    pending = [
        group.all_gather(gathered, base, async_op=True),
        group.all_gather(in_place, in_place.view(size, 2)[rank], async_op=True),
        group.all_to_all(swapped, rows, async_op=True),
    ]

    def arrived() -> list[torch.Tensor]:
        for work in reversed(pending):
            assert (work is None) == (size == 1)
            if work is not None:
                work.wait()
        return [gathered, in_place.view(size, 2), swapped]

    return arrived


def on_rank_exchange(groups: ProcessGroups, dtype: torch.dtype) -> bool:
    """Return whether every rank's values arrive in their places, with 30 exchanges under way."""
    group, expected = groups.dp, torch.arange(groups.dp.size)
    time.sleep(0.1 * group.rank)  # so that messages come before they are asked for
    flights = [in_flight(group, number, dtype) for number in range(30)]
    late = torch.tensor([1.0])
    group.all_reduce(late, dist.ReduceOp.SUM)  # while they are under way
    right = late.item() == group.size
    for number, arrived in reversed(list(enumerate(flights))):
        gathered, in_place, swapped = (found.long() for found in arrived())
        numbers = torch.full_like(expected, number)
        right &= torch.equal(gathered, torch.stack([numbers, expected], dim=1))
        right &= torch.equal(in_place, gathered)
        own = torch.full_like(expected, group.rank)
        right &= torch.equal(swapped, torch.stack([expected + number, own], dim=1))
    one = torch.tensor([group.rank], dtype=dtype)
    group.all_gather(out := one.new_zeros(group.size), one)  # which waits
    return right and torch.equal(out.long(), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_arrive_in_the_order_of_their_exchanges(
    ranks: Ranks, world: int, dtype: torch.dtype
) -> None:
    assert ranks.run(world, on_rank_exchange, dtype) == [True] * world


def on_rank_late(groups: ProcessGroups, collective: str) -> str:
    """Return the error of a tensor-parallel rank whose peer does not come."""
    dims = ParallelDims(tp=2, dp=1, pp=2)
    mine = ProcessGroups.build(dims, rank=groups.world.rank, timeout=timedelta(seconds=0.3))
    if mine.tp.rank:
        return ""
    calls = {
        "all-reduce": lambda: mine.tp.all_reduce(torch.zeros(1), dist.ReduceOp.SUM),
        "all-gather": lambda: mine.tp.all_gather(torch.zeros(2), torch.zeros(1)),
        "all-to-all": lambda: mine.tp.all_to_all(torch.zeros(2, 1), torch.zeros(2, 1)),
    }
    with pytest.raises(RuntimeError) as caught:
        calls[collective]()
    return str(caught.value)


@pytest.mark.parametrize("collective", ["all-reduce", "all-gather", "all-to-all"])
def test_groups_of_a_part_of_the_world_wait_no_longer_than_asked(
    ranks: Ranks, collective: str
) -> None:
    """torch would let subgroups wait half an hour, whatever timeout the world has."""
    first, _, third, _ = ranks.run(4, on_rank_late, collective)
    assert "Timed out waiting 300ms" in first and "Timed out waiting 300ms" in third


def on_rank_edges(groups: ProcessGroups, folder: Path, odd: bool) -> dict[str, object]:
    """Pass the number of each stage of a pipeline of all ranks up, then another number down."""
    dims = ParallelDims(tp=1, dp=1, pp=groups.world.size)
    mine = ProcessGroups.build(dims, rank=groups.world.rank)
    stage, edges = mine.pp.rank, mine.edges
    assert edges is not None
    heartbeat = Heartbeat(folder, rank=stage, attempt="a")
    mine.listen(heartbeat.called)
    mine.world.barrier()
    got = {}
    for way, step in (("activations", 1), ("gradients", -1)):
        came = torch.zeros(1)
        before, after = getattr(edges, f"{way}_in"), getattr(edges, f"{way}_out")
        about = "another" if odd and stage == 1 and step == -1 else way
        # Receives are posted before any send; the ring closes, so that all ranks wait for all.
        receive = before.receive(came, source=0, tag=7, about=way)
        send = after.send(torch.tensor([float(stage)]), to=1, tag=7, about=about)
        receive.wait()
        send.wait()
        got[way] = int(came)
        assert before.ranks[0] == came and after.ranks[1] == (stage + step) % dims.pp
    return {**got, "sent": mine.pp.traffic.take(), "again": mine.pp.traffic.take()}


@pytest.mark.parametrize("world", [2, 4])
def test_edges_go_round_one_way_and_are_told_apart(
    ranks: Ranks, tmp_path: Path, world: int
) -> None:
    found = ranks.run(world, on_rank_edges, tmp_path, False)
    for stage, got in enumerate(found):
        assert got["activations"] == (stage - 1) % world
        assert got["gradients"] == (stage + 1) % world
        assert (got["sent"], got["again"]) == (8, 0)
    logs = calls(tmp_path, attempt="a", ranks=range(world))
    assert find_parting(logs) is None
    for rank, log in logs.items():
        # One barrier of the world, and one transfer on each of four edges.
        assert [call.number for call in log] == [1] * 5, log
        assert sum(str(rank) in call.group for call in log) == 4


def test_a_rank_that_sends_what_nobody_expects_is_found(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, on_rank_edges, tmp_path, True)
    parting = find_parting(calls(tmp_path, attempt="a", ranks=[0, 1]))
    assert parting is not None and {parting.odd.what, parting.usual.what} == {
        "another of 1 float32",
        "gradients of 1 float32",
    }
    assert "at collective 1 of gradients 1>0, " in str(parting)


def on_rank_traffic(groups: ProcessGroups) -> list[int]:
    group, mine = groups.dp, torch.zeros(4)
    group.traffic.take()
    group.all_reduce(mine, dist.ReduceOp.SUM)
    sent = [group.traffic.take()]
    group.all_gather(torch.zeros(4 * group.size), mine)
    sent.append(group.traffic.take())
    group.reduce_scatter(torch.zeros(4), torch.zeros(4 * group.size), dist.ReduceOp.SUM)
    return [*sent, group.traffic.take()]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_bytes_are_counted_by_the_ring_model(ranks: Ranks, world: int) -> None:
    others = world - 1
    wanted = [2 * others * 16 // world, others * 16, others * 16]
    assert ranks.run(world, on_rank_traffic) == [wanted] * world


@contextmanager
def as_on_gpus(*, cpu: str = "gloo") -> Iterator[None]:
    """Let torch report the backends of a GPU run, one for each device; gloo stays in use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend", lambda: f"cpu:{cpu},cuda:nccl")
        yield


def on_rank_nccl_edges(groups: ProcessGroups) -> int:
    """Return the number of communicators that a stage makes where GPU tensors go by NCCL."""
    with as_on_gpus():
        dims = ParallelDims(tp=1, dp=1, pp=groups.world.size)
        edges = ProcessGroups.build(dims, rank=groups.world.rank).edges
    assert edges is not None
    return len({id(group.handle) for group in vars(edges).values()})


def test_with_nccl_no_direction_waits_for_another(ranks: Ranks) -> None:
    assert ranks.run(2, on_rank_nccl_edges) == [4, 4]


FAMILIES = ("world", "tp", "dp", "pp", "embedding")
GRIDS = [
    ParallelDims(tp=1, dp=1, pp=4),
    ParallelDims(tp=2, dp=1, pp=2),
    ParallelDims(tp=1, dp=2, pp=2),
]
LARGE_GRIDS = [
    ParallelDims(tp=2, dp=2, pp=2),
    ParallelDims(tp=1, dp=2, pp=4, order="tp-pp-dp"),
]


def on_rank_all_groups(groups: ProcessGroups, dims: ParallelDims) -> None:
    """Check that every group of a grid joins the right ranks, with edges as on GPUs."""
    rank = groups.world.rank
    with as_on_gpus():
        mine = ProcessGroups.build(dims, rank=rank)
    assert mine.edges is not None
    for group in (*(getattr(mine, name) for name in FAMILIES), mine.world.new_gloo_group()):
        total = torch.tensor([rank])
        group.all_reduce(total, dist.ReduceOp.SUM)
        assert int(total) == sum(group.ranks) and group.ranks[group.rank] == rank
    for way in ("activations", "gradients"):
        before, after = getattr(mine.edges, f"{way}_in"), getattr(mine.edges, f"{way}_out")
        came = torch.zeros(1)
        receive = before.receive(came, source=0, about=way)
        after.send(torch.tensor([float(rank)]), to=1, about=way).wait()
        receive.wait()
        assert int(came) == before.ranks[0]


def test_groups_of_every_kind_join_their_ranks(ranks: Ranks) -> None:
    """Middle stages are in no embedding group, so ranks are in different numbers of groups."""
    for dims in GRIDS:
        ranks.run(4, on_rank_all_groups, dims)


@pytest.mark.push
def test_so_do_those_of_eight_ranks() -> None:
    ranks = Ranks()
    try:
        for dims in LARGE_GRIDS:
            ranks.run(8, on_rank_all_groups, dims)
    finally:
        ranks.close()


def on_rank_apart_from_others(groups: ProcessGroups) -> None:
    """Build two pipelines, one of which makes its edges only when the other one has them."""
    rank = groups.world.rank
    with as_on_gpus():
        if rank % 2:
            groups.world.barrier()
        limit = timedelta(seconds=LIMIT / 2)
        edges = _edges([(0, 2), (1, 3)], rank, Group((rank,), 0), limit)
        if rank % 2 == 0:
            groups.world.barrier()
    assert all(rank in edge.ranks for edge in edges)


def test_no_rank_waits_for_groups_that_it_is_not_in(ranks: Ranks) -> None:
    """The grid has twice as many edges as ranks: a wait of all ranks for each would take long."""
    ranks.run(4, on_rank_apart_from_others)


def on_rank_connect(groups: ProcessGroups, dims: ParallelDims, cpu: str) -> list[tuple[str, str]]:
    """Return what is sent to connect the groups of a grid, with a given CPU backend."""
    mine = ProcessGroups.build(dims, rank=groups.world.rank)
    told: list[tuple[str, str]] = []
    mine.listen(lambda number, what, name: told.append((name, what)))
    with as_on_gpus(cpu=cpu):
        mine.connect(torch.device("cpu"))
    return told


def test_communicators_are_made_at_the_start(ranks: Ranks) -> None:
    dims = ParallelDims(tp=1, dp=1, pp=4)
    first, second, third, last = ranks.run(4, on_rank_connect, dims, "nccl")
    world = ("world", "connect of 1 float32")
    ends = ("embedding of 0", "connect of 1 float32")
    # The world and the one pipeline share a communicator.
    assert first == last == [world, world, ends] and second == third == [world, world]


def test_families_are_connected_in_one_order(ranks: Ranks) -> None:
    dims = ParallelDims(tp=2, dp=2, pp=1)
    names = [[name for name, _ in told] for told in ranks.run(4, on_rank_connect, dims, "nccl")]
    assert names == [
        ["world", f"tp of {tp}", f"dp of {dp}"] for tp, dp in ((0, 0), (0, 1), (2, 0), (2, 1))
    ]


def test_gloo_is_connected_already(ranks: Ranks) -> None:
    dims = ParallelDims(tp=2, dp=1, pp=2)
    assert ranks.run(4, on_rank_connect, dims, "gloo") == [[]] * 4


def test_alone_there_is_nobody_to_connect_to() -> None:
    alone = ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=1), rank=0)
    alone.connect(torch.device("cuda", 0))
