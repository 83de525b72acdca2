"""PowerSGD against the plain formulas in fp64, and against torch's own hook."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs

from megatron.data_parallel.exchange import Exchange
from megatron.data_parallel.reducer import StepContext
from megatron.parallel.groups import Group, ProcessGroups
from radius.baselines.message_bytes import FactorRank
from radius.baselines.powersgd import WARM_START, PowerSGDReducer, first_q
from tests.contract.harness import copies
from tests.radius.functional_ranks import bucket_of, equals_dense, fill, infos_of, mean_of, random
from tests.ranks import Ranks

pytestmark = pytest.mark.push

SHAPES = {"wide": (6, 50), "small": (3, 4), "tall": (40, 9)}
COMPRESSED = ("wide", "tall")
RANK, SEED = 2, 5
ALONE = Group((0,), 0)


def reducer_of(infos: list, group: Group, **options: Any) -> PowerSGDReducer:
    settings: dict[str, Any] = {"rank": RANK, "seed": SEED}
    return PowerSGDReducer(infos, Exchange(group), **(settings | options))


def on_rank_steps(groups: ProcessGroups, dtype: torch.dtype, scale: float) -> list[dict]:
    infos = infos_of(SHAPES)
    reducer, bucket = reducer_of(infos, groups.dp), bucket_of(infos, dtype=dtype)
    reducer.attach([bucket])
    found = []
    for step in range(5):
        mine = random(SHAPES, step, groups.dp.rank, dtype=dtype)
        mean = mean_of(reducer, bucket, mine, t=step + 1, scale=scale)
        kept = copies(reducer.state_tensors())
        shared = copies(reducer.shared_tensors())
        found.append({"mean": mean, "kept": kept, "shared": shared, "stats": reducer.stats()})
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float32, 1.0), (torch.float32, 512.0), (torch.bfloat16, 1.0), (torch.float16, 64.0)],
)
def test_steps_follow_the_formulas(
    ranks: Ranks, world: int, dtype: torch.dtype, scale: float
) -> None:
    by_rank = ranks.run(world, on_rank_steps, dtype, scale)
    tolerance = 1e-4 if dtype == torch.float32 else 6e-2  # two units of bf16 at size 4
    close: dict[str, Any] = {"rtol": tolerance, "atol": tolerance}
    q = {n: first_q(SEED, n, SHAPES[n][1], RANK).double() for n in COMPRESSED}
    kept = {(r, n): torch.zeros(SHAPES[n]).double() for r in range(world) for n in COMPRESSED}
    for step in range(5):
        mine = [random(SHAPES, step, rank, dtype=dtype) for rank in range(world)]
        for name in COMPRESSED:
            offered = [kept[rank, name] + mine[rank][name].double() for rank in range(world)]
            total = torch.stack(offered).mean(0)
            basis = torch.linalg.qr(total @ torch.linalg.qr(q[name]).Q).Q
            q[name] = total.T @ basis
            sent = basis @ q[name].T
            for rank, found in enumerate(by_rank):
                kept[rank, name] = offered[rank] - sent
                got = found[step]
                torch.testing.assert_close(got["mean"][name].double(), sent.view(-1), **close)
                residual = got["kept"][name].double()
                torch.testing.assert_close(residual, kept[rank, name].view(-1), **close)
                learned = got["shared"][WARM_START + name]
                # Its basis may turn by a sign; what it spans may not.
                torch.testing.assert_close(
                    (learned @ learned.T).double(), q[name] @ q[name].T, rtol=1e-3, atol=0.3
                )
        whole = torch.stack([gradients["small"] for gradients in mine]).mean(0).view(-1)
        for found in by_rank:
            torch.testing.assert_close(found[step]["mean"]["small"], whole, **close)
            assert found[step]["kept"].keys() == set(COMPRESSED)
            sent_entries = RANK * (6 + 50 + 40 + 9) + 3 * 4
            stats = found[step]["stats"]
            assert stats.bytes_sent == pytest.approx(
                2 * (world - 1) / world * 4 * sent_entries, abs=1
            )
            assert stats.density == sent_entries / sum(map(math.prod, SHAPES.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_not_sent_is_kept(dtype: torch.dtype) -> None:
    infos = infos_of(SHAPES)
    reducer, bucket = reducer_of(infos, ALONE), bucket_of(infos, dtype=dtype)
    reducer.attach([bucket])
    before = {name: torch.zeros(()) for name in SHAPES}
    for step in range(4):
        mine = random(SHAPES, step, dtype=dtype)
        mean = mean_of(reducer, bucket, mine, t=step + 1)
        for name, after in copies(reducer.state_tensors()).items():
            offered = mine[name].view(-1) + before[name]
            torch.testing.assert_close(mean[name] + after, offered, rtol=0, atol=2e-6)
            before[name] = after.clone()


# ---- torch's hook -------------------------------------------------------------------------------


class LowRankWeights(torch.nn.Module):
    """Parameters with given gradients."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterDict(
            {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
        )

    def forward(self, wanted: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([(self.weights[n] * g).sum() for n, g in wanted.items()]).sum()


def on_rank_hook(groups: ProcessGroups, steps: int) -> list[tuple[dict, dict, dict, dict]]:
    """Step by step: gradients after torch's hook and after ours, its residuals and ours."""
    infos = infos_of(SHAPES)
    reducer, mine = reducer_of(infos, groups.dp), bucket_of(infos)
    reducer.attach([mine])
    state = theirs.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=RANK,
        start_powerSGD_iter=2,
        min_compression_rate=1,
        use_error_feedback=True,
        warm_start=True,
    )
    wrapped = torch.nn.parallel.DistributedDataParallel(LowRankWeights(SHAPES), bucket_cap_mb=1)
    order: list[str] = []

    def hook(state, bucket):  # noqa: ANN001, ANN202  # torch refuses annotations kept as text
        assert bucket.is_last(), "one bucket"
        order[:] = [n for g in bucket.gradients() for n in SHAPES if g.shape == SHAPES[n]]
        if state.iter == 2 and 0 not in state.q_memory_dict:
            factored = [name for name in order if name in COMPRESSED]
            state.q_memory_dict[0] = torch.cat([reducer.q[n].reshape(-1) for n in factored])
            state.p_memory_dict[0] = torch.empty(sum(SHAPES[n][0] for n in factored) * RANK)
        return theirs.powerSGD_hook(state, bucket)

    wrapped.register_comm_hook(state, hook)
    found = []
    for step in range(2 + steps):
        gradients = random(SHAPES, step, groups.dp.rank)
        wrapped.zero_grad(set_to_none=True)
        wrapped(gradients).backward()
        if step < 2:
            continue
        hooked = {n: p.grad.view(-1).clone() for n, p in wrapped.module.weights.items()}
        ours = mean_of(reducer, mine, gradients, t=step)
        pieces = state.error_dict[0].split([math.prod(SHAPES[name]) for name in order])
        kept = copies(reducer.state_tensors())
        found.append((hooked, ours, dict(zip(order, pieces, strict=True)), kept))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_gradients_and_residuals_are_those_of_torchs_hook(ranks: Ranks, world: int) -> None:
    close: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4}
    for found in ranks.run(world, on_rank_hook, 6):
        assert len(found) == 6
        for hooked, ours, left, kept in found:
            assert hooked.keys() == SHAPES.keys() and kept.keys() == set(COMPRESSED)
            for name in SHAPES:
                torch.testing.assert_close(ours[name], hooked[name], **close)
            # Of what it sends whole it keeps local minus mean, which adds up to 0 over ranks.
            for name in COMPRESSED:
                torch.testing.assert_close(kept[name], left[name], **close)


