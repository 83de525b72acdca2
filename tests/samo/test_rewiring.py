"""Tests of dynamic sparse reparameterization: pruning, growth, and that nothing is lost."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.data_parallel.bucket import ParamInfo
from megatron.data_parallel.gradient_path import LayoutChange
from megatron.data_parallel.layout import DenseLayout, Masks
from samo.dsr import DsrMaskUpdater, RewiringSettings, choose, share_out
from samo.schedule import CONSTANT, RewiringSchedule

SHAPES: dict[str, tuple[int, ...]] = {"wide": (40, 50), "thin": (8, 5), "embedding": (21, 32)}
PADDING = {"embedding": 3}
"""Number of rows that exist in memory only."""
EVERY = RewiringSchedule(interval=1, until=1_000_000, periods=CONSTANT)
SETTINGS = RewiringSettings(
    schedule=EVERY, target=60, threshold=0.02, reset_moments=True, seed=1234
)


class MaskLayout(DenseLayout):
    """A layout with masks, as a mask updater reads and makes it."""

    def __init__(self, masks: Masks) -> None:
        self.masks = dict(masks)

    def mask(self, name: str) -> torch.Tensor | None:
        return self.masks.get(name)


class ToyNetwork:
    """Dense weights that show only their stored entries, as a compressed optimizer does."""

    def __init__(self, *, density: float = 0.2, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.infos = [_info(name, shape) for name, shape in SHAPES.items()]
        self.infos.append(_info("bias", (50,)))
        self.weights = {info.name: self._noise(info.param.numel()) for info in self.infos}
        masks: dict[str, torch.Tensor] = {}
        for info in self.infos[:-1]:
            numel, logical = info.param.numel(), math.prod(info.logical_shape)
            mask = torch.rand(numel, generator=self.random) < density
            mask[0], mask[logical:] = True, False
            masks[info.name] = mask
            self.weights[info.name][~mask] = 0.0
        self.layout = MaskLayout(masks)

    def stored(self) -> Iterator[tuple[ParamInfo, torch.Tensor]]:
        for info in self.infos:
            mask = self.layout.mask(info.name)
            whole = self.weights[info.name]
            yield info, whole if mask is None else whole[mask]

    def train(self) -> None:
        """Update the stored entries at random."""
        for info in self.infos:
            noise = self._noise(info.param.numel()) * 0.3
            mask = self.layout.mask(info.name)
            self.weights[info.name] += noise if mask is None else noise * mask

    def take(self, change: LayoutChange | None) -> None:
        if change is None:
            return
        assert isinstance(change.layout, MaskLayout)
        for name, mask in change.layout.masks.items():
            self.weights[name][~mask] = 0.0
        self.layout = change.layout

    def masks(self) -> dict[str, torch.Tensor]:
        return {name: mask.clone() for name, mask in self.layout.masks.items()}

    def _noise(self, numel: int) -> torch.Tensor:
        return torch.randn(numel, generator=self.random) * 0.1


def _info(name: str, shape: tuple[int, ...]) -> ParamInfo:
    rows = shape[0] + PADDING.get(name, 0)
    param = torch.nn.Parameter(torch.zeros(rows, *shape[1:]))
    return ParamInfo(name=name, leaves=(param,), logical_shape=shape)


def mask_updater(**changes: object) -> DsrMaskUpdater:
    return DsrMaskUpdater(SHAPES, dataclasses.replace(SETTINGS, **changes), MaskLayout)  # pyright: ignore[reportArgumentType]


def run(network: ToyNetwork, dsr: DsrMaskUpdater, updates: range) -> list[dict[str, torch.Tensor]]:
    """Return the masks after each update."""
    found = []
    for t in updates:
        network.train()
        network.take(dsr.after_update(t, network.layout, network.stored()))
        found.append(network.masks())
    return found


def same(a: Sequence[dict[str, torch.Tensor]], b: Sequence[dict[str, torch.Tensor]]) -> bool:
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)
        for x, y in zip(a, b, strict=True)
    )


# ---- a run of rewirings ------------------------------------------------------------------------


def test_number_of_nonzeros_never_changes() -> None:
    network, dsr = ToyNetwork(), mask_updater()
    begin = network.masks()
    total = sum(int(mask.sum()) for mask in begin.values())
    for masks in run(network, dsr, range(1, 301)):
        assert masks.keys() == SHAPES.keys()
        assert sum(int(mask.sum()) for mask in masks.values()) == total
        for name, mask in masks.items():
            assert mask.any() and not mask[math.prod(SHAPES[name]) :].any()
    assert not same([begin], [network.masks()])


def test_what_goes_is_below_the_threshold_and_what_stays_is_untouched() -> None:
    network, dsr = ToyNetwork(), mask_updater()
    old = network.masks()
    before = {name: weight.clone() for name, weight in network.weights.items()}
    change = dsr.after_update(1, network.layout, network.stored())
    assert change is not None
    network.take(change)
    gone = 0
    for name, mask in network.masks().items():
        small = old[name] & (before[name].abs() < SETTINGS.threshold)
        gone += int(small.sum())
        large = old[name] & ~small
        assert mask[large].all()
        assert torch.equal(network.weights[name][large], before[name][large])
        assert not network.weights[name][~large].any(), "new weights are 0"
        assert not mask[small].any(), "nothing grows where it was just pruned"
    assert torch.equal(network.weights["bias"], before["bias"])
    assert dsr.stats() == {"dsr_pruned": gone, "dsr_threshold": SETTINGS.threshold}
    assert dsr.stats() == {}


def test_ranks_agree_without_talking_and_whatever_the_order_of_parameters() -> None:
    class Reversed(ToyNetwork):
        def stored(self) -> Iterator[tuple[ParamInfo, torch.Tensor]]:
            return reversed(list(super().stored()))  # pyright: ignore[reportReturnType]

    first = run(ToyNetwork(), mask_updater(), range(1, 40))
    assert same(first, run(ToyNetwork(), mask_updater(), range(1, 40)))
    assert same(first, run(Reversed(), mask_updater(), range(1, 40)))
    assert not same(first, run(ToyNetwork(), mask_updater(seed=1), range(1, 40)))


def test_resumed_run_goes_on_with_the_same_masks() -> None:
    settings = {
        "schedule": RewiringSchedule(interval=3, until=60, periods=CONSTANT),
        "threshold": 0.001,
    }
    whole = run(ToyNetwork(), mask_updater(**settings), range(1, 70))
    network, dsr = ToyNetwork(), mask_updater(**settings)
    run(network, dsr, range(1, 35))
    saved = {name: tensor.clone() for name, tensor in dsr.state_tensors()}
    assert saved["dsr/threshold"] > 0.001
    assert saved["dsr/counts"].tolist() == [34, 11]
    resumed = mask_updater(**settings)
    resumed.load_state_tensors(saved | {"mask/wide": torch.zeros(3)})
    assert same(whole[34:], run(network, resumed, range(35, 70)))


def test_settles_after_the_last_rewiring() -> None:
    network, dsr = (
        ToyNetwork(),
        mask_updater(schedule=RewiringSchedule(interval=3, until=10, periods=CONSTANT)),
    )
    settled = []
    for t in range(1, 12):
        network.take(dsr.after_update(t, network.layout, network.stored()))
        settled.append(dsr.layout_is_final)
    assert settled == [False] * 8 + [True] * 3
    (note,) = dsr.notes()
    assert "update 9 was the last after which to rewire; there were 3 rewirings" in note
    assert dsr.notes() == ()
    again = mask_updater(schedule=RewiringSchedule(interval=3, until=10, periods=CONSTANT))
    again.load_state_tensors(dict(dsr.state_tensors()))
    assert again.layout_is_final


def test_weights_are_not_looked_at_between_rewirings() -> None:
    def nobody() -> Iterator[tuple[ParamInfo, torch.Tensor]]:
        raise AssertionError("the weights were asked for")
        yield

    dsr = mask_updater(schedule=RewiringSchedule(interval=10, until=20, periods=CONSTANT))
    for t in [*range(1, 10), *range(11, 20), *range(21, 50)]:
        assert dsr.after_update(t, MaskLayout({}), nobody()) is None


@pytest.mark.parametrize("reset", [True, False])
def test_moments_begin_anew_as_asked(reset: bool) -> None:
    network = ToyNetwork()
    change = mask_updater(reset_moments=reset).after_update(1, network.layout, network.stored())
    assert change is not None and change.reset_moments is reset


def test_other_masks_and_tensors_stored_whole_take_part_as_they_should() -> None:
    """Masks of other parameters stay; a rewired parameter without a mask is stored whole."""
    network = ToyNetwork()
    whole = network.layout.masks.pop("embedding")
    other = torch.arange(50) % 2 == 0
    network.layout.masks["bias"] = other
    network.weights["embedding"] = torch.ones(whole.numel())
    network.weights["embedding"][5] = 0.0
    change = mask_updater().after_update(1, network.layout, network.stored())
    assert change is not None and isinstance(change.layout, MaskLayout)
    logical = math.prod(SHAPES["embedding"])
    assert torch.equal(change.layout.masks["bias"], other)
    mask = change.layout.masks["embedding"]
    assert not mask[logical:].any() and int(mask.sum()) in (logical - 1, logical)


# ---- the threshold -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pruned", "factor"),
    [(0, 2.0), (89, 2.0), (90, 1.0), (100, 1.0), (110, 1.0), (111, 0.5), (200, 0.5)],
)
def test_threshold_doubles_and_halves_outside_a_tenth_of_the_target(
    pruned: int, factor: float
) -> None:
    network = ToyNetwork(density=0.5)
    values = network.weights["wide"]
    stored = network.layout.masks["wide"].nonzero().view(-1)
    assert stored.numel() > 300
    for name in SHAPES:
        network.weights[name].fill_(1.0)
    values[stored[:pruned]] = -0.01
    dsr = mask_updater(target=100, threshold=0.02)
    change = dsr.after_update(1, network.layout, network.stored())
    assert (change is None) is (pruned == 0)
    assert dsr.stats() == {"dsr_pruned": pruned, "dsr_threshold": 0.02}
    state = dict(dsr.state_tensors())
    assert state["dsr/threshold"].item() == 0.02 * factor
    assert state["dsr/counts"].tolist() == [1, int(pruned > 0)]


@pytest.mark.parametrize("threshold", [1e-7, 30.0])
def test_threshold_finds_the_target_from_far_away(threshold: float) -> None:
    network, dsr = ToyNetwork(density=0.3), mask_updater(threshold=threshold)
    stored = sum(int(mask.sum()) for mask in network.masks().values())
    pruned = []
    for t in range(1, 61):
        network.train()
        network.take(dsr.after_update(t, network.layout, network.stored()))
        pruned.append(dsr.stats()["dsr_pruned"])
    if threshold > 1:
        assert pruned[0] == stored - len(SHAPES), "all but one of each: no limit of our own"
    assert 0.5 < sum(pruned[30:]) / 30 / SETTINGS.target < 1.7


def test_where_too_few_places_are_free_less_is_pruned() -> None:
    """A network that is less than half zeros may have more below the threshold than zeros."""
    network = ToyNetwork(density=0.9)
    stored = sum(int(mask.sum()) for mask in network.masks().values())
    free = sum(math.prod(shape) for shape in SHAPES.values()) - stored
    dsr = mask_updater(threshold=64.0)
    network.take(dsr.after_update(1, network.layout, network.stored()))
    stats = dsr.stats()
    assert 0 < stats["dsr_pruned"] <= free < stored
    assert math.log2(64 / stats["dsr_threshold"]).is_integer() and stats["dsr_threshold"] < 1
    assert sum(int(mask.sum()) for mask in network.masks().values()) == stored
    assert dict(dsr.state_tensors())["dsr/threshold"].item() == stats["dsr_threshold"] / 2


def test_as_many_zeros_as_no_place_is_left_for_stay() -> None:
    network = ToyNetwork(density=0.9)
    for weight in network.weights.values():
        weight.zero_()
    dsr = mask_updater()
    assert dsr.after_update(1, network.layout, network.stored()) is None
    assert dsr.stats() == {"dsr_pruned": 0, "dsr_threshold": 0.0}
    assert dict(dsr.state_tensors())["dsr/threshold"].item() > 0


def test_zeros_go_whatever_their_number() -> None:
    network = ToyNetwork(density=0.5)
    network.weights["wide"].zero_()
    zeros = int(network.layout.masks["wide"].sum()) - 1  # a tensor keeps at least one
    dsr = mask_updater(target=10, threshold=1e-5)
    assert zeros > 100
    dsr.after_update(1, network.layout, network.stored())
    assert dsr.stats()["dsr_pruned"] == zeros


def test_no_tensor_loses_its_last_entry() -> None:
    network = ToyNetwork(density=0.5)
    thin = network.weights["thin"]
    network.layout.masks["thin"].fill_(True)
    thin.fill_(1e-3)
    thin[[7, 11, 30]] = torch.tensor([0.002, -0.005, 0.005])
    for name in ("wide", "embedding"):
        network.weights[name].fill_(1.0)
    dsr = mask_updater()
    change = dsr.after_update(1, network.layout, network.stored())
    assert change is not None and dsr.stats()["dsr_pruned"] == thin.numel() - 1
    network.take(change)
    assert network.layout.masks["thin"][11] and thin[11] == torch.tensor(-0.005)
    assert thin.count_nonzero() == 1, "the first of the largest stays, the others go"


def test_not_a_number_stays() -> None:
    network = ToyNetwork()
    place = int(network.layout.masks["wide"].nonzero()[3])
    network.weights["wide"][place] = math.nan
    network.take(mask_updater().after_update(1, network.layout, network.stored()))
    assert network.layout.masks["wide"][place] and network.weights["wide"][place].isnan()


# ---- chance ------------------------------------------------------------------------------------


def deviation(found: np.ndarray, expected: np.ndarray, degrees: int) -> float:
    """Return Pearson's chi-squared in standard deviations from its mean."""
    statistic = float(((found - expected) ** 2 / expected).sum())
    return (statistic - degrees) / math.sqrt(2 * degrees)


