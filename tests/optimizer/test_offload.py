"""Tests of optimizer states in host memory: the bits of the device, in bounded device memory."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from megatron.data_parallel.all_reduce import AllReduceReducer
from megatron.data_parallel.bucket import ParamInfo, Slice
from megatron.data_parallel.engine import GradientEngine
from megatron.data_parallel.exchange import Exchange
from megatron.data_parallel.gradient_path import PathParts
from megatron.data_parallel.reducer import PiecewiseWork, ReducedGrad
from megatron.errors import NumericsError
from megatron.fault_tolerance.replicas import compare_replicas
from megatron.optimizer import bucket_optimizer, distributed_optimizer
from megatron.optimizer.cpu_offload import OffloadedOptimizer
from megatron.optimizer.host import MaskedHostLayout
from megatron.optimizer.update_rules import SGD, AdamW, UpdateRule
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from samo.layout import CompressedLayout
from tests.contract.harness import (
    DSR,
    EARLY_BIRD,
    OFFLOAD_BUCKET,
    RANDOM,
    PathCase,
    Toy,
    gradients,
    same,
)
from tests.ranks import Ranks
from tools.bench.common.tensors import bytes_of, storages

ALONE = ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=1), rank=0)
DENSE = PathCase("dense")
REWIRED = PathCase("samo", RANDOM | DSR)
TICKET = PathCase("samo", EARLY_BIRD | {"samo_early_bird_interval": 1})
"""An early-bird ticket that is pruned after its fifth update."""
BF16: dict[str, Any] = {"dtype": torch.bfloat16, "grad_dtype": torch.bfloat16}
BF16_WIDE: dict[str, Any] = {"dtype": torch.bfloat16, "grad_dtype": torch.float32}
FP16: dict[str, Any] = {"dtype": torch.float16, "grad_dtype": torch.float16}
FP16_WIDE: dict[str, Any] = {"dtype": torch.float16, "grad_dtype": torch.float32}
ADAM, MOMENTUM = AdamW(beta1=0.9, beta2=0.99, eps=1e-8), SGD(momentum=0.9)
NESTEROV = SGD(momentum=0.9, nesterov=True, coupled=True)
SCALE = 64.0


def offloaded(case: PathCase) -> PathCase:
    return replace(case, offloaded=True)


def pair(groups: ProcessGroups, case: PathCase, kinds: dict[str, Any], **options: Any) -> list[Toy]:
    """Return a toy with its states on the device, and a toy with offloaded states."""
    return [Toy(groups, one, **kinds, **options) for one in (case, offloaded(case))]


# ---- the same bits ------------------------------------------------------------------------------


def on_rank_run(
    groups: ProcessGroups, case: PathCase, kinds: dict[str, Any], rule: UpdateRule, clip: float
) -> dict[str, list]:
    """Run nine steps; one rank has a NaN in the fourth, and the sixth is not applied."""
    toys = pair(groups, case, kinds, rule=rule)
    found: dict[str, list] = {"differ": [], "norms": [], "arriving": [], "changed": []}
    for number in range(9):
        mine = [gradients(number, micro, groups.dp.rank) for micro in range(2)]
        if number == 3 and groups.dp.rank == groups.dp.size - 1:
            mine[1]["second.weight"].view(-1)[toys[0].entry("second.weight")] = math.nan
        before, steps = toys[1].state(), []
        for toy in toys:
            toy.backward(mine, loss_scale=SCALE)
            steps.append(toy.finish(clip_norm=clip))
        found["arriving"].append(steps[1].arriving)
        for toy, step in zip(toys, steps, strict=True):
            if number == 5:
                toy.engine.abort()  # a loss too far out
            else:
                toy.apply(step)
        if number in (3, 5):
            found["changed"] += same(before, toys[1].state())
        found["norms"].append([step.norm for step in steps])
        found["differ"] += same(*(toy.state() for toy in toys))
        compare_replicas(toys[1].optimizer, groups, step=number)
    return found


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize(
    ("world", "case", "kinds", "rule"),
    [
        (1, DENSE, BF16, ADAM),
        (1, DENSE, FP16_WIDE, MOMENTUM),
        (1, REWIRED, FP16, ADAM),
        (1, TICKET, BF16_WIDE, ADAM),
        (2, DENSE, FP16, MOMENTUM),
        (2, REWIRED, BF16, MOMENTUM),
        (1, DENSE, BF16, NESTEROV),
        (2, REWIRED, FP16_WIDE, NESTEROV),
        (4, TICKET, FP16, ADAM),
    ],
)
def test_no_bit_of_a_run_changes(
    ranks: Ranks, world: int, case: PathCase, kinds: dict, rule: UpdateRule, clip: float
) -> None:
    for found in ranks.run(world, on_rank_run, case, kinds, rule, clip):
        assert found["differ"] == found["changed"] == []
        assert all(a == b or (a != a and b != b) for a, b in found["norms"])
        assert sum(a == a for a, _ in found["norms"]) == 8, "a norm is found of aborted steps too"
        assert found["arriving"] == [not clip and number != 3 for number in range(9)]


def test_pieces_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_optimizer, "CPU_CHUNK", 64)
    cut = Toy(ALONE, offloaded(DENSE), **BF16_WIDE)
    monkeypatch.setattr(bucket_optimizer, "CPU_CHUNK", 1 << 20)
    whole = Toy(ALONE, DENSE, **BF16_WIDE)
    assert (cut.optimizer._chunk, whole.optimizer._chunk) == (64, 1 << 20)
    for number in range(4):
        for toy in (cut, whole):
            toy.step([gradients(number)])
        assert same(whole.state(), cut.state()) == []


def on_rank_in_pieces(groups: ProcessGroups, kinds: dict[str, Any]) -> dict[str, Any]:
    """Sums of all of a bucket at once, and of 128 entries at a time."""
    toys = pair(groups, DENSE, kinds)
    toys[1].engine.reducer.most = 128  # type: ignore[attr-defined]
    told: list[str] = []
    groups.dp.calls.tell = lambda number, what, name: told.append(what)
    differ, counts = [], []
    for number in range(3):
        for toy in toys:
            told.clear()
            toy.backward([gradients(number, 0, groups.dp.rank)], loss_scale=SCALE)
            step = toy.finish(clip_norm=0.0)
            toy.apply(step)
            counts.append(sum(what.startswith(("sum", "avg")) for what in told))
            differ.append(step.norm)
        differ[-2:] = [differ[-1] == pytest.approx(differ[-2], rel=1e-6)]
        differ += same(toys[0].state(), toys[1].state())
    groups.dp.calls.tell = None
    longest = max(bucket.numel for bucket in toys[1].engine.buckets)
    pieces = sum(-(-bucket.numel // 128) for bucket in toys[1].engine.buckets)
    return {
        "differ": [each for each in differ if each is not True],
        "counts": counts,
        "wanted": [len(toys[0].engine.buckets), pieces] * 3,
        "longest": longest,
    }


@pytest.mark.parametrize("kinds", [FP16, BF16_WIDE], ids=["fp16", "bf16, fp32 gradients"])
def test_long_buckets_are_summed_in_chunks(ranks: Ranks, kinds: dict[str, Any]) -> None:
    for found in ranks.run(2, on_rank_in_pieces, kinds):
        assert found["differ"] == []
        assert found["counts"] == found["wanted"] and found["longest"] > 2 * 128


def test_a_bucket_is_updated_from_its_beginning_while_its_end_is_on_its_way() -> None:
    events: list[str] = []

    class Sum:
        def __init__(self, number: int, where: Slice, grad: torch.Tensor) -> None:
            self.number, self.values = number, where.of(grad)

        def wait(self) -> ReducedGrad:
            events.append(f"sum {self.number}")
            return ReducedGrad(values=self.values)

        def drop(self) -> None:
            self.wait()

    class PiecewiseSums(PiecewiseWork):
        def __init__(self, grad: torch.Tensor) -> None:
            cuts = [Slice(at, min(128, grad.numel() - at)) for at in range(0, grad.numel(), 128)]
            super().__init__(grad, [(cut, Sum(i, cut, grad)) for i, cut in enumerate(cuts)])

        def wait(self) -> ReducedGrad:
            raise AssertionError("nobody may wait for all of it")

        def drop(self) -> None:
            pass

    toy = Toy(ALONE, offloaded(DENSE), **BF16)
    toy.engine.reducer.reduce = lambda bucket, step: PiecewiseSums(bucket.grad)  # type: ignore
    apply = toy.optimizer.rule.apply

    def watched(*args: Any) -> None:
        events.append("update")
        apply(*args)

    toy.optimizer.rule = Mock(wraps=toy.optimizer.rule, apply=watched)  # type: ignore[assignment]
    toy.backward([gradients(0)])
    step = toy.finish(clip_norm=0.0)
    assert events == []
    toy.optimizer.step(step, lr=0.1, weight_decay=0.0)
    first = toy.engine.buckets[0].numel
    assert events[0] == "sum 0" and first > 3 * 128
    assert "update" in events[: -(-first // 128)]
    assert math.isnan(step.norm)
    toy.engine.commit(step)
    assert step.norm > 0.0


def test_what_it_leaves_in_the_gradients_memory_is_no_gradient() -> None:
    """The gaps, and a parameter without gradient in the next step, have zero gradients."""
    toys = pair(ALONE, DENSE, BF16)
    for toy in toys:
        toy.step([gradients(0)])
        every, toy.infos = toy.infos, toy.infos[1:]
        toy.backward([gradients(1)])
        toy.infos = every
        toy.apply(toy.finish())
    assert same(*(toy.state() for toy in toys)) == []
    for bucket in toys[1].engine.buckets:
        gaps = bucket.grad.float()
        for where in bucket.slices.values():
            where.of(gaps).zero_()
        assert not gaps.any()


# ---- the order of a step ------------------------------------------------------------------------


def on_rank_order(groups: ProcessGroups, clip: float, zeros: bool) -> list[tuple[str, int]]:
    """Return the order in which a step squares and updates its buckets."""
    toy = Toy(groups, offloaded(DENSE), **BF16, cap=1)
    engine, optimizer, events = toy.engine, toy.optimizer, []
    toy.step([gradients(0)])
    square, update = engine._square, optimizer._update
    engine._square = lambda reduced: events.append("square") or square(reduced)  # type: ignore

    def updated(bucket: Any, *more: Any) -> None:
        events.append("update")
        update(bucket, *more)

    optimizer._update = updated  # type: ignore[method-assign]
    toy.backward([gradients(1, groups.dp.rank)])
    step = toy.finish(clip_norm=clip)
    if zeros:
        engine.count_zeros(step)
    toy.apply(step)
    return events


@pytest.mark.parametrize(
    ("clip", "zeros", "together"), [(0.0, False, True), (1.0, False, False), (0.0, True, False)]
)
def test_buckets_are_updated_as_they_come_unless_all_are_wanted_first(
    ranks: Ranks, clip: float, zeros: bool, together: bool
) -> None:
    buckets = 6
    one = ["square", "update"] * buckets
    other = ["square"] * buckets + ["update"] * buckets
    assert ranks.run(2, on_rank_order, clip, zeros) == [one if together else other] * 2


def on_rank_far_out(
    groups: ProcessGroups, values: list[float], predivided: bool
) -> tuple[list[bool], bool, bool, list[str], list[str]]:
    """Run a step with a far-out fp16 entry; return ok, if it was arriving, and differences."""
    toys = pair(groups, replace(DENSE, predivided=predivided), FP16)
    for toy in toys:
        toy.step([gradients(0, groups.dp.rank)])
    before = toys[1].state()
    wanted = gradients(1)
    wanted["first.weight"][2, 3] = values[groups.dp.rank]
    steps = []
    for toy in toys:
        toy.backward([wanted])
        steps.append(toy.finish())
    arriving = steps[1].arriving
    for toy, step in zip(toys, steps, strict=True):
        toy.apply(step)
    differ = same(*(toy.state() for toy in toys))
    return [step.ok for step in steps], arriving, differ, same(before, toys[1].state())  # type: ignore


@pytest.mark.parametrize(
    ("values", "predivided", "ok", "arriving"),
    [
        ([65000.0, 65000.0], False, True, True),  # divided first
        ([65504.0, 65504.0], False, True, False),  # halves round, so this is not certain
        ([30000.0, 30000.0], True, True, True),
        ([40000.0, -40000.0], True, True, False),  # might have overflowed
        ([40000.0, 40000.0], True, False, False),  # does
        ([40000.0, 20000.0], True, True, False),
        ([math.inf, 0.0], True, False, False),
    ],
)
def test_no_sum_overflows_after_others_were_applied(
    ranks: Ranks, values: list[float], predivided: bool, ok: bool, arriving: bool
) -> None:
    for found in ranks.run(2, on_rank_far_out, values, predivided):
        oks, was_arriving, differ, changed = found
        assert oks == [ok, ok] and was_arriving == arriving and differ == []
        assert bool(changed) == ok


def test_a_sum_that_breaks_its_bound_is_told() -> None:
    toy = Toy(ALONE, offloaded(DENSE), **BF16)
    toy.backward([gradients(0)])
    step = toy.finish()
    assert step.arriving
    toy.engine.buckets[-1].grad[0] = math.inf  # as a faulty network would
    toy.optimizer.step(step, lr=1e-2, weight_decay=0.0)
    with pytest.raises(NumericsError, match="numbers changed on their way"):
        toy.engine.commit(step)


# ---- memory -------------------------------------------------------------------------------------


def _model(shared: float, rule: UpdateRule, bucket_size: int) -> dict[str, int]:
    """Return bytes of states, other tensors and an index; then entries and stored entries."""
    before = storages()
    shape, count = (512, 64), 12
    infos = [
        ParamInfo(
            name=f"{number}",
            leaves=(torch.nn.Parameter(torch.randn(shape).bfloat16()),),
            logical_shape=shape,
        )
        for number in range(count)
    ]
    masks = {info.name: torch.rand(512 * 64) < shared for info in infos if shared < 1}
    layout = CompressedLayout(masks, device=torch.device("cpu"))
    del masks
    parts = PathParts(layout=layout, reducer=AllReduceReducer(Exchange(ALONE.dp)))
    engine = GradientEngine(
        infos, parts, ALONE, cap=4 * bucket_size, grad_dtype=torch.bfloat16, stream=True
    )
    optimizer = OffloadedOptimizer(engine, rule, bucket_size=bucket_size)
    for _ in range(2):
        engine.expect_last_backward()
        for info in infos:
            info.param.grad = torch.randn(shape).bfloat16()
            engine.accumulate(info.name, info.param)
        step = engine.finish(tag=1)
        optimizer.step(step, lr=1e-3, weight_decay=0.1)
        engine.commit(step)
        del step
    states = bytes_of(t for s in optimizer.states for t in (s.master, *s.moments))
    new = {at: size for at, size in storages().items() if at not in before}
    return {
        "states": sum(states.values()),
        "device": sum(size for at, size in new.items() if at not in states),
        "index": layout.nbytes,
        "buffers": optimizer.device_bytes,
        "entries": count * math.prod(shape),
        "stored": sum(bucket.numel for bucket in engine.buckets),
    }


@pytest.mark.push
@pytest.mark.parametrize("shared", [1.0, 0.3])
@pytest.mark.parametrize(("rule", "each"), [(ADAM, 14), (MOMENTUM, 10)])
def test_the_device_holds_16_bytes_an_entry_of_a_bucket(
    shared: float, rule: UpdateRule, each: int
) -> None:
    """4 phi + 16 bsize bytes in all (AxoNN V-B); pruned, 2 phi + 2 f phi and an index."""
    size = 16384
    found = _model(shared, rule, size)
    stored = found["stored"]
    assert found["states"] == (4 + 4 * len(rule.moments)) * stored
    assert found["buffers"] == each * size
    model = 2 * found["entries"] + 2 * stored + found["index"]
    assert 0 <= found["device"] - model - found["buffers"] < 1024, "and scalars"
    assert found["device"] <= model + 16 * size
    assert stored == found["entries"] if shared == 1 else stored < 0.32 * found["entries"]


# ---- going over to other states -----------------------------------------------------------------


@pytest.mark.parametrize("case", [DENSE, REWIRED, TICKET], ids=lambda case: str(case.options))
def test_states_go_from_host_to_device_and_back(case: PathCase) -> None:
    """Resident and offloaded optimizers take over each other's states with equal bits."""
    through = Toy(ALONE, case, **BF16)
    resident, other = pair(ALONE, case, BF16)
    toys = [through, resident, other]
    for number in range(8):
        for toy in toys:
            toy.step([gradients(number)])
        source, target = (resident, other) if number % 2 else (other, resident)
        states = {(k, n): t.clone() for k, n, t in source.optimizer.tensors()}
        for kind, name, flat in target.optimizer.tensors():
            flat.fill_(math.nan)
            flat.copy_(states[kind, name])
        for info in target.infos:
            info.param.detach().masked_fill_(toy.exists(info.name).view(info.param.shape), 7.0)
        target.optimizer.finish_load()
        weights = {info.name: flat for info, flat in target.optimizer.weights()}
        assert all(torch.equal(weights[name], states["param", name]) for name in weights)
        assert same(through.state(), target.state()) == []
    assert through.optimizer.params_norm() == other.optimizer.params_norm()


