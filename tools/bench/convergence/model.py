"""The models of the convergence studies. Imports no torch.

One model is shared by all runs, pruned or not; a small one has as many parameters as the pruned
model stores.
"""

from __future__ import annotations

from fractions import Fraction

from megatron.config import ModelConfig
from megatron.model.flops import parameter_count
from samo.schedule import stored_count

LAYERS, HIDDEN, HEADS, VOCABULARY = 4, 256, 4, 8192

Shape = tuple[int, int]
"""Layers and width, which determine everything else."""
SHAPE: Shape = (LAYERS, HIDDEN)


def parameters(sequence: int, shape: Shape = SHAPE) -> int:
    """Return the parameters of the model for sequences of this length."""
    layers, hidden = shape
    model = ModelConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=HEADS, seq_length=sequence
    )
    return parameter_count(model, VOCABULARY)


def stored(sequence: int, sparsity: Fraction, shape: Shape = SHAPE) -> int:
    """Return the parameters left when each matrix and embedding is pruned to this sparsity."""
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