@pytest.mark.push
def test_growth_is_uniform_over_the_places_of_a_tensor_that_were_zero() -> None:
    times = 3000
    network = ToyNetwork()
    hits = {name: np.zeros(math.prod(shape)) for name, shape in SHAPES.items()}
    for t in range(1, times + 1):
        dsr = mask_updater()  # each from the same network, with the draws of another update
        change = dsr.after_update(t, network.layout, network.stored())
        assert change is not None and isinstance(change.layout, MaskLayout)
        for name, mask in change.layout.masks.items():
            hits[name] += mask[: hits[name].size].numpy()
    for name, counts in hits.items():
        stored = network.layout.masks[name][: counts.size].numpy()
        small = stored & (network.weights[name][: counts.size].abs() < SETTINGS.threshold).numpy()
        assert (counts[stored & ~small] == times).all() and not counts[small].any()
        free = counts[~stored]
        grown = int(free.sum()) // times
        assert grown > 0 and free.sum() == times * grown, "the same number each time"
        expected = times * grown / free.size
        assert expected > 20
        # Draws without replacement scatter less than independent draws, by the part not drawn.
        scatter = 1 - grown / free.size
        places = (free - expected) / math.sqrt(scatter) + expected
        assert abs(deviation(places, np.full(free.size, expected), free.size - 1)) < 4


