"""What the user asked for: frozen sections, Megatron-named flags, one strict YAML file.

`parse` reads both, `resolve` adds what follows from the number of ranks, `to_yaml` writes what
`--config` reads back. Nothing here imports torch: a wrong flag is told before that.
"""

from __future__ import annotations

from megatron.config.config import Config
from megatron.config.learning import OptimizerConfig, PrecisionConfig, TrainingConfig
from megatron.config.model import ModelConfig
from megatron.config.options import (
    Interval,
    above,
    at_least,
    below_one,
    between,
    option,
    section,
)
from megatron.config.parsing import fields_by_section, parse
from megatron.config.refused_pairs import REFUSED_PAIRS, RefusedPair
from megatron.config.resolve import resolve
from megatron.config.rules import check
from megatron.config.running import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    GradientConfig,
    LoggingConfig,
    OffloadConfig,
    ParallelConfig,
    RecomputeConfig,
    RunConfig,
)
from megatron.config.to_yaml import brief_settings, to_yaml

__all__ = [
    "REFUSED_PAIRS",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "GradientConfig",
    "Interval",
    "LoggingConfig",
    "ModelConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RecomputeConfig",
    "RefusedPair",
    "RunConfig",
    "TrainingConfig",
    "above",
    "at_least",
    "below_one",
    "between",
    "brief_settings",
    "check",
    "fields_by_section",
    "option",
    "parse",
    "resolve",
    "section",
    "to_yaml",
]
