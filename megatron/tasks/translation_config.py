"""The configuration of a translation run: its sections `model` and `data`, and their rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from megatron.config import Config
from megatron.config.fields import at_least, below_one, between, option, section
from megatron.config.rules import Complaint, RefusedPair, nearest_multiples, refused_pair
from megatron.config.sections import LARGEST_BATCH, LARGEST_DEPTH

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


@section
class PairDataConfig:
    """The files of sentence pairs, and the size of the packs, which are the samples of a run."""

    data_path: str | None = option(
        default=None,
        help="Prefix of the files that tools/preprocess_pairs.py wrote; required to train.",
    )
    source_lang: str = option(default="de", help="Language code of the sources (fairseq's).")
    target_lang: str = option(default="en", help="Language code of the targets (fairseq's).")
    max_tokens: int = option(
        default=4000,
        help="Padded tokens of a pack, the sample of a run (fairseq's): pairs x longest sentence.",
        within=between(2, LARGEST_BATCH),
    )
    microbatch_tokens: int | None = option(
        default=None,
        help="Padded tokens of a microbatch, into which packs are cut (ours; none = whole packs).",
        within=between(2, LARGEST_BATCH),
    )


def _heads_divide_width(c: TranslationConfig) -> Complaint:
    size, heads = c.model.embed_dim, c.model.attention_heads
    if size % heads == 0:
        return None
    return (
        f"embed_dim {size} is not a multiple of attention_heads {heads}; nearest embed_dim: "
        f"{nearest_multiples(size, heads)}"
    )


def _each_layer_has_a_kernel(c: TranslationConfig) -> Complaint:
    m = c.model
    for side, layers, kernels in (
        ("encoder", m.encoder_layers, m.encoder_kernel_size_list),
        ("decoder", m.decoder_layers, m.decoder_kernel_size_list),
    ):
        if kernels is not None and len(kernels) != layers:
            return (
                f"{side}_kernel_size_list {' '.join(map(str, kernels))} has {len(kernels)} sizes, "
                f"{side}_layers is {layers}; give one size for each layer, or leave it out"
            )
    return None


def _a_sample_is_a_microbatch(c: TranslationConfig) -> Complaint:
    size = c.training.micro_batch_size
    if size == 1:
        return None
    return (
        f"micro_batch_size {size} must be 1, since a sample is a pack of pairs; --max-tokens sets "
        "the size of a pack, and --microbatch-tokens that of a microbatch"
    )


def _microbatches_fit_packs(c: TranslationConfig) -> Complaint:
    part, whole = c.data.microbatch_tokens, c.data.max_tokens
    if part is None or part <= whole:
        return None
    return f"microbatch_tokens {part} is more than max_tokens {whole}; lower the former"


def _languages_differ(c: TranslationConfig) -> Complaint:
    if c.data.source_lang != c.data.target_lang:
        return None
    return f"target_lang {c.data.target_lang} is source_lang too; give another"


def _recomputes_existing_layers(c: TranslationConfig) -> Complaint:
    count, m = c.recompute.recompute_num_layers, c.model
    most = max(m.encoder_layers, m.decoder_layers)
    counts_layers = c.recompute.recompute_granularity != "every"
    if count is None or count <= most or not counts_layers:
        return None
    return (
        f"recompute_num_layers {count} is more than encoder_layers {m.encoder_layers} and "
        f"decoder_layers {m.decoder_layers}; lower the former"
    )


@dataclass(frozen=True, kw_only=True)
class TranslationConfig(Config):
    """Every setting of a translation run, by section."""

    model: DCTransformerConfig = field(default_factory=DCTransformerConfig)
    data: PairDataConfig = field(default_factory=PairDataConfig)
    name: str = field(default="translation", compare=False)

    task: ClassVar[str] = "translation"
    example: ClassVar[str] = "configs/dc_transformer_de_en.yaml"
    divides: ClassVar[bool] = False
    recomputes: ClassVar[bool] = True
    refused_pairs: ClassVar[tuple[RefusedPair, ...]] = (
        refused_pair(
            "recompute_granularity selective",
            lambda c: c.recompute.recompute_granularity == "selective",
            "a DC-Transformer has no attention whose scores grow with the square of a sentence",
            "give --recompute-granularity full",
        ),
        refused_pair(
            "recompute_method sqrt",
            lambda c: c.recompute.recompute_method == "sqrt",
            "encoder and decoder have different numbers of layers",
            "give --recompute-method uniform and --recompute-num-layers",
        ),
    )
    rules = (
        _heads_divide_width,
        _each_layer_has_a_kernel,
        _a_sample_is_a_microbatch,
        _microbatches_fit_packs,
        _languages_differ,
        _recomputes_existing_layers,
    )

    def data_paths(self) -> list[str]:
        return [] if self.data.data_path is None else [self.data.data_path]

    def descriptions(self) -> Iterator[str]:
        m = self.model
        yield (
            f"encoder: {m.encoder_layers} layers, kernels {_listed(m.encoder_kernels)}; decoder: "
            f"{m.decoder_layers} layers, kernels {_listed(m.decoder_kernels)}; width {m.embed_dim}"
        )


def _listed(kernels: tuple[int, ...]) -> str:
    return ", ".join(map(str, kernels))
