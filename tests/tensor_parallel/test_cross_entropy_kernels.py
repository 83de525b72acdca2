"""The Triton kernels against plain torch, by Triton's interpreter; `tests/gpu` runs the real ones.

The interpreter is chosen when Triton is imported, so a process of its own runs the comparison.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.limits import LIMIT

pytestmark = pytest.mark.push

REPO = Path(__file__).resolve().parents[2]
COMPARISON = """
import torch
from megatron.tensor_parallel import cross_entropy, cross_entropy_kernels
cross_entropy_kernels._BLOCK = 16
torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16):
    logits = torch.randn(7, 60).mul(4).to(dtype)
    logits[2, :20] = -torch.inf
    targets = torch.randint(20, 50, (7,))
    found = []
    for kernels in (None, cross_entropy_kernels):
        cross_entropy._kernels = lambda _, kernels=kernels: kernels
        leaf = logits.clone().requires_grad_()
        owned = leaf * 1
        losses = cross_entropy.token_losses(owned, targets, vocab_size=50)
        losses.mul(3).sum().backward(retain_graph=True)
        try:
            losses.sum().backward()
        except RuntimeError:
            found.append((losses.detach(), leaf.grad.float()))
    (losses, grad), (kernel_losses, kernel_grad) = found
    torch.testing.assert_close(kernel_losses, losses)
    rtol = 2**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(kernel_grad, grad, atol=1e-6, rtol=rtol)
"""


def test_kernels_equal_plain_torch() -> None:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed; it comes with the gpu extra")
    done = subprocess.run(
        ["env", "TRITON_INTERPRET=1", sys.executable, "-c", COMPARISON],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
