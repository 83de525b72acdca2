"""Bytes of model state under SAMO: of this layout, and by the paper's Eq. 1 to 5.

Loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from megatron.sparse.sizes import bitmap_bytes

POSITION_BYTES = 4
"""Bytes of a stored entry's position on a CPU (int32)."""
MASTER_BYTES = MOMENT_BYTES = 4


def state_bytes(
    entries: int, stored: int, *, index: int, param_bytes: int, grad_bytes: int, moments: int = 2
) -> dict[str, int]:
    """Return bytes of model state by kind, for `entries` parameters of which `stored` exist.

    The kinds are those of Eq. 1 without the fp32 copy of the gradients and the 16-bit copy of the
    new weights, both of which exist in chunks only. The parameters are dense; `index` is in bytes.
    """
    return {
        "parameters": param_bytes * entries,
        "gradients": grad_bytes * stored,
        "master weights": MASTER_BYTES * stored,
        "moments": MOMENT_BYTES * moments * stored,
        "index": index,
    }


def index_bytes(sizes: Mapping[str, int], stored: Mapping[str, int], *, device: str) -> int:
    """Return the bytes of the indices of all parameters that are not stored whole.

    A CPU index has a position for each stored entry; a GPU index is a bitmap. `sizes` are entries
    in memory, `stored` the stored ones.
    """
    indexed = [name for name in sizes if stored[name] < sizes[name]]
    if device == "cpu":
        return POSITION_BYTES * sum(stored[name] for name in indexed)
    return sum(bitmap_bytes(sizes[name]) for name in indexed)


def paper_bytes(entries: int, stored: int) -> int:
    """Return the bytes of Eq. 2: 24 f + 2 per parameter."""
    return 24 * stored + 2 * entries


def memory_note(kinds: Mapping[str, int], entries: int, stored: int, *, beside_paper: bool) -> str:
    """Return a log line of the bytes per parameter, optionally with the paper's figure."""
    each = ", ".join(f"{kind} {size / entries:.2f}" for kind, size in kinds.items() if size)
    text = f"samo: {sum(kinds.values()) / entries:.2f} bytes a parameter are kept ({each})"
    paper = f"; the paper's 24 f + 2 is {paper_bytes(entries, stored) / entries:.2f}"
    return text + paper * beside_paper


def csr_bits(shape: Sequence[int], stored: int, *, value_bits: int, copies: int) -> int:
    """Return the bits of `copies` tensors of one pattern of nonzeros in flattened CSR.

    With 0 copies that is the index alone.
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
    """Return the bits of a model's tensors, the sparse ones in flattened CSR.

    Args:
        shapes: logical shapes by name.
        stored: nonzeros of the sparse tensors by name.
        copies: 2 with plain SGD (weight, gradient), 3 with momentum, 4 with Adam.
    """
    dense = sum(math.prod(shape) for name, shape in shapes.items() if name not in stored)
    sparse = [
        csr_bits(shapes[name], count, value_bits=value_bits, copies=copies)
        for name, count in stored.items()
    ]
    return copies * value_bits * dense + sum(sparse)


def _bits_to_tell(choices: int) -> int:
    """Return ceil(log2(choices))."""
    return (choices - 1).bit_length()


DEFAULT_BYTES = 20
"""Bytes per parameter of dense mixed precision: both weights, both gradients, two moments."""
TERMS = {"compressed states": 18, "index": 4, "16-bit weights": 2, "their copy": 2}
"""Bytes of Eq. 1 by kind: per entry that exists, but for the dense weights."""
BREAK_EVEN = Fraction(1, 4)
FIGURE = tuple(Fraction(tenths, 10) for tenths in range(2, 10))
PAPER_SIZES = {"dense": 80.16e9, "SAMO": 20.28e9}
"""Bytes that the paper measured for GPT-3 2.7B, 90 % pruned (section I)."""
PAPER_PARAMETERS = range(2_600_000_000, 2_700_000_001)
"""Sizes taken for GPT-3 2.7B; 32 layers, width 2560 and GPT-2's vocabulary make 2,651,553,280."""


def eq_1(parameters: int, sparsity: Fraction) -> Fraction:
    """Return M^SAMO = 18 f phi + 4 f phi + 2 phi + 2 f phi, term by term."""
    exist = (1 - sparsity) * parameters
    dense = TERMS["16-bit weights"] * Fraction(parameters)
    return dense + exist * sum(each for kind, each in TERMS.items() if kind != "16-bit weights")


def eq_2(parameters: int, sparsity: Fraction) -> Fraction:
    """Return 24 f phi + 2 phi; with f = 1 - p this is Eq. 3."""
    return 24 * (1 - sparsity) * parameters + 2 * parameters


def eq_4(parameters: int, sparsity: Fraction) -> Fraction:
    """Return 20 phi - (24 p - 6) phi; Eq. 5 calls the first term M^default."""
    return DEFAULT_BYTES * parameters - (24 * sparsity - 6) * parameters


def saved(sparsity: Fraction) -> Fraction:
    """Return the share of M^default that is saved (figure 2)."""
    return 1 - eq_2(1, sparsity) / DEFAULT_BYTES


def equations() -> Iterator[str]:
    """Yield the lines of figure 2 as a table, by Eq. 1 to 5."""
    yield "SAMO paper, Eq. 1-5 and figure 2: bytes a parameter and what is saved of 20"
    yield "  p      " + "".join(f"{float(p):>8.2f}" for p in (BREAK_EVEN, *FIGURE[1:]))
    yield "  bytes  " + "".join(f"{float(eq_2(1, p)):>8.1f}" for p in (BREAK_EVEN, *FIGURE[1:]))
    yield "  saved  " + "".join(f"{float(saved(p)):>8.0%}" for p in (BREAK_EVEN, *FIGURE[1:]))


def comparison(parameters: int) -> Iterator[str]:
    """Yield the formulas and the paper's measurements for a model of the size of GPT-3 2.7B."""
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
