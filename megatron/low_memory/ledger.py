"""The memory ledger of a training step: planned, tracked and measured, by kind, layer and time.

    planned    formulas and counted shapes (`planned_memory`)
    tracked    the step on fake tensors, whatever the grid and the size (`dry_run`)
    measured   the step on real tensors: on a CPU what autograd saves and the peak of the process's
               resident memory, on a GPU the allocator's counters

Kinds are those of Sohoni et al. 2019, section 2.1: model, optimizer, activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron.config import Config, GPTConfig
from megatron.config.sections import RecomputeConfig
from megatron.errors import ConfigError
from megatron.low_memory.dry_run import (
    DryRank,
    DryTranslation,
    Profiled,
    check_dry,
    fake_groups,
    fake_tensors,
)
from megatron.low_memory.memory_recorder import HEAD, MemorySample
from megatron.low_memory.planned_memory import (
    MemoryColumn,
    planned_gpt,
    planned_translation,
    planned_wide_resnet,
)
from megatron.parallel.dims import ParallelDims
from megatron.pretrain import Paths
from megatron.tasks.translation_config import TranslationConfig
from megatron.tasks.vision_config import VisionConfig

CPU = torch.device("cpu")
NEAR_PEAK = 0.999
"""An operator that brings the bytes so close to the peak is the one that the peak names."""


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs of the products of one microbatch on a rank."""

    formula: float
    forward: int
    backward: int
    recomputed: int


@dataclass(frozen=True, kw_only=True)
class MemoryLedger:
    """The memory of one rank's training step.

    Attributes:
        summary: The model in a few words.
        rank: The rank, of `world` ranks.
        world: The number of ranks.
        columns: Columns by name, those of `planned`, `tracked` and `measured` that exist.
        missing: The reason for each column that does not exist.
        samples: Bytes by kind after every operator of the tracked step.
        flops: FLOPs of one microbatch; None without a tracked step.
        process_peak: Growth of the process's resident memory over the measured step, or the
            allocator's peak on a GPU.
    """

    summary: str
    rank: int
    world: int
    columns: Mapping[str, MemoryColumn]
    missing: Mapping[str, str]
    samples: Sequence[MemorySample]
    flops: Flops | None
    process_peak: int | None

    @property
    def peak_text(self) -> str:
        """Return a sentence that names the operator of the tracked peak."""
        peak = self.peak
        if peak is None:
            return "the peak is not tracked"
        return f"peak at `{peak.operator}` of {peak.phase}, in {peak.module or HEAD}"

    @property
    def peak(self) -> MemorySample | None:
        """Return the operator at which the tracked step needs most."""
        return peak_of(self.samples)

    def as_data(self) -> dict[str, Any]:
        """Return the totals as JSON can hold them, without the course of the step."""
        peak = self.peak
        return {
            "accounting": "actual",
            "title": self.summary,
            "rank": self.rank,
            "world_size": self.world,
            **{name: asdict(column) for name, column in self.columns.items()},
            "missing": dict(self.missing),
            "peak_at": None if peak is None else asdict(peak) | {"total": peak.total},
            "flops": None if self.flops is None else asdict(self.flops),
            "process_peak": self.process_peak,
        }


def peak_of(samples: Sequence[MemorySample]) -> MemorySample | None:
    """Return the first sample within a thousandth of the most bytes, with these bytes."""
    if not samples:
        return None
    most = max(sample.total for sample in samples)
    return next(sample for sample in samples if sample.total >= NEAR_PEAK * most)


def memory_ledger(
    opened: Profiled,
    config: Config,
    paths: Paths,
    *,
    world: int = 1,
    rank: int = 0,
    vocabulary: int = 0,
    measure: bool = True,
) -> MemoryLedger:
    """Count the memory of a rank's training step in three ways.

    Args:
        opened: The task's model and data, for its chunks.
        config: Resolved for `world` ranks.
        paths: The gradient paths by name.
        world: The number of ranks.
        rank: The rank whose memory is counted.
        vocabulary: Entries of a GPT's vocabulary.
        measure: Whether to run the step on real tensors too.

    Raises:
        ConfigError: The rank is not in the grid.
    """
    parallel = config.parallel
    dims = ParallelDims.from_world(
        world,
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        order=parallel.rank_order,
    )
    if not 0 <= rank < world:
        raise ConfigError(f"rank: {rank} is not a rank of {world}; choose 0 to {world - 1}")
    columns: dict[str, MemoryColumn] = {}
    missing: dict[str, str] = {}
    samples: Sequence[MemorySample] = ()
    flops = process_peak = None
    try:
        columns["planned"] = _planned(opened, config, dims, paths, rank, vocabulary)
    except ConfigError as error:
        missing["planned"] = str(error)
    build = _LedgerBuilder(opened, config, paths, dims, rank)
    try:
        check_dry(config)
        if measure:  # first, so that no memory that was freed before is used again
            measured, process_peak = _measured(build)
        columns["tracked"], samples = _tracked(build)
        flops = _flops(build)
        if measure:
            columns["measured"] = measured
    except ConfigError as error:
        missing["tracked"] = missing["measured"] = str(error)
    return MemoryLedger(
        summary=opened.summary,
        rank=rank,
        world=world,
        columns=columns,
        missing=missing,
        samples=samples,
        flops=flops,
        process_peak=process_peak,
    )


