"""The SAMO paper's memory model: Eq. 1 to 5, figure 2, and what the paper measured for GPT-3 2.7B.

`samo/memory.py` has Eq. 2, which a run prints, and the bytes that this program stores. Loads no
torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from samo.memory import (
    ADAM,
    COPY_BYTES,
    MOMENT_BYTES,
    POSITION_BYTES,
    STATES,
    WEIGHT_BYTES,
    paper_bytes,
    stored_bytes,
)

MOMENTUM_SGD = 1
"""Moments that momentum SGD keeps, the optimizer of the paper's image networks."""
FIGURE = tuple(Fraction(tenths, 10) for tenths in range(2, 10))
"""Sparsities of figure 2."""
PAPER_SIZES = {"dense": 80.16e9, "SAMO": 20.28e9}
"""Bytes that the paper measured for GPT-3 2.7B, 90 % pruned (section I)."""
PAPER_PARAMETERS = range(2_600_000_000, 2_700_000_001)
"""Sizes taken for GPT-3 2.7B; 32 layers, width 2560 and GPT-2's vocabulary make 2,651,553,280."""


def default_bytes(moments: int = ADAM) -> int:
    """Return the bytes per parameter of dense mixed precision: 20 with Adam, 16 with momentum SGD.

    They are 16-bit and fp32 weights and gradients, and the moments (SAMO paper, section III-D).
    """
    return WEIGHT_BYTES + sum(STATES.values()) + MOMENT_BYTES * moments


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
