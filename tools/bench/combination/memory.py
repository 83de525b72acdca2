"""Memory columns of a setting: by the report's accounting, and as a run of ours is planned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron.config import GPTConfig
from megatron.low_memory.planned_memory import (
    MemoryColumn,
    planned_gpt,
    planned_translation,
    planned_wide_resnet,
)
from megatron.parallel.dims import ParallelDims
from megatron.tasks.translation_config import TranslationConfig
from megatron.tasks.vision_config import VisionConfig
from pretrain_gpt import GRADIENT_PATHS
from tools.bench.combination.settings import MODELS, MemorySetting
from tools.plan import vocabulary_of
from tools.planner.paper_accounting import (
    DICTIONARIES,
    MB,
    TABLE_4_ACTIVATIONS_MB,
    account,
)
from tools.profile_memory import counted_network

FITTED_AT = 250
"""Tokens of a microbatch for which the DC-Transformer's activations are fitted to table 4."""


@dataclass(frozen=True, kw_only=True)
class MemoryBytes:
    """Bytes by the report's kinds.

    `activations` with the cached statistics of normalizations are None where the report has no
    rule; the total is None there too. `fitted`: the activations are the number fitted to table 4.
    """

    model: int
    optimizer: int
    activations: int | None
    fitted: bool = False

    @property
    def states(self) -> int:
        """Bytes of model and optimizer."""
        return self.model + self.optimizer

    @property
    def total(self) -> int | None:
        """Bytes of all kinds."""
        return None if self.activations is None else self.states + self.activations


def paper_memory(setting: MemorySetting) -> MemoryBytes:
    """Return the bytes of a setting by the accounting of Sohoni et al. 2019."""
    _, network, graph, microbatch = counted_network(setting.config)
    model, optimizer = network.states(bits=setting.bits, nonzero=setting.nonzero)
    if graph is None:
        fits = setting.size == MODELS["dc"].size and setting.microbatch == FITTED_AT
        fitted = round(TABLE_4_ACTIVATIONS_MB * MB * setting.bits / 32)
        return MemoryBytes(
            model=model, optimizer=optimizer, activations=fitted if fits else None, fitted=fits
        )
    counted = account(
        network,
        graph,
        bits=setting.bits,
        nonzero=setting.nonzero,
        microbatch=microbatch,
        strategy=setting.strategy,
    ).bytes
    return MemoryBytes(
        model=model, optimizer=optimizer, activations=counted.activations + counted.statistics
    )


def planned_memory(setting: MemorySetting) -> MemoryColumn:
    """Return the planned ledger of a run of ours with the setting's flags, on one rank."""
    config = setting.config
    dims, path = ParallelDims(tp=1, dp=1, pp=1), GRADIENT_PATHS[config.gradient.grad_path]
    if isinstance(config, VisionConfig):
        return planned_wide_resnet(config, dims, path)
    if isinstance(config, TranslationConfig):
        return planned_translation(config, dims, path, dictionaries=DICTIONARIES)
    assert isinstance(config, GPTConfig), "the last of MODELS"
    vocabulary, _ = vocabulary_of(config)
    return planned_gpt(config, dims, path, rank=0, vocabulary=vocabulary)


def comparable(setting: MemorySetting) -> int:
    """Return the bytes by which networks are equal, by the report's accounting.

    They are those of model and optimizer alone where the report has no rule for activations.
    """
    counted = paper_memory(setting)
    if counted.fitted or counted.total is None:
        return counted.states
    return counted.total


def nearest(setting: MemorySetting, others: Iterable[MemorySetting]) -> MemorySetting:
    """Return the setting whose `comparable` bytes differ least from those of `setting`."""
    wanted = comparable(setting)
    return min(others, key=lambda other: abs(comparable(other) - wanted))
