"""Bits that a sparse network takes as "Low-Memory Neural Network Training" counts them (3.1).

A tensor of c_o x c_i x k_1 x k_2 is a sparse matrix of c_o rows and c_i k_1 k_2 columns in CSR
format ("flattened CSR"), a column index takes ceil(log2(c_i k_1 k_2)) bits, and the weight, its
gradient and its moments share one index. What the format needs besides, which the paper does not
spell out, are pointers to the rows' first entries: one a row and one to the end, each of as many
bits as tell 0 to the number of nonzeros. Tensors that are not sparsified count dense.

This says what a method would need at least. What a run does need is another matter: dense 16-bit
parameters, int32 positions (`CompressedLayout.nbytes`). Loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def csr_bits(shape: Sequence[int], stored: int, *, value_bits: int, copies: int) -> int:
    """Bits of `copies` tensors of this shape with one pattern of `stored` nonzeros, in flattened
    CSR; 0 copies are the index alone."""
    rows, columns = shape[0], math.prod(shape[1:])
    assert 0 <= stored <= rows * columns
    index = stored * _bits_to_tell(columns) + (rows + 1) * _bits_to_tell(stored + 1)
    return copies * value_bits * stored + index


def model_bits(
    shapes: Mapping[str, Sequence[int]],
    stored: Mapping[str, int],
    *,
    value_bits: int = 32,
    copies: int,
) -> int:
    """Bits of a model's tensors, by logical name and shape; `stored` gives the nonzeros of those
    that are sparse. `copies`: 2 with plain SGD (weight, gradient), 3 with momentum, 4 with Adam."""
    dense = sum(math.prod(shape) for name, shape in shapes.items() if name not in stored)
    sparse = [
        csr_bits(shapes[name], count, value_bits=value_bits, copies=copies)
        for name, count in stored.items()
    ]
    return copies * value_bits * dense + sum(sparse)


def _bits_to_tell(choices: int) -> int:
    """ceil(log2(choices))."""
    return (choices - 1).bit_length()
