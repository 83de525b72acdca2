"""Tests that the CPU's features decide how 16-bit products run, and are reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron import processor
from megatron.processor import (
    describe_processor,
    is_intel,
    multiplies_natively,
    processor_model,
)


def test_fp32_and_fp64_are_always_native() -> None:
    assert multiplies_natively(torch.float32) and multiplies_natively(torch.float64)


def test_native_products_are_a_part_of_the_description() -> None:
    facts = describe_processor()
    assert facts["vector_instructions"] == torch.backends.cpu.get_cpu_capability()
    named = {"bf16": torch.bfloat16, "fp16": torch.float16}
    native = [name for name, dtype in named.items() if multiplies_natively(dtype)]
    assert facts["native_products"] == ["fp32", *native]


@pytest.mark.push
def test_a_lower_instruction_set_has_no_16_bit_products() -> None:
    code = (
        "import json; from megatron.processor import describe_processor; "
        "print(json.dumps(describe_processor()))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ATEN_CPU_CAPABILITY": "avx2"},
        capture_output=True,
        text=True,
        check=True,
    )
    facts = json.loads(answer.stdout)
    if facts["vector_instructions"] != "AVX2":
        pytest.skip("the CPU has no AVX2")
    assert facts["native_products"] == ["fp32"]


def test_a_machine_without_cpuinfo_is_named_by_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(processor, "_CPUINFO", tmp_path / "cpuinfo")
    is_intel.cache_clear()
    request.addfinalizer(is_intel.cache_clear)
    assert processor_model() == os.uname().machine
    assert not is_intel()
    (tmp_path / "cpuinfo").write_text(
        "processor : 0\nvendor_id\t: GenuineIntel\nmodel name\t: Some CPU: 9000\n"
    )
    is_intel.cache_clear()
    assert processor_model() == "Some CPU: 9000" and is_intel()
