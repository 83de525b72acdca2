"""Compile every Triton kernel of Radius for an sm_90 GPU, which takes no GPU: `python -m` this."""

from __future__ import annotations

import sys
from typing import Any

from triton import compile as compile_kernel  # pyright: ignore[reportMissingImports]
from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

from radius import kernels, selection_kernels
from radius.reference import BINS, BLOCK, GROUP, TIE_BLOCK, WORDS

BITS = {"words": "*i32", "offsets": "*i64", "patch": "*i32", "patches": "*i32"}
STATES = {"weight": "*fp32", "exp_avg": "*fp32", "exp_avg_sq": "*fp32"}
SCALARS = (
    "factor",
    "rest1",
    "beta2",
    "rest2",
    "log_beta2",
    "shrink",
    "step_size",
    "unbias2",
    "eps",
)
CUT = {"row": "i64", "stride": "i64", "offset": "i64"}
ENTRIES = GROUP * BLOCK


def cases(dtype: str, flag: bool) -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    """Kernels with the types of their arguments and their constants; `flag` turns every choice of
    a kernel on or off."""
    chosen = {"BLOCKS": 1, "WORDS": WORDS, "PATCHED": flag}
    moved = {**BITS, "apart": "i32"}
    adamw = {**STATES, "gathered": "*fp32", "length": "i64", **dict.fromkeys(SCALARS, "fp32")}
    values = {"values": "*fp32", "threshold": "*i32", "numel": "i64", **CUT}
    return [
        (
            kernels._compact,
            {**moved, "flat": dtype, "out": dtype, "scale": "fp32"},
            {"TAKE": True, "SCALE": flag, "CLEAR": flag, **chosen},
        ),
        (
            kernels._expand,
            {**moved, "values": dtype, "out": "*fp32", "first_block": "i32", "length": "i64"},
            {"ZEROS": flag, **chosen},
        ),
        (
            kernels._adamw,
            {**moved, **adamw, "values": dtype},
            {"GATHERED": flag, "FROZEN": flag, **chosen},
        ),
        (
            selection_kernels._histogram,
            {
                "values": "*fp32",
                "bracket": "*i64",
                "counts": "*i32",
                "numel": "i64",
                "apart": "i32",
            },
            {"BINS": BINS, "ENTRIES": ENTRIES},
        ),
        (
            selection_kernels._tie_counts,
            {**values, "wanted": "*i1", "counts": "*i64", "apart": "i32"},
            {"TIE_BLOCK": TIE_BLOCK, "ENTRIES": ENTRIES},
        ),
        (
            selection_kernels._write_bits,
            {**values, "words": "*i32", "cutoff": "*i64", "first": "i64", "start": "i64"},
            {"IS_RUN": flag, "WORDS": ENTRIES // 32},
        ),
        (
            selection_kernels._count_blocks,
            {"words": "*i32", "counts": "*i64", "rows": "i32"},
            {"ROWS": 64, "WORDS": WORDS},
        ),
    ]


def main() -> int:
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
    print("all compiled")
    return 0


if __name__ == "__main__":
    sys.exit(main())