@pytest.mark.parametrize("case", [REWIRED, TICKET], ids=lambda case: str(case.options))
def test_states_apart_from_the_index_are_carried_over_by_masks(
    monkeypatch: pytest.MonkeyPatch, case: PathCase
) -> None:
    """Device kernels read no host memory, so that masks carry the states over."""
    plain = Toy(ALONE, case, **BF16)
    for number in range(8):
        plain.step([gradients(number)])
    used = []

    def apart(layout: Any, state: torch.Tensor, param: torch.Tensor) -> MaskedHostLayout:
        used.append(state.numel())
        return MaskedHostLayout(layout)

    monkeypatch.setattr(bucket_optimizer, "beside", apart)
    monkeypatch.setattr(distributed_optimizer, "beside", apart)
    toy = Toy(ALONE, offloaded(case), **BF16)
    for number in range(8):
        toy.step([gradients(number)])
    assert used and same(plain.state(), toy.state()) == []


def test_the_bucket_has_room_for_two_pieces() -> None:
    assert OFFLOAD_BUCKET // 2 % 64 == 0
    toy = Toy(ALONE, offloaded(DENSE), **BF16)
    assert toy.optimizer._chunk == OFFLOAD_BUCKET // 2
    with pytest.raises(AssertionError):
        OffloadedOptimizer(toy.engine, ADAM, bucket_size=64)
