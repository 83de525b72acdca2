"""Compile every Triton kernel for GPUs that need not be here: `python -m` this `[--all]`.

The functions that launch kernels are called on the CPU. Each launch is recorded in place of being
run, and its kernel is compiled down to machine code as a launch on a GPU would have it compiled:
for the same types, constants and alignments. The launches of a kernel take the architectures in
turns; with `--all`, each launch is compiled for every architecture.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton import compile as compile_kernel  # pyright: ignore[reportMissingImports]
from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
from triton.compiler import ASTSource, make_backend  # pyright: ignore[reportMissingImports]
from triton.runtime.jit import (  # pyright: ignore[reportMissingImports]
    JITFunction,
    create_function_from_signature,
)

import radius.kernels
import samo.kernels
from megatron.sparse import kernels as sparse
from megatron.sparse import selection
from megatron.sparse.counting import DTYPES, Candidates
from megatron.sparse.counting_kernels import KernelCounter
from megatron.sparse.reference import BLOCK, GROUP, Bits
from megatron.sparse.shard import FlatShard
from megatron.tensor_parallel import cross_entropy_kernels

REPO = Path(__file__).resolve().parent.parent
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
"""Shared memory in bytes that a program may use on each architecture."""
LONG = (1 << 31) + 5
"""A number of entries that does not fit in 32 bits."""


@dataclass(frozen=True)
class KernelLaunch:
    """A kernel and the arguments it was called with."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def compiled(self, architecture: int, cache: dict[str, Any]) -> Any:
        """Return the compiled kernel, from `cache` if an earlier launch has the same one."""
        target = GPUTarget("cuda", architecture, 32)
        backend = make_backend(target)
        bind = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        options, signature, constants, attributes = self.kernel._pack_args(
            backend, self.options, *bind(*self.arguments, **self.options)
        )
        hash(tuple(constants.values()))  # a launch looks for its kernel by them
        key = f"{self.kernel!r} {target} {options} {signature} {constants} {attributes}"
        if key not in cache:
            source = ASTSource(self.kernel, signature, constants, attributes)
            cache[key] = compile_kernel(source, target=target, options=options.__dict__)
        return cache[key]


def project_kernels() -> set[Any]:
    """Return every function under `triton.jit` in the packages of the project."""
    found = set()
    for package in ("megatron", "radius", "samo"):
        for path in sorted((REPO / package).rglob("*.py")):
            if "@triton.jit" in path.read_text():
                name = ".".join(path.relative_to(REPO).with_suffix("").parts)
                members = vars(importlib.import_module(name)).values()
                found |= {f for f in members if isinstance(f, JITFunction)}
    return found


def with_callees(kernel: Any) -> set[Any]:
    """Return a kernel and the functions under `triton.jit` that are compiled into it."""
    named = (kernel.fn.__globals__.get(name) for name in kernel.fn.__code__.co_names)
    callees = [with_callees(f) for f in named if isinstance(f, JITFunction)]
    return {kernel}.union(*callees)


