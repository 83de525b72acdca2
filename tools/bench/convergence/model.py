"""The models of the convergence studies.

One that all runs share, pruned or not, and a small one that has as many parameters as that has
left. No torch.
"""

from __future__ import annotations

from fractions import Fraction

from megatron.config import ModelConfig
from megatron.model.flops import parameter_count
from samo.schedule import stored_count

LAYERS, HIDDEN, HEADS, VOCABULARY = 4, 256, 4, 8192

Shape = tuple[int, int]
"""Layers and width; everything else follows."""
SHAPE: Shape = (LAYERS, HIDDEN)


def parameters(sequence: int, shape: Shape = SHAPE) -> int:
    """Parameters of the model for sequences of this length."""
    layers, hidden = shape
    model = ModelConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=HEADS, seq_length=sequence
    )
    return parameter_count(model, VOCABULARY)


def stored(sequence: int, sparsity: Fraction, shape: Shape = SHAPE) -> int:
    """Parameters that are left when each matrix and embedding is pruned to this sparsity."""
    layers, hidden = shape
    square = hidden * hidden
    sizes = [VOCABULARY * hidden, sequence * hidden]
    sizes += [3 * square, square, 4 * square, 4 * square] * layers
    gone = sum(size - stored_count(size, sparsity) for size in sizes)
    return parameters(sequence, shape) - gone


def shape_of(entries: int, sequence: int) -> Shape:
    """Return the shape whose number of parameters is nearest to `entries`.

    The shape is at most twice as deep as the shared model and not wider.
    """
    shapes = [
        (layers, hidden)
        for layers in range(1, 2 * LAYERS + 1)
        for hidden in range(HEADS, HIDDEN + 1, HEADS)
    ]
    return min(shapes, key=lambda shape: abs(parameters(sequence, shape) - entries))
