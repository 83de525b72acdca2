"""Contracts 6 and 9 for partly stored parameters: pruned entries, and pruning nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.errors import ConfigError
from megatron.parallel.groups import ProcessGroups
from tests.contract.harness import (
    EARLY_BIRD,
    RANDOM,
    SHAPES,
    SHORT,
    WORLDS,
    PathCase,
    SavedToy,
    Toy,
    case_id,
    gradients,
    same,
)
from tests.contract.pairs import cases
from tests.ranks import Ranks
from tests.tiers import sampled

pytestmark = pytest.mark.push


def on_rank_pruned(groups: ProcessGroups, case: PathCase, dtype: torch.dtype) -> dict[str, Any]:
    toy = Toy(groups, case, dtype=dtype)
    found: dict[str, Any] = {"nonzero": [], "stored": [], "masks": []}
    for number in range(16):
        toy.step([gradients(number, groups.dp.rank)], clip_norm=1.0)
        masks = {name: toy.exists(name).clone() for name in SHAPES}
        found["masks"].append(masks)
        found["stored"].append(sum(int(mask.sum()) for mask in masks.values()))
        for info in toy.infos:
            for leaf in info.leaves:
                gone = leaf.detach().reshape(-1)[~masks[info.name]]
                found["nonzero"].append(int(gone.view(torch.uint8).count_nonzero()))
    for _, name, tensor in toy.optimizer.whole_tensors():
        assert tensor.numel() == int(toy.exists(name).sum()), "no state of what does not exist"
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@cases(lambda case, world: case.name.startswith("samo"))
def test_6_pruned_entries_are_zero_and_masks_equal_on_every_rank(
    ranks: Ranks, case: PathCase, world: int, dtype: torch.dtype
) -> None:
    first, *others = ranks.run(world, on_rank_pruned, case, dtype)
    assert not any(first["nonzero"]), "a bit is set where an entry is pruned"
    for other in others:
        assert not any(other["nonzero"])
        for mine, theirs in zip(first["masks"], other["masks"], strict=True):
            assert same(mine, theirs) == []
    changes = sum(
        bool(same(a, b)) for a, b in zip(first["masks"], first["masks"][1:], strict=False)
    )
    everything = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    if "dsr_interval" in case.options:
        assert changes == 7 and len(set(first["stored"])) == 1
    elif case.options.get("samo_pruning") == "early-bird":
        assert changes == 1 and first["stored"][0] == everything
    else:
        assert changes == 0
    assert first["stored"][-1] < 0.6 * everything


def on_rank_other_mask(groups: ProcessGroups) -> str:
    saved = SavedToy(Toy(groups, PathCase("samo", RANDOM)))
    if groups.dp.rank == 1:
        bits = saved.read("mask/first.weight").view(-1)
        on, off = bits.nonzero()[0], (~bits).nonzero()[0]
        bits[on], bits[off] = False, True
    with pytest.raises(ConfigError) as caught:
        Toy(groups, PathCase("samo", RANDOM), saved=saved)
    return str(caught.value)


def test_6_ranks_with_other_masks_are_refused(ranks: Ranks) -> None:
    for text in ranks.run(2, on_rank_other_mask):
        assert "rank 1" in text


LIMITS = [
    (
        PathCase("dense"),
        [
            PathCase("samo", {"samo_sparsity": 0.0}),
            PathCase("samo", {"samo_sparsity": 0.0, "samo_pruning": "random"}),
        ],
    ),
    (PathCase("radius", SHORT), [PathCase("samo+radius", {"samo_sparsity": 0.0} | SHORT)]),
    (PathCase("samo", RANDOM), [PathCase("samo+radius", {"radius_density": 1.0} | RANDOM)]),
    # Nothing but the rounding of the wire is fed back.
    (
        PathCase("dense", wire="int8"),
        [
            PathCase("radius", {"radius_density": 1.0}, wire="int8"),
            PathCase("radius", SHORT | {"radius_interval": 1}, wire="int8"),
        ],
    ),
    (
        PathCase("samo", {"samo_early_bird_interval": 2} | EARLY_BIRD),
        [
            PathCase(
                "samo+radius", {"radius_density": 1.0, "samo_early_bird_interval": 2} | EARLY_BIRD
            )
        ],
    ),
]
"""A path, and cases of other paths that are this path at a limit of their options."""


def on_rank_limit(
    groups: ProcessGroups, case: PathCase, dtype: torch.dtype, grad_dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    toy = Toy(groups, case, dtype=dtype, grad_dtype=grad_dtype)
    for number in range(50):
        mine = [gradients(number, micro, groups.dp.rank) for micro in range(2)]
        toy.step(mine, clip_norm=1.0)
    state = {k: v for k, v in toy.state().items() if not k.startswith("shared/")}
    # A residual of zeros equals none: a single rank loses nothing.
    return {k: v for k, v in state.items() if not k.startswith("reducer/") or v.any()}


@pytest.mark.parametrize(("limit", "others"), LIMITS, ids=[case_id(limit) for limit, _ in LIMITS])
@pytest.mark.parametrize(
    ("world", "dtype", "grad_dtype"),
    sampled(
        [
            *((world, torch.float32, torch.float32) for world in WORLDS),
            (2, torch.bfloat16, torch.float32),
            (2, torch.bfloat16, torch.bfloat16),
        ],
        [(2, torch.float32, torch.float32), (2, torch.bfloat16, torch.bfloat16)],
    ),
)
def test_9_limits_agree_bit_by_bit(
    ranks: Ranks,
    limit: PathCase,
    others: list[PathCase],
    world: int,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
) -> None:
    """Over 50 steps of two microbatches, with clipping."""
    wanted = ranks.run(world, on_rank_limit, limit, dtype, grad_dtype)
    for case in others:
        found = ranks.run(world, on_rank_limit, case, dtype, grad_dtype)
        for mine, theirs in zip(found, wanted, strict=True):
            assert same(mine, theirs) == [], case_id(case)
