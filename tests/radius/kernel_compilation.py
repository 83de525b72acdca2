"""Compile every Triton kernel of Radius for an sm_90 GPU, which takes no GPU: `python -m` this."""

from __future__ import annotations

import sys

from megatron.sparse.reference import WORDS
from radius import kernels
from tests.sparse.kernel_compilation import Case, compile_all

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


def cases(dtype: str, flag: bool) -> list[Case]:
    """Kernels for values of a type; `flag` turns every choice of a kernel on or off."""
    chosen = {"BLOCKS": 1, "WORDS": WORDS, "PATCHED": flag}
    moved = {**BITS, "apart": "i32"}
    adamw = {**STATES, "gathered": "*fp32", "length": "i64", **dict.fromkeys(SCALARS, "fp32")}
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
    ]


def main() -> int:
    compile_all(cases)
    print("all compiled")
    return 0


if __name__ == "__main__":
    sys.exit(main())
