"""Compressed storage: the same entries as the dense layout, in a fraction of the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data_parallel.bucket import ParamInfo
from megatron.data_parallel.layout import DenseLayout
from megatron.errors import ConfigError
from megatron.sparse.reference import CHUNK
from samo.layout import MOST_ENTRIES, BitmapStore, CompressedLayout, PositionStore, StoredCount
from tests.radius.test_memory import most_at_once

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CONV = (8, 5, 3, 3)
"""Output and input channels and the window of a convolution."""
Index = PositionStore | BitmapStore
KINDS: list[Callable[[torch.Tensor], Index]] = [PositionStore, lambda mask: BitmapStore(mask, CPU)]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=["positions", "bitmap"])


def some_mask(entries: int, kept: float = 0.1) -> torch.Tensor:
    mask = torch.rand(entries) < kept
    mask[entries // 2], mask[-1] = True, False
    return mask


@every_kind
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_holds_what_the_dense_layout_holds_of_the_stored_entries(
    kind: Callable[[torch.Tensor], Index], dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    mask = some_mask(5000)
    index, numel = kind(mask), int(mask.sum())
    first, second = torch.randn(2, 5000).to(dtype).unbind()
    wanted, found = torch.empty(5000, dtype=out_dtype), torch.empty(numel, dtype=out_dtype)
    DenseLayout().gather("w", first, wanted)
    index.compress(first, found, add=False)
    assert torch.equal(found, wanted[mask])
    DenseLayout().gather_add("w", second, wanted)
    index.compress(second, found, add=True)
    assert torch.equal(found, wanted[mask])
    # Entries that do not exist stay, whatever they are.
    placed = torch.full((5000,), 7.0, dtype=dtype)
    index.expand(found, placed)
    assert torch.equal(placed[mask], found.to(dtype)) and (placed[~mask] == 7).all()


@given(st.lists(st.booleans(), min_size=1, max_size=70), st.sampled_from(KINDS))
@settings(max_examples=50, deadline=None)
def test_compress_undoes_expand_for_any_mask(
    marks: list[bool], kind: Callable[[torch.Tensor], Index]
) -> None:
    mask = torch.tensor(marks)
    index = kind(mask)
    assert (index.length, index.stored) == (len(marks), sum(marks))
    assert torch.equal(index.mask(), mask)
    values = torch.arange(1.0, index.stored + 1)
    dense, back = torch.zeros(len(marks)), torch.empty(index.stored)
    index.expand(values, dense)
    index.compress(dense, back, add=False)
    assert torch.equal(back, values) and torch.equal(dense != 0, mask)


@every_kind
def test_many_chunks_are_one_to_the_caller(kind: Callable[[torch.Tensor], Index]) -> None:
    entries = 3 * CHUNK + 77
    mask = torch.rand(entries) < 0.8
    mask[CHUNK : 2 * CHUNK] = False  # nothing in a whole chunk of the parameter
    index, dense = kind(mask), torch.randn(entries).bfloat16()
    out = torch.ones(index.stored)
    index.compress(dense, out, add=True)
    assert index.stored > CHUNK and torch.equal(out, 1 + dense[mask].float())
    back = torch.zeros_like(dense)
    index.expand(out, back)
    assert torch.equal(back, torch.where(mask, 1 + dense.float(), 0).bfloat16())
    assert torch.equal(index.mask(), mask)


def test_no_call_makes_more_than_a_chunk() -> None:
    entries = 8 * CHUNK
    mask = torch.rand(entries) < 0.5
    index, dense = PositionStore(mask), torch.randn(entries).bfloat16()
    wide, same = torch.empty(index.stored), torch.empty(index.stored, dtype=torch.bfloat16)
    assert most_at_once(lambda: index.compress(dense, same, add=False)) == 0
    assert most_at_once(lambda: index.compress(dense, wide, add=False)) == 2 * CHUNK
    # torch adds to fp32 what it has widened beside it.
    assert most_at_once(lambda: index.compress(dense, wide, add=True)) == (2 + 4) * CHUNK
    assert most_at_once(lambda: index.expand(wide, dense)) == (8 + 2) * CHUNK < wide.nbytes


def leaves_of(shape: tuple[int, ...], dtype: torch.dtype, *, tied: bool = False) -> Any:
    leaf = torch.nn.Parameter(torch.randn(shape).to(dtype))
    return (leaf, torch.nn.Parameter(leaf.detach())) if tied else (leaf,)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_binding_prunes_the_parameter_where_it_lies(dtype: torch.dtype) -> None:
    leaves = leaves_of(CONV, dtype, tied=True)
    mask, before = some_mask(360, 0.4), leaves[0].detach().clone()
    layout = CompressedLayout({"w": mask})
    flat = torch.empty(layout.numel("w", leaves[0]))
    where = leaves[0].data_ptr()
    layout.bind("w", flat, leaves)
    assert torch.equal(flat, before.view(-1)[mask].float())
    for leaf in leaves:
        assert leaf.data_ptr() == where and leaf.shape == CONV and leaf.dtype == dtype
        assert torch.equal(leaf.detach(), torch.where(mask.view(CONV), before, 0))
    flat.mul_(1.001)
    layout.scatter("w", flat, leaves[0].detach())
    wanted = torch.zeros(CONV, dtype=dtype).masked_scatter_(mask.view(CONV), flat.to(dtype))
    assert all(torch.equal(leaf.detach(), wanted) for leaf in leaves)


def test_a_gradient_in_any_order_of_memory_is_read_as_the_parameter_lies() -> None:
    mask, grad = some_mask(360), torch.randn(CONV)
    layout = CompressedLayout({"w": mask})
    out = torch.empty(int(mask.sum()))
    layout.gather("w", grad.to(memory_format=torch.channels_last), out)
    assert torch.equal(out, grad.view(-1)[mask])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_pruned_entries_it_is_the_dense_layout(dtype: torch.dtype) -> None:
    grads, results = torch.randn(2, 360).to(dtype).unbind(), []
    made = torch.randn(CONV).to(dtype)
    for layout in (DenseLayout(), CompressedLayout({"w": torch.ones(360, dtype=torch.bool)})):
        leaf = torch.nn.Parameter(made.clone())
        assert layout.numel("w", leaf) == 360 and layout.mask("w") is None
        flat, out = torch.empty(360), torch.empty(360)
        layout.bind("w", flat, (leaf,))
        assert (leaf.data_ptr() == flat.data_ptr()) == (dtype == torch.float32)
        layout.gather("w", grads[0], out)
        layout.gather_add("w", grads[1], out)
        flat.add_(out)
        layout.scatter("w", flat, leaf.detach())
        results.append((layout.fingerprint(), flat, out, leaf.detach()))
    (text, *wanted), (found_text, *found) = results
    assert text == found_text
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_parameters_without_a_mask_are_stored_whole() -> None:
    mask = some_mask(360)
    layout = CompressedLayout({"w": mask})
    bias = torch.nn.Parameter(torch.randn(8))
    flat = torch.empty(layout.numel("bias", bias))
    layout.bind("bias", flat, (bias,))
    assert flat.numel() == 8 and bias.data_ptr() == flat.data_ptr()
    assert layout.mask("bias") is None
    found = layout.mask("w")
    assert found is not None and torch.equal(found, mask)


def test_an_index_takes_four_bytes_a_stored_entry_or_a_bit_for_each() -> None:
    mask = some_mask(1 << 20)
    assert CompressedLayout({"w": mask}).nbytes == 4 * int(mask.sum())
    assert BitmapStore(mask, CPU).nbytes == (1 << 20) / 8 + 16 * 1024
    assert CompressedLayout({"w": torch.ones(9, dtype=torch.bool)}).nbytes == 0


def test_entries_are_counted_without_padding() -> None:
    embedding, bias = leaves_of((4, 3), torch.float32), leaves_of((5,), torch.float32)
    infos = [
        ParamInfo(name="embedding", leaves=embedding, logical_shape=(3, 3)),
        ParamInfo(name="bias", leaves=bias, logical_shape=(5,)),
    ]
    assert CompressedLayout({}).count(infos) == StoredCount(14, 14)
    mask = torch.tensor([True, False, True] + 9 * [False])
    assert CompressedLayout({"embedding": mask}).count(infos) == StoredCount(7, 14)


@every_kind
def test_fingerprint_tells_masks_apart_and_nothing_else(
    kind: Callable[[torch.Tensor], Index],
) -> None:
    first, second = some_mask(360), some_mask(90)

    def text(**masks: torch.Tensor) -> str:
        layout = CompressedLayout(masks)
        layout._indices = {name: kind(mask) for name, mask in sorted(masks.items())}
        return layout.fingerprint()

    found = text(a=first, b=second)
    assert found == text(b=second, a=first) == CompressedLayout({"a": first, "b": second})._digest
    other = second.clone()
    other[17] = ~other[17]
    longer = torch.cat([second, torch.zeros(6, dtype=torch.bool)])
    others = {text(a=first, b=other), text(a=first, c=second), text(a=first), text(b=second)}
    others |= {text(a=second, b=first), text(a=first, b=longer), DenseLayout().fingerprint()}
    assert len(others) == 7 and found not in others


def test_masks_that_do_not_fit_are_our_own_bug() -> None:
    layout = CompressedLayout({"w": some_mask(360)})
    with pytest.raises(AssertionError, match="w: the mask is of another length"):
        layout.numel("w", torch.empty(361))
    for mask in (torch.zeros(6), torch.zeros(2, 3, dtype=torch.bool)):
        with pytest.raises(AssertionError, match="w: not a flat mask"):
            CompressedLayout({"w": mask})


def test_a_parameter_too_long_for_32_bits_is_refused() -> None:
    mask = torch.zeros(1, dtype=torch.bool).expand(MOST_ENTRIES + 1)
    with pytest.raises(ConfigError) as refused:
        CompressedLayout({"layers.0.weight": mask})
    assert str(refused.value) == (
        "layers.0.weight: 2147483648 entries on this rank; a pruned parameter has at most "
        "2147483647 on a CPU; split it with a larger --tensor-model-parallel-size"
    )
