"""Tests that masks of a sharded model are, bit by bit, the masks that one rank draws."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.config import GradientConfig, OffloadConfig, OptimizerConfig, ParallelConfig
from megatron.data_parallel.engine import GradientEngine
from megatron.data_parallel.gradient_path import CheckpointView, LayoutChange, PathParts
from megatron.data_parallel.layout import DenseLayout, Masks
from megatron.data_parallel.reducer import StepContext
from megatron.errors import ConfigError, DataError, NumericsError
from megatron.optimizer.bucket_optimizer import BucketOptimizer
from megatron.optimizer.update_rules import AdamW
from megatron.parallel.groups import ProcessGroups
from samo.dsr import DsrMaskUpdater, Growth, RewiringSettings
from samo.early_bird import EarlyBird
from samo.mask import flat_mask, save_masks
from samo.model_parts import ModelParts
from samo.options import SamoConfig
from samo.path import SamoPath
from samo.pruning import Scope, magnitude, prunable, random
from samo.schedule import CONSTANT, RewiringSchedule
from tests.ranks import Ranks
from tests.samo.grid_toy import (
    GRIDS,
    KINDS,
    PRUNED,
    WORDS,
    ToyWeights,
    alone,
    draw,
    entries,
    grid,
    make_infos,
    part,
    state_of,
)

pytestmark = pytest.mark.push

TOTAL = 40
every_grid = pytest.mark.parametrize("dims", GRIDS, ids=lambda d: f"tp{d[0]}-dp{d[1]}-pp{d[2]}")


def run(ranks: Ranks, dims: tuple[int, int, int], function: Any, *args: Any) -> list[Any]:
    tp, dp, pp = dims
    return ranks.run(tp * dp * pp, function, dims, *args)


def here(groups: ProcessGroups, dims: tuple[int, int, int]) -> ProcessGroups:
    return grid(*dims, groups.world.rank)


def build(
    groups: ProcessGroups,
    options: dict[str, Any],
    saved: CheckpointView | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **extensions: Any,
) -> tuple[PathParts, list[Any]]:
    """Return the parts that the path builds for a grid, and the parameters."""
    config: Any = SimpleNamespace(
        extensions={"samo": SamoConfig(**options), **extensions},
        gradient=GradientConfig(grad_path="samo"),
        training=SimpleNamespace(seed=7, skip_train=False),
        offload=OffloadConfig(),
        precision=SimpleNamespace(
            param_dtype=str(dtype).partition(".")[2], grad_dtype="float32", predivide_loss=False
        ),
        optimizer=OptimizerConfig(),
        parallel=ParallelConfig(),
        total_iterations=lambda: TOTAL,
    )
    infos = make_infos(groups, dtype)
    return SamoPath().build(config, infos, groups, saved), infos


class FakeCheckpoint:
    """A checkpoint of the model with the given masks, and weights other than the initial ones."""

    def __init__(self, masks: dict[str, torch.Tensor], *, same_path: bool) -> None:
        self.same_path = same_path
        self.tensors = {f"param/{name}": draw(name, 9) for name in KINDS}
        for name, mask in masks.items():
            self.tensors[f"mask/{name}"] = mask
            self.tensors[f"param/{name}"] *= mask

    def names(self, prefix: str = "") -> tuple[str, ...]:
        return tuple(name for name in self.tensors if name.startswith(prefix))

    def read(self, name: str, start: Any = None, stop: Any = None) -> torch.Tensor:
        tensor = self.tensors[name]
        if start is None:
            return tensor.clone()
        return tensor[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))].clone()


def some_masks(p: str = "0.5") -> dict[str, torch.Tensor]:
    return random({name: KINDS[name].shape for name in PRUNED}, Fraction(p), seed=3)


CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "magnitude": ({}, None),
    "low": ({"samo_sparsity": 0.03}, None),
    "global": ({"samo_scope": "global", "samo_sparsity": 0.6}, None),
    "global-high": ({"samo_scope": "global", "samo_sparsity": 0.99}, None),
    "keep": ({"samo_keep_embeddings": True}, None),
    "random": ({"samo_pruning": "random", "samo_sparsity": 0.7}, None),
    "file": ({"samo_pruning": "file"}, None),
    "loaded": ({}, FakeCheckpoint(some_masks("0.2"), same_path=False)),
    "loaded-global": ({"samo_scope": "global"}, FakeCheckpoint(some_masks(), same_path=False)),
    "resumed": ({}, FakeCheckpoint(some_masks("0.2"), same_path=True)),
    "nothing": ({"samo_sparsity": 0.0}, None),
}


def on_rank_masks(groups: ProcessGroups, dims: tuple[int, int, int], file: Path) -> list[str]:
    """Return the cases in which this rank has other masks than one rank alone has."""
    mine, wrong = here(groups, dims), []
    for name, (options, saved) in CASES.items():
        given = options | ({"samo_mask_file": str(file)} if name == "file" else {})
        found, infos = build(mine, given, saved)
        wanted, _ = build(alone(), given, saved)
        assert found.notes == wanted.notes and found.notes
        for info in infos:
            mask, whole = found.layout.mask(info.name), wanted.layout.mask(info.name)
            assert (mask is None) == (whole is None), (name, info.name)
            if mask is None or whole is None:
                continue
            if not torch.equal(
                mask, flat_mask(info, whole[: info.entries].view(KINDS[info.name].shape))
            ):
                wrong.append(f"{name}: {info.name}")
    return wrong


@every_grid
def test_every_ticket_is_that_of_one_rank(
    ranks: Ranks, tmp_path: Path, dims: tuple[int, int, int]
) -> None:
    """The weights in bf16 have many equal magnitudes, within tensors and among them."""
    masks = some_masks("0.4")
    masks.pop("a.down")
    masks["c.small"][:, :3] = False  # a rank then stores nothing of it
    masks["b.gated"][:10] = True
    save_masks(tmp_path / "masks.npz", masks)
    for wrong in run(ranks, dims, on_rank_masks, tmp_path / "masks.npz"):
        assert wrong == []


def on_rank_refused(groups: ProcessGroups, dims: tuple[int, int, int], file: Path) -> list[str]:
    mine, said = here(groups, dims), []
    spoiled = FakeCheckpoint({}, same_path=False)
    if mine.tp.rank == mine.tp.size - 1:  # as if one rank alone had read something else
        spoiled.tensors["param/a.down"][3, 20] = torch.nan
    cases: list[tuple[dict[str, Any], CheckpointView | None, type[Exception]]] = [
        ({"samo_scope": "global"}, spoiled, NumericsError),
        ({}, spoiled, NumericsError),
        ({"samo_sparsity": 0.5}, FakeCheckpoint(some_masks("0.9"), same_path=False), ConfigError),
        ({"samo_pruning": "file", "samo_mask_file": str(file)}, None, DataError),
        ({"samo_pruning": "file", "samo_mask_file": "none"}, None, DataError),
        ({"samo_pruning": "random", "dsr_interval": 2, "dsr_fraction": 0.9}, None, ConfigError),
    ]
    for options, saved, error in cases:
        with pytest.raises(error) as caught:
            mine.world.raise_on_all_ranks(lambda o=options, s=saved: build(mine, o, s))
        said.append(str(caught.value))
    return said


def test_what_is_refused_is_refused_on_every_rank_alike(ranks: Ranks, tmp_path: Path) -> None:
    masks = some_masks() | {"unknown": torch.ones(2, 2, dtype=torch.bool)}
    save_masks(tmp_path / "masks.npz", masks)
    first, *others = run(ranks, (2, 1, 2), on_rank_refused, tmp_path / "masks.npz")
    assert all(other == first for other in others)
    nan, again, zeros, unknown, missing, many = first
    assert nan == again and nan.startswith("a.down: has entries that are not finite")
    assert "entries that would be kept are not in it" in zeros
    assert "masks unknown, of which the model has none" in unknown
    assert "no such file" in missing
    assert f"of {entries(PRUNED)} entries, as" in many


# ---- early bird --------------------------------------------------------------------------------

INTERVAL, LAST = 2, 60


def bird_of(groups: ProcessGroups, scope: Scope) -> tuple[EarlyBird, list[Any]]:
    infos = make_infos(groups)
    bird = EarlyBird(
        prunable(infos, keep_embeddings=False),
        Fraction("0.75"),
        scope=scope,
        interval=INTERVAL,
        limit=0.2,
        last=LAST,
        parts=ModelParts(infos, groups),
        make_layout=lambda masks: GridMaskLayout(masks),
    )
    return bird, infos


class GridMaskLayout(DenseLayout):
    """A layout with masks, as a mask updater makes and reads it."""

    def __init__(self, masks: Masks) -> None:
        self.masks = dict(masks)

    def mask(self, name: str) -> torch.Tensor | None:
        return self.masks.get(name)


def masks_of(change: LayoutChange) -> dict[str, torch.Tensor]:
    assert isinstance(change.layout, GridMaskLayout)
    return change.layout.masks


def settling(infos: list[Any], t: int) -> list[tuple[Any, torch.Tensor]]:
    """Return weights that move less and less."""
    return [(i, part(i, draw(i.name) + draw(i.name, 5) * 20 / t**1.5)) for i in infos]


def on_rank_early_bird(
    groups: ProcessGroups, dims: tuple[int, int, int], scope: Scope
) -> tuple[int, list[str]]:
    mine = here(groups, dims)
    bird, infos = bird_of(mine, scope)
    one, whole = bird_of(alone(), scope)
    for t in range(1, LAST):
        if t == 8:  # another grid takes over the queue, each rank its own part
            saved = state_of(one)
            bird, infos = bird_of(mine, scope)
            bird.load_state_tensors(
                {
                    name: part(info, tensor)[: info.local_entries] if info else tensor
                    for name, tensor in saved.items()
                    for info in [next((i for i in infos if name.endswith(f"/{i.name}")), None)]
                }
            )
        change = bird.after_update(t, DenseLayout(), settling(infos, t))
        wanted = one.after_update(t, DenseLayout(), settling(whole, t))
        assert bird.stats() == one.stats() and (notes := bird.notes()) == one.notes()
        state, all_ = state_of(bird), state_of(one)
        for info in infos:
            for name in (name for name in all_ if name.endswith(f"/{info.name}")):
                assert state[name].dtype == torch.bool and state[name].dim() == 1
                assert torch.equal(state[name], part(info, all_[name])[: info.local_entries])
        assert (change is None) == (wanted is None)
        if change is not None and wanted is not None:
            table = {i.name: i for i in infos}
            for name, mask in masks_of(change).items():
                assert torch.equal(
                    mask, part(table[name], masks_of(wanted)[name][: table[name].entries])
                )
            return t, list(notes)
    raise AssertionError("no ticket")


@pytest.mark.parametrize("scope", ["tensor", "global"])
@pytest.mark.parametrize("dims", [(2, 1, 2), (2, 1, 1)])
def test_all_ranks_draw_the_early_bird_ticket_of_one_rank_at_one_step(
    ranks: Ranks, dims: tuple[int, int, int], scope: Scope
) -> None:
    (ticket, notes), *others = run(ranks, dims, on_rank_early_bird, scope)
    assert all(other == (ticket, notes) for other in others)
    assert 5 * INTERVAL < ticket < LAST, "a case that tells nothing"
    assert f"of {entries(PRUNED):,} entries" in notes[0]


# ---- rewiring ----------------------------------------------------------------------------------


class Sparse:
    """A network that is rewired on one grid."""

    def __init__(
        self, groups: ProcessGroups, threshold: float, density: str, growth: Growth
    ) -> None:
        infos = make_infos(groups)
        kept = some_masks(density)
        masks = {i.name: flat_mask(i, kept[i.name]) for i in infos if i.name in kept}
        masks.pop(WORDS)  # stored whole at first, including padding
        self.weights = ToyWeights(infos, masks)
        settings = RewiringSettings(
            schedule=RewiringSchedule(interval=1, until=1000, periods=CONSTANT),
            target=60,
            threshold=threshold,
            growth=growth,
            reset_moments=False,
            seed=11,
        )
        self.dsr = DsrMaskUpdater(PRUNED, settings, GridMaskLayout, parts=ModelParts(infos, groups))

    def step(self, t: int, by: float) -> None:
        self.weights.train(t, by)
        layout = GridMaskLayout(self.weights.masks)
        change = self.dsr.after_update(t, layout, self.weights.stored())
        if change is not None:
            self.weights.masks = masks_of(change)
            self.weights.set()

    @property
    def stored(self) -> dict[str, int]:
        """Number of stored entries of each prunable parameter on this rank."""
        infos = {info.name: info for info in self.weights.infos}
        masks = self.weights.masks
        return {n: int(masks[n].sum()) if n in masks else i.local_entries for n, i in infos.items()}


def on_rank_rewired(
    groups: ProcessGroups, dims: tuple[int, int, int], threshold: float, growth: Growth
) -> tuple[int, list[float]]:
    """Return the number of effective rewirings, and the nonzeros after each update."""
    mine = here(groups, dims)
    net, one = (Sparse(each, threshold, "0.6", growth) for each in (mine, alone()))
    parts = ModelParts(net.weights.infos, mine)
    totals: list[float] = []
    for t in range(1, 13):
        if t == 5:  # all weights are below the threshold: the largest stays, wherever it is
            for sparse in (net, one):
                if "c.small" in sparse.weights.values:
                    sparse.weights.values["c.small"] *= 1e-6
        net.step(t, 0.0 if t == 5 else 0.1)
        one.step(t, 0.0 if t == 5 else 0.1)
        assert net.dsr.stats() == one.dsr.stats(), t
        assert net.dsr.notes() == one.dsr.notes()
        state, all_ = state_of(net.dsr), state_of(one.dsr)
        assert state.keys() == all_.keys()
        assert all(torch.equal(state[name], all_[name]) for name in state)
        for info in net.weights.infos:
            whole = one.weights.values[info.name][: info.entries]
            assert torch.equal(
                net.weights.values[info.name][: info.local_entries],
                part(info, whole)[: info.local_entries],
            )
            mask, all_ = net.weights.masks.get(info.name), one.weights.masks.get(info.name)
            assert (mask is None) == (all_ is None)
            if mask is not None and all_ is not None:
                assert torch.equal(mask, part(info, all_[: info.entries]))
        rows = parts.table({name: [count] for name, count in net.stored.items()})
        totals.append(sum(count for (count,) in rows.values()))
        assert all(count >= 1 for (count,) in rows.values())
    return int(state_of(net.dsr)["dsr/counts"][1]), totals


@pytest.mark.parametrize(
    ("dims", "threshold", "growth"),
    [
        *(((2, 1, 2), threshold, "survivors") for threshold in (1e-4, 0.02, 5.0)),
        ((2, 1, 1), 0.02, "survivors"),
        ((1, 2, 1), 0.02, "survivors"),
        ((1, 1, 2), 0.02, "survivors"),
        ((2, 1, 2), 0.02, "zeros"),
    ],
)
def test_rewirings_are_those_of_one_rank(
    ranks: Ranks, dims: tuple[int, int, int], threshold: float, growth: Growth
) -> None:
    (rewirings, totals), *others = run(ranks, dims, on_rank_rewired, threshold, growth)
    assert all(other == (rewirings, totals) for other in others)
    assert rewirings >= 5 and len(set(totals)) == 1


# ---- under an engine ---------------------------------------------------------------------------

RUNS: dict[str, dict[str, Any]] = {
    "dsr": {
        "samo_pruning": "random",
        "samo_sparsity": 0.5,
        "dsr_interval": 2,
        "dsr_fraction": 0.05,
        "dsr_threshold": 0.05,
    },
    "early-bird": {
        "samo_pruning": "early-bird",
        "samo_sparsity": 0.5,
        "samo_scope": "global",
        "samo_early_bird_interval": 1,
        "samo_early_bird_distance": 1.0,
    },
}


class Trained:
    """An engine and an optimizer on one grid, with the same gradients on every grid."""

    def __init__(self, groups: ProcessGroups, options: dict[str, Any]) -> None:
        parts, self.infos = build(groups, options, dtype=torch.float32)
        self.groups = groups
        self.engine = GradientEngine(self.infos, parts, groups, cap=400, grad_dtype=torch.float32)
        self.optimizer = BucketOptimizer(self.engine, AdamW(beta1=0.9, beta2=0.99, eps=1e-8))

    def step(self, t: int) -> None:
        self.engine.begin(StepContext(t=t))
        self.engine.expect_last_backward()
        losses = []
        for info in self.infos:
            wanted = part(info, draw(info.name, 100 + t)).view(info.param.shape)
            # The engine adds the two copies of a tied parameter.
            copies = self.groups.embedding.size if info.tied else 1
            losses.append((info.param * wanted).sum() / copies)
        torch.stack(losses).sum().backward()
        found = self.engine.finish(tag=t, clip_norm=1.0)
        assert found.ok
        self.optimizer.step(found, lr=0.02, weight_decay=0.1)
        self.engine.commit(found)
        self.optimizer.update_masks()


def on_rank_trained(groups: ProcessGroups, dims: tuple[int, int, int], name: str) -> list[str]:
    """Compare the run with a run of one rank at each step; return the messages."""
    mine = here(groups, dims)
    net, one = Trained(mine, RUNS[name]), Trained(alone(), RUNS[name])
    told = []
    for t in range(1, 11):
        net.step(t)
        one.step(t)
        whole = {info.name: info.param.detach() for info in one.infos}
        table: dict[str, list[int]] = {}
        for info in net.infos:
            mask, all_ = net.engine.layout.mask(info.name), one.engine.layout.mask(info.name)
            assert (mask is None) == (all_ is None)
            param = info.param.detach().view(-1)
            wanted = part(info, whole[info.name].view(-1)[: info.entries])
            torch.testing.assert_close(
                param[: info.local_entries], wanted[: info.local_entries], rtol=1e-4, atol=1e-5
            )
            table[info.name] = [info.local_entries]
            if mask is not None and all_ is not None:
                assert torch.equal(mask, part(info, all_[: info.entries]))
                assert not param[~mask].view(torch.int32).any()
                table[info.name] = [int(mask.sum())]
        told.append(json.dumps(ModelParts(net.infos, mine).table(table)))
    net.engine.detach()
    one.engine.detach()
    return told


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_a_grid_has_the_masks_of_one_rank(ranks: Ranks, name: str) -> None:
    first, *others = run(ranks, (2, 1, 2), on_rank_trained, name)
    assert all(other == first for other in others)
    totals = [sum(count for (count,) in json.loads(text).values()) for text in first]
    if name == "dsr":
        assert len(set(totals)) == 1 and len(set(first)) >= 4
    else:
        pruned = entries(PRUNED)
        left = pruned - int(Fraction("0.5") * pruned)
        assert totals == [entries(list(KINDS))] * 4 + [entries(list(KINDS)) - pruned + left] * 6


def test_equal_magnitudes_go_by_the_names_of_tensors() -> None:
    tensors = {name: torch.ones(2, 4) for name in ("b", "a", "c")}
    found = magnitude(tensors, Fraction(1, 2), scope="global")
    assert {name: int(mask.sum()) for name, mask in found.items()} == {"a": 8, "b": 3, "c": 1}
