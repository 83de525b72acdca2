"""The sections of a translation run's configuration that no other task has. Loads no torch."""

from __future__ import annotations

from megatron.config.fields import at_least, below_one, between, option, section
from megatron.config.sections import LARGEST_DEPTH

FIRST_KERNELS = (3, 7, 15)
"""Kernel sizes of the first layers of fairseq's `lightconv_iwslt_de_en`; later layers have 31."""
LATER_KERNEL = 31


@section
class DCTransformerConfig:
    """Shape of a DC-Transformer, a transformer whose self-attention is a dynamic convolution.

    Names are fairseq's where it has one for both sides. The defaults are fairseq's
    `lightconv_iwslt_de_en` with `--encoder-glu 0 --decoder-glu 0 --dropout 0.3`.
    """

    encoder_layers: int = option(
        default=7, help="Number of encoder layers.", within=between(1, LARGEST_DEPTH)
    )
    decoder_layers: int = option(
        default=6, help="Number of decoder layers.", within=between(1, LARGEST_DEPTH)
    )
    embed_dim: int = option(
        default=512, help="Width of the network (ours; one for both sides).", within=at_least(2)
    )
    ffn_embed_dim: int | None = option(
        default=None, help="Width of the MLPs (ours; none = 2 x embed_dim).", within=at_least(1)
    )
    attention_heads: int = option(
        default=4,
        help="Heads of convolutions and of the attention to the encoder (ours).",
        within=at_least(1),
    )
    encoder_kernel_size_list: tuple[int, ...] | None = option(
        default=None,
        help="Taps of the convolution of each encoder layer (none = 3 7 15, then 31).",
        within=at_least(1),
    )
    decoder_kernel_size_list: tuple[int, ...] | None = option(
        default=None,
        help="Taps of the convolution of each decoder layer (none = 3 7 15, then 31).",
        within=at_least(1),
    )
    dropout: float = option(
        default=0.3,
        help="Probability of dropping an embedding or the output of a block (0 = off).",
        within=below_one(),
    )
    attention_dropout: float = option(
        default=0.1,
        help="Probability of dropping a weight of the attention to the encoder (0 = off).",
        within=below_one(),
    )
    weight_dropout: float = option(
        default=0.1,
        help="Probability of dropping a tap of a convolution (DropConnect; 0 = off).",
        within=below_one(),
    )
    label_smoothing: float = option(
        default=0.1,
        help="Share of a target's probability that is spread over the vocabulary (0 = off).",
        within=below_one(),
    )
    norm_epsilon: float = option(
        default=1e-5,
        help="Term added to the variance in a normalization.",
        within=at_least(1e-12),
    )

    @property
    def ffn_size(self) -> int:
        """Width of the MLPs."""
        return self.ffn_embed_dim or 2 * self.embed_dim

    @property
    def encoder_kernels(self) -> tuple[int, ...]:
        """Taps of the convolution of each encoder layer."""
        return self.encoder_kernel_size_list or first_kernels(self.encoder_layers)

    @property
    def decoder_kernels(self) -> tuple[int, ...]:
        """Taps of the convolution of each decoder layer."""
        return self.decoder_kernel_size_list or first_kernels(self.decoder_layers)


def first_kernels(layers: int) -> tuple[int, ...]:
    """Return the kernel sizes of `layers` layers: 3, 7, 15, then 31 (Wu et al. 2019, 5.2)."""
    return (FIRST_KERNELS + (LATER_KERNEL,) * layers)[:layers]