# ---- warm start ---------------------------------------------------------------------------------


def test_the_first_q_depends_on_seed_and_name_alone() -> None:
    again = first_q(SEED, "a", 7, 3)
    torch.manual_seed(99)
    assert torch.equal(first_q(SEED, "a", 7, 3), again)
    assert not torch.equal(first_q(SEED, "b", 7, 3), again)
    assert not torch.equal(first_q(SEED + 1, "a", 7, 3), again)


def test_a_gradient_of_low_rank_goes_through_whole() -> None:
    infos = infos_of(SHAPES)
    reducer, bucket = reducer_of(infos, ALONE), bucket_of(infos)
    reducer.attach([bucket])
    for step in range(3):
        thin = random({n: (s[0], RANK) for n, s in SHAPES.items()}, step, 0)
        wide = random({n: (RANK, s[1]) for n, s in SHAPES.items()}, step, 1)
        mine = {name: thin[name] @ wide[name] for name in SHAPES}
        mean = mean_of(reducer, bucket, mine, t=step + 1)
        for name in SHAPES:
            torch.testing.assert_close(mean[name], mine[name].view(-1), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("silent", [0.0, 1.0])
def test_gradients_without_rank_leave_a_q_that_still_works(silent: float) -> None:
    """All zero, or all columns alike: the directions that Q lost are found again."""
    infos = infos_of(SHAPES)
    reducer, bucket = reducer_of(infos, ALONE), bucket_of(infos)
    reducer.attach([bucket])
    for t in (1, 2):
        flat = {name: torch.full(shape, silent) for name, shape in SHAPES.items()}
        mean = mean_of(reducer, bucket, flat, t=t)
        for name in SHAPES:
            torch.testing.assert_close(mean[name], flat[name].view(-1), rtol=1e-4, atol=1e-5)
    thin, wide = torch.randn(40, RANK), torch.randn(RANK, 9)
    wanted = random(SHAPES, 3) | {"tall": thin @ wide}
    for t in range(3, 9):
        mean = mean_of(reducer, bucket, wanted, t=t)
    torch.testing.assert_close(mean["tall"], wanted["tall"].view(-1), rtol=1e-2, atol=1e-2)


# ---- what goes when -----------------------------------------------------------------------------


class LoggedGroup(Group):
    """Two ranks of which the other always sends the same, noting what is sent and waited for."""

    events: list[str]

    def all_reduce(
        self, tensor: torch.Tensor, op: Any, *, async_op: bool = False, about: str = ""
    ) -> Any:
        self.events.append(f"send {tensor.numel()}")
        return LoggedWork(self.events, tensor.numel())


class LoggedWork:
    def __init__(self, events: list[str], numel: int) -> None:
        self.events, self.numel = events, numel

    def wait(self) -> None:
        self.events.append(f"wait {self.numel}")


def start_two_buckets() -> tuple[PowerSGDReducer, list[str], list[Any]]:
    """`send` and `wait` with the number of entries: P of 8 and 16, Q of 20 and 24."""
    group = LoggedGroup((0, 1), 0)
    object.__setattr__(group, "events", [])
    infos = infos_of({"a": (8, 20), "b": (16, 24)})
    buckets = [bucket_of([info], index=index) for index, info in enumerate(infos)]
    reducer = reducer_of(infos, group, rank=1)
    reducer.attach(buckets)
    for bucket, info in zip(buckets, infos, strict=True):
        fill(bucket, random({info.name: info.logical_shape}, 1))
    work = [reducer.reduce(bucket, StepContext(t=1)) for bucket in buckets]
    return reducer, group.events, work


def test_every_second_round_is_sent_before_the_first_is_waited_for() -> None:
    _, events, work = start_two_buckets()
    assert events == ["send 8", "send 16"], "reduce waits for nothing"
    work[0].wait()
    assert events[2:] == ["wait 8", "send 20", "wait 16", "send 24", "wait 20"]
    work[1].wait()
    assert events[7:] == ["wait 24"]


def test_a_dropped_step_sends_no_second_round_and_changes_nothing() -> None:
    reducer, events, work = start_two_buckets()
    q = {name: tensor.clone() for name, tensor in reducer.q.items()}
    for one in work:
        one.drop()
    for index, info in enumerate(reducer.infos.values()):
        reducer.abort(bucket_of([info], index=index))
    assert events[2:] == ["wait 8", "wait 16"]
    assert all(torch.equal(q[name], tensor) for name, tensor in reducer.q.items())
    assert not list(reducer.state_tensors()) and not list(reducer.shared_tensors())
    # The next step sends its own second round and no other.
    events.clear()
    for index, info in enumerate(reducer.infos.values()):
        reducer.reduce(bucket_of([info], index=index), StepContext(t=1)).wait()
    assert events == [f"{what} {n}" for n in (8, 20, 16, 24) for what in ("send", "wait")]


# ---- limits -------------------------------------------------------------------------------------


def on_rank_limit(groups: ProcessGroups, rank: int, start_iter: int) -> list[bool]:
    infos = infos_of(SHAPES)
    reducer = reducer_of(infos, groups.dp, rank=rank, start_iter=start_iter)
    return equals_dense(groups.dp, reducer, infos, SHAPES)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("rank", "start_iter", "same"), [(9, 0, [True] * 4), (2, 3, [True, True, False, False])]
)
def test_a_rank_that_saves_nothing_and_steps_before_the_first_are_the_dense_path(
    ranks: Ranks, world: int, rank: int, start_iter: int, same: list[bool]
) -> None:
    assert ranks.run(world, on_rank_limit, rank, start_iter) == [same] * world


