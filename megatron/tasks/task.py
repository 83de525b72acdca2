"""The interface between `megatron.pretrain` and a task. Imports no torch.

Task.check_files --> the files that a run would read exist and fit; nothing is built
Task.open        --> LoadedTask: chunks, readers, message shape, FLOPs, identity
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from megatron.checkpoint.find import CheckpointSource
    from megatron.config import Config
    from megatron.data.batches import Readers
    from megatron.data_parallel.gradient_path import GradientPath
    from megatron.metrics.record import Measures
    from megatron.metrics.throughput import Workload
    from megatron.parallel.groups import ProcessGroups
    from megatron.pipeline.stage import Chunk


class LoadedTask(Protocol):
    """A task for one run, after its files were read; `Task.open` returns it."""

    @property
    def summary(self) -> str:
        """A short description of the model, for the log."""
        ...

    @property
    def flops_per_sample(self) -> float:
        """Model FLOPs of forward and backward of one sample."""
        ...

    @property
    def workload(self) -> Workload:
        """The work of a sample, for the figures at the end of a run."""
        ...

    def identity(self) -> dict[str, Any]:
        """Return the settings that a checkpoint and a run that loads it must share.

        Keys are dotted names and values JSON values, as `checkpoint.compatibility.identity` returns
        them for a configuration and for facts that were read from files.
        """
        ...

    def data_files(self) -> dict[str, Any]:
        """Return facts about the data files, by which a resumed run detects that its data changed.

        Raises:
            DataError: A file is missing or cannot be read.
        """
        ...

    def chunks(self, groups: ProcessGroups, device: torch.device) -> Sequence[Chunk]:
        """Build the chunks of this rank's stage, in the order in which a microbatch runs them."""
        ...

    def readers(
        self, groups: ProcessGroups, device: torch.device, *, log: Callable[[str], None]
    ) -> Readers:
        """Open the data sets of training, validation and test. Collective over the world.

        Args:
            groups: The groups of this rank.
            device: Device of the batches: that of the model, or the CPU for a pipeline on GPUs.
            log: Writes a line to the log of the run.

        Raises:
            DataError: Data are missing, damaged, too small or of another tokenizer.
        """
        ...

    def message_shape(self, groups: ProcessGroups) -> tuple[int, ...]:
        """Return the shape of the tensor that one chunk hands to the next."""
        ...


class Task(Protocol):
    """A model with its data, as `megatron.pretrain` trains it.

    Methods get a configuration of the type `config`.
    """

    @property
    def config(self) -> type[Config]:
        """The configuration of the task's runs: its sections, their rules, its name."""
        ...

    @property
    def measures(self) -> Measures:
        """The unit that batches count, and the names of sums and means, such as the loss."""
        ...

    @property
    def formula(self) -> str:
        """The terms of `LoadedTask.flops_per_sample` in words, for the log and the trackers."""
        ...

    def check_files(
        self, config: Any, run_dir: Path, *, log: Callable[[str], None]
    ) -> CheckpointSource | None:
        """Check the files that a run would read, without starting the run.

        Returns:
            The checkpoint from which the run would start; None for initial weights.

        Raises:
            ConfigError, DataError, CheckpointError: The run itself would raise this error.
        """
        ...

    def logical_shapes(
        self, config: Any, path: GradientPath
    ) -> Mapping[str, tuple[int, ...]] | None:
        """Return the shape of every parameter of the whole model by logical name.

        None if the size of the model depends on files that the configuration does not name.
        """
        ...

    def open(self, config: Any) -> LoadedTask:
        """Read the files on which the model depends. Not collective: each rank reads them.

        Raises:
            ConfigError, DataError: The files do not fit the configuration.
        """
        ...