@pytest.mark.parametrize(("n", "count"), [(5, 2), (5, 3), (4, 4), (3, 0)])
def test_every_set_is_as_likely_as_another(n: int, count: int) -> None:
    generator = np.random.default_rng(3)
    times = 6000
    sets = {frozenset(s): 0 for s in itertools.combinations(range(n), count)}
    for _ in range(times):
        sets[frozenset(np.flatnonzero(choose(n, count, generator)).tolist())] += 1
    found = np.array(list(sets.values()), dtype=float)
    expected = np.full(len(sets), times / len(sets))
    assert len(sets) == 1 or abs(deviation(found, expected, len(sets) - 1)) < 4


# ---- shares ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "weights", "room", "shares"),
    [
        (10, [3, 1, 1], [99, 99, 99], [6, 2, 2]),
        (7, [3, 1, 1], [99, 99, 99], [4, 2, 1]),  # 4.2, 1.4, 1.4: the first of equal remainders
        (1, [1, 2, 3], [99, 99, 99], [0, 0, 1]),
        (10, [3, 1, 1], [4, 99, 99], [4, 3, 3]),  # 2 are divided again
        (10, [3, 1, 1], [4, 2, 99], [4, 2, 4]),
        (9, [5, 3, 1], [4, 3, 2], [4, 3, 2]),
        (5, [7, 1, 2], [0, 99, 99], [0, 2, 3]),  # 1.67, 3.33
        (0, [1, 1], [0, 0], [0, 0]),
        (3, [0, 1], [0, 5], [0, 3]),
    ],
)
def test_shares_by_hand(count: int, weights: list[int], room: list[int], shares: list[int]) -> None:
    assert share_out(count, weights, room) == shares


