"""Masks by magnitude against a sort, over one tensor and over all; random ones; distances."""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Iterator, Mapping
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megatron.config import resolve
from megatron.data_parallel.bucket import ParamInfo
from megatron.errors import NumericsError
from samo import pruning
from samo.pruning import distance, magnitude, prunable, random
from samo.schedule import is_prunable, stored_count

P = Fraction("0.9")


def by_sorting(
    tensors: Mapping[str, torch.Tensor], sparsity: Fraction, scope: str
) -> dict[str, torch.Tensor]:
    """Entries in the order in which they deserve to stay, taken until there are enough; a tensor's
    own first entry before all of the others'."""
    parts = [sorted(tensors)] if scope == "global" else [[name] for name in tensors]
    masks = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in tensors.items()}
    for names in parts:
        order = sorted(
            (-abs(value), number, place)
            for number, name in enumerate(names)
            for place, value in enumerate(tensors[name].flatten().tolist())
        )
        wanted = len(order) - math.floor(sparsity * len(order))
        firsts = {next(entry for entry in order if entry[1] == n) for n in range(len(names))}
        others = [entry for entry in order if entry not in firsts]
        for _, number, place in [*firsts, *others[: max(wanted - len(firsts), 0)]]:
            masks[names[number]].view(-1)[place] = True
    return masks


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def stored(masks: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: int(mask.sum()) for name, mask in masks.items()}


