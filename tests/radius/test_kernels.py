"""The Triton kernels against plain torch by Triton's interpreter; `tests/gpu` runs the real
ones."""

from __future__ import annotations

import pytest

from tests.triton_process import needs_triton, run_module

pytestmark = [needs_triton, pytest.mark.push]


def test_kernels_equal_plain_torch() -> None:
    assert "all equal" in run_module("tests.radius.kernel_comparisons", "TRITON_INTERPRET=1")
