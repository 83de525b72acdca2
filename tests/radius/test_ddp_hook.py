"""Tests of laws of the DDP hook in any loop; numbers in names are numbers of contracts."""

from __future__ import annotations

import copy
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megatron.errors import ConfigError
from megatron.parallel.groups import ProcessGroups
from radius.ddp_hook import RadiusHook, radius_hook
from radius.torch_update import in_memory_order
from tests.radius.loops import INTERVAL, LR, START, Loop, unpacked
from tests.radius.toys import index_of
from tests.ranks import Ranks

pytestmark = pytest.mark.push

STEPS = 3 * INTERVAL + 1


# ---- conservation, selection and what is sent ---------------------------------------------------


def on_rank_conservation(
    groups: ProcessGroups, microbatches: int, scale: float, as_view: bool
) -> list[dict[str, Any]]:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1.0)
    loop = Loop(groups, scaler=scaler, gradient_as_bucket_view=as_view)
    found = []
    for number in range(STEPS):
        batches = [10 * number + micro for micro in range(microbatches)]
        seen: dict[str, Any] = {"local": loop.local(*batches), "before": loop.waiting()}
        old_weights = [p.detach().clone() for p in loop.parameters]
        already_sent = loop.state.payload_bytes
        loop.backward(*batches)
        scaler.unscale_(loop.optimizer)
        seen["means"] = loop.means()
        scaler.step(loop.optimizer)
        scaler.update()
        seen["sent"] = loop.state.payload_bytes - already_sent
        seen["after"] = loop.waiting()
        seen["update"] = [
            in_memory_order((old - p.detach()) / LR)
            for old, p in zip(old_weights, loop.parameters, strict=True)
        ]
        found.append(seen)
    return found


MATRICES = (0, 2, 6)
"""Positions of the weights of `small_model` that are not 1-D."""


@pytest.mark.parametrize(
    ("microbatches", "scale", "as_view"), [(1, 1.0, False), (2, 1.0, True), (2, 1024.0, False)]
)
def test_3_what_is_not_sent_waits_and_nothing_is_lost(
    ranks: Ranks, microbatches: int, scale: float, as_view: bool
) -> None:
    by_rank = ranks.run(2, on_rank_conservation, microbatches, scale, as_view)
    for t, here in enumerate(zip(*by_rank, strict=True), start=1):
        sparse = t > INTERVAL and t % INTERVAL != 0
        sizes = [local.numel() for local in here[0]["local"]]
        sent = [_quota(n) if sparse and at in MATRICES else n for at, n in enumerate(sizes)]
        hashes = 16 if t % INTERVAL == 0 else 0
        assert [rank["sent"] for rank in here] == [4 * sum(sent) + hashes] * 2
        assert set(here[0]["after"]) == (set(MATRICES) if t >= INTERVAL else set())
        for number in range(len(sizes)):
            _check_conservation(here, number, sparse=sparse and number in MATRICES)
        if t % INTERVAL == 0:
            for number in MATRICES:
                _check_selection(here, number)


def _quota(entries: int) -> int:
    return math.ceil(Fraction(2, 5) * entries)


def _check_conservation(here: tuple[dict[str, Any], ...], number: int, *, sparse: bool) -> None:
    """Check that sent + residual after == gradient + residual before, and that means agree."""
    sent = []
    for rank in here:
        local = rank["local"][number]
        nothing = torch.zeros(local.numel(), dtype=torch.bool), torch.zeros(local.numel())
        chosen, before = rank["before"].get(number, nothing)
        _, after = rank["after"].get(number, nothing)
        chosen = chosen if sparse else torch.ones_like(chosen)
        assert torch.equal(after, torch.where(chosen, 0.0, local + before))
        sent.append(torch.where(chosen, local + before, 0.0))
    mean = here[0]["means"][number]
    assert torch.equal(mean, here[1]["means"][number])
    torch.testing.assert_close(mean, sum(sent) / 2, rtol=1e-6, atol=0.0)


