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
WEIGHT_BYTES = 2
"""Bytes of a 16-bit weight, the one state that SAMO keeps for pruned parameters too."""
STATES = {"gradients in 16 bit": 2, "gradients in fp32": 4, "master weights": 4}
"""Bytes of the paper's compressed states per stored parameter by kind; each moment adds 4."""
COPY_BYTES = 2
"""Bytes per stored parameter of the 16-bit copy that the paper's optimizer expands."""
ADAM, MOMENTUM_SGD = 2, 1
"""Moments that the optimizers of the paper keep: Adam for GPT, momentum SGD for images."""


def state_bytes(
    entries: int, stored: int, *, index: int, param_bytes: int, grad_bytes: int, moments: int = 2
) -> dict[str, int]:
    """Return bytes of model state by kind, for `entries` parameters with `stored` stored entries.

    The kinds are those of Eq. 1 without the fp32 copy of the gradients and the 16-bit copy of the
    new weights, since both copies exist in chunks only. Parameters are dense; `index` is in bytes.
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


def paper_bytes(entries: int, stored: int, moments: int = ADAM) -> int:
    """Return the bytes of Eq. 2: 24 f + 2 per parameter with Adam, 20 f + 2 with momentum SGD.

    Args:
        entries: parameters of the model.
        stored: parameters that are not pruned; f is `stored` over `entries`.
        moments: fp32 numbers that the optimizer keeps for a stored parameter.
    """
    return stored_bytes(moments) * stored + WEIGHT_BYTES * entries


def formula(moments: int = ADAM) -> str:
    """Return Eq. 2 as text, for example "24 f + 2"."""
    return f"{stored_bytes(moments)} f + {WEIGHT_BYTES}"


def memory_note(
    kinds: Mapping[str, int],
    entries: int,
    stored: int,
    *,
    beside_paper: bool,
    moments: int = ADAM,
) -> str:
    """Return a log line of the bytes per parameter, optionally with the paper's figure."""
    each = ", ".join(f"{kind} {size / entries:.2f}" for kind, size in kinds.items() if size)
    text = f"samo: {sum(kinds.values()) / entries:.2f} bytes a parameter are kept ({each})"
    count = paper_bytes(entries, stored, moments) / entries
    paper = f"; the paper's {formula(moments)} is {count:.2f}"
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


FIGURE = tuple(Fraction(tenths, 10) for tenths in range(2, 10))
PAPER_SIZES = {"dense": 80.16e9, "SAMO": 20.28e9}
"""Bytes that the paper measured for GPT-3 2.7B, 90 % pruned (section I)."""
PAPER_PARAMETERS = range(2_600_000_000, 2_700_000_001)
"""Sizes taken for GPT-3 2.7B; 32 layers, width 2560 and GPT-2's vocabulary make 2,651,553,280."""


def default_bytes(moments: int = ADAM) -> int:
    """Return the bytes per parameter of dense mixed precision: 20 with Adam, 16 with momentum SGD.

    They are 16-bit and fp32 weights and gradients, and the moments (SAMO paper, section III-D).
    """
    return WEIGHT_BYTES + sum(STATES.values()) + MOMENT_BYTES * moments


def stored_bytes(moments: int = ADAM) -> int:
    """Return the bytes per stored parameter of Eq. 1 without the dense weight: 24 with Adam."""
    return sum(STATES.values()) + MOMENT_BYTES * moments + POSITION_BYTES + COPY_BYTES


def break_even(moments: int = ADAM) -> Fraction:
    """Return the sparsity from which Eq. 2 is below dense training: 1/4 with Adam."""
    return 1 - Fraction(default_bytes(moments) - WEIGHT_BYTES, stored_bytes(moments))


def eq_1(parameters: int, sparsity: Fraction, moments: int = ADAM) -> Fraction:
    """Return M^SAMO term by term: with Adam, 18 f phi + 4 f phi + 2 phi + 2 f phi."""
    exist = (1 - sparsity) * parameters
    states = sum(STATES.values()) + MOMENT_BYTES * moments
    dense = WEIGHT_BYTES * Fraction(parameters)
    return states * exist + POSITION_BYTES * exist + dense + COPY_BYTES * exist


def eq_2(parameters: int, sparsity: Fraction, moments: int = ADAM) -> Fraction:
    """Return 24 f phi + 2 phi with Adam, 20 f phi + 2 phi with momentum SGD.

    With f = 1 - p this is Eq. 3.
    """
    return stored_bytes(moments) * (1 - sparsity) * parameters + WEIGHT_BYTES * parameters


def eq_4(parameters: int, sparsity: Fraction, moments: int = ADAM) -> Fraction:
    """Return 20 phi - (24 p - 6) phi with Adam; Eq. 5 calls the first term M^default."""
    dense, each = default_bytes(moments), stored_bytes(moments)
    return dense * parameters - (each * sparsity - (each + WEIGHT_BYTES - dense)) * parameters


def saved(sparsity: Fraction, moments: int = ADAM) -> Fraction:
    """Return the share of M^default that SAMO saves by Eq. 2 (figure 2)."""
    return 1 - eq_2(1, sparsity, moments) / default_bytes(moments)


def equations() -> Iterator[str]:
    """Yield the lines of figure 2 as a table, by Eq. 1 to 5, and the table of momentum SGD."""
    yield "SAMO paper, Eq. 1-5 and figure 2: bytes a parameter and what is saved of 20"
    yield from _by_sparsity(ADAM)
    yield "the same counts with SGD and momentum, of 16"
    yield from _by_sparsity(MOMENTUM_SGD)


def _by_sparsity(moments: int) -> Iterator[str]:
    columns = (break_even(moments), *(p for p in FIGURE if p > break_even(moments)))
    yield "  p      " + "".join(f"{float(p):>8.2f}" for p in columns)
    yield "  bytes  " + "".join(f"{float(eq_2(1, p, moments)):>8.1f}" for p in columns)
    yield "  saved  " + "".join(f"{float(saved(p, moments)):>8.0%}" for p in columns)


def comparison(parameters: int) -> Iterator[str]:
    """Yield the formulas and the paper's measurements for a model of the size of GPT-3 2.7B."""
    if parameters not in PAPER_PARAMETERS:
        return
    states = {
        "dense": default_bytes() * parameters,
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