def recorded() -> list[KernelLaunch]:
    """Record the kernel launches of all `launch_*` functions below."""
    found: list[KernelLaunch] = []

    def record(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        assert grid[0] > 0 and not warmup
        found.append(KernelLaunch(kernel, arguments, options))

    with mock.patch.object(JITFunction, "run", record):
        for dtype in DTYPES:
            launch_choosing(dtype)
            launch_counting(dtype)
            launch_moving(dtype)
            launch_compressing(dtype)
            launch_cross_entropy(dtype)
    return found


def some_bits(dtype: torch.dtype) -> Iterator[Bits]:
    """Yield bitmaps with patches; for fp32 also bitmaps without patches, and long ones.

    The last two kinds do not depend on the dtype.
    """
    words = torch.zeros(2 * GROUP, BLOCK // 32, dtype=torch.int32)
    counts = torch.zeros(2 * GROUP, dtype=torch.int64)
    patch = torch.full((2 * GROUP,), -1, dtype=torch.int32)
    yield Bits.of(2 * GROUP * BLOCK, words, counts, patch, words[:1])
    if dtype == torch.float32:
        yield Bits.of(2 * GROUP * BLOCK, words, counts)
        yield Bits.of(LONG, words, counts)


def launch_choosing(dtype: torch.dtype) -> None:
    """Launch with slices that begin anywhere in their bucket and have any length."""
    words = torch.zeros(GROUP, BLOCK // 32, dtype=torch.int32)
    number = torch.zeros((), dtype=torch.int64)
    bucket = torch.zeros(2 * BLOCK + 1, dtype=dtype)
    long = [bucket[:1].expand(LONG)] if dtype == torch.float32 else []
    for values in (bucket[:-1], bucket[1:], *long):
        numel = values.numel()
        for shard in (FlatShard(numel, numel), FlatShard(numel, 2 * numel, row=8, stride=16)):
            sparse.write_bits(words, 64, values, number.int(), number, shard)
    sparse.count_blocks(words)


def launch_counting(dtype: torch.dtype) -> None:
    """Launch with counts of 32 bits, and of the 64 bits of longer tensors and of sums of ranks."""
    one = Candidates(torch.zeros(BLOCK, dtype=dtype), 1, FlatShard(BLOCK, BLOCK))
    for kind in (torch.int32, torch.int64):
        counter = KernelCounter([one])
        counter._kind = kind
        with mock.patch.object(selection, "_counter", lambda batch, counter=counter: counter):
            list(selection._by_counting([one], None, sampled=True))


def launch_moving(dtype: torch.dtype) -> None:
    values = torch.zeros(2 * GROUP * BLOCK, dtype=dtype)
    state = values.float()
    for bits in some_bits(dtype):
        radius.kernels.compact(bits, values, values)
        radius.kernels.clear(bits, values)
        radius.kernels.clear_range(bits, values, 5, bits.length - 3)
        out = values[:1].expand(bits.length)
        radius.kernels.expand(bits, values, out, first=GROUP)
        radius.kernels.place(bits, values, out)
        for steps_accumulated, frozen in product((None, state), (False, True)):
            radius.kernels.adamw(
                bits,
                values,
                steps_accumulated,
                state,
                state,
                state,
                factor=0.5,
                frozen=frozen,
                lr=0.1,
                weight_decay=0.1,
                betas=(0.9, 0.95),
                eps=1e-8,
                t=1,
            )


def launch_compressing(dtype: torch.dtype) -> None:
    values = torch.zeros(2 * GROUP * BLOCK, dtype=dtype)
    for bits, other in product(some_bits(dtype), (values, values.float())):
        for add in (False, True):
            samo.kernels.compress(bits, values, other, add=add)
        samo.kernels.expand(bits, other, values)


def launch_cross_entropy(dtype: torch.dtype) -> None:
    """Launch with aligned and with unaligned rows."""
    rows = torch.zeros(2)
    for columns in (64, 61):
        logits = torch.zeros(2, columns, dtype=dtype)
        cross_entropy_kernels.statistics(logits)
        cross_entropy_kernels.write_gradient(logits, rows, rows, rows.long(), rows)


def check(compiled: Any, architecture: int) -> None:
    """Assert that a compiled kernel is machine code of an architecture that can hold it."""
    assert compiled.asm["cubin"].startswith(b"\x7fELF"), compiled.name
    assert f".target sm_{architecture}" in compiled.asm["ptx"], compiled.name
    assert compiled.metadata.shared <= SHARED_BYTES[architecture], compiled.name


def main(arguments: Sequence[str]) -> int:
    launches = recorded()
    assert launches, "Triton interprets its kernels and compiles none"
    covered = set().union(*(with_callees(launch.kernel) for launch in launches))
    missing = sorted(kernel.__name__ for kernel in project_kernels() - covered)
    assert not missing, f"{missing} must be launched by a case here"
    cache: dict[str, Any] = {}
    turns = dict[Any, Iterator[int]]()
    for launch in launches:
        turn = turns.setdefault(launch.kernel, cycle(SHARED_BYTES))
        chosen = SHARED_BYTES if "--all" in arguments else [next(turn)]
        for architecture in chosen:
            check(launch.compiled(architecture, cache), architecture)
    print(f"all {len(cache)} compiled")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
