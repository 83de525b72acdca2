"""The Triton kernels against plain torch by Triton's interpreter; `tests/gpu` runs the real
ones."""

from __future__ import annotations

import pytest

from tests.tiers import sampled
from tests.triton_process import needs_triton, run_module

pytestmark = [needs_triton, pytest.mark.push]
COMPARISONS = ("compare_counting", "compare_bit_writing", "compare_selection")


@pytest.mark.parametrize("comparison", sampled(COMPARISONS, COMPARISONS[1:]))
def test_kernels_equal_plain_torch(comparison: str) -> None:
    """A selection consists of all steps whose counts `compare_counting` compares one by one."""
    module = "tests.sparse.kernel_comparisons"
    assert "all equal" in run_module(module, "TRITON_INTERPRET=1", comparison)
