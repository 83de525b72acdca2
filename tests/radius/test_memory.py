"""Memory counted from the tensors alive during a step, compared with the planned memory."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron.data_parallel.bucket import GradBucket, Slice
from megatron.data_parallel.exchange import Exchange
from megatron.data_parallel.reducer import Step, StepContext
from megatron.data_parallel.streaming import StreamedGrads
from megatron.optimizer.bucket_optimizer import BucketOptimizer
from megatron.optimizer.update_rules import AdamW, Hyper
from megatron.parallel.groups import Group
from radius.bitmap_index import BitmapIndex
from radius.index import index_bytes
from radius.memory import memory_note, planned_bytes, radius_bytes
from radius.native_library import native_library
from radius.reducer import RadiusReducer, RadiusSettings
from tests.planner.shapes import rank_of
from tools.bench.common.tensors import storages

pytestmark = pytest.mark.push

ENTRIES = 3_000_000 // 64 * 64
"""Entries of one matrix: a dozen chunks."""
MIB = 2**20
SLACK = 64 * 1024
"""Bytes: a step's small tensors (a boolean, bounds of a search)."""


class BucketBench:
    """A reducer with one bucket, whose tensors are distinguished from all others."""

    def __init__(self, density: str, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.bucket = GradBucket(
            index=0,
            slices={"w": Slice(0, ENTRIES)},
            grad=torch.randn(ENTRIES).to(dtype),
            weight_decay=True,
            tied=False,
            tp_sharded=False,
        )
        self.update = torch.randn(ENTRIES).to(dtype)
        self.weight = torch.randn(ENTRIES)
        self.moments = [torch.zeros(ENTRIES), torch.zeros(ENTRIES)]
        settings = RadiusSettings(density=Fraction(density), interval=4, start=1, **options)
        self.before = storages()
        self.reducer = RadiusReducer(Exchange(Group((0,), 0)), {"w": ENTRIES}, settings)
        self.reducer.attach([self.bucket])

    def step(self, t: int) -> None:
        """One step through reducer and index, as the optimizer takes it."""
        context = StepContext(t)
        reduced = self.reducer.reduce(self.bucket, context).wait()
        if reduced.index is not None:
            rule, hyper = AdamW(beta1=0.9, beta2=0.99, eps=1e-8), Hyper(t=t, lr=0, weight_decay=0)
            reduced.index.apply(rule, reduced, self.weight, self.moments, hyper, factor=0.5)
        update = reduced.values if reduced.index else self.update
        wanted = self.reducer.wants_update(context)
        self.reducer.commit(self.bucket, update if wanted else None)

    def kept(self) -> tuple[int, int]:
        """Return the bytes that the reducer holds: state, and vectors of sent values."""
        own = self.reducer._own[0]
        values = sum(tensor.nbytes for tensor in own._kept.values())
        if isinstance(own.index, BitmapIndex):
            assert own.index.bits.counts.numel(), "counted when it is next used"
        new = {at: size for at, size in storages().items() if at not in self.before}
        return sum(new.values()) - values, values


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[False, True], ids=["offsets", "bits"])
def bits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Each kind of index that a CPU may have."""
    if request.param and native_library() is None:
        pytest.skip("needs the kernels of radius/native.c, and AVX2")
    monkeypatch.setattr("radius.reducer.keeps_bits", lambda *_: request.param)
    return request.param


@pytest.mark.turns
@pytest.mark.parametrize("density", ["0.4", "0.1"])
@pytest.mark.parametrize("residual", ["separate", "none"])
@pytest.mark.parametrize("schedule", ["paper", "rolling"])
def test_what_lasts_is_index_and_residual(
    density: str, residual: str, schedule: str, bits: bool
) -> None:
    bench = BucketBench(density, residual=residual, schedule=schedule)
    for t in range(1, 8):
        bench.step(t)
    state, values = bench.kept()
    planned = radius_bytes(
        [ENTRIES],
        density=Fraction(density),
        residual=residual,
        rolling_interval=4 if schedule == "rolling" else None,
        value_bytes=4,
        bits=bits,
    )
    assert planned["index"] <= 4 * float(density) * ENTRIES + 4
    assert planned["residual"] == (4 * ENTRIES if residual == "separate" else 0)
    assert 0 <= state - planned["index"] - planned["residual"] < SLACK
    # Chosen entries lie unevenly in a rolling schedule's parts.
    assert planned["values"] * 0.95 < values < planned["values"] * 1.05


def most_at_once(work: Any) -> int:
    """Bytes that all tensors made while it runs held at their peak."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        work()
    assert watched.profiler is not None and watched.profiler.kineto_results is not None
    events = [e for e in watched.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
        peak = max(peak, now)
    return peak


def test_the_peak_is_seen() -> None:
    def work() -> None:
        first = torch.empty(MIB)
        second = first * 2
        del first, second
        torch.empty(16)

    assert 8 * MIB <= most_at_once(work) < 8 * MIB + 1024


@pytest.mark.turns
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("density", ["0.4", "0.1"])
def test_a_sparse_step_takes_a_compact_vector_and_a_mebibyte(
    density: str, dtype: torch.dtype, bits: bool
) -> None:
    bench = BucketBench(density, dtype)
    for t in range(1, 5):
        bench.step(t)
    compact = dtype.itemsize * float(density) * ENTRIES
    # 16-bit values are widened as well, a chunk's at a time.
    scratch = (1 + float(density) * (dtype != torch.float32)) * MIB + SLACK
    # The residual is made when something is first to wait, and stays.
    first = most_at_once(lambda: bench.step(5)) - 4 * ENTRIES
    assert compact - SLACK < first <= compact + scratch
    again = most_at_once(lambda: bench.step(6))
    assert again <= scratch, "the compact vector is kept for the next step"
    own = bench.reducer._own[0]
    residual = own.residual.waiting(own.index)
    assert residual is not None and residual.nbytes == 4 * ENTRIES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resample_takes_bits_and_a_few_chunks_beside_the_new_index(
    dtype: torch.dtype, bits: bool
) -> None:
    """The old one, whose end the profiler does not see, goes chunk by chunk as the new one comes;
    both are compared as bits."""
    bench = BucketBench("0.4", dtype)
    for t in range(1, 8):
        bench.step(t)
    index, compared = 0 if bits else 4 * 0.4 * ENTRIES, 2 * ENTRIES / 8
    assert most_at_once(lambda: bench.step(8)) <= index + compared + 5 * MIB


class Whole:
    """An engine of one bucket, as far as the optimizer sees it."""

    def __init__(self, bench: BucketBench) -> None:
        self.buckets = [bench.bucket]
        self.layout: Any = SimpleNamespace(bind=lambda *_: None, scatter=lambda *_: None)
        self.infos = {"w": SimpleNamespace(param=bench.weight, leaves=())}
        self.wants_update = True
        self.local_steps = None

    def slices(self) -> Iterator[Any]:
        yield SimpleNamespace(name="w", leaves=()), self.buckets[0], Slice(0, ENTRIES)

    def place(self, name: str) -> tuple[GradBucket, Slice]:
        return self.buckets[0], self.buckets[0].slices[name]


@pytest.mark.turns
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rolling_update_takes_the_old_weights_of_a_part_and_chunks(
    dtype: torch.dtype, weight_decay: float, bits: bool
) -> None:
    """One part in four; without weight decay they are not read."""
    bench = BucketBench("0.1", dtype, schedule="rolling")
    for t in range(1, 6):
        bench.step(t)
    reduced = bench.reducer.reduce(bench.bucket, StepContext(6)).wait()
    engine: Any = Whole(bench)
    optimizer = BucketOptimizer(engine, AdamW(beta1=0.9, beta2=0.99, eps=1e-8))
    means = StreamedGrads(lambda number: reduced, 1)
    step = Step(ok=True, norm=1.0, factor=0.5, reduced=means)
    taken = most_at_once(lambda: optimizer.step(step, lr=0.0, weight_decay=weight_decay))
    kept = 4 * ENTRIES / 4 if weight_decay else 0
    # `frozen` entries are gathered chunk by chunk as well.
    assert kept <= taken <= kept + 5 * MIB, taken / MIB


def test_a_bitmap_is_as_large_as_planned() -> None:
    index = BitmapIndex(ENTRIES // 1024 * 1024, torch.device("cpu"))
    planned = index_bytes(index.length, index.length // 3, bits=True)
    assert planned <= index.nbytes < 1.01 * planned < 0.2 * index.length


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_selection_by_gradient_holds_a_copy_of_all_means_until_it_selects(
    dtype: torch.dtype,
) -> None:
    bench, rank = BucketBench("0.4", dtype, select="gradient"), rank_of({"w": (ENTRIES, 1)})
    planned = planned_bytes(
        rank,
        density=Fraction("0.4"),
        residual="separate",
        rolling_interval=None,
        value_bytes=dtype.itemsize,
        selects_by_gradient=True,
    )
    before = storages()
    bench.reducer.reduce(bench.bucket, StepContext(4)).wait()
    held = sum(size for at, size in storages().items() if at not in before)
    copied = planned.passing["mean gradients"]
    assert copied == dtype.itemsize * ENTRIES and copied <= held < copied + SLACK


def test_rounding_that_is_kept_takes_a_second_buffer() -> None:
    settings = {"density": Fraction("0.4"), "rolling_interval": None, "value_bytes": 4}
    for residual, each in (("separate", 8), ("none", 0)):
        kinds = radius_bytes([1000], residual=residual, bits=True, keeps_rounding=True, **settings)
        assert kinds["residual"] == each * 1000


def test_the_log_tells_it_beside_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radius.memory.instruction_sets", lambda: ("AVX2",))
    kinds = radius_bytes(
        [10_000_000, 500],
        density=Fraction("0.4"),
        residual="separate",
        rolling_interval=None,
        value_bytes=4,
        bits=True,
    )
    assert memory_note(10_000_500, kinds, "cpu", bits=True) == (
        "radius: keeps 1.41 MB of index, 40 MB of residual and 16 MB of values for 10,000,500 "
        "entries (the paper: 50 MB of booleans and residual); moves them by compiled kernels "
        "with AVX2"
    )
    assert memory_note(10_000_500, kinds, "cuda", bits=True) == (
        "radius: keeps 1.41 MB of index and 40 MB of residual for 10,000,500 entries, and 16 MB of "
        "values while they are sent (the paper: 50 MB of booleans and residual)"
    )
    told = memory_note(1, kinds | {"index": 9020}, "cpu", bits=False)
    assert "9.02 kB of index" in told and told.endswith("; moves them by torch")
