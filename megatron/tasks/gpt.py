"""The GPT task: a decoder-only transformer on `.bin/.idx` data. Imports torch only to build."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config import GPTConfig
from megatron.metrics.record import Measures

if TYPE_CHECKING:
    import torch

    from megatron.checkpoint.find import CheckpointSource
    from megatron.data.batches import Readers
    from megatron.data.build import Datasets
    from megatron.data.vocabulary import Vocabulary
    from megatron.data_parallel.gradient_path import GradientPath
    from megatron.metrics.throughput import Workload
    from megatron.model.gpt import GPT
    from megatron.parallel.groups import ProcessGroups


FREE = (
    "model.attention_dropout",
    "model.hidden_dropout",
    "model.init_method_std",
    "model.make_vocab_size_divisible_by",
    "data.data_cache_path",
    "data.no_mmap_bin_files",
    "data.dataloader_type",
    "data.multiple_validation_sets",
)
"""Settings of the task that a resumed run may change."""


def gpt_identity(config: GPTConfig, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the settings that a checkpoint and the run that loads it must share."""
    from megatron.checkpoint.compatibility import identity

    facts = {"data.tokenizer": vocabulary.fingerprint, "model.vocab_size": vocabulary.size}
    return identity(config, free=FREE, facts=facts)


@dataclass(frozen=True)
class GPTTask:
    """GPT pretraining.

    Args:
        model_provider: Builds one chunk of the model; called as
            `model_provider(config, vocabulary, groups, device, layers=..., pre_process=...,
            post_process=...)`.
        train_valid_test_datasets_provider: Builds the three data sets; called as
            `train_valid_test_datasets_provider(config, vocabulary, samples, log)`. `samples` has
            the least number of samples of each, or None for one pass over the whole split.
    """

    model_provider: Callable[..., GPT]
    train_valid_test_datasets_provider: Callable[..., Datasets]
    config: type[GPTConfig] = GPTConfig
    measures: Measures = Measures(unit="tokens", means=("lm loss",), perplexity="lm loss")

    @property
    def formula(self) -> str:
        from megatron.model.flops import FORMULA

        return FORMULA

    def check_files(
        self, config: GPTConfig, run_dir: Path, *, log: Callable[[str], None]
    ) -> CheckpointSource | None:
        from megatron.preflight import check_paths

        return check_paths(config, run_dir, log=log)

    def logical_shapes(
        self, config: GPTConfig, path: GradientPath
    ) -> Mapping[str, tuple[int, ...]] | None:
        from megatron.memory_estimate import logical_shapes
        from megatron.preflight import vocabulary_size

        size = vocabulary_size(config.data)
        return None if size is None else logical_shapes(config, path, vocabulary=size)

    def open(self, config: GPTConfig) -> LoadedGPT:
        from megatron.config.gpt import check_vocabulary
        from megatron.data.vocabulary import data_prefixes, find_vocabulary

        hub = "tokenizer_model" in config.from_flags
        vocabulary = find_vocabulary(config.data, data_prefixes(config.data), hub=hub)
        check_vocabulary(config, vocabulary.size)
        return LoadedGPT(self, config, vocabulary)


@dataclass(frozen=True)
class LoadedGPT:
    """The GPT task of a run whose vocabulary is known."""

    task: GPTTask
    config: GPTConfig
    vocabulary: Vocabulary

    @property
    def summary(self) -> str:
        from megatron.model.flops import parameter_count

        count = parameter_count(self.config.model, self.vocabulary.size)
        return f"{count:,} parameters, vocabulary {self.vocabulary.size:,}"

    @property
    def flops_per_sample(self) -> float:
        from megatron.model.flops import flops_per_token

        model = self.config.model
        return flops_per_token(model, self.vocabulary.size) * model.seq_length

    @property
    def workload(self) -> Workload:
        from megatron.metrics.throughput import Workload
        from megatron.model.flops import flops_per_token, recomputing_flops_per_token

        model, recompute = self.config.model, self.config.recompute
        length = model.seq_length
        granularity, method = recompute.recompute_granularity, recompute.recompute_method
        full = granularity == "residual" or (granularity == "full" and method != "block")
        count = recomputing_flops_per_token if full else flops_per_token
        return Workload(
            flops_per_sample=count(model, self.vocabulary.size) * length,
            seq_length=length,
            recomputed=full,
        )

    def identity(self) -> dict[str, Any]:
        return gpt_identity(self.config, self.vocabulary)

    def data_files(self) -> dict[str, Any]:
        from megatron.data.indexed_dataset import file_facts
        from megatron.data.vocabulary import data_prefixes

        return file_facts(data_prefixes(self.config.data))

    def chunks(self, groups: ProcessGroups, device: torch.device) -> list[GPT]:
        from megatron.config.compilation import choose_compilation

        config = self.config
        split = config.parallel.layer_split(config.model.num_layers)
        stage, stages = groups.pp.rank, groups.pp.size
        chunks = [
            self.task.model_provider(
                config,
                self.vocabulary,
                groups,
                device,
                layers=layers,
                pre_process=stage == 0 and number == 0,
                post_process=stage == stages - 1 and number == len(split[stage]) - 1,
            )
            for number, layers in enumerate(split[stage])
        ]
        if choose_compilation(config, device.type).on:
            for chunk in chunks:
                # Compiled dropout draws other numbers than eager dropout; grids would disagree.
                chunk.compile_layers(options={"fallback_random": True})
        return chunks

    def readers(
        self, groups: ProcessGroups, device: torch.device, *, log: Callable[[str], None]
    ) -> Readers:
        from megatron.data.batches import Readers
        from megatron.data.data_loader import BatchReader
        from megatron.data.sampler import CollateOptions, MicrobatchSampler
        from megatron.errors import DataError

        config = self.config
        batch_size = config.training.global_batch_size
        assert batch_size is not None, "resolve fills it in"
        evaluation = config.evaluation
        # None: each sample of the split once.
        evaluated = None if evaluation.full_validation else evaluation.eval_iters * batch_size
        samples = (config.total_samples(), evaluated, evaluated)

        def build() -> Datasets:
            provider = self.task.train_valid_test_datasets_provider
            return provider(config, self.vocabulary, samples, log)

        sampler = MicrobatchSampler(
            config.training.micro_batch_size, groups.dp.rank, groups.dp.size
        )
        options = CollateOptions(
            eod=self.vocabulary.eod,
            eod_mask_loss=config.data.eod_mask_loss,
            reset_position_ids=config.data.reset_position_ids,
            reset_attention_mask=config.data.reset_attention_mask,
        )
        # Rank 0 builds the data sets first and fills the index cache, which may take longer than
        # the timeout of a collective.
        mine = groups.world.raise_on_all_ranks(
            lambda: groups.run_beyond_timeout(lambda: build() if groups.world.rank == 0 else None)
        )
        sets = groups.world.raise_on_all_ranks(lambda: mine or build())

        def reader(dataset: Any) -> Any:
            if dataset is None:
                return None
            if isinstance(dataset, Mapping):
                return {name: reader(part) for name, part in dataset.items()}
            return BatchReader(dataset=dataset, sampler=sampler, options=options, device=device)

        if sets.train is None and not config.training.skip_train:
            raise DataError("split: leaves no documents for training; give training a share")
        return Readers(train=reader(sets.train), valid=reader(sets.valid), test=reader(sets.test))

    def message_shape(self, groups: ProcessGroups) -> tuple[int, ...]:
        length = self.config.model.seq_length
        if self.config.parallel.sequence_parallel:
            length //= groups.tp.size
        return (self.config.training.micro_batch_size, length, self.config.model.hidden_size)
