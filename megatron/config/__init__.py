"""The configuration: frozen sections, Megatron-named flags, one strict YAML file.

`parse` reads both, `resolve` adds what follows from the number of ranks, `to_yaml` writes what
`--config` reads back. A task is a subclass of `Config` with sections `model` and `data` of its own;
`GPTConfig` is the default. Nothing here imports torch, so a wrong flag is reported at once.
"""

from __future__ import annotations

from megatron.config.fields import ValueRange, above, at_least, below_one, between, option, section
from megatron.config.gpt import GPTConfig
from megatron.config.parsing import brief_settings, fields_by_section, parse, to_yaml
from megatron.config.rules import PathOptions, RefusedPair, refused_pair
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
    known_length,
    options_of,
)
from megatron.config.validate import check, pairs_of, resolve

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "GPTConfig",
    "GradientConfig",
    "ValueRange",
    "LoggingConfig",
    "ModelConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PathOptions",
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
    "known_length",
    "option",
    "options_of",
    "pairs_of",
    "parse",
    "refused_pair",
    "resolve",
    "section",
    "to_yaml",
]