def _check_selection(here: tuple[dict[str, Any], ...], number: int) -> None:
    """Check that both ranks select the k entries with the largest update."""
    chosen = here[0]["after"][number][0]
    assert torch.equal(chosen, here[1]["after"][number][0])
    update = here[0]["update"][number].abs()
    assert int(chosen.sum()) == _quota(update.numel())
    # Up to the rounding of the weights, from which the test computes the update.
    assert update[chosen].min() > update[~chosen].max() - 1e-4


def on_rank_other_rounding(groups: ProcessGroups) -> list[tuple[dict[str, torch.Tensor], int]]:
    """Return selections and extra bytes of each step, where rank 1 computes other moments."""
    loop, plain = Loop(groups), Loop(groups)

    def round_differently(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        generator = torch.Generator().manual_seed(loop.state.applied)
        for state in optimizer.state.values():
            noise = torch.randn(state["exp_avg"].shape, generator=generator)
            state["exp_avg"] *= 1 + 1e-2 * noise

    if groups.dp.rank == 1:
        loop.optimizer.register_step_pre_hook(round_differently)
    found = []
    for number in range(STEPS):
        before = loop.state.payload_bytes, plain.state.payload_bytes
        loop.step(number)
        plain.step(number)
        more = loop.state.payload_bytes - before[0] - (plain.state.payload_bytes - before[1])
        chosen = {k: v for k, v in loop.state.state_dict().items() if k.startswith("index.")}
        found.append((chosen, more))
    return found


def test_2_ranks_that_round_differently_take_the_choice_of_the_first(ranks: Ranks) -> None:
    for t, here in enumerate(zip(*ranks.run(2, on_rank_other_rounding), strict=True), start=1):
        (one, sent), (two, as_much) = here
        assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)
        bitmaps = sum(octets.numel() for octets in one.values())
        assert sent == as_much == (bitmaps if t % INTERVAL == 0 else 0)


# ---- steps that are not taken -------------------------------------------------------------------


def on_rank_skips(groups: ProcessGroups, poison: float, amp: bool, fused: bool) -> dict[str, Any]:
    def loop() -> Loop:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3) if amp else None
        return Loop(groups, scaler=scaler, fused=fused)

    plain, troubled = loop(), loop()
    seen = []
    for number in range(2 * INTERVAL + 2):
        plain.step(number)
        if number in (1, INTERVAL - 1, INTERVAL + 1, 2 * INTERVAL - 1):
            before = troubled.tensors()
            troubled.step(number + 1000, poison=poison)
            after = troubled.tensors()
            seen.append([name for name in after if not torch.equal(after[name], before[name])])
        troubled.step(number)
    wanted, found = plain.tensors(), troubled.tensors()
    different = [name for name in wanted if not torch.equal(wanted[name], found[name])]
    return {"changed by a skip": seen, "different": different, "applied": troubled.state.applied}


@pytest.mark.parametrize(
    ("poison", "amp", "fused"),
    [(math.nan, False, False), (math.inf, True, False), (math.inf, True, True)],
)
def test_4_a_skipped_step_changes_nothing(
    ranks: Ranks, poison: float, amp: bool, fused: bool
) -> None:
    """Each rank notices the non-finite entry, sent or not, in steps at and around resamples."""
    for result in ranks.run(2, on_rank_skips, poison, amp, fused):
        assert result == {
            "changed by a skip": [[], [], [], []],
            "different": [],
            "applied": 2 * INTERVAL + 2,
        }


