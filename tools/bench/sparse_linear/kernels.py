"""The kernels for a pruned fully connected layer that torch has, for `run.py`.

y = x W^T; backward computes the input's gradient g W, and g^T x at the stored weights. A sparse
kernel gets its preferred form beforehand: the index of W and of W^T, activations in either order.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

DENSE, CSR, FEATURES_FIRST = "dense", "CSR", "CSR, features first"
TWO_OF_FOUR = "2:4"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Tolerances relative to the largest entry, for the order of sums and the rounding of results."""
NO_TRANSPOSED = "backward needs W^T to be two of four as well, which it is not"


@dataclass(frozen=True)
class Operands:
    """Weights [n, n] of which most are 0, activations and output gradients [tokens, n]."""

    weight: torch.Tensor
    x: torch.Tensor
    grad: torch.Tensor

    @classmethod
    def draw(
        cls, size: int, *, tokens: int, sparsity: float, dtype: str, device: torch.device
    ) -> Operands:
        """Draw normal numbers with randomly placed zeros."""
        random = torch.Generator().manual_seed(size)
        weight = torch.randn(size, size, generator=random)
        weight[torch.rand(size, size, generator=random) < sparsity] = 0.0
        x, grad = (torch.randn(tokens, size, generator=random) for _ in range(2))
        return cls(*(t.to(device, DTYPES[dtype]) for t in (weight, x, grad)))

    def to(self, dtype: torch.dtype) -> Operands:
        """Return the operands in another dtype."""
        return Operands(self.weight.to(dtype), self.x.to(dtype), self.grad.to(dtype))


@dataclass(frozen=True)
class Kernel:
    """One pass of the layer.

    `run` returns the output, or for a backward the gradients of the input and of the weights, whole
    or CSR. `weight` is the matrix of the product. `missing` gives the reason if the kernel cannot
    run.
    """

    name: str
    run: Callable[[], object]
    weight: torch.Tensor
    missing: str = ""


def kernels(operands: Operands, one_pass: str) -> Iterator[Kernel]:
    """Yield all kernels of one pass, dense first.

    A CPU's sparse kernels refuse 16 bit and get fp32 instead, as a 16-bit run would have to do.
    """
    yield Kernel(DENSE, _dense(operands, one_pass), operands.weight)
    yield from _both_orders(operands, one_pass)
    if operands.weight.device.type == "cpu" and operands.weight.dtype != torch.float32:
        yield from _both_orders(operands.to(torch.float32), one_pass, suffix=" in fp32")
    yield _two_of_four(operands, one_pass)


def _both_orders(operands: Operands, one_pass: str, *, suffix: str = "") -> Iterator[Kernel]:
    yield Kernel(CSR + suffix, _csr(operands, one_pass), operands.weight)
    first = _csr_features_first(operands, one_pass)
    yield Kernel(FEATURES_FIRST + suffix, first, operands.weight)


def check(kernel: Kernel, operands: Operands) -> str:
    """Run a kernel once, and return "" or torch's reason for refusing it.

    Raises `AssertionError` if its result is wrong.
    """
    try:
        found = kernel.run()
    except (NotImplementedError, RuntimeError) as error:
        return str(error).strip().splitlines()[0]
    x, grad = operands.x.float(), operands.grad.float()
    weight, limit = kernel.weight.float(), TOLERANCE[operands.x.dtype]
    if isinstance(found, torch.Tensor):
        _assert_near(found, linear(x, weight), limit)
        return ""
    assert isinstance(found, tuple)
    of_input, of_weight = found
    _assert_near(of_input, grad @ weight, limit)
    if of_weight.layout == torch.sparse_csr:
        _assert_near(of_weight.to_dense(), grad.t() @ x * (weight != 0), limit)
    else:
        _assert_near(of_weight, grad.t() @ x, limit)
    return ""


def _dense(operands: Operands, one_pass: str) -> Callable[[], object]:
    weight, x, grad = operands.weight, operands.x, operands.grad
    if one_pass == "forward":
        return lambda: linear(x, weight)
    return lambda: (grad @ weight, grad.t() @ x)


def _csr(operands: Operands, one_pass: str) -> Callable[[], object]:
    """Return kernels for activations stored token by token, as in a dense layer."""
    sparse, transposed = _both(operands.weight)
    x, grad = operands.x, operands.grad
    if one_pass == "forward":
        return lambda: (sparse @ x.t()).t()
    return lambda: (
        (transposed @ grad.t()).t(),
        torch.sparse.sampled_addmm(sparse, grad.t(), x, beta=0.0),
    )


def _csr_features_first(operands: Operands, one_pass: str) -> Callable[[], object]:
    """Return kernels for activations stored feature by feature, before and after."""
    sparse, transposed = _both(operands.weight)
    x, grad = operands.x.t().contiguous(), operands.grad.t().contiguous()
    if one_pass == "forward":
        return lambda: (sparse @ x).t()
    return lambda: (
        (transposed @ grad).t(),
        torch.sparse.sampled_addmm(sparse, grad, x.t(), beta=0.0),
    )


def _two_of_four(operands: Operands, one_pass: str) -> Kernel:
    """Return the kernel for two nonzeros of four: the two largest of four weights are kept."""
    groups = operands.weight.view(-1, 4)
    kept = torch.zeros_like(groups).scatter_(1, groups.abs().topk(2).indices, 1.0)
    weight = (groups * kept).view_as(operands.weight)
    if one_pass == "backward":
        return Kernel(TWO_OF_FOUR, lambda: None, weight, missing=NO_TRANSPOSED)
    try:
        with _unfinished():
            packed = torch.sparse.to_sparse_semi_structured(weight)
    except (NotImplementedError, RuntimeError) as error:
        return Kernel(TWO_OF_FOUR, lambda: None, weight, missing=str(error).splitlines()[0])
    return Kernel(TWO_OF_FOUR, lambda: linear(operands.x, packed), weight)


def _both(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _with_short_index(weight), _with_short_index(weight.t())


def _with_short_index(weight: torch.Tensor) -> torch.Tensor:
    """Convert to CSR with int32 positions, which the libraries use directly."""
    with _unfinished():
        found = weight.to_sparse_csr()
        rows, columns = found.crow_indices().int(), found.col_indices().int()
        return torch.sparse_csr_tensor(
            rows, columns, found.values(), size=weight.shape, check_invariants=True
        )


@contextlib.contextmanager
def _unfinished() -> Iterator[None]:
    """Suppress torch's warning that its sparse tensors are a beta or a prototype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def _assert_near(found: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    error = float((found.float() - expected).abs().max() / expected.abs().max())
    assert error <= limit, f"off by {error:.1e} of the largest entry"