NUMBERS = st.one_of(
    st.sampled_from([0.0, -0.0, 0.5, -0.5, 1e-40, -1e38]),
    st.floats(width=32, allow_nan=False, min_value=-(2.0**100), max_value=2.0**100),
)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.lists(NUMBERS, min_size=1, max_size=12), min_size=1, max_size=4),
    st.fractions(0, Fraction(999, 1000), max_denominator=1000),
    st.sampled_from(["tensor", "global"]),
)
def test_magnitude_equals_sorting(
    rows: list[list[float]], sparsity: Fraction, scope: pruning.Scope
) -> None:
    tensors = {f"b{9 - i}": torch.tensor(row).view(1, -1) for i, row in enumerate(rows)}
    found = magnitude(tensors, sparsity, scope=scope)
    assert same(found, by_sorting(tensors, sparsity, scope))
    if scope == "tensor":
        assert stored(found) == {n: stored_count(t.numel(), sparsity) for n, t in tensors.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_magnitude_of_larger_tensors_of_any_dtype(dtype: torch.dtype, scope: pruning.Scope) -> None:
    # Rounded to 16 bit there are ties by the dozen, at the threshold too.
    scales = {"wide": 1.0, "narrow": 0.02, "middle": 0.3}
    tensors = {name: torch.randn(30, 40).mul(scale).to(dtype) for name, scale in scales.items()}
    for sparsity in (P, Fraction(1, 2), Fraction(0)):
        found = magnitude(tensors, sparsity, scope=scope)
        assert same(found, by_sorting(tensors, sparsity, scope))
        assert sum(stored(found).values()) == 3600 - math.floor(sparsity * 3600)


def test_of_equal_entries_the_first_ones_stay() -> None:
    tensors = {name: torch.full((2, 5), -1.0) for name in ("z", "a")}
    each = magnitude(tensors, Fraction(7, 10))
    assert [mask.flatten().nonzero().flatten().tolist() for mask in each.values()] == [
        [0, 1, 2]
    ] * 2
    # Together: the first entry of each, then in the order of their names.
    both = magnitude(tensors, Fraction(7, 10), scope="global")
    assert both["a"].flatten().nonzero().flatten().tolist() == [0, 1, 2, 3, 4]
    assert both["z"].flatten().nonzero().flatten().tolist() == [0]


def test_no_tensor_is_left_without_an_entry() -> None:
    tensors = {"large": torch.arange(1.0, 101).view(10, 10), "small": torch.full((1, 3), 1e-9)}
    tensors["small"][0, 1] = -2e-9
    masks = magnitude(tensors, Fraction("0.95"), scope="global")
    assert stored(masks) == {"large": 5, "small": 1}
    assert masks["small"].tolist() == [[False, True, False]]
    assert masks["large"].flatten().nonzero().flatten().tolist() == [95, 96, 97, 98, 99]
    # Fewer are wanted than there are tensors.
    least = magnitude(tensors, Fraction("0.999"), scope="global")
    assert stored(least) == {"large": 1, "small": 1}
    assert stored(magnitude(tensors, Fraction("0.999"))) == {"large": 1, "small": 1}


class Made(Mapping[str, torch.Tensor]):
    """Tensors made when they are looked up, with a count of how many of them are alive."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes, self.lookups, self.alive, self.most = shapes, 0, 0, 0

    def __getitem__(self, name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(len(name))
        tensor = torch.randn(self.shapes[name], generator=generator)
        weakref.finalize(tensor, self.gone)
        self.lookups += 1
        self.alive += 1
        self.most = max(self.most, self.alive)
        return tensor

    def gone(self) -> None:
        self.alive -= 1

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


@pytest.mark.parametrize(("scope", "times"), [("tensor", 1), ("global", 4)])
def test_tensors_are_held_one_at_a_time(scope: pruning.Scope, times: int) -> None:
    lazy = Made({"one": (20, 30), "three": (9, 9), "fives": (50, 2), "eleven": (8, 7)})
    masks = magnitude(lazy, P, scope=scope)
    # A loop lets go of a tensor when it has the next one.
    assert lazy.most <= 2 and lazy.lookups == 4 * times
    assert same(masks, magnitude(dict(lazy), P, scope=scope))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_weights_that_are_not_finite_are_refused(value: float, scope: pruning.Scope) -> None:
    bad = torch.zeros(3, 3)
    bad[1, 1] = value
    with pytest.raises(NumericsError, match="^bad: has entries that are not finite"):
        magnitude({"good": torch.ones(2, 2), "bad": bad}, P, scope=scope)


def test_random_masks_have_exact_counts_and_depend_on_seed_and_name_alone() -> None:
    shapes = {"a": (37, 16), "b": (101,), "c": (3, 5, 7)}
    masks = random(shapes, P, seed=1)
    assert {name: tuple(mask.shape) for name, mask in masks.items()} == shapes
    assert stored(masks) == {"a": 60, "b": 11, "c": 11}
    assert torch.equal(random({"b": (101,)}, P, seed=1)["b"], masks["b"])
    assert not torch.equal(random({"B": (101,)}, P, seed=1)["B"], masks["b"])
    assert not torch.equal(random({"b": (101,)}, P, seed=2)["b"], masks["b"])


def test_random_masks_are_the_same_everywhere() -> None:
    mask = random({"layers.0.mlp.up.weight": (64, 64)}, P, seed=1234)["layers.0.mlp.up.weight"]
    digest = hashlib.sha256(np.packbits(mask.numpy()).tobytes()).hexdigest()
    assert digest[:16] == "8cc16d970b738fe3"


def test_random_masks_are_uniform() -> None:
    draws = 2000
    masks = torch.stack(
        [random({"w": (4, 5)}, Fraction(3, 4), seed=s)["w"].flatten() for s in range(draws)]
    ).double()
    singles = masks.mean(0)
    assert (singles - 0.25).abs().max() < 5 * math.sqrt(0.25 * 0.75 / draws)
    pairs = (masks.T @ masks / draws)[*torch.triu_indices(20, 20, 1)]
    chance = 5 / 20 * 4 / 19  # without replacement
    assert (pairs - chance).abs().max() < 5 * math.sqrt(chance * (1 - chance) / draws)


def test_distance() -> None:
    a = {"x": torch.tensor([[True, True, False, False]]), "y": torch.tensor([[True, False]])}
    b = {"x": torch.tensor([[True, False, True, False]]), "y": torch.tensor([[True, False]])}
    assert distance(a, a) == 0.0
    assert distance(a, b) == distance(b, a) == 2 / 6
    opposite = {name: ~mask for name, mask in a.items()}
    assert distance(a, opposite) == 1.0


@pytest.mark.parametrize("p", [0.5, 0.9, 0.95])
def test_unrelated_masks_are_p_apart(p: float) -> None:
    """Over all entries they would be 2 p (1 - p) apart, which is little where p is large."""
    one, other = (random({"w": (400, 500)}, Fraction(str(p)), seed=seed) for seed in (1, 2))
    assert distance(one, other) == pytest.approx(p, abs=0.01)


def info(name: str, *shape: int, rows: int | None = None) -> ParamInfo:
    logical = (shape[0] if rows is None else rows, *shape[1:])
    return ParamInfo(name=name, leaves=(nn.Parameter(torch.zeros(shape)),), logical_shape=logical)


def test_what_is_pruned() -> None:
    infos = [
        info("embedding.word_embeddings.weight", 8, 4, rows=7),
        info("embedding.position_embeddings.weight", 8, 4),
        info("layers.0.mlp.up.weight", 4, 4),
        info("layers.0.mlp.up.bias", 4),
        info("final_norm.weight", 4),
        info("conv.weight", 2, 2, 3, 3),
        info("output_layer.weight", 8, 4),
    ]
    names = [i.name for i in prunable(infos, keep_embeddings=False)]
    assert names == [infos[n].name for n in (0, 1, 2, 5, 6)]
    kept = [i.name for i in prunable(infos, keep_embeddings=True)]
    assert kept == [infos[n].name for n in (2, 5, 6)]


def test_the_names_of_the_model_are_known() -> None:
    from megatron.config import parse
    from megatron.model.gpt import GPT
    from pretrain_gpt import GRADIENT_PATHS

    flags = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --lr 1e-3 "
    flags += "--micro-batch-size 1 --train-iters 1 --mock-data"
    config = resolve(parse(flags.split(), paths=GRADIENT_PATHS), 1)
    model = GPT(config.model, vocab_size=257, seed=3, dtype=torch.float32, device="cpu")
    infos = model.parameter_infos()
    pruned = {i.name for i in prunable(infos, keep_embeddings=False)}
    assert pruned == {i.name for i in infos if i.param.dim() > 1}
    embeddings = {n for n in pruned if not is_prunable(n, (2, 2), keep_embeddings=True)}
    assert embeddings == {
        "embedding.word_embeddings.weight",
        "embedding.position_embeddings.weight",
    }
