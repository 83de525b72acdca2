"""The compiled kernels of a CPU against plain torch, bit by bit, and where they are not there."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.parallel.groups import ProcessGroups
from megatron.sparse.reference import BLOCK, GROUP, Bits, count_blocks
from megatron.sparse.selection import Given
from radius import native_library as finder
from radius import reference
from radius.bitmap import BitmapIndex
from radius.index import keeps_bits
from tests.contract.harness import Toy, gradients
from tests.radius.toys import radius, reducer_of
from tests.ranks import Ranks

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.int64]
GUARD = 99
"""What lies around a tensor, which nobody may touch."""
needs_native = pytest.mark.skipif(
    finder.native_library() is None, reason="needs the kernels of radius/native.c, and AVX-512"
)
if finder.native_library() is not None:
    from radius import native


def bits_of(length: int, share: float, *, flushed: bool) -> Bits:
    index = BitmapIndex(length, CPU)
    index.choose(0, Given(torch.rand(length) < share))
    return index.flushed([(length // 5, length // 2)]).bits if flushed else index.bits


def guarded(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy with room on both sides, and the room."""
    padded = torch.full((values.numel() + 128,), GUARD, dtype=values.dtype)
    inner = padded[64 : 64 + values.numel()]
    inner.copy_(values)
    return inner, padded


def assert_untouched(*padded: torch.Tensor) -> None:
    for tensor in padded:
        assert (tensor[:64] == GUARD).all() and (tensor[-64:] == GUARD).all()


LENGTHS = st.integers(1, 3 * GROUP * BLOCK)
SHARES = st.sampled_from([0.0, 0.01, 0.4, 0.97, 1.0])


