"""The CPU's instruction sets, and the choices that depend on them.

A CPU without 16-bit multiply-add units still runs 16-bit matrix products, by converting one entry
at a time: on an AVX2 machine at a sixth to a thirtieth of the rate of fp32. Products and attention
ask `multiplies_natively` whether to widen their operands.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_CPUINFO = Path("/proc/cpuinfo")


def vector_instructions() -> str:
    """Return the instruction set of torch's CPU kernels: AVX512, AVX2, DEFAULT or another name.

    `ATEN_CPU_CAPABILITY` lowers it, and with it every choice of this module.
    """
    import torch

    return torch.backends.cpu.get_cpu_capability()


@functools.cache
def multiplies_natively(dtype: torch.dtype) -> bool:
    """Return whether the CPU has multiply-add instructions for a dtype: true of fp32 and fp64."""
    import torch

    if dtype not in (torch.bfloat16, torch.float16):
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    if platform.machine() not in ("x86_64", "AMD64"):
        ops = torch.ops.mkldnn
        is_bf16 = dtype == torch.bfloat16
        return ops._is_mkldnn_bf16_supported() if is_bf16 else ops._is_mkldnn_fp16_supported()
    # oneDNN also "supports" bf16 on AVX512 without bf16 units, by converting in fp32.
    if vector_instructions() != "AVX512":
        return False
    if dtype == torch.bfloat16:
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.ops.mkldnn._is_mkldnn_fp16_supported()


def describe_processor() -> dict[str, object]:
    """Return the CPU's facts for `environment.json`.

    These are the model, the instruction set of torch's kernels, and the dtypes of native products.
    """
    import torch

    native = [
        name
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
        if multiplies_natively(dtype)
    ]
    return {
        "model": processor_model(),
        "vector_instructions": vector_instructions(),
        "native_products": ["fp32", *native],
    }


def processor_model() -> str:
    """Return the CPU's model as the operating system names it, or its architecture."""
    return _fact("model name") or platform.machine()


@functools.cache
def is_intel() -> bool:
    """Return whether the CPU is made by Intel."""
    return _fact("vendor_id") == "GenuineIntel"


def _fact(name: str) -> str:
    """Return an entry of the first core in /proc/cpuinfo; "" if there is none."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    facts = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in facts if key.strip() == name), "")
