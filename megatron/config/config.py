"""The whole configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_type_hints

from megatron.config.learning import OptimizerConfig, PrecisionConfig, TrainingConfig
from megatron.config.model import ModelConfig
from megatron.config.options import Spec, specs_of
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


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every setting of a run, by section.

    `extensions` holds the sections that the gradient path brings. `name` is the stem of the
    configuration file; `notices` are lines to be announced once; `from_flags` are the fields that
    the command line itself sets. These three are no settings and do not count in comparisons.
    """

    model: ModelConfig
    training: TrainingConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    gradient: GradientConfig = field(default_factory=GradientConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    data: DataConfig = field(default_factory=DataConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    run: RunConfig = field(default_factory=RunConfig)
    extensions: dict[str, object] = field(default_factory=dict[str, object])
    name: str = field(default="gpt", compare=False)
    notices: tuple[str, ...] = field(default=(), compare=False)
    from_flags: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def sections(self) -> dict[str, object]:
        """All sections by name, the gradient path's last."""
        return {name: getattr(self, name) for name in SECTIONS} | self.extensions

    @property
    def masks_grouped_queries(self) -> bool:
        """Whether attention has fewer key-value heads than queries, and a mask besides.

        On CUDA such attention keeps its scores. In torch 2.13 flash attention takes no mask
        (`check_for_attn_mask` in ATen/native/transformers/sdp_utils_cpp.h), memory-efficient
        attention takes no `enable_gqa` (`check_batch_size_and_num_heads_dense<false>` in
        cuda/sdp_utils.cpp; the documentation of `scaled_dot_product_attention` names flash and math
        alone for it). Only cuDNN, preferred on compute capability 9 and 10, may take both.
        """
        model = self.model
        grouped = model.query_groups < model.num_attention_heads
        return grouped and self.data.reset_attention_mask

    def values(self) -> dict[str, object]:
        """All settings by field name."""
        return {
            spec.name: getattr(section, spec.name)
            for name, section in self.sections.items()
            for spec in specs_of(type(section), name).values()
        }

    def data_parallel_size(self, world_size: int) -> int:
        """Copies of the model among `world_size` ranks."""
        return world_size // self.parallel.model_parallel_size

    def num_microbatches(self, global_batch: int, dp: int) -> int:
        """See `TrainingConfig.num_microbatches`."""
        return self.training.num_microbatches(global_batch, dp)

    def batch_size_at(self, consumed_samples: int) -> int:
        """See `TrainingConfig.batch_size_at`."""
        return self.training.batch_size_at(consumed_samples)

    def total_samples(self) -> int:
        """See `TrainingConfig.total_samples`."""
        return self.training.total_samples()

    def total_iterations(self) -> int:
        """See `TrainingConfig.total_iterations`."""
        return self.training.total_iterations()


_NOT_SECTIONS = ("extensions", "name", "notices", "from_flags")

SECTIONS: dict[str, type] = {
    name: hint for name, hint in get_type_hints(Config).items() if name not in _NOT_SECTIONS
}
"""The fixed sections, in the order of files and help."""

SPECS: Mapping[str, Spec] = {
    name: spec
    for section_name, cls in SECTIONS.items()
    for name, spec in specs_of(cls, section_name).items()
}
"""Every fixed field by name. Names are unique over all sections."""
