"""The translation task: a DC-Transformer on packs of sentence pairs.

Imports torch only to build.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.errors import ConfigError, DataError
from megatron.metrics.record import Measures
from megatron.metrics.throughput import Workload
from megatron.tasks.translation_config import TranslationConfig

if TYPE_CHECKING:
    import torch

    from megatron.checkpoint.find import CheckpointSource
    from megatron.data.batches import Readers
    from megatron.data.pair_dataset import Packs, PairVocabulary
    from megatron.data.pair_reader import PackReader
    from megatron.data.preprocess_pairs import PairPaths
    from megatron.data_parallel.gradient_path import GradientPath
    from megatron.model.dc_transformer import DCTransformer
    from megatron.parallel.groups import ProcessGroups

FREE = (
    "model.dropout",
    "model.attention_dropout",
    "model.weight_dropout",
    "model.label_smoothing",
    "data.microbatch_tokens",
)
"""Settings of the task that a resumed run may change."""


@dataclass(frozen=True)
class TranslationTask:
    """Translation with a DC-Transformer.

    `loss` is the mean label-smoothed cross-entropy of a target token, `nll` its mean negative
    log-likelihood. The perplexity is exp(nll).
    """

    config: type[TranslationConfig] = TranslationConfig
    measures: Measures = Measures(
        unit="tokens", sums=("loss", "nll"), means=("loss", "nll"), perplexity="nll"
    )

    @property
    def formula(self) -> str:
        from megatron.model.dc_transformer_shapes import FORMULA

        return FORMULA

    def check_files(
        self, config: TranslationConfig, run_dir: Path, *, log: Callable[[str], None]
    ) -> CheckpointSource | None:
        from megatron.checkpoint.find import locate_checkpoint
        from megatron.preflight import SKIP

        if config.data.data_path is None:
            log("note: no data is named; a run needs --data-path")
        else:
            try:
                self.open(config)
            except DataError as error:
                raise DataError(f"{error}; {SKIP}") from error
        return locate_checkpoint(config, run_dir, log=log, look=True)

    def logical_shapes(
        self, config: TranslationConfig, path: GradientPath
    ) -> Mapping[str, tuple[int, ...]] | None:
        from megatron.data.pair_dataset import PairVocabulary
        from megatron.model.dc_transformer_shapes import logical_shapes

        if config.data.data_path is None:
            return None
        found = PairVocabulary.load(pair_paths(config))
        sizes = {"source_size": len(found.source), "target_size": len(found.target)}
        return logical_shapes(config.model, **sizes)

    def open(self, config: TranslationConfig) -> LoadedTranslation:
        from megatron.data.local_file import is_file
        from megatron.data.pair_dataset import Packs, PairDataset, PairVocabulary, check_longest
        from megatron.data.raw_pairs import SPLITS

        if config.data.data_path is None:
            raise ConfigError(
                "data_path: not given; give --data-path the prefix of the files that "
                "tools/preprocess_pairs.py wrote"
            )
        paths = pair_paths(config)
        vocabulary = PairVocabulary.load(paths)
        packs: dict[str, Packs] = {}
        for split in SPLITS:
            needed = split == "train" and not config.training.skip_train
            if needed or is_file(f"{paths.tokens(split, config.data.target_lang)}.idx"):
                dataset = PairDataset(paths, split, vocabulary)
                packs[split] = Packs(
                    dataset, max_tokens=config.data.max_tokens, seed=config.training.seed
                )
                if config.data.microbatch_tokens is not None:
                    check_longest(dataset, config.data.microbatch_tokens, "microbatch_tokens")
        if not packs:
            raise DataError(f"{paths.prefix}: holds no pairs; write it with preprocess_pairs.py")
        return LoadedTranslation(config, vocabulary, packs)


@dataclass(frozen=True)
class LoadedTranslation:
    """The translation task of one run, after dictionaries and pairs were read."""

    config: TranslationConfig
    vocabulary: PairVocabulary
    packs: Mapping[str, Packs]
    """The packs of each split that has pairs."""

    @property
    def _sizes(self) -> dict[str, int]:
        vocabulary = self.vocabulary
        return {"source_size": len(vocabulary.source), "target_size": len(vocabulary.target)}

    @property
    def summary(self) -> str:
        from megatron.model.dc_transformer_shapes import parameter_count

        count = parameter_count(self.config.model, **self._sizes)
        data, sizes = self.config.data, self._sizes
        parts = ", ".join(
            f"{split} {len(packs.dataset):,} pairs in {packs.per_epoch:,} packs"
            for split, packs in self.packs.items()
        )
        return (
            f"{count:,} parameters, dictionaries {data.source_lang} {sizes['source_size']:,} and "
            f"{data.target_lang} {sizes['target_size']:,}; {parts}"
        )

    @property
    def flops_per_sample(self) -> float:
        from megatron.model.dc_transformer_shapes import training_flops

        shapes = next(iter(self.packs.values())).shapes().tolist()
        size = len(self.vocabulary.target)
        total = sum(
            training_flops(self.config.model, pairs=n, source=s, target=t, target_size=size)
            for n, s, t in shapes
        )
        return total / len(shapes)

    @property
    def workload(self) -> Workload:
        return Workload(flops_per_sample=self.flops_per_sample)

    def identity(self) -> dict[str, Any]:
        from megatron.checkpoint.compatibility import identity

        source, target = self.vocabulary.fingerprints()
        facts: dict[str, Any] = {f"model.{name}": size for name, size in self._sizes.items()}
        return identity(
            self.config, free=FREE, facts={**facts, "data.vocabulary": [source, target]}
        )

    def data_files(self) -> dict[str, Any]:
        from megatron.data.indexed_dataset import file_facts

        return file_facts(
            prefix for packs in self.packs.values() for prefix in packs.dataset.prefixes
        )

    def chunks(self, groups: ProcessGroups, device: torch.device) -> list[DCTransformer]:
        return [build_model(self.config, self._sizes, device)]

    def readers(
        self, groups: ProcessGroups, device: torch.device, *, log: Callable[[str], None]
    ) -> Readers:
        from megatron.data.batches import Readers
        from megatron.data.pair_reader import PackReader
        from megatron.data.sampler import MicrobatchSampler

        sampler = MicrobatchSampler(1, groups.dp.rank, groups.dp.size)

        def reader(split: str) -> PackReader | None:
            packs = self.packs.get(split)
            if packs is None:
                return None
            whole_run = split == "train"
            return PackReader(
                packs=packs,
                sampler=sampler,
                samples=max(self.config.total_samples(), 1) if whole_run else packs.per_epoch,
                microbatch_tokens=self.config.data.microbatch_tokens,
                device=device,
            )

        return Readers(train=reader("train"), valid=reader("valid"), test=reader("test"))

    def message_shape(self, groups: ProcessGroups) -> tuple[int, ...]:
        return (1,)


def build_model(
    config: TranslationConfig, sizes: Mapping[str, int], device: torch.device
) -> DCTransformer:
    """Build the initialized model of a configuration.

    Args:
        config: The checked configuration.
        sizes: `source_size` and `target_size`, the entries of the dictionaries.
        device: The device of the parameters.
    """
    import torch

    from megatron.model.dc_transformer import DCTransformer

    return DCTransformer(
        config.model,
        seed=config.training.seed,
        dtype=getattr(torch, config.precision.param_dtype),
        device=device,
        recompute=config.recompute,
        **sizes,
    )


def pair_paths(config: TranslationConfig) -> PairPaths:
    """Return the files of the data that a configuration names by `data_path` and languages."""
    from megatron.data.preprocess_pairs import PairPaths

    data = config.data
    assert data.data_path is not None, "checked before"
    return PairPaths(data.data_path, data.source_lang, data.target_lang)
