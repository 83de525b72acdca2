"""The vision task: a network that classifies images. Imports torch only to build."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.metrics.record import Measures
from megatron.tasks.vision_config import VisionConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

    from megatron.checkpoint.find import CheckpointSource
    from megatron.data.batches import Readers
    from megatron.data.images import ImageSource, ImageSplits
    from megatron.data_parallel.gradient_path import GradientPath
    from megatron.metrics.throughput import Workload
    from megatron.model.image_classifier import ImageClassifier
    from megatron.parallel.groups import ProcessGroups

FREE = ("model.hidden_dropout", "model.simulated_micro_batch_size")
"""Settings of the task that a resumed run may change."""


@dataclass(frozen=True)
class VisionTask:
    """Training of an image classifier with data parallelism.

    Args:
        model_provider: Builds the network; called as `model_provider(config, device, streams)`.
        train_valid_test_datasets_provider: Opens the images; called as
            `train_valid_test_datasets_provider(config)`.
    """

    model_provider: Callable[..., nn.Module]
    train_valid_test_datasets_provider: Callable[[VisionConfig], ImageSplits]
    config: type[VisionConfig] = VisionConfig
    measures: Measures = Measures(
        unit="images", sums=("loss", "correct"), means=("loss", "accuracy")
    )

    @property
    def formula(self) -> str:
        from megatron.model.image_shapes import FORMULA

        return FORMULA

    def check_files(
        self, config: VisionConfig, run_dir: Path, *, log: Callable[[str], None]
    ) -> CheckpointSource | None:
        from megatron.checkpoint.find import locate_checkpoint
        from megatron.data.images import ImageFiles
        from megatron.errors import DataError
        from megatron.preflight import SKIP

        if config.data.mock_data:
            pass
        elif config.data.data_path is None:
            log("note: no data is named; a run needs --data-path, or --mock-data")
        else:
            try:
                ImageFiles.find(config.data.data_path)
            except DataError as error:
                raise DataError(f"{error}; {SKIP}") from error
        return locate_checkpoint(config, run_dir, log=log, look=True)

    def logical_shapes(
        self, config: VisionConfig, path: GradientPath
    ) -> Mapping[str, tuple[int, ...]] | None:
        from megatron.model.image_shapes import parameter_shapes

        return parameter_shapes(config.model.layers())

    def open(self, config: VisionConfig) -> LoadedVision:
        return LoadedVision(self, config)


@dataclass(frozen=True)
class LoadedVision:
    """The vision task of a run."""

    task: VisionTask
    config: VisionConfig

    @property
    def summary(self) -> str:
        from megatron.model.image_shapes import parameter_count

        model = self.config.model
        return (
            f"{model.title}, {parameter_count(model.layers()):,} parameters, {model.num_classes:,} "
            f"classes of {model.img_h} x {model.img_w} pixels"
        )

    @property
    def flops_per_sample(self) -> float:
        from megatron.model.image_shapes import training_flops

        return training_flops(self.config.model.layers())

    @property
    def workload(self) -> Workload:
        from megatron.metrics.throughput import Workload

        return Workload(flops_per_sample=self.flops_per_sample)

    def identity(self) -> dict[str, Any]:
        from megatron.checkpoint.compatibility import identity

        return identity(self.config, free=FREE, facts={})

    def data_files(self) -> dict[str, Any]:
        from megatron.data.images import ImageFiles

        data = self.config.data
        if data.mock_data or data.data_path is None:
            return {}
        return ImageFiles.find(data.data_path).facts()

    def chunks(self, groups: ProcessGroups, device: torch.device) -> list[ImageClassifier]:
        import torch

        from megatron.model.image_classifier import ImageClassifier
        from megatron.tensor_parallel.rng import DropoutStreams

        streams = DropoutStreams(self.config.training.seed, device=device)
        network = self.task.model_provider(self.config, device, streams)
        dtype = getattr(torch, self.config.precision.param_dtype)
        return [ImageClassifier(network, device=device, dtype=dtype, streams=streams)]

    def readers(
        self, groups: ProcessGroups, device: torch.device, *, log: Callable[[str], None]
    ) -> Readers:
        from megatron.data.batches import Readers
        from megatron.data.image_reader import ImageReader, ImageTransform
        from megatron.data.sampler import MicrobatchSampler

        config = self.config
        model, data = config.model, config.data
        splits = groups.world.raise_on_all_ranks(
            lambda: self.task.train_valid_test_datasets_provider(config)
        )
        log(
            f"images: {len(splits.train):,} for training, {len(splits.valid):,} for validation, "
            f"{len(splits.test):,} for the test"
        )
        sampler = MicrobatchSampler(
            config.training.micro_batch_size, groups.dp.rank, groups.dp.size
        )

        def reader(source: ImageSource, *, trains: bool = False) -> ImageReader:
            transform = ImageTransform(
                height=model.img_h,
                width=model.img_w,
                mean=data.image_mean,
                std=data.image_std,
                augment=trains and data.augmentation == "flip-crop",
            )
            return ImageReader(
                source=source,
                sampler=sampler,
                transform=transform,
                device=device,
                seed=config.training.seed if trains else None,
            )

        return Readers(
            train=reader(splits.train, trains=True),
            valid=reader(splits.valid),
            test=reader(splits.test),
        )

    def message_shape(self, groups: ProcessGroups) -> tuple[int, ...]:
        """Return an empty shape, since the only chunk sends no message."""
        return ()
