"""Bytes of model state under SAMO: as this program stores it, and by the paper's Eq. 2.

Loads no torch. `tools/planner/samo_equations.py` has the paper's other equations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

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
ADAM = 2
"""Moments that Adam keeps, the optimizer of the paper's GPT models."""


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


def stored_bytes(moments: int = ADAM) -> int:
    """Return the bytes per stored parameter of Eq. 1 without the dense weight: 24 with Adam."""
    return sum(STATES.values()) + MOMENT_BYTES * moments + POSITION_BYTES + COPY_BYTES


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