@needs_native
@settings(deadline=None, max_examples=150)
@given(LENGTHS, SHARES, st.booleans(), st.sampled_from(DTYPES), st.integers(0, 2**31))
def test_every_kernel_equals_plain_torch(
    length: int, share: float, flushed: bool, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    bits = bits_of(length, share, flushed=flushed)
    numel = int(bits.counts.sum())
    flat = (torch.randn(length) * 100).to(dtype)
    scales = (1.0, 0.37) if dtype.is_floating_point else (1.0,)
    for clear in (False, True):
        for scale in scales:
            wanted, left = flat.new_empty(numel), flat.clone()
            reference.compact(bits, left, wanted, scale=scale, clear=clear)
            found, around = guarded(torch.zeros(numel, dtype=dtype))
            mine, beside = guarded(flat)
            native.compact(bits, mine, found, scale=scale, clear=clear)
            assert torch.equal(found, wanted) and torch.equal(mine, left)
            assert_untouched(around, beside)
    mine, beside = guarded(flat)
    native.clear(bits, mine)
    left = flat.clone()
    reference.clear(bits, left)
    assert torch.equal(mine, left)

    values = torch.arange(1, numel + 1).to(dtype)
    for name in ("expand", "place"):
        wanted = flat.clone()
        getattr(reference, name)(bits, values, wanted)
        mine, beside = guarded(flat)
        getattr(native, name)(bits, values, mine)
        assert torch.equal(mine, wanted)
        assert_untouched(beside)
    for first in range(0, -(-length // BLOCK), GROUP):
        part = flat[first * BLOCK : (first + GROUP) * BLOCK + 100]
        for scale in scales:
            wanted, (mine, beside) = part.clone(), guarded(part)
            reference.expand(bits, values, wanted, first=first, scale=scale)
            native.expand(bits, values, mine, first=first, scale=scale)
            assert torch.equal(mine, wanted)
            assert_untouched(beside)


@needs_native
def test_values_are_cast_as_they_are_placed() -> None:
    bits = bits_of(9 * BLOCK + 5, 0.3, flushed=True)
    values = torch.randn(int(bits.counts.sum())).bfloat16()
    for first in (0, GROUP):
        wanted, found = torch.ones(4 * BLOCK), torch.ones(4 * BLOCK)
        reference.expand(bits, values, wanted, first=first, scale=0.37)
        native.expand(bits, values, found, first=first, scale=0.37)
        assert torch.equal(found, wanted)


@needs_native
def test_what_is_not_finite_is_moved_and_cleared() -> None:
    odd = torch.tensor([torch.nan, torch.inf, -0.0, 1e-45]).repeat(BLOCK)
    bits = bits_of(odd.numel(), 0.5, flushed=False)
    wanted, found = torch.empty(2, int(bits.counts.sum())).unbind()
    left, mine = odd.clone(), odd.clone()
    reference.compact(bits, left, wanted, clear=True)
    native.compact(bits, mine, found, clear=True)
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))
    assert torch.equal(mine.view(torch.int32), left.view(torch.int32))


@needs_native
def test_blocks_are_counted() -> None:
    words = torch.randint(-(2**31), 2**31, (37, 32)).to(torch.int32)
    assert torch.equal(native.count_blocks(words), count_blocks(words))


@needs_native
def test_vectors_that_are_too_short_are_refused() -> None:
    bits = bits_of(5 * BLOCK, 0.4, flushed=False)
    flat, numel = torch.randn(5 * BLOCK), int(bits.counts.sum())
    short, around = guarded(torch.zeros(numel - 1))
    with pytest.raises(AssertionError):
        native.compact(bits, flat, short)
    assert_untouched(around)
    with pytest.raises(AssertionError):
        native.expand(bits, short, flat)
    with pytest.raises(AssertionError):
        native.compact(bits, flat[: 3 * BLOCK - 7], short)  # bits beyond the end
    with pytest.raises(AssertionError):
        native.expand(bits, short, torch.empty(20 * BLOCK))


def test_a_bitmap_on_a_cpu_takes_the_kernels_and_enough_entries() -> None:
    for density in (Fraction("0.4"), Fraction(1, 16)):
        assert keeps_bits("cpu", density, native=True)
        assert not keeps_bits("cpu", density, native=False)
    assert not keeps_bits("cpu", Fraction("0.06"), native=True)
    assert keeps_bits("cuda", Fraction("0.01"), native=False)


@pytest.mark.parametrize(
    ("text", "usable"),
    [
        ("int sparsetron_version(void) { return -1; }", False),
        ("int something_else(void) { return 1; }", False),
        ("not a library", False),
        (None, True),
    ],
)
def test_a_library_of_another_version_or_kind_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, usable: bool
) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    built, source = tmp_path / f"{finder.MODULE}.so", tmp_path / "source.c"
    if text == "not a library":
        built.write_text(text)
    else:
        path = Path(finder.__file__).with_name("native.c")
        source.write_text(path.read_text() if text is None else text)
        command = [compiler, "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        subprocess.run([*command, str(source), "-o", str(built)], check=True)
    monkeypatch.setattr(finder, "_origin", lambda: str(built))
    finder.native_library.cache_clear()
    try:
        found = finder.native_library()
    finally:
        finder.native_library.cache_clear()
    if usable and has_avx512():
        assert isinstance(found, ctypes.CDLL)
    else:
        assert found is None


def has_avx512() -> bool:
    return "avx512f" in Path("/proc/cpuinfo").read_text().split()


def on_rank_with_odd_one_out(groups: ProcessGroups, odd: int) -> list[object]:
    """Which kind each rank keeps where one has no kernels, and what it says of it."""
    import radius.reducer as module

    keeps = module.keeps_bits
    module.keeps_bits = lambda *_: groups.dp.rank != odd
    try:
        toy = Toy(groups, radius())
        toy.step([gradients(1, groups.dp.rank)])
        notes = " ".join(toy.engine.stats(full=True).notes)
        return [{own.bits for own in reducer_of(toy)._own}, notes]
    finally:
        module.keeps_bits = keeps


@pytest.mark.parametrize("odd", [-1, 1])
def test_ranks_keep_the_same_kind(ranks: Ranks, odd: int) -> None:
    for kinds, notes in ranks.run(2, on_rank_with_odd_one_out, odd):
        assert kinds == {odd == -1}
        assert ("moves them by compiled kernels" in notes) == (odd == -1)
        assert ("moves them by torch" in notes) == (odd == 1)