def test_shares_of_more_entries_than_a_float_counts() -> None:
    weights = [3 * 10**18, 1, 7 * 10**18]
    shares = share_out(10**18 + 1, weights, weights)
    assert sum(shares) == 10**18 + 1 and shares == [3 * 10**17, 0, 7 * 10**17 + 1]


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 60)), min_size=1, max_size=7),
    st.data(),
)
def test_shares_sum_exactly_and_are_the_nearest_to_proportional(
    tensors: list[tuple[int, int]], data: st.DataObject
) -> None:
    weights, room = [w for w, _ in tensors], [r for _, r in tensors]
    count = data.draw(st.integers(0, sum(room)))
    shares = share_out(count, weights, room)
    assert sum(shares) == count
    assert all(0 <= share <= most for share, most in zip(shares, room, strict=True))
    for share, weight, most in zip(shares, weights, room, strict=True):
        quota = Fraction(count * weight, sum(weights))
        assert share == most or share >= math.floor(quota), "what others lack room for only adds"
    if all(Fraction(count * w, sum(weights)) + 1 <= r for w, r in tensors):
        assert all(
            abs(share - Fraction(count * weight, sum(weights))) < 1
            for share, weight in zip(shares, weights, strict=True)
        )


# ---- three tensors by hand, and a transcription in loops ----------------------------------------