def test_vocabulary_padding_is_no_part_of_the_matrix() -> None:
    plain, padded = infos_of({"e": (21, 8)}), infos_of({"e": (21, 8)}, padded={"e": (32, 8)})
    found = []
    for infos in (plain, padded):
        reducer, bucket = reducer_of(infos, ALONE), bucket_of(infos)
        reducer.attach([bucket])
        for t in (1, 2):
            mean = mean_of(reducer, bucket, random({"e": (21, 8)}, t), t=t)["e"]
        found.append((mean[: 21 * 8], copies(reducer.state_tensors())["e"]))
        assert not mean[21 * 8 :].any()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


# ---- rank as a share ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "shape", "rank"),
    [
        (0.03125, (768, 256), 8),
        (0.03125, (1000, 300), 10),  # 9.375
        (0.1, (30, 40), 3),  # 0.1 * 30 is above 3 in floating point
        (0.001, (30, 40), 1),
        (0.25, (64, 2, 4), 2),
        (1.0, (8, 20), 8),
    ],
)
def test_a_share_is_of_the_shorter_side_and_rounded_up(
    share: float, shape: tuple[int, ...], rank: int
) -> None:
    assert FactorRank(share=share).of(shape) == rank
    assert FactorRank(5).of(shape) == 5


def test_each_matrix_has_factors_of_its_share() -> None:
    infos = infos_of(SHAPES)
    bucket = bucket_of(infos)
    by_share = reducer_of(infos, ALONE, rank=4, rank_share=0.2)
    by_share.attach([bucket])
    # A fifth of 6, 3 and 9, rounded up.
    assert {name: tuple(q.shape) for name, q in by_share.q.items()} == {
        "wide": (50, 2),
        "small": (4, 1),
        "tall": (9, 2),
    }
    two = reducer_of(infos, ALONE)
    two.attach([other := bucket_of(infos)])
    for t in (1, 2, 3):
        gradients = random(SHAPES, t)
        first, second = (
            mean_of(each, where, gradients, t=t)
            for each, where in ((by_share, bucket), (two, other))
        )
        assert all(torch.equal(first[name], second[name]) for name in COMPRESSED)
        assert not torch.equal(first["small"], second["small"])
