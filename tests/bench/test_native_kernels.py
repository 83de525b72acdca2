"""The benchmark of C kernels and torch runs at a size that measures nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.errors import ConfigError
from megatron.processor import processor_model
from radius.native_library import instruction_sets
from tools.bench.common.page_files import PAGE, read_results
from tools.bench.native_kernels import run as native_kernels
from tools.bench.native_kernels.run import CASES, COMPILED, TORCH, NativeKernelRow, main, page_part


@pytest.mark.skipif(not instruction_sets(), reason="needs the kernels of radius/native.c")
def test_smoke_writes_a_row_for_each_case(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        assert main(["--entries", "70001", "--rounds", "2", "--out", str(tmp_path)]) == 0
    finally:
        torch.set_num_threads(threads)
    part = page_part(instruction_sets()[-1])
    found = read_results(tmp_path, part)
    assert found["cpu"] == processor_model()
    assert [(row["density"], row["select"]) for row in found["rows"]] == list(CASES)
    for row in found["rows"]:
        assert all(seconds > 0 for by_who in row["took"].values() for seconds in by_who.values())
        assert row["index_bytes"][TORCH] == pytest.approx(4 * row["density"], rel=0.01)
        assert row["index_bytes"][COMPILED] < 0.15
    text = (tmp_path / (f"{part}.md" if part else PAGE)).read_text()
    assert text.count("largest") == sum(select == "largest" for _, select in CASES)
    assert processor_model() in text


def test_each_instruction_set_has_a_page_of_its_own() -> None:
    assert page_part("AVX-512") == ""
    assert page_part("AVX2") == "avx2"


def test_the_ratio_is_of_what_a_step_does() -> None:
    took = {"gather": {COMPILED: 1.0, TORCH: 3.0}, "place": {COMPILED: 1.0, TORCH: 1.0}}
    took["take"] = {COMPILED: 50.0, TORCH: 1.0}
    row = NativeKernelRow(density=0.4, select="largest", took=took, index_bytes={})
    assert row.ratio == 0.5


def test_without_the_kernels_it_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_kernels, "instruction_sets", tuple)
    with pytest.raises(ConfigError, match="C compiler"):
        main([])


@pytest.mark.parametrize("flag", ["--entries", "--rounds"])
def test_nothing_to_measure_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} 0: must be at least 1"):
        main([flag, "0"])