def three_tensors(growth: str) -> tuple[dict[str, list[int]], dict[str, float]]:
    """Rewire three tensors of 20, 10 and 10 entries, of which 8, 4 and 4 are stored.

    Returns:
        The positions of each that are stored afterwards, and the numbers of the rewiring.
    """
    infos = [ParamInfo(name=n, leaves=(torch.nn.Parameter(torch.zeros(s)),), logical_shape=s)
             for n, s in (("a", (4, 5)), ("b", (2, 5)), ("c", (2, 5)))]  # fmt: skip
    kept = {
        "a": [1.0, -2.0, 3.0, -4.0, 5.0, 0.05, -0.05, 0.01],  # three go
        "b": [0.01, 0.5, -0.02, 0.03],  # three go
        "c": [0.2, 0.3, 0.4, -0.5],  # none goes
    }
    masks = {info.name: torch.arange(info.entries) < len(kept[info.name]) for info in infos}
    dsr = DsrMaskUpdater(
        list(kept),
        dataclasses.replace(SETTINGS, target=6, threshold=0.1, growth=growth),  # pyright: ignore[reportArgumentType]
        MaskLayout,
    )
    weights = ((info, torch.tensor(kept[info.name])) for info in infos)
    change = dsr.after_update(1, MaskLayout(masks), weights)
    assert change is not None and isinstance(change.layout, MaskLayout)
    found = {n: mask.nonzero().view(-1).tolist() for n, mask in change.layout.masks.items()}
    return found, dict(dsr.stats())


def test_three_tensors_grow_by_their_survivors() -> None:
    """K = 6 of R = 5 + 1 + 4 = 10: shares 3, 0.6 and 2.4 are 3, 1 and 2."""
    found, stats = three_tensors("survivors")
    assert stats == {"dsr_pruned": 6.0, "dsr_threshold": 0.1}
    assert {name: len(places) for name, places in found.items()} == {"a": 8, "b": 2, "c": 6}
    assert found["a"][:5] == [0, 1, 2, 3, 4] and min(found["a"][5:]) >= 8
    assert found["b"][0] == 1 and found["b"][1] >= 4
    assert found["c"][:4] == [0, 1, 2, 3] and min(found["c"][4:]) >= 4


