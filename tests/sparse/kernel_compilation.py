"""Compile the Triton kernels that choose entries for an sm_90 GPU, which takes no GPU: `python -m`
this."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from triton import compile as compile_kernel  # pyright: ignore[reportMissingImports]
from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

from megatron.sparse import kernels
from megatron.sparse.reference import BINS, BLOCK, GROUP, TIE_BLOCK, WORDS

Case = tuple[Any, dict[str, str], dict[str, Any]]
"""A kernel with the types of its arguments and its constants."""
CUT = {"row": "i64", "stride": "i64", "offset": "i64", "skipped": "i64"}
ENTRIES = GROUP * BLOCK


def cases(dtype: str, flag: bool) -> list[Case]:
    """Kernels for values of a type; `flag` turns every choice of a kernel on or off."""
    values = {"values": dtype, "threshold": "*i32", "numel": "i64", **CUT}
    return [
        (
            kernels._histogram,
            {
                "values": dtype,
                "bracket": "*i64",
                "counts": "*i32",
                "numel": "i64",
                "apart": "i32",
            },
            {"BINS": BINS, "ENTRIES": ENTRIES},
        ),
        (
            kernels._tie_counts,
            {**values, "wanted": "*i1", "counts": "*i64", "apart": "i32"},
            {"TIE_BLOCK": TIE_BLOCK, "ENTRIES": ENTRIES},
        ),
        (
            kernels._write_bits,
            {**values, "words": "*i32", "cutoff": "*i64", "first": "i64", "start": "i64"},
            {"IS_RUN": flag, "WORDS": ENTRIES // 32},
        ),
        (
            kernels._count_blocks,
            {"words": "*i32", "counts": "*i64", "rows": "i32"},
            {"ROWS": 64, "WORDS": WORDS},
        ),
    ]


def compile_all(cases: Callable[[str, bool], list[Case]]) -> None:
    """Compile what `cases` gives for both types and flags."""
    target = GPUTarget("cuda", 90, 32)
    for dtype, flag in (("*fp32", True), ("*bf16", False)):
        for kernel, types, constants in cases(dtype, flag):
            names = kernel.arg_names
            assert set(names) == types.keys() | constants.keys(), kernel
            signature = {name: types.get(name, "constexpr") for name in names}
            values = {(names.index(name),): value for name, value in constants.items()}
            source = ASTSource(fn=kernel, signature=signature, constexprs=values)
            found = compile_kernel(source, target=target, options={"enable_fp_fusion": True})
            assert len(found.asm["cubin"]) > 0


def main() -> int:
    compile_all(cases)
    print("all compiled")
    return 0


if __name__ == "__main__":
    sys.exit(main())
