"""Bytes of model state under SAMO: of this layout, and of the paper's memory model (Eq. 1 to 5).

Loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from megatron.sparse.sizes import bitmap_bytes

POSITION_BYTES = 4
"""Bytes of the int32 position of a stored entry on a CPU."""
MASTER_BYTES = MOMENT_BYTES = 4


def state_bytes(
    entries: int, stored: int, *, index: int, param_bytes: int, grad_bytes: int, moments: int = 2
) -> dict[str, int]:
    """Return model state by kind (Eq. 1 of the paper) of `entries` parameters, `stored` of them.

    The index takes the given bytes. Left out are the fp32 copy of the gradients and the 16-bit copy
    of the new weights, which are made chunk by chunk. The parameters themselves are dense.
    """
    return {
        "parameters": param_bytes * entries,
        "gradients": grad_bytes * stored,
        "master weights": MASTER_BYTES * stored,
        "moments": MOMENT_BYTES * moments * stored,
        "index": index,
    }


def index_bytes(sizes: Mapping[str, int], stored: Mapping[str, int], *, device: str) -> int:
    """Return the bytes of the index of all parameters that are partly stored.

    Positions on a CPU, a bitmap on a GPU. `sizes`: entries in memory.
    """
    indexed = [name for name in sizes if stored[name] < sizes[name]]
    if device == "cpu":
        return POSITION_BYTES * sum(stored[name] for name in indexed)
    return sum(bitmap_bytes(sizes[name]) for name in indexed)


def paper_bytes(entries: int, stored: int) -> int:
    """Eq. 2: (24 f + 2) bytes a parameter."""
    return 24 * stored + 2 * entries


def memory_note(kinds: Mapping[str, int], entries: int, stored: int, *, beside_paper: bool) -> str:
    """One line that says what is kept, a parameter.

    Beside the paper's figure, which is for 16-bit parameters.
    """
    each = ", ".join(f"{kind} {size / entries:.2f}" for kind, size in kinds.items() if size)
    text = f"samo: {sum(kinds.values()) / entries:.2f} bytes a parameter are kept ({each})"
    paper = f"; the paper's 24 f + 2 is {paper_bytes(entries, stored) / entries:.2f}"
    return text + paper * beside_paper


def csr_bits(shape: Sequence[int], stored: int, *, value_bits: int, copies: int) -> int:
    """Return the bits of `copies` tensors with one pattern of `stored` nonzeros, in flattened CSR.

    0 copies are the index alone.
    """
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
    """Bits of a model's tensors, by logical name and shape.

    `stored` gives the nonzeros of those that are sparse. `copies`: 2 with plain SGD (weight,
    gradient), 3 with momentum, 4 with Adam.
    """
    dense = sum(math.prod(shape) for name, shape in shapes.items() if name not in stored)
    sparse = [
        csr_bits(shapes[name], count, value_bits=value_bits, copies=copies)
        for name, count in stored.items()
    ]
    return copies * value_bits * dense + sum(sparse)


def _bits_to_tell(choices: int) -> int:
    """ceil(log2(choices))."""
    return (choices - 1).bit_length()


DEFAULT_BYTES = 20
"""Bytes of a parameter under mixed precision: both weights, both gradients, two moments."""
TERMS = {"compressed states": 18, "index": 4, "16-bit weights": 2, "their copy": 2}
"""Eq. 1, bytes: of an entry that exists, but for the weights, which are dense."""
BREAK_EVEN = Fraction(1, 4)
FIGURE = tuple(Fraction(tenths, 10) for tenths in range(2, 10))
PAPER_SIZES = {"dense": 80.16e9, "SAMO": 20.28e9}
"""Bytes that the paper measured for GPT-3 2.7B, 90 % pruned (section I)."""
PAPER_PARAMETERS = range(2_600_000_000, 2_700_000_001)
"""What counts as that model: 32 layers, width 2560 and GPT-2's vocabulary make 2,651,553,280."""


def eq_1(parameters: int, sparsity: Fraction) -> Fraction:
    """M^SAMO = 18 f phi + 4 f phi + 2 phi + 2 f phi, term by term."""
    exist = (1 - sparsity) * parameters
    dense = TERMS["16-bit weights"] * Fraction(parameters)
    return dense + exist * sum(each for kind, each in TERMS.items() if kind != "16-bit weights")


def eq_2(parameters: int, sparsity: Fraction) -> Fraction:
    """24 f phi + 2 phi; with f = 1 - p, as here, Eq. 3."""
    return 24 * (1 - sparsity) * parameters + 2 * parameters


def eq_4(parameters: int, sparsity: Fraction) -> Fraction:
    """20 phi - (24 p - 6) phi; Eq. 5 calls the first term M^default."""
    return DEFAULT_BYTES * parameters - (24 * sparsity - 6) * parameters


def saved(sparsity: Fraction) -> Fraction:
    """Figure 2: share of M^default that is saved."""
    return 1 - eq_2(1, sparsity) / DEFAULT_BYTES


def equations() -> Iterator[str]:
    """Figure 2 as a table, by Eq. 1 to 5."""
    yield "SAMO paper, Eq. 1-5 and figure 2: bytes a parameter and what is saved of 20"
    yield "  p      " + "".join(f"{float(p):>8.2f}" for p in (BREAK_EVEN, *FIGURE[1:]))
    yield "  bytes  " + "".join(f"{float(eq_2(1, p)):>8.1f}" for p in (BREAK_EVEN, *FIGURE[1:]))
    yield "  saved  " + "".join(f"{float(saved(p)):>8.0%}" for p in (BREAK_EVEN, *FIGURE[1:]))


def comparison(parameters: int) -> Iterator[str]:
    """Yield the rows that compare the formulas with the paper's measurements for GPT-3 2.7B."""
    if parameters not in PAPER_PARAMETERS:
        return
    states = {
        "dense": DEFAULT_BYTES * parameters,
        "SAMO": paper_bytes(parameters, parameters // 10),
    }
    yield f"GPT-3 2.7B, {parameters:,} parameters, p = 0.9, in GB"
    yield f"  {'':8}{'the paper':>12}{'model state':>14}{'unexplained':>14}"
    for name, measured in PAPER_SIZES.items():
        state = states[name]
        yield (
            f"  {name:8}{measured / 1e9:>12.2f}{state / 1e9:>14.1f}"
            f"{(measured - state) / 1e9:>14.1f}"
        )
