"""The values that follow from the number of ranks."""

from __future__ import annotations

import dataclasses

from megatron.config.config import Config
from megatron.config.learning import TrainingConfig
from megatron.config.model import ModelConfig
from megatron.config.rules import check_batch, check_world
from megatron.config.running import ParallelConfig, RecomputeConfig
from megatron.low_memory.checkpoint_interval import checkpoint_interval


def resolve(config: Config, world_size: int) -> Config:
    """Return the configuration with derived values filled in, so that `to_yaml` writes every value
    that the run uses. Idempotent.

    Raises:
        ConfigError: `world_size` ranks, the grid and the batch do not fit.
    """
    check_world(config, world_size)
    dp = config.data_parallel_size(world_size)
    resolved = dataclasses.replace(
        config,
        model=_resolve_model(config.model),
        training=_resolve_training(config.training, dp),
        parallel=_resolve_parallel(config.parallel),
        recompute=_resolve_recompute(config),
    )
    check_batch(resolved, dp)
    return resolved


def _resolve_model(model: ModelConfig) -> ModelConfig:
    return dataclasses.replace(
        model,
        max_position_embeddings=model.positions,
        ffn_hidden_size=model.ffn_size,
        kv_channels=model.head_dim,
    )


def _resolve_training(training: TrainingConfig, dp: int) -> TrainingConfig:
    batch = training.global_batch_size or training.micro_batch_size * dp
    return dataclasses.replace(training, global_batch_size=batch)


def _resolve_parallel(parallel: ParallelConfig) -> ParallelConfig:
    """As Megatron, at tensor-parallel size 1 there is no one to share the sequence with."""
    shared = parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1
    return dataclasses.replace(parallel, sequence_parallel=shared)


def _resolve_recompute(config: Config) -> RecomputeConfig:
    recompute = config.recompute
    if recompute.recompute_granularity != "full":
        return recompute
    method, count = recompute.recompute_method or "uniform", recompute.recompute_num_layers or 1
    if method == "sqrt":
        layers = config.model.num_layers
        held = config.parallel.longest_run(layers)
        method, count = "uniform", checkpoint_interval(layers, held)
    return dataclasses.replace(recompute, recompute_method=method, recompute_num_layers=count)