def test_three_tensors_grow_by_their_zeros() -> None:
    """Zeros after pruning are 15, 9 and 6 of 30: shares 3, 1.8 and 1.2 are 3, 2 and 1."""
    found, _ = three_tensors("zeros")
    assert {name: len(places) for name, places in found.items()} == {"a": 8, "b": 3, "c": 5}


def rewire_in_loops(
    weights: dict[str, list[float]],
    stored: dict[str, list[bool]],
    threshold: float,
    target: int,
    draw: Callable[[str, int, int], list[int]],
) -> tuple[dict[str, list[float]], dict[str, list[bool]], float]:
    """Transcribe one rewiring of Sohoni et al. (2019): one weight, one tensor, one place a time.

    `draw(name, n, count)`: which of n free places of a tensor grow.
    """
    weights, after = copy.deepcopy(weights), copy.deepcopy(stored)
    pruned, survivors = dict.fromkeys(weights, 0), dict.fromkeys(weights, 0)
    for name in weights:
        small = [i for i, w in enumerate(weights[name]) if stored[name][i] and abs(w) < threshold]
        if len(small) == sum(stored[name]):
            small.remove(max(small, key=lambda i, n=name: (abs(weights[n][i]), -i)))
        for i in small:
            weights[name][i], after[name][i] = 0.0, False
        pruned[name], survivors[name] = len(small), sum(after[name])
    total, left = sum(pruned.values()), sum(pruned.values())
    growth = dict.fromkeys(weights, 0)
    while left:
        able = [n for n in sorted(weights) if growth[n] < stored[n].count(False)]
        exact = {n: Fraction(left * survivors[n], sum(survivors[m] for m in able)) for n in able}
        share = {n: math.floor(exact[n]) for n in able}
        for n in sorted(able, key=lambda n: share[n] - exact[n])[: left - sum(share.values())]:
            share[n] += 1
        for n in able:
            growth[n] = min(growth[n] + share[n], stored[n].count(False))
        left = total - sum(growth.values())
    for name in weights:
        free = [i for i, exists in enumerate(stored[name]) if not exists]
        for place in draw(name, len(free), growth[name]):
            after[name][free[place]] = True
    factor = 2.0 if total < 0.9 * target else 0.5 if total > 1.1 * target else 1.0
    return weights, after, threshold * factor


@pytest.mark.parametrize("density", [0.1, 0.45])
def test_a_run_is_that_of_the_loops(density: float) -> None:
    network = ToyNetwork(density=density)
    dsr = mask_updater(threshold=0.001)
    threshold, counts = 0.001, []
    for t in range(1, 41):
        network.train()
        if t == 20:
            network.weights["thin"] *= 1e-6  # all of it is below the threshold: one stays

        def draw(name: str, n: int, count: int, t: int = t) -> list[int]:
            digest = hashlib.sha256(f"dsr/{SETTINGS.seed}/{t}/{name}".encode()).digest()
            generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
            return np.flatnonzero(choose(n, count, generator)).tolist() if count else []

        sizes = {name: math.prod(shape) for name, shape in SHAPES.items()}
        weights, stored, threshold = rewire_in_loops(
            {name: network.weights[name][:n].tolist() for name, n in sizes.items()},
            {name: network.layout.masks[name][:n].tolist() for name, n in sizes.items()},
            threshold,
            SETTINGS.target,
            draw,
        )
        network.take(dsr.after_update(t, network.layout, network.stored()))
        counts.append(dsr.stats()["dsr_pruned"])
        for name, n in sizes.items():
            assert network.layout.masks[name][:n].tolist() == stored[name], (t, name)
            assert network.weights[name][:n].tolist() == weights[name], (t, name)
        assert dict(dsr.state_tensors())["dsr/threshold"].item() == threshold, t
    assert len(set(counts)) > 10 and min(counts[:3]) < SETTINGS.target < max(counts)
