"""The configuration: frozen sections, Megatron-named flags, one strict YAML file.

`parse` reads both, `resolve` adds values that follow from the number of ranks, `to_yaml` writes a
file that `--config` reads back. Nothing here imports torch, so that a wrong flag is reported at
once.
"""

from __future__ import annotations

from megatron.config.fields import ValueRange, above, at_least, below_one, between, option, section
from megatron.config.parsing import brief_settings, fields_by_section, parse, to_yaml
from megatron.config.sections import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    GradientConfig,
    LoggingConfig,
    ModelConfig,
    OffloadConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RecomputeConfig,
    RunConfig,
    TrainingConfig,
)
from megatron.config.validate import REFUSED_PAIRS, RefusedPair, check, resolve

__all__ = [
    "REFUSED_PAIRS",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "GradientConfig",
    "ValueRange",
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
