"""Gradients that a GPU accumulates together equal gradients accumulated one by one."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from megatron.data_parallel import held_gradients
from megatron.data_parallel.held_gradients import HeldGradients
from megatron.parallel.groups import ProcessGroups
from tests.contract.harness import PATHS, SHAPES, PathCase, Toy, case_id, gradients, same
from tests.ranks import Ranks
from tests.tiers import sampled

pytestmark = pytest.mark.push

STEPS, MICROBATCHES = 4, 3
FP32, BF16 = (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)
CAST = (torch.bfloat16, torch.float32)
"""Dtypes of parameters and of gradients."""
CASES = (
    [(PathCase("dense"), CAST)]
    + [(case, FP32) for case in PATHS if "radius_density" not in case.options]
    + [(case, BF16) for case in PATHS if case.name in ("dense", "samo")]
)


def str_id(value: PathCase | tuple[torch.dtype, torch.dtype]) -> str:
    return case_id(value) if isinstance(value, PathCase) else str(value[0])


def trained(
    groups: ProcessGroups, case: PathCase, kind: tuple[torch.dtype, torch.dtype], held_bytes: int
) -> tuple[dict[str, torch.Tensor], int]:
    """The state after some steps, and how often held gradients were accumulated."""
    launches: list[None] = []
    store = HeldGradients.store

    def counted(self: HeldGradients) -> None:
        launches.extend([None] * bool(self._gradients))
        store(self)

    with (
        mock.patch.object(held_gradients, "launches_kernels", lambda tensor: held_bytes > 0),
        mock.patch.object(held_gradients, "HELD_BYTES", held_bytes),
        mock.patch.object(HeldGradients, "store", counted),
    ):
        toy = Toy(groups, case, dtype=kind[0], grad_dtype=kind[1])
        for number in range(STEPS):
            mine = [gradients(number, micro, groups.dp.rank) for micro in range(MICROBATCHES)]
            toy.step(mine, clip_norm=1.0)
    return toy.state(), len(launches)


def on_rank_held(
    groups: ProcessGroups, case: PathCase, kind: tuple[torch.dtype, torch.dtype]
) -> tuple[list[str], list[int]]:
    alone, none = trained(groups, case, kind, 0)
    some, few = trained(groups, case, kind, 2048)
    together, fewest = trained(groups, case, kind, 1 << 30)
    return same(alone, some) + same(alone, together), [none, few, fewest]


@pytest.mark.parametrize(("case", "kind"), sampled(CASES, CASES[::2]), ids=str_id)
def test_held_gradients_are_accumulated_bit_by_bit(
    ranks: Ranks, case: PathCase, kind: tuple[torch.dtype, torch.dtype]
) -> None:
    for differing, (none, few, fewest) in ranks.run(2, on_rank_held, case, kind):
        assert differing == [] and none == 0
        assert 0 < fewest <= few < STEPS * MICROBATCHES * len(SHAPES)
        assert case.name != "dense" or fewest < few


def test_large_gradients_that_must_be_cast_are_not_held(ranks: Ranks) -> None:
    assert ranks.run(1, on_rank_largest_cast, 0) == [0]
    assert 0 < ranks.run(1, on_rank_largest_cast, 48)[0]


def on_rank_largest_cast(groups: ProcessGroups, entries: int) -> int:
    with mock.patch.object(held_gradients, "LARGEST_CAST", entries):
        return trained(groups, PathCase("dense"), CAST, 1 << 30)[1]
