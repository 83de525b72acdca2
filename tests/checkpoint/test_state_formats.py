"""Optimizer states that are not fp32, saved by any grid and loaded by any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.store import Checkpoint
from megatron.data_parallel.bucket import STATE_BLOCK
from megatron.optimizer.state_formats import StateFormats
from megatron.parallel.groups import ProcessGroups
from tests.contract.grid import GridToy, differing, logical, on_grid, world_of
from tests.contract.harness import PathCase
from tests.ranks import Ranks

pytestmark = pytest.mark.push

BF16 = StateFormats(main=torch.bfloat16, exp_avg="bf16", exp_avg_sq="bf16")
KAHAN = replace(BF16, rounding="kahan")
INT8 = StateFormats(main=torch.bfloat16, exp_avg="int8", exp_avg_sq="int8")
FP16 = StateFormats(exp_avg="fp16", exp_avg_sq="fp16")
FORMATS = {"bf16": BF16, "kahan": KAHAN, "int8": INT8, "fp16": FP16}
LEFT_AT, STEPS = 3, 6
DTYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "kahan": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "int8": (torch.bfloat16, torch.int8, torch.uint8),
    "fp16": (torch.float32, torch.float16, torch.float16),
}


def toy(groups: ProcessGroups, formats: StateFormats, **options: Any) -> GridToy:
    case = PathCase("dense", sharded=options.pop("sharded", False))
    options.setdefault("plain_cuts", case.sharded)
    dtype = torch.float32 if formats.main is torch.float32 else torch.bfloat16
    return GridToy(groups, case, dtype=dtype, formats=formats, **options)


def run(made: GridToy, first: int, last: int) -> None:
    for number in range(first, last):
        made.step(made.share(number))


def states(made: GridToy) -> dict[str, torch.Tensor]:
    """Return copies of all tensors of all states, and the parameters."""
    found = {f"param of {info.name}": info.param.detach().clone() for info in made.infos}
    for kind, name, state in made.optimizer.vectors():
        for number, tensor in enumerate(state.tensors):
            found[f"{kind}/{name}/{number}"] = tensor.clone()
    return found


def on_rank_resumed(
    groups: ProcessGroups, grid: str, formats: StateFormats, options: dict[str, Any], folder: Path
) -> tuple[list[str], set[str]]:
    """Return what differs after a resumed run, and what was encoded again."""
    groups = on_grid(groups, grid)
    usual = toy(groups, formats, **options)
    run(usual, 0, LEFT_AT)
    usual.save(folder)
    at_save = states(usual)
    run(usual, LEFT_AT, STEPS)
    again = toy(groups, formats, **options)
    run(again, 10, 11)  # other numbers, all of which are replaced
    encoded = load(again, folder)
    odd = differing(at_save, states(again))
    run(again, LEFT_AT, STEPS)
    return odd + differing(states(usual), states(again)), encoded


def load(made: GridToy, folder: Path) -> set[str]:
    with Checkpoint.open(folder / f"step_{LEFT_AT:08d}") as saved:
        encoded = made.tensors.take(saved, moments=True)
        made.optimizer.finish_load()
        made.optimizer.applied = LEFT_AT
    return encoded


@pytest.mark.full
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize(
    ("grid", "options"),
    [
        ("1", {}),
        ("1", {"pruned": True}),
        ("TP2", {"pruned": True}),
        ("TP4", {}),
        ("TP2xDP2", {"sharded": True}),
        ("DP4", {"sharded": True, "pruned": True}),
        ("TP2xPP2", {}),
    ],
    ids=str,
)
def test_a_resumed_run_is_the_uninterrupted_run(
    ranks: Ranks, tmp_path: Path, grid: str, options: dict[str, Any], formats: str
) -> None:
    found = ranks.run(world_of(grid), on_rank_resumed, grid, FORMATS[formats], options, tmp_path)
    assert found == [([], set())] * len(found)


def on_rank_saved(
    groups: ProcessGroups, grid: str, formats: StateFormats, options: dict[str, Any], folder: Path
) -> None:
    made = toy(on_grid(groups, grid), formats, **options)
    run(made, 0, LEFT_AT)
    made.save(folder)


def on_rank_loaded(
    groups: ProcessGroups, grid: str, formats: StateFormats, options: dict[str, Any], folder: Path
) -> set[str]:
    """Load in fp32 on this grid, save, and load in `formats`; return what is encoded again."""
    groups = on_grid(groups, grid)
    plain = toy(groups, StateFormats(), **options)
    assert load(plain, folder) == set()
    plain.steps = LEFT_AT
    plain.save(folder / "decoded")
    made = toy(groups, formats, **options)
    encoded = load(made, folder)
    made.save(folder / "again")
    return encoded


PLAIN = {"plain_cuts": True}
SHARDED = {"sharded": True, "plain_cuts": True}
PAIRS = [
    ("1", "TP4", {}, {}),
    ("TP4", "1", {}, {}),
    ("TP2", "TP4", {"pruned": True}, {"pruned": True}),
    ("TP2xPP2", "TP2xDP2", PLAIN, SHARDED),
    ("DP4", "TP2", SHARDED, PLAIN),
]


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize(("source", "target", "how", "other"), PAIRS, ids=str)
def test_other_grids_load_the_same_numbers(
    ranks: Ranks,
    tmp_path: Path,
    source: str,
    target: str,
    how: dict[str, Any],
    other: dict[str, Any],
    formats: str,
) -> None:
    ranks.run(world_of(source), on_rank_saved, source, FORMATS[formats], how, tmp_path)
    found = ranks.run(world_of(target), on_rank_loaded, target, FORMATS[formats], other, tmp_path)
    # Blocks follow the tensor-parallel parts.
    has_blocks = FORMATS[formats].has_blocks and source[:3] != target[:3]
    moments = {"exp_avg", "exp_avg_sq"}
    assert found == [moments if has_blocks else set()] * len(found)
    saved, decoded, again = (
        decode(folder) for folder in (tmp_path, tmp_path / "decoded", tmp_path / "again")
    )
    assert saved.keys() == decoded.keys() == again.keys()
    for name, tensor in saved.items():
        assert torch.equal(decoded[name], tensor), name
        if not has_blocks or not name.startswith("exp_avg"):
            assert torch.equal(again[name], tensor), name
            continue
        # Encoded to nearest with the scales of other blocks: of a second moment, whose root is
        # rounded, twice as much of the largest number.
        share = {"int8": 1 / 127, "fp16": 2.0**-10}[formats]
        assert (again[name] - tensor).abs().max() <= share * tensor.abs().max(), name


def decode(folder: Path) -> dict[str, torch.Tensor]:
    """Return the logical states of a checkpoint in fp32, by independent means."""
    found = logical(folder, LEFT_AT)
    with Checkpoint.open(folder / f"step_{LEFT_AT:08d}") as saved:
        masks = {name: saved.mask(name) for name in found}
        boxes = {name: saved.boxes(name) for name in found}
    decoded = {}
    for name, tensor in found.items():
        kind, _, param = name.partition("/")
        if kind.endswith(("_scale", "_compensation")):
            continue
        decoded[name] = tensor.double() if tensor.dtype is not torch.bool else tensor
        if (extra := found.get(f"{kind}_compensation/{param}")) is not None:
            decoded[name] += extra
        if (scales := found.get(f"{kind}_scale/{param}")) is None:
            decoded[name] = decoded[name].to(torch.float32)
            continue
        parts = scales.shape[0]
        mask = torch.ones_like(tensor, dtype=torch.bool)
        if (masked_by := masks[name]) is not None:
            mask = found[masked_by]
        for row in range(parts):
            at = 0
            for start, stop in boxes[name][row::parts]:
                cut = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
                exists, values = mask[cut], decoded[name][cut]
                block = (torch.arange(int(exists.sum())) + at) // STATE_BLOCK
                at += block.numel()
                values[exists] *= scales[row][block].double()
        square = tensor.dtype is torch.uint8
        # fp32 products, as those of a run.
        decoded[name] = decoded[name].float()
        decoded[name] = decoded[name].square() if square else decoded[name]
    return decoded


@pytest.mark.parametrize("formats", FORMATS)
def test_states_are_saved_in_their_dtypes(ranks: Ranks, tmp_path: Path, formats: str) -> None:
    ranks.run(1, on_rank_saved, "1", FORMATS[formats], {}, tmp_path)
    found = logical(tmp_path, LEFT_AT)
    name = "0.first.weight"
    kinds = ("param", "exp_avg", "exp_avg_sq")
    assert tuple(found[f"{kind}/{name}"].dtype for kind in kinds) == DTYPES[formats]
    assert all(found[f"{kind}/0.first.bias"].dtype is torch.float32 for kind in kinds)
    assert (f"param_compensation/{name}" in found) == (formats == "kahan")
    blocks = FORMATS[formats].has_blocks
    assert {f"{kind}_scale/{name}" in found for kind in kinds[1:]} == {blocks}
    if blocks:
        assert found[f"exp_avg_scale/{name}"].shape == (1, 3), "48 x 16 entries"


def on_rank_changed(
    groups: ProcessGroups, before: StateFormats, after: StateFormats, folder: Path
) -> tuple[set[str], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    made = toy(groups, before)
    run(made, 0, LEFT_AT)
    made.save(folder)
    other = toy(groups, after)
    encoded = load(other, folder)
    one, two = (
        {f"{kind}/{name}": t.clone() for kind, name, t in each.optimizer.whole_tensors()}
        for each in (made, other)
    )
    return encoded, one, two


@pytest.mark.parametrize(
    ("before", "after", "encoded", "share"),
    [
        (replace(BF16, main=torch.float32), StateFormats(), set(), 0.0),
        (KAHAN, INT8, {"param", "exp_avg", "exp_avg_sq"}, 1 / 127),
        (INT8, KAHAN, {"param", "exp_avg", "exp_avg_sq"}, 2.0**-8),
        (BF16, KAHAN, {"param"}, 0.0),
    ],
)
def test_a_run_may_change_formats(
    ranks: Ranks,
    tmp_path: Path,
    before: StateFormats,
    after: StateFormats,
    encoded: set[str],
    share: float,
) -> None:
    ((told, one, two),) = ranks.run(1, on_rank_changed, before, after, tmp_path)
    assert told == encoded
    for name, tensor in one.items():
        assert (two[name] - tensor).abs().max() <= share * tensor.abs().max(), name
