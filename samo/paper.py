"""The SAMO paper's memory model, Eq. 1 to 5 and figure 2, and its 2.7B beside ours. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from samo.memory import paper_bytes

DEFAULT_BYTES = 20
"""Of a parameter under mixed precision: both weights, both gradients, two moments."""
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
    """Of a model of the size of GPT-3 2.7B: the formulas and what the paper measured."""
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