class Branches(nn.Module):
    """A model with a matrix for even numbers and a matrix for odd numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.even, self.odd = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return (self.odd if number % 2 else self.even)(x)


def on_rank_branches(groups: ProcessGroups) -> list[dict[int, Any]]:
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = RadiusHook(optimizer, interval=INTERVAL, start=START)
    model.register_comm_hook(state, radius_hook)
    generator = torch.Generator().manual_seed(groups.dp.rank)
    found = []
    # The resamples, t = 4, 8 and 12, use the even matrix, the odd one and the even one.
    for number in (0, 1, 1, 0, 1, 0, 0, 1, 0, 1, 1, 0):
        loss = model(torch.randn(4, 8, generator=generator), number).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(unpacked(state.state_dict(), [p.numel() for p in model.parameters()]))
    return found


def test_what_a_resample_does_not_use_goes_on_waiting(ranks: Ranks) -> None:
    even, odd = 0, 2
    for found in ranks.run(2, on_rank_branches):
        at = {t: found[t - 1] for t in range(1, len(found) + 1)}
        assert set(at[4]) == {even} and set(at[8]) == {even, odd}
        assert all(torch.equal(a, b) for a, b in zip(at[7][even], at[8][even], strict=True))
        assert at[7][even][1].any() and not at[8][odd][1].any()
        # Everything is sent in the end.
        assert not at[12][even][1].any() and at[12][odd][1].any()


# ---- state --------------------------------------------------------------------------------------


def on_rank_resumed(groups: ProcessGroups, saved_at: int, bits: bool) -> list[str]:
    with index_of(bits):
        return resumed_at(saved_at, groups)


def resumed_at(saved_at: int, groups: ProcessGroups) -> list[str]:
    loop = Loop(groups)
    for number in range(saved_at):
        loop.step(number)
    state = loop.state.state_dict()
    resumed = Loop(groups)
    resumed.model.load_state_dict(loop.model.state_dict())
    resumed.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))
    resumed.state.load_state_dict(state)
    again = resumed.state.state_dict()
    different = [name for name in state if not torch.equal(state[name], again[name])]
    for number in range(saved_at, STEPS):
        loop.step(number)
        resumed.step(number)
    wanted, found = loop.tensors(), resumed.tensors()
    assert wanted.keys() == found.keys() and state.keys() == again.keys()
    return different + [name for name in wanted if not torch.equal(wanted[name], found[name])]


@pytest.mark.parametrize("bits", [False, True])
@pytest.mark.parametrize("saved_at", [2, INTERVAL, INTERVAL + 2])
def test_10_resumed_is_uninterrupted(ranks: Ranks, saved_at: int, bits: bool) -> None:
    assert ranks.run(2, on_rank_resumed, saved_at, bits) == [[], []]


def _optimizer() -> torch.optim.Optimizer:
    """Return an optimizer of a matrix of 15 entries and a vector."""
    shapes = ((3, 5), (5,))
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(shape)) for shape in shapes])


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "no 'applied'"),
        ({"applied": torch.tensor(3), "index.7": torch.zeros(1)}, "index.7: there is no such"),
        ({"applied": torch.tensor(3), "index.0": torch.zeros(2)}, "one is missing"),
        (
            {
                "applied": torch.tensor(3),
                "index.0": torch.zeros(3, dtype=torch.uint8),
                "residual.0": torch.zeros(15),
            },
            "index.0: 3 bytes for 15 entries",
        ),
        (
            {
                "applied": torch.tensor(3),
                "index.0": torch.tensor([128, 0], dtype=torch.uint8),
                "residual.0": torch.zeros(15),
            },
            "residual.0: 15 entries; must be the 14",
        ),
    ],
)
def test_state_of_other_parameters_is_refused(state: dict[str, torch.Tensor], message: str) -> None:
    hook = RadiusHook(_optimizer(), start=1)
    with pytest.raises(ConfigError, match=message):
        hook.load_state_dict(state)
    assert hook.applied == 0 and not hook.kept


@pytest.mark.parametrize(
    "options",
    [{"density": 0.0}, {"density": 1.5}, {"interval": 0}, {"start": 0}],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}="):
        RadiusHook(_optimizer(), **{"start": 1, **options})
