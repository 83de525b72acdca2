"""Tests of dynamic sparse reparameterization: pruning, growth, and that nothing is lost."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from megatron.data_parallel.bucket import ParamInfo
from megatron.data_parallel.gradient_path import LayoutChange
from megatron.data_parallel.layout import DenseLayout, Masks
from samo.dsr import DsrMaskUpdater, RewiringSettings, choose, share_out
from samo.schedule import RewiringSchedule

SHAPES: dict[str, tuple[int, ...]] = {"wide": (40, 50), "thin": (8, 5), "embedding": (21, 32)}
PADDING = {"embedding": 3}
"""Number of rows that exist in memory only."""
EVERY = RewiringSchedule(interval=1, until=1_000_000, widening=False)
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
            if name in change.anew:
                self.weights[name][change.anew[name]] = 0.0
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
        assert change.anew.get(name, torch.empty(0)).tolist() == (
            (small & mask).nonzero().view(-1).tolist()
        ), "what was pruned and drawn again begins anew"
    assert change.anew, "one of them was drawn again"
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
        "schedule": RewiringSchedule(interval=3, until=60, widening=False),
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
        mask_updater(schedule=RewiringSchedule(interval=3, until=10, widening=False)),
    )
    settled = []
    for t in range(1, 12):
        network.take(dsr.after_update(t, network.layout, network.stored()))
        settled.append(dsr.layout_is_final)
    assert settled == [False] * 8 + [True] * 3
    (note,) = dsr.notes()
    assert "update 9 was the last after which to rewire; there were 3 rewirings" in note
    assert dsr.notes() == ()
    again = mask_updater(schedule=RewiringSchedule(interval=3, until=10, widening=False))
    again.load_state_tensors(dict(dsr.state_tensors()))
    assert again.layout_is_final


def test_weights_are_not_looked_at_between_rewirings() -> None:
    def nobody() -> Iterator[tuple[ParamInfo, torch.Tensor]]:
        raise AssertionError("the weights were asked for")
        yield

    dsr = mask_updater(schedule=RewiringSchedule(interval=10, until=20, widening=False))
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


def test_threshold_finds_the_target_from_far_away() -> None:
    for threshold in (1e-7, 30.0):
        network, dsr = ToyNetwork(density=0.5), mask_updater(threshold=threshold)
        pruned = []
        for t in range(1, 61):
            network.train()
            network.take(dsr.after_update(t, network.layout, network.stored()))
            pruned.append(dsr.stats()["dsr_pruned"])
        assert max(pruned) <= 2 * SETTINGS.target
        assert 0.5 < sum(pruned[30:]) / 30 / SETTINGS.target < 1.7


def test_a_pruned_network_is_not_wiped_out_by_the_doubling_that_reaches_it() -> None:
    network = ToyNetwork(density=0.5)
    for name in SHAPES:  # magnitudes as pruning leaves them: none up to 0.033, all within 0.066
        weight = network.weights[name]
        weight.copy_(torch.rand(weight.numel(), generator=network.random) * 0.03 + 0.033)
    stored = sum(int(mask.sum()) for mask in network.masks().values())
    dsr = mask_updater(threshold=0.001)
    counts = []
    for t in range(1, 9):
        network.take(dsr.after_update(t, network.layout, network.stored()))
        counts.append(dsr.stats()["dsr_pruned"])
    assert counts[:7] == [0] * 6 + [counts[6]] and 110 <= counts[6] <= 120 < stored / 4
    (note,) = dsr.notes()
    assert "the threshold 0.064 would have pruned" in note and "after update 7" in note


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


def test_growth_is_uniform_over_every_place_that_is_zero() -> None:
    """All zeros of tensors of any size take part, just pruned or never stored, and no others."""
    times = 4000
    network = ToyNetwork()
    hits = {name: np.zeros(math.prod(shape)) for name, shape in SHAPES.items()}
    for t in range(1, times + 1):
        dsr = mask_updater()  # each from the same network, with the draws of another update
        change = dsr.after_update(t, network.layout, network.stored())
        assert change is not None and isinstance(change.layout, MaskLayout)
        for name, mask in change.layout.masks.items():
            hits[name] += mask[: hits[name].size].numpy()
    pruned = dsr.stats()["dsr_pruned"]
    kept, gone, never = [], [], []
    for name, counts in hits.items():
        stored = network.layout.masks[name][: counts.size].numpy()
        small = stored & (network.weights[name][: counts.size].abs() < SETTINGS.threshold).numpy()
        kept.append(counts[stored & ~small])
        gone.append(counts[small])
        never.append(counts[~stored])
    assert (np.concatenate(kept) == times).all()
    zeros = np.concatenate(gone + never)
    expected = times * pruned / zeros.size
    assert expected > 20 and zeros.sum() == times * pruned
    # Draws without replacement scatter less than independent draws, by the part not drawn.
    scatter = 1 - pruned / zeros.size
    places = (zeros - expected) / math.sqrt(scatter) + expected
    assert abs(deviation(places, np.full(zeros.size, expected), zeros.size - 1)) < 4
    groups = [*gone, *never]
    sums = np.array([group.sum() for group in groups])
    sizes = np.array([group.size for group in groups])
    scaled = (sums - expected * sizes) / math.sqrt(scatter) + expected * sizes
    assert abs(deviation(scaled, expected * sizes, len(groups) - 1)) < 4


def test_shares_are_hypergeometric() -> None:
    sizes, count, times = [500, 3, 120, 60], 200, 20_000
    generator = np.random.default_rng(7)
    found = np.array([share_out(count, sizes, generator) for _ in range(times)])
    assert (found.sum(1) == count).all() and (found <= sizes).all()
    total, part = sum(sizes), np.array(sizes) / sum(sizes)
    shrink = count * (total - count) / (total - 1)
    covariance = shrink * (np.diag(part) - np.outer(part, part))
    error = np.sqrt(np.diag(covariance) / times)
    assert (np.abs(found.mean(0) - count * part) < 4 * error).all()
    deviations = np.sqrt(np.diag(covariance))
    limits = 5 * np.outer(deviations, deviations) / math.sqrt(times)
    assert (np.abs(np.cov(found.T) - covariance) < limits).all()


def test_shares_of_more_entries_than_numpy_draws_from() -> None:
    sizes = [3_000_000_000, 1, 7_000_000_000]
    shares = share_out(1_000_000, sizes, np.random.default_rng(7))
    assert sum(shares) == 1_000_000
    assert abs(shares[0] - 300_000) < 5 * math.sqrt(1_000_000 * 0.3 * 0.7)


@pytest.mark.parametrize("count", [0, 1, 10, 11])
def test_shares_of_everything_and_nothing(count: int) -> None:
    shares = share_out(count, [4, 0, 7], np.random.default_rng(count))
    assert sum(shares) == count and shares[1] == 0
    assert count < 11 or shares == [4, 0, 7]


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
