"""Tests of exact selection against a stable sort of magnitudes, and of seeded draws.

Tensors are whole or sharded over ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.parallel.tensor_shard import TensorShard
from megatron.sparse import counting, selection
from megatron.sparse.counting import Candidates
from megatron.sparse.reference import CHUNK, TIE_BLOCK
from megatron.sparse.selection import (
    DRAWN_BLOCK,
    draw_seeded,
    select_largest,
    select_largest_each,
)
from megatron.sparse.shard import FlatShard
from tests.limits import LIMIT
from tests.triton_process import needs_triton

DENORMAL = 1e-40
HALF = (torch.bfloat16, torch.float16)


def largest_by_sorting(values: torch.Tensor, k: int) -> torch.Tensor:
    # By bits: torch's sort on a CPU may treat denormal numbers as zeros.
    bits = torch.int32 if values.dtype == torch.float32 else torch.int16
    magnitudes = values.view(bits) & torch.iinfo(bits).max
    return torch.sort(magnitudes, descending=True, stable=True).indices[:k].sort().values


def assert_selects(values: torch.Tensor, k: int) -> None:
    expected = largest_by_sorting(values, k)
    for few in (0, values.numel()):  # by counting, and by partition
        with mock.patch.object(selection, "FEW", few):
            found = select_largest(values, k)
        assert found.count == k and found.n == values.numel()
        assert found.positions().dtype == torch.int32
        assert torch.equal(found.positions().long(), expected)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.one_of(
            st.floats(width=32, allow_nan=False, allow_infinity=False),
            st.sampled_from([0.0, -0.0, 1.0, -1.0, DENORMAL, -DENORMAL, 3.4e38]),
        ),
        min_size=1,
        max_size=60,
    ),
    st.data(),
)
def test_equals_sorting(numbers: list[float], data: st.DataObject) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    assert_selects(values, data.draw(st.integers(0, len(numbers))))


@pytest.mark.parametrize("kind", ["normal", "few values", "equal", "zeros", "denormal", "ramp"])
def test_equals_sorting_over_several_chunks(kind: str) -> None:
    numel = 2 * CHUNK + 777
    random = torch.randn(numel) * 1e-3
    values = {
        "normal": random,
        "few values": torch.randint(-3, 4, (numel,)).float(),
        "equal": torch.full((numel,), -0.5),
        "zeros": random * (torch.rand(numel) < 0.1),
        "denormal": torch.randint(0, 2**23, (numel,), dtype=torch.int32).view(torch.float32),
        "ramp": torch.arange(numel).float(),
    }[kind]
    for k in (1, 1000, int(0.4 * numel), TIE_BLOCK + 1, numel - 1, numel):
        assert_selects(values, k)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_every_16_bit_number_is_told_apart(dtype: torch.dtype) -> None:
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    values = values[torch.randperm(values.numel())]
    values = values[~values.isnan()]
    for k in (1, 300, 30_000, values.numel()):
        assert_selects(values, k)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("kind", ["normal", "few values", "equal"])
def test_16_bit_values_are_chosen_as_their_fp32_copies(kind: str, dtype: torch.dtype) -> None:
    for numel in (1, 77, CHUNK + 4321):
        values = {
            "normal": torch.randn(numel) * 1e-3,
            "few values": torch.randint(-3, 4, (numel,)).float(),
            "equal": torch.full((numel,), -0.5),
        }[kind].to(dtype)
        for k in {1, int(0.4 * numel) + 1, numel}:
            assert_selects(values, k)
            wide = select_largest(values.float(), k)
            found = select_largest(torch.nn.Parameter(values), k)
            assert torch.equal(found.positions(), wide.positions())
            assert torch.equal(found.threshold, wide.threshold)
            assert torch.equal(found.cutoff, wide.cutoff)


def test_agrees_with_topk() -> None:
    values = torch.randperm(100_000).float() * torch.randint(0, 2, (100_000,)).mul(2).sub(1)
    expected = torch.topk(values.abs(), 40_000, sorted=False).indices.sort().values
    assert torch.equal(select_largest(values, 40_000).positions().long(), expected)


def test_positions_of_a_range_are_counted_from_its_start() -> None:
    values = torch.randint(-3, 4, (CHUNK + 5000,)).float()
    chosen = select_largest(values, 20_000)
    everything = chosen.positions().long()
    for start, stop in ((0, 10), (1234, 5678), (CHUNK - 7, CHUNK + 9), (5, 5), (3, CHUNK + 5000)):
        inside = everything[(everything >= start) & (everything < stop)]
        assert torch.equal(chosen.positions(start, stop).long(), inside - start)


@pytest.mark.parametrize("misleading", [False, True])
def test_a_sample_changes_nothing(monkeypatch: pytest.MonkeyPatch, misleading: bool) -> None:
    """A GPU looks at a sample first; the sample may contradict the rest of the values."""
    monkeypatch.setattr(counting, "SAMPLE", 100)
    values = torch.randn(30_000)
    if misleading:
        values[:: (30_000 // 100) | 1] = 1e-9
    for k in (0, 1, 12_000, 30_000):
        passes: list[int] = []
        one = Candidates(values, k, FlatShard(30_000, 30_000))
        (found,) = selection._by_counting(
            [one], lambda counts, passes=passes: passes.append(int(counts.sum())), sampled=True
        )
        assert torch.equal(found.positions().long(), largest_by_sorting(values, k))
        if k == 12_000:
            again = passes[2]  # counted in the pass over everything
            assert again == (30_000 if misleading else 0)


class Together:
    """Threads that run a function as every rank of a group, with a sum over the group."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=LIMIT)
        self.offered: list[torch.Tensor] = [torch.empty(0)] * ranks
        self.calls = [0] * ranks

    def sums(self, rank: int) -> Callable[[torch.Tensor], None]:
        def add_up(counts: torch.Tensor) -> None:
            self.calls[rank] += 1
            self.offered[rank] = counts.clone()
            self.barrier.wait()
            counts.copy_(torch.stack(self.offered).sum(0))
            self.barrier.wait()

        return add_up

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        found: list[Any] = [None] * len(self.calls)

        def on_rank(rank: int) -> None:
            found[rank] = function(rank)

        threads = [threading.Thread(target=on_rank, args=(rank,)) for rank in range(len(found))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", ["normal", "few values", "bf16"])
@pytest.mark.parametrize("shape", [(520, 512), (52, 36)], ids=str)
def test_cut_over_ranks_chooses_the_same(
    shape: tuple[int, int], axis: int, ranks: int, kind: str
) -> None:
    """The selection is by counts, or for a small tensor by sending all of it."""
    whole = torch.randint(-2, 3, shape).float() if kind == "few values" else torch.randn(shape)
    whole = whole.bfloat16() if kind == "bf16" else whole
    for k in (0, 1, whole.numel() * 3 // 8, whole.numel()):
        expected = torch.zeros(whole.numel(), dtype=torch.bool)
        expected[largest_by_sorting(whole.view(-1), k)] = True
        group = Together(ranks)

        def on_rank(rank: int, k: int = k, group: Together = group) -> torch.Tensor:
            part = whole.chunk(ranks, dim=axis)[rank].contiguous()
            shard = FlatShard.of(TensorShard.evenly(shape, axis=axis, rank=rank, ranks=ranks))
            found = select_largest(part.view(-1), k, sum_bins=group.sums(rank), shard=shard)
            assert found.count is None
            chosen = torch.zeros(part.numel(), dtype=torch.bool)
            chosen[found.positions().long()] = True
            return chosen.view(part.shape)

        assert torch.equal(torch.cat(group.run(on_rank), dim=axis).view(-1), expected)
        assert len(set(group.calls)) == 1


def stored_in_part(ranks: int) -> list[FlatShard]:
    """Return shards by columns of a 6 x 8 tensor, with some stored entries; one row has none."""
    counts = torch.tensor([[2, 0, 1, 0, 4, 3], [1, 3, 0, 0, 2, 0], [0, 1, 1, 0, 0, 0]])[:ranks]
    return [FlatShard.of_stored(counts, rank) for rank in range(ranks)]


KINDS_OF_CUT = {
    "rows": [FlatShard.of(TensorShard.evenly((7, 8), axis=0, rank=r, ranks=3)) for r in range(3)],
    "columns": [
        FlatShard.of(TensorShard.evenly((6, 8), axis=1, rank=r, ranks=3)) for r in range(3)
    ],
    "blocks": [
        FlatShard.of(TensorShard.evenly((8, 5), axis=0, rank=r, ranks=2, blocks=2))
        for r in range(2)
    ],
    "stored": stored_in_part(3),
}


@pytest.mark.parametrize("kind", KINDS_OF_CUT)
@pytest.mark.parametrize("parts", [1, 4, 9])
@pytest.mark.parametrize("together", [0, 1 << 17])
def test_parts_of_a_cut_tensor_are_chosen_from_alike(
    monkeypatch: pytest.MonkeyPatch, kind: str, parts: int, together: int
) -> None:
    """Each rank has a range of every part, or nothing, and takes part in any case."""
    monkeypatch.setattr(selection, "TOGETHER", together)
    shards = KINDS_OF_CUT[kind]
    total = shards[0].total
    whole = torch.randint(-3, 4, (total,)).float()
    places = [shard.logical(torch.arange(shard.numel)) for shard in shards]
    assert torch.equal(torch.cat(places).sort().values, torch.arange(total))
    for number in range(parts):
        lo, hi = total * number // parts, total * (number + 1) // parts
        group = Together(len(shards))
        expected = largest_by_sorting(whole[lo:hi], (hi - lo) // 2)

        def on_rank(rank: int, lo: int = lo, hi: int = hi, group: Together = group) -> torch.Tensor:
            mine, shard = whole[places[rank]], shards[rank]
            local, part = slice(shard.below(lo), shard.below(hi)), shard.part(lo, hi)
            assert torch.equal(part.logical(torch.arange(part.numel)), places[rank][local] - lo)
            back, here = part.local(torch.arange(hi - lo)) if part.numel else (None, None)
            if back is not None and here is not None:
                assert torch.equal(back[here], torch.arange(part.numel))
            k = (hi - lo) // 2
            found = select_largest(mine[local], k, sum_bins=group.sums(rank), shard=part)
            drawn = draw_seeded(hi - lo, k, seed=1, step=2, name="w", shard=part)
            assert not part.numel or drawn.count == drawn.positions().numel()
            return part.logical(found.positions().long())

        chosen = torch.cat(group.run(on_rank)).sort().values
        assert torch.equal(chosen, expected)
        assert len(set(group.calls)) == 1


@pytest.mark.parametrize("axis", [0, 1])
def test_shard_places_are_those_of_the_cut(axis: int) -> None:
    places = torch.arange(6 * 8).view(6, 8)
    for rank, part in enumerate(places.chunk(2, dim=axis)):
        shard = FlatShard.of(TensorShard.evenly((6, 8), axis=axis, rank=rank, ranks=2))
        local = torch.arange(part.numel())
        assert torch.equal(shard.logical(local), part.reshape(-1))
        back, here = shard.local(places.view(-1))
        assert torch.equal(places.view(-1)[here], part.reshape(-1))
        assert torch.equal(back[here], local)


class LargestOutput(TorchDispatchMode):
    """A mode that records the bytes of the largest tensor that an operation returns."""

    nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and not func.is_view:
                self.nbytes = max(self.nbytes, tensor.nbytes)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_scratch_does_not_grow_with_the_tensor(dtype: torch.dtype) -> None:
    values = torch.randint(-30, 30, (12 * CHUNK,)).to(dtype)
    with LargestOutput() as seen:
        chosen = select_largest(values, 4 * CHUNK)
        for start in range(0, values.numel(), CHUNK):
            chosen.positions(start, start + CHUNK)
    assert 0 < seen.nbytes <= 2 * 2**20


# ---- draws --------------------------------------------------------------------------------------


@settings(deadline=None)
@given(n=st.integers(1, 3000), density=st.floats(0, 1), step=st.integers(0, 2**40))
@example(n=130, density=1.0, step=0)
@example(n=64, density=0.0, step=0)
def test_draw_has_exactly_k_in_whole_blocks(n: int, density: float, step: int) -> None:
    k = int(density * n)
    draw = draw_seeded(n, k, seed=1, step=step, name="weight")
    positions = draw.positions().long()
    assert draw.count == positions.numel() == k and draw.n == n
    assert torch.equal(positions, positions.unique())
    assert k == 0 or 0 <= int(positions[0]) <= int(positions[-1]) < n
    assert not (draw.starts % DRAWN_BLOCK).any() and (draw.starts[1:] > draw.starts[:-1]).all()
    whole = torch.minimum(torch.tensor(DRAWN_BLOCK), n - draw.starts)
    assert (draw.lengths <= whole).all() and int((draw.lengths < whole).sum()) <= 1


def test_draw_depends_on_seed_step_and_name_alone() -> None:
    def drawn(**changes: Any) -> torch.Tensor:
        settings = {"seed": 3, "step": 40, "name": "layers.0.weight"} | changes
        return draw_seeded(64 * 1000, 64 * 400, **settings).positions()

    first = drawn()
    torch.rand(7)  # other generators have no influence
    assert torch.equal(drawn(), first)
    for change in ({"seed": 4}, {"step": 41}, {"name": "layers.1.weight"}):
        shared = set(drawn(**change).tolist()) & set(first.tolist())
        assert 0.3 < len(shared) / first.numel() < 0.5


def test_draw_is_even() -> None:
    """Each block is drawn in 40 % of the steps; 5 standard deviations are 11 %."""
    hits = torch.zeros(64 * 40)
    for step in range(500):
        hits[draw_seeded(64 * 40, 64 * 16, seed=0, step=step, name="w").positions().long()] += 1
    assert (hits / 500 - 0.4).abs().max() < 0.11


@pytest.mark.parametrize("axis", [0, 1])
def test_draw_cut_over_ranks_is_the_same_draw(axis: int) -> None:
    shape, k = (48, 200), 3333
    whole = draw_seeded(48 * 200, k, seed=1, step=2, name="w").positions().long()
    expected = torch.zeros(48 * 200)
    expected[whole] = 1
    parts = []
    for rank in range(4):
        shard = FlatShard.of(TensorShard.evenly(shape, axis=axis, rank=rank, ranks=4))
        draw = draw_seeded(48 * 200, k, seed=1, step=2, name="w", shard=shard)
        part = torch.zeros(shard.numel)
        part[draw.positions().long()] = 1
        assert draw.count == int(part.sum())
        half = torch.zeros(shard.numel)
        half[draw.positions(shard.numel // 2).long() + shard.numel // 2] = 1
        assert torch.equal(half[shard.numel // 2 :], part[shard.numel // 2 :])
        parts.append(part.view([n // 4 if a == axis else n for a, n in enumerate(shape)]))
    assert torch.equal(torch.cat(parts, dim=axis).view(-1), expected)


def assorted(seed: int) -> list[Candidates]:
    """Return tensors of many lengths, dtypes and kinds, with and without ties at the threshold."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number, numel in enumerate((1, 7, 1000, TIE_BLOCK + 5, 3 * TIE_BLOCK, 40_000)):
        values = torch.randn(numel, generator=generator)
        if number % 3 == 1:
            values = values.mul(2).round()
        if number == seed % 6:
            values.zero_()
        values = values.to((torch.float32, torch.bfloat16, torch.float16)[(number + seed) % 3])
        for k in {0, 1, numel // 3, numel}:
            found.append(Candidates(values, k, FlatShard(numel, numel)))
    return found


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_tensors_selected_from_together_are_those_selected_from_alone(
    seed: int, sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "SAMPLE", 100)
    tensors = assorted(seed)
    together = selection._by_counting(tensors, None, sampled=sampled)
    alone = select_largest_each(tensors)
    for one, found, wanted in zip(tensors, together, alone, strict=True):
        assert found.count == wanted.count == one.k
        assert torch.equal(found.positions(), wanted.positions())
        assert torch.equal(found.positions().long(), largest_by_sorting(one.values, one.k))


def test_cut_tensors_are_selected_from_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks select in one order, with or without entries; one sum serves all tensors."""
    monkeypatch.setattr(selection, "TOGETHER", 0)
    cuts = [KINDS_OF_CUT["rows"], KINDS_OF_CUT["columns"], KINDS_OF_CUT["stored"]]
    wholes = [torch.randint(-3, 4, (shards[0].total,)).float() for shards in cuts]
    sums: dict[int, int] = {}
    for count in (1, 3):
        group = Together(3)

        def on_rank(rank: int, count: int = count, group: Together = group) -> list[torch.Tensor]:
            batch = []
            for whole, shards in zip(wholes[:count], cuts, strict=False):
                places = shards[rank].logical(torch.arange(shards[rank].numel))
                batch.append(Candidates(whole[places], whole.numel() // 2, shards[rank]))
            found = selection._by_counting(batch, group.sums(rank), sampled=False)
            return [
                one.shard.logical(largest.positions().long())
                for one, largest in zip(batch, found, strict=True)
            ]

        by_rank = group.run(on_rank)
        for whole, parts in zip(wholes, zip(*by_rank, strict=True), strict=False):
            expected = largest_by_sorting(whole, whole.numel() // 2)
            assert torch.equal(torch.cat(parts).sort().values, expected)
        sums[count] = group.calls[0]
    assert sums[1] == sums[3]


class DeviceOperations(TorchDispatchMode):
    """A mode that counts operations of a device, of which views are none."""

    number = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.number += not func.is_view
        return func(*args, **(kwargs or {}))


@needs_triton
def test_operations_do_not_grow_with_the_number_of_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernels of a batch are launched once for all of its tensors."""
    from megatron.sparse import counting_kernels

    launches: list[str] = []

    def launch(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
        launches.append(kernel.__name__)

    monkeypatch.setattr(counting_kernels, "launch", launch)
    monkeypatch.setattr(selection, "_counter", counting_kernels.KernelCounter)
    counted = set()
    for count in (1, 2, 16):
        launches.clear()
        batch = [Candidates(torch.randn(30_000), 10_000, FlatShard(30_000, 30_000))] * count
        with DeviceOperations() as operations:
            found = list(selection._by_counting(batch, None, sampled=True))
        assert len(found) == count
        counted.add((len(launches), operations.number))
    ((launched, operated),) = counted
    assert launched == 12 and operated <= 12
