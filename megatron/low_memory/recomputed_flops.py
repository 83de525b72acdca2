"""FLOPs that a configuration recomputes, from shapes alone. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config import Config, GPTConfig
from megatron.errors import ConfigError
from megatron.low_memory.checkpoint_interval import layers_again
from megatron.low_memory.operation_graph import wide_resnet_graph
from megatron.low_memory.strategies import Strategy, activation_course
from megatron.model.dc_transformer_shapes import forward_flops, training_flops
from megatron.model.flops import flops_per_token, layer_products
from megatron.tasks.translation_config import TranslationConfig
from megatron.tasks.vision_config import VisionConfig


def recomputed_share(config: Config, vocabularies: Sequence[int]) -> float:
    """Return the FLOPs of recomputed products divided by those of forward and backward.

    Both are those of the whole model, over all ranks. `ops` and `no-norm` recompute no product, and
    `every` of a transformer counts as a whole forward pass of its layers, which it is at most.

    Args:
        config: The configuration, with `recompute_method` resolved.
        vocabularies: Entries of a GPT's vocabulary, or of the two dictionaries of a translation.

    Raises:
        ConfigError: The task or its network is unknown here.
    """
    if config.recompute.recompute_granularity in (None, "ops", "no-norm"):
        return 0.0
    if isinstance(config, GPTConfig):
        return _of_gpt(config, vocabularies[0])
    if isinstance(config, VisionConfig) and config.model.vision_backbone_type == "wide-resnet":
        return _of_wide_resnet(config)
    if isinstance(config, TranslationConfig):
        return _of_translation(config, vocabularies[1])
    raise ConfigError(f"task: the FLOPs that a model of {config.task} recomputes are not known")


def _of_gpt(config: GPTConfig, vocabulary: int) -> float:
    """Count layers that run forward again.

    The last product of a run is recomputed only if a dropout or a later layer reads its output.
    """
    each = layer_products(config.model)
    runs = [
        len(layers)
        for stage in config.parallel.layer_split(config.model.num_layers)
        for layers in stage
    ]
    again = 0.0
    for count in runs:
        layers, ends = layers_again(count, config.recompute)
        again += layers * each.total
        if not config.model.hidden_dropout:
            again -= ends * each.last
    if config.recompute.recompute_granularity == "selective":
        again = config.model.num_layers * each.attention
    return again / flops_per_token(config.model, vocabulary)


def _of_wide_resnet(config: VisionConfig) -> float:
    model, recompute = config.model, config.recompute
    name = recompute.recompute_granularity
    assert name in ("every", "residual", "residual-star"), "other ones recompute no product"
    graph = wide_resnet_graph(
        depth=model.depth,
        width=model.width,
        classes=model.num_classes,
        height=model.img_h,
        image_width=model.img_w,
    )
    strategy = Strategy(name, recompute.recompute_num_layers or 1)
    return activation_course(graph, strategy, batch=1, entry_bytes=4).flops_ratio - 1


def _of_translation(config: TranslationConfig, target_size: int) -> float:
    """Count the layers again; sentences of equal length have equal shares, whatever the length."""
    batch = {"pairs": 1, "source": 25, "target": 25}
    layers = forward_flops(config.model, **batch, target_size=0)
    return layers / training_flops(config.model, **batch, target_size=target_size)
