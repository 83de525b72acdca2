"""Compile every Triton kernel of SAMO for an sm_90 GPU, which takes no GPU: `python -m` this."""

from __future__ import annotations

import sys

from megatron.sparse.reference import WORDS
from samo import kernels
from tests.sparse.kernel_compilation import Case, compile_all

BITS = {"words": "*i32", "offsets": "*i64", "patch": "*i32", "patches": "*i32", "apart": "i32"}


def cases(dtype: str, flag: bool) -> list[Case]:
    """Kernels for parameters of a type; `flag` turns every choice of a kernel on or off."""
    chosen = {"BLOCKS": 2, "WORDS": WORDS, "PATCHED": flag}
    return [
        (kernels._compress, {**BITS, "dense": dtype, "out": "*fp32"}, {"ADD": flag, **chosen}),
        (kernels._expand, {**BITS, "values": "*fp32", "out": dtype}, chosen),
    ]


def main() -> int:
    compile_all(cases)
    print("all compiled")
    return 0


if __name__ == "__main__":
    sys.exit(main())
