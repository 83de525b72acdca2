"""Tests of a CPU's compiled kernels against plain torch, bit by bit, and of missing kernels."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data_parallel.exchange import Exchange
from megatron.optimizer.update_rules import AdamW, Hyper
from megatron.parallel.groups import Group, ProcessGroups
from megatron.parallel.tensor_shard import ModelShard
from megatron.sparse.reference import BLOCK, GROUP, Bits, count_blocks
from megatron.sparse.selection import GivenSelection
from radius import native_library as finder
from radius import reference
from radius.bitmap_index import BitmapIndex
from radius.index import LEAST_DENSITY, keeps_bits
from radius.reducer import RadiusReducer
from radius.schedule import RadiusSettings
from tests.conftest import REPO
from tests.contract.harness import Toy, gradients
from tests.radius.toys import index_of, radius, reducer_of
from tests.ranks import Ranks

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.int64]
SOURCE = REPO / "radius" / "native.c"
COMPILER = shutil.which("cc") or shutil.which("gcc")
ON_X86 = platform.machine() == "x86_64" and sys.platform == "linux"
GUARD = 99
"""Value of the entries around a tensor, which no kernel may touch."""
needs_native = pytest.mark.skipif(
    finder.native_library() is None, reason="needs the kernels of radius/native.c, and AVX2"
)
if finder.native_library() is not None:
    from radius import native

by_instruction_set = pytest.mark.parametrize("instruction_set", finder.INSTRUCTION_SETS)


def using(instruction_set: str) -> AbstractContextManager[None]:
    if instruction_set not in finder.instruction_sets():
        pytest.skip(f"needs a CPU with {instruction_set}")
    return native.using(instruction_set)


def bits_of(length: int, share: float, *, flushed: bool) -> Bits:
    index = BitmapIndex(length, CPU)
    index.choose(0, GivenSelection(torch.rand(length) < share))
    return index.flushed([(length // 5, length // 2)]).bits if flushed else index.bits


def guarded(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy with guard entries on both sides, and the padded tensor."""
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
@by_instruction_set
@settings(deadline=None, max_examples=150)
@given(
    length=LENGTHS,
    share=SHARES,
    flushed=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_every_kernel_equals_plain_torch(
    instruction_set: str, length: int, share: float, flushed: bool, dtype: torch.dtype, seed: int
) -> None:
    with using(instruction_set):
        assert_every_kernel_equals_plain_torch(length, share, flushed, dtype, seed)


def assert_every_kernel_equals_plain_torch(
    length: int, share: float, flushed: bool, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    bits = bits_of(length, share, flushed=flushed)
    numel = int(bits.counts.sum())
    flat = (torch.randn(length) * 100).to(dtype)
    wanted = flat.new_empty(numel)
    reference.compact(bits, flat, wanted)
    found, around = guarded(torch.zeros(numel, dtype=dtype))
    mine, beside = guarded(flat)
    native.compact(bits, mine, found)
    assert torch.equal(found, wanted) and torch.equal(mine, flat)
    assert_untouched(around, beside)
    native.clear(bits, mine)
    left = flat.clone()
    reference.clear(bits, left)
    assert torch.equal(mine, left)
    assert_untouched(beside)
    for start, stop in ((0, length), (length // 3, length // 2), (length // 5, length)):
        mine, beside = guarded(flat)
        native.clear_range(bits, mine, start, stop)
        part = flat.clone()
        part[start:stop] = left[start:stop]
        assert torch.equal(mine, part)
        assert_untouched(beside)

    values = torch.arange(1, numel + 1).to(dtype)
    for name in ("expand", "place"):
        wanted = flat.clone()
        getattr(reference, name)(bits, values, wanted)
        mine, beside = guarded(flat)
        getattr(native, name)(bits, values, mine)
        assert torch.equal(mine, wanted)
        assert_untouched(beside)
    scales = (1.0, 0.37) if dtype.is_floating_point else (1.0,)
    for first in range(0, -(-length // BLOCK), GROUP):
        part = flat[first * BLOCK : (first + GROUP) * BLOCK + 100]
        for scale in scales:
            wanted, (mine, beside) = part.clone(), guarded(part)
            reference.expand(bits, values, wanted, first=first, scale=scale)
            native.expand(bits, values, mine, first=first, scale=scale)
            assert torch.equal(mine, wanted)
            assert_untouched(beside)


@needs_native
@by_instruction_set
def test_values_are_cast_as_they_are_placed(instruction_set: str) -> None:
    bits = bits_of(9 * BLOCK + 5, 0.3, flushed=True)
    values = torch.randn(int(bits.counts.sum())).bfloat16()
    for first in (0, GROUP):
        wanted, found = torch.ones(4 * BLOCK), torch.ones(4 * BLOCK)
        reference.expand(bits, values, wanted, first=first, scale=0.37)
        with using(instruction_set):
            native.expand(bits, values, found, first=first, scale=0.37)
        assert torch.equal(found, wanted)


@needs_native
@by_instruction_set
def test_what_is_not_finite_is_moved_and_cleared(instruction_set: str) -> None:
    odd = torch.tensor([torch.nan, torch.inf, -0.0, 1e-45]).repeat(BLOCK)
    bits = bits_of(odd.numel(), 0.5, flushed=False)
    wanted, found = torch.empty(2, int(bits.counts.sum())).unbind()
    left, mine = odd.clone(), odd.clone()
    reference.compact(bits, left, wanted)
    reference.clear(bits, left)
    with using(instruction_set):
        native.compact(bits, mine, found)
        native.clear(bits, mine)
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))
    assert torch.equal(mine.view(torch.int32), left.view(torch.int32))


@needs_native
@by_instruction_set
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("counted", [False, True])
@settings(deadline=None, max_examples=40)
@given(length=LENGTHS, share=SHARES, flushed=st.booleans(), seed=st.integers(0, 2**31))
def test_adamw_equals_the_rule_on_the_chosen_entries_and_decays_the_others(
    instruction_set: str,
    decay: float,
    counted: bool,
    length: int,
    share: float,
    flushed: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    bits = bits_of(length, share, flushed=flushed)
    rule, hyper = AdamW(beta1=0.9, beta2=0.999, eps=1e-8), Hyper(t=7, lr=1e-2, weight_decay=decay)
    chosen = torch.zeros(length)
    reference.place(bits, torch.ones(int(bits.counts.sum())), chosen)
    values = torch.randn(int(bits.counts.sum()))
    counts = torch.randint(1, 5, values.shape).float() if counted else None
    before = [torch.randn(length), torch.randn(length), torch.rand(length)]
    wanted = [state[chosen > 0] for state in before]
    rule.apply(wanted[0], values * 0.37, wanted[1:], hyper, counts)
    states, padded = zip(*map(guarded, before), strict=True)
    with using(instruction_set):
        native.adamw(bits, values, counts, *states, **adamw_of(rule, hyper))
    for state, mine, old in zip(states, wanted, before, strict=True):
        # What a sum of several numbers can lose to cancellation, in units of their last places.
        torch.testing.assert_close(state[chosen > 0], mine, rtol=1e-6, atol=1e-6)
        frozen = old * hyper.shrink if state is states[0] else old
        assert torch.equal(state[chosen == 0], frozen[chosen == 0])
    assert_untouched(*padded)


def adamw_of(rule: AdamW, hyper: Hyper) -> dict[str, Any]:
    """Return the arguments of a kernel of AdamW that are no tensors."""
    return {
        "factor": 0.37,
        "frozen": True,
        "lr": hyper.lr,
        "weight_decay": hyper.weight_decay,
        "betas": (rule.beta1, rule.beta2),
        "eps": rule.eps,
        "t": hyper.t,
    }


@needs_native
def test_blocks_are_counted() -> None:
    words = torch.randint(-(2**31), 2**31, (37, 32)).to(torch.int32)
    assert torch.equal(native.count_blocks(words), count_blocks(words))


@needs_native
@by_instruction_set
def test_tensors_that_do_not_go_with_the_bitmap_are_refused(instruction_set: str) -> None:
    chosen = torch.zeros(5 * BLOCK, dtype=torch.bool)
    chosen[::3] = True
    index = BitmapIndex(5 * BLOCK, CPU)
    index.choose(0, GivenSelection(chosen))
    bits, flat, numel = index.bits, torch.randn(5 * BLOCK), int(chosen.sum())
    short, around = guarded(torch.zeros(numel - 1))
    values = torch.zeros(numel)
    cut = 3 * BLOCK - 7
    states = [torch.zeros(5 * BLOCK) for _ in range(3)]
    constants = adamw_of(
        AdamW(beta1=0.9, beta2=0.999, eps=1e-8), Hyper(t=1, lr=0.1, weight_decay=0)
    )
    refused: list[Callable[[], None]] = [
        lambda: native.adamw(bits, short, None, *states, **constants),
        lambda: native.adamw(bits, torch.zeros(numel + 1), None, *states, **constants),
        lambda: native.adamw(bits, values, short, *states, **constants),
        lambda: native.adamw(bits, values, None, states[0], states[1], flat[:cut], **constants),
        lambda: native.adamw(bits, values, None, states[0], states[1], flat.double(), **constants),
        lambda: native.compact(bits, flat, short),
        lambda: native.compact(bits, flat, torch.zeros(numel + 1)),
        lambda: native.compact(bits, flat, values.bfloat16()),
        lambda: native.compact(bits, flat[:cut], torch.zeros(int(chosen[:cut].sum()))),
        lambda: native.clear(bits, flat[:cut]),
        lambda: native.compact(bits, torch.randn(9 * BLOCK), values),
        lambda: native.compact(bits, torch.randn(5 * BLOCK, 2)[:, 0], values),
        lambda: native.expand(bits, short, flat),
        lambda: native.expand(bits, values, torch.empty(9 * BLOCK)),
        lambda: native.expand(bits, values, torch.empty(5 * BLOCK), first=GROUP),
    ]
    for call in refused:
        with using(instruction_set), pytest.raises(ValueError, match="not of the bitmap's length"):
            call()
    assert_untouched(around)


@by_instruction_set
def test_a_bitmap_on_a_cpu_takes_the_kernels_and_enough_entries(
    monkeypatch: pytest.MonkeyPatch, instruction_set: str
) -> None:
    enough = LEAST_DENSITY[instruction_set]
    few = enough - Fraction(1, 1000)
    monkeypatch.setattr("radius.index.instruction_sets", lambda: (instruction_set,))
    assert keeps_bits("cpu", enough) and not keeps_bits("cpu", few)
    monkeypatch.setattr("radius.index.instruction_sets", tuple)
    assert not keeps_bits("cpu", enough) and keeps_bits("cuda", few)


# ---- the library -------------------------------------------------------------------------------


def test_the_version_is_raised_with_every_change() -> None:
    """A clone may find a library that was built from older source."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    known = {4: "56c27cabfca5f94b"}
    assert known.get(finder.VERSION) == digest, (
        "raise VERSION in native.c and native_library.py, install again, and note the digest here"
    )
    assert f"VERSION = {finder.VERSION} " in SOURCE.read_text()


@pytest.mark.skipif(not os.environ.get("CI"), reason="elsewhere a build may be old or missing")
def test_a_machine_that_can_have_the_kernels_has_them() -> None:
    if COMPILER is None or not ON_X86 or not has_avx2():
        pytest.skip("needs a C compiler, and an x86-64 with AVX2")
    assert finder.native_library() is not None


@pytest.mark.push
@pytest.mark.parametrize(
    ("text", "usable"),
    [
        ("int sparsetron_version(void) { return -1; }", False),
        ("int something_else(void) { return 1; }", False),
        (None, True),
    ],
)
def test_a_library_of_another_version_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, usable: bool
) -> None:
    if COMPILER is None or not ON_X86:
        pytest.skip("needs a C compiler, and an x86-64")
    built, source = tmp_path / f"{finder.MODULE}.so", tmp_path / "source.c"
    source.write_text(SOURCE.read_text() if text is None else text)
    command = [COMPILER, "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*command, str(source), "-o", str(built)], check=True)
    found = found_at(built, monkeypatch)
    assert isinstance(found, ctypes.CDLL) if usable and has_avx2() else found is None


def test_what_is_no_library_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / f"{finder.MODULE}.so"
    broken.write_text("not a library")
    assert found_at(broken, monkeypatch) is None


def found_at(path: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL | None:
    monkeypatch.setattr(finder, "_origin", lambda: str(path))
    return finder.native_library.__wrapped__()


def has_avx2() -> bool:
    return {"avx2", "popcnt"} <= set(Path("/proc/cpuinfo").read_text().split())


@pytest.mark.push
@pytest.mark.parametrize("compiler", ["false", COMPILER])
def test_the_package_installs_with_a_compiler_and_without(
    tmp_path: Path, compiler: str | None
) -> None:
    if compiler is None or not ON_X86:
        pytest.skip("needs a C compiler, and an x86-64")
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "pretrain_gpt.py"):
        shutil.copy(REPO / name, source)
    shutil.copytree(REPO / "radius", source / "radius", ignore=shutil.ignore_patterns("*.pyc"))
    flags = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--target", str(target)]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *flags, str(source)],
        env=os.environ | {"CC": compiler, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        stdin=subprocess.DEVNULL,
        check=True,
    )
    assert (target / "radius" / "reducer.py").exists()
    assert bool(list(target.glob(f"{finder.MODULE}.*"))) == (compiler != "false")


# ---- ranks -------------------------------------------------------------------------------------


def on_rank_with_odd_one_out(groups: ProcessGroups, odd: int) -> tuple[set[bool], str]:
    """Return the kinds of index on a rank, and its notes, where one rank has no kernels."""
    with index_of(bits=groups.dp.rank != odd):
        toy = Toy(groups, radius())
        toy.step([gradients(1, groups.dp.rank)])
        notes = " ".join(toy.engine.stats(full=True).notes)
        return {own.bits for own in reducer_of(toy)._own}, notes


@pytest.mark.parametrize("odd", [-1, 1])
def test_ranks_keep_the_same_kind(ranks: Ranks, odd: int) -> None:
    for kinds, notes in ranks.run(2, on_rank_with_odd_one_out, odd):
        assert kinds == {odd == -1}
        assert ("moves them by compiled kernels" in notes) == (odd == -1)
        assert ("moves them by torch" in notes) == (odd == 1)


def on_rank_with(groups: ProcessGroups, sets: list[tuple[str, ...]], density: str) -> set[bool]:
    """Return the kinds of index on a rank, given the instruction sets of all ranks."""
    case = radius(density=density)
    with (
        patch("radius.index.instruction_sets", lambda: sets[groups.dp.rank]),
        patch.dict(LEAST_DENSITY, {"AVX2": Fraction("0.2"), "AVX-512": Fraction("0.1")}),
    ):
        return {own.bits for own in reducer_of(Toy(groups, case))._own}


@pytest.mark.parametrize(
    ("other", "density", "bits"),
    [
        (("AVX2", "AVX-512"), "0.4", True),
        (("AVX2", "AVX-512"), "0.15", False),
        ((), "0.4", False),
    ],
)
def test_ranks_on_different_cpus_keep_the_same_kind(
    ranks: Ranks, other: tuple[str, ...], density: str, bits: bool
) -> None:
    for sets in ([("AVX2",), other], [other, ("AVX2",)]):
        assert ranks.run(2, on_rank_with, sets, density) == [{bits}, {bits}]


@pytest.mark.parametrize("others", [True, False])
def test_so_do_those_that_share_a_model(others: bool) -> None:
    """Two more ranks of the same replica keep bitmaps or do not."""

    class Shared(ModelShard):
        def sum_over_model(self, counts: torch.Tensor) -> torch.Tensor:
            return counts + torch.tensor([2.0 * others, 2.0])

    settings = RadiusSettings(density=Fraction("0.4"), interval=4, start=1)
    reducer = RadiusReducer(Exchange(Group((0,), 0)), {}, settings, Shared())
    with index_of(bits=True):
        assert reducer._all_keep_bits(CPU) is others