@dataclass(frozen=True)
class _LedgerBuilder:
    opened: Profiled
    config: Config
    paths: Paths
    dims: ParallelDims
    rank: int

    def rank_on(self, device: torch.device = CPU) -> DryRank:
        """Build the rank; collectives of its groups are played."""
        groups = fake_groups(self.dims, self.rank)
        return DryRank.build(self.opened, self.config, self.paths, groups, device)

    def without_recomputation(self) -> _LedgerBuilder:
        """Return the builder of the same rank that stores all activations."""
        config = replace(self.config, recompute=RecomputeConfig())
        return replace(self, config=config, opened=replace(self.opened, config=config))  # type: ignore[type-var]


def _planned(
    opened: Profiled, config: Config, dims: ParallelDims, paths: Paths, rank: int, vocabulary: int
) -> MemoryColumn:
    path = paths[config.gradient.grad_path]
    if isinstance(config, GPTConfig):
        return planned_gpt(config, dims, path, rank=rank, vocabulary=vocabulary)
    if isinstance(config, VisionConfig):
        return planned_wide_resnet(config, dims, path)
    if isinstance(config, TranslationConfig) and isinstance(opened, DryTranslation):
        sizes = (opened.source_size, opened.target_size)
        return planned_translation(config, dims, path, dictionaries=sizes)
    raise ConfigError(f"task: {config.task} has no planned memory")


def _tracked(build: _LedgerBuilder) -> tuple[MemoryColumn, Sequence[MemorySample]]:
    with fake_tensors():
        rank = build.rank_on()
        saved = rank.stored()
        recorder = rank.recorder()
        rank.step(recorder)
        model, optimizer = rank.state_bytes()
    most = max(recorder.samples, key=lambda sample: sample.total)
    column = MemoryColumn(
        model=model,
        optimizer=optimizer,
        stored=saved.total,
        layers=saved.by_layer,
        forward=most.forward,
        backward=most.backward,
        other=most.other,
        total=most.total,
    )
    return column, recorder.samples


def _flops(build: _LedgerBuilder) -> Flops:
    """Count a microbatch's FLOPs; recomputation is what a run without recomputation lacks."""
    with fake_tensors():
        with_all = without = build.rank_on().flops()
        if build.config.recompute.recompute_granularity is not None:
            without = build.without_recomputation().rank_on().flops()
    return Flops(
        formula=build.opened.flops_per_sample * build.config.training.micro_batch_size,
        forward=with_all.forward,
        backward=without.backward,
        recomputed=with_all.backward - without.backward,
    )


def _measured(build: _LedgerBuilder) -> tuple[MemoryColumn, int]:
    """Run the step on real tensors."""
    device = torch.device(build.config.run.device or "cpu")
    if device.type == "cuda":
        return _measured_on_gpu(build, device)
    before = resident("VmRSS")
    restart_peak()
    rank = build.rank_on(device)
    rank.step()
    peak = resident("VmHWM") - before
    model, optimizer = rank.state_bytes()
    saved = rank.stored()
    column = MemoryColumn(
        model=model,
        optimizer=optimizer,
        stored=saved.total,
        layers=saved.by_layer,
        total=peak,
    )
    return column, peak


def _measured_on_gpu(build: _LedgerBuilder, device: torch.device) -> tuple[MemoryColumn, int]:
    """Ask the allocator: after the build, after a forward pass, and for the peak of a step."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    rank = build.rank_on(device)
    model, optimizer = rank.state_bytes()
    held = torch.cuda.memory_allocated(device) - before
    saved = rank.stored()
    torch.cuda.reset_peak_memory_stats(device)
    rank.step()
    peak = torch.cuda.max_memory_allocated(device) - before
    column = MemoryColumn(
        model=model,
        optimizer=optimizer,
        stored=saved.total,
        layers=saved.by_layer,
        other=held - model - optimizer,
        total=peak,
    )
    return column, peak


def resident(field: str) -> int:
    """Return VmRSS, the resident memory of this process, or VmHWM, its peak, in bytes (Linux)."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise AssertionError(f"Linux tells {field} of every process")


def restart_peak() -> None:
    """Let VmHWM start again from the memory that is resident now (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        pass  # the peak is then that of the process so far
