"""The memory ledger of a training step: planned, tracked and measured, by kind, layer and time.

    planned    formulas and counted shapes (`planned_memory`)
    tracked    the step on fake tensors, whatever the grid and the size (`dry_run`)
    measured   the step on real tensors: on a CPU what autograd saves and the peak of the process's
               resident memory, on a GPU the allocator's counters

Kinds are those of Sohoni et al. 2019, section 2.1: model, optimizer, activations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from megatron.config import Config
from megatron.config.sections import RecomputeConfig
from megatron.errors import ConfigError
from megatron.low_memory.dry_run import (
    DryRank,
    DryTranslation,
    Profiled,
    check_measured,
    check_tracked,
    fake_groups,
    fake_tensors,
)
from megatron.low_memory.memory_recorder import MemorySample
from megatron.low_memory.operation_graph import HEAD
from megatron.low_memory.planned_memory import MemoryColumn, planned_column
from megatron.metrics import memory
from megatron.parallel.dims import ParallelDims
from megatron.pretrain import Paths

CPU = torch.device("cpu")
CLEAR_REFS = Path("/proc/self/clear_refs")
ColumnName = Literal["planned", "tracked", "measured"]
COLUMNS: tuple[ColumnName, ...] = ("planned", "tracked", "measured")


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
        columns: Columns by name: those of `COLUMNS` that were asked for and could be counted.
        missing: The reason for each column that was asked for and could not be counted.
        samples: Bytes by kind after every operator of the tracked step.
        flops: FLOPs of one microbatch; None if they were not asked for or no step was tracked.
    """

    summary: str
    rank: int
    world: int
    columns: Mapping[str, MemoryColumn]
    missing: Mapping[str, str]
    samples: Sequence[MemorySample]
    flops: Flops | None

    @property
    def peak_text(self) -> str:
        """A clause that names the operator of the tracked peak."""
        peak = self.peak
        if peak is None:
            return "the peak is not tracked"
        return f"peak at `{peak.operator}` of {peak.phase}, in {peak.module or HEAD}"

    @property
    def peak(self) -> MemorySample | None:
        """The sample with the most bytes of the tracked step, the first of equal ones."""
        return max(self.samples, key=lambda sample: sample.total, default=None)

    @property
    def process_peak(self) -> int | None:
        """Bytes by which the process grew in the measured step; on a GPU, the allocator's peak."""
        measured = self.columns.get("measured")
        return None if measured is None else measured.total

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


def memory_ledger(
    opened: Profiled,
    config: Config,
    paths: Paths,
    *,
    world: int = 1,
    rank: int = 0,
    vocabulary: int = 0,
    columns: Collection[ColumnName] = COLUMNS,
    flops: bool = True,
) -> MemoryLedger:
    """Count the memory of a rank's training step in up to three ways.

    Args:
        opened: The task's model, for its chunks.
        config: Resolved for `world` ranks.
        paths: The gradient paths by name.
        world: The number of ranks.
        rank: The rank whose memory is counted.
        vocabulary: Entries of a GPT's vocabulary.
        columns: The columns to count. `tracked` and `measured` each build the rank once.
        flops: Whether to count FLOPs too, on the tracked rank. A configuration that recomputes
            builds the rank once more, without recomputation.

    Raises:
        ConfigError: The rank is not in the grid.
    """
    parallel = config.parallel
    dims = ParallelDims.from_world(
        world,
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        order=parallel.rank_order,
        dp_inner=parallel.dp_inner_size,
    )
    if not 0 <= rank < world:
        raise ConfigError(f"rank: {rank} is not a rank of {world}; choose 0 to {world - 1}")
    build = _LedgerBuilder(opened, config, paths, dims, rank)
    tracking = _Tracking(build, flops)
    ways: dict[ColumnName, Callable[[], MemoryColumn]] = {
        # First, so that the process does not use memory again that an earlier column has freed.
        "measured": lambda: _measured(build),
        "planned": lambda: _planned(opened, config, dims, paths, rank, vocabulary),
        "tracked": tracking.column,
    }
    found: dict[str, MemoryColumn] = {}
    missing: dict[str, str] = {}
    for name, count in ways.items():
        if name in columns:
            try:
                found[name] = count()
            except ConfigError as error:
                missing[name] = str(error)
    return MemoryLedger(
        summary=opened.summary,
        rank=rank,
        world=world,
        columns={name: found[name] for name in COLUMNS if name in found},
        missing={name: missing[name] for name in COLUMNS if name in missing},
        samples=tracking.samples,
        flops=tracking.flops,
    )


@dataclass(frozen=True)
class _LedgerBuilder:
    opened: Profiled
    config: Config
    paths: Paths
    dims: ParallelDims
    rank: int

    def rank_on(self, device: torch.device = CPU) -> DryRank:
        """Build the rank on fake groups."""
        groups = fake_groups(self.dims, self.rank)
        return DryRank.build(self.opened, self.config, self.paths, groups, device)

    def without_recomputation(self) -> _LedgerBuilder:
        """Return the builder of the same rank that stores all activations."""
        config = replace(self.config, recompute=RecomputeConfig())
        return replace(self, config=config, opened=replace(self.opened, config=config))


def _planned(
    opened: Profiled, config: Config, dims: ParallelDims, paths: Paths, rank: int, vocabulary: int
) -> MemoryColumn:
    sizes = [vocabulary]
    if isinstance(opened, DryTranslation):
        sizes = [opened.source_size, opened.target_size]
    path = paths[config.gradient.grad_path]
    return planned_column(config, dims, path, rank=rank, vocabularies=sizes)


class _Tracking:
    """The step on fake tensors: its column, and beside it the samples and the FLOPs."""

    def __init__(self, build: _LedgerBuilder, count_flops: bool) -> None:
        self._build, self._count_flops = build, count_flops
        self.samples: Sequence[MemorySample] = ()
        self.flops: Flops | None = None

    def column(self) -> MemoryColumn:
        """Run the step and return its column.

        Raises:
            ConfigError: The configuration needs values or other threads.
        """
        check_tracked(self._build.config)
        with fake_tensors():
            rank = self._build.rank_on()
            saved = rank.stored()
            flops = self._flops(rank) if self._count_flops else None
            recorder = rank.recorder()
            rank.step(recorder)
            model, optimizer = rank.state_bytes()
        self.samples, self.flops = recorder.samples, flops
        most = max(recorder.samples, key=lambda sample: sample.total)
        return MemoryColumn(
            model=model,
            optimizer=optimizer,
            stored=saved.total,
            layers=saved.by_layer,
            forward=most.forward,
            backward=most.backward,
            other=most.other,
            total=most.total,
        )

    def _flops(self, rank: DryRank) -> Flops:
        """Count a microbatch's FLOPs; recomputation is what a run without recomputation lacks."""
        build = self._build
        with_all = without = rank.flops()
        if build.config.recompute.recompute_granularity is not None:
            without = build.without_recomputation().rank_on().flops()
        return Flops(
            formula=build.opened.flops_per_sample * build.config.training.micro_batch_size,
            forward=with_all.forward,
            backward=without.backward,
            recomputed=with_all.backward - without.backward,
        )


def _measured(build: _LedgerBuilder) -> MemoryColumn:
    """Run the step on real tensors.

    Raises:
        ConfigError: The rank has states that are not measured, there is no GPU for `--device cuda`,
            the step does not fit on it, or Linux does not tell its memory.
    """
    check_measured(build.config)
    device = torch.device(build.config.run.device or "cpu")
    if device.type == "cuda":
        way_out = "give --no-measured, which leaves this column out"
        if not torch.cuda.is_available():
            raise ConfigError(f"device cuda: this machine has none; {way_out}")
        try:
            return _measured_on_gpu(build, device)
        except torch.OutOfMemoryError:
            text = f"device cuda: the step does not fit into its memory; {way_out}"
            raise ConfigError(text) from None
    before = resident("VmRSS")
    restart_peak()
    rank = build.rank_on(device)
    rank.step()
    peak = resident("VmHWM") - before
    model, optimizer = rank.state_bytes()
    saved = rank.stored()
    return MemoryColumn(
        model=model,
        optimizer=optimizer,
        stored=saved.total,
        layers=saved.by_layer,
        total=peak,
    )


def _measured_on_gpu(build: _LedgerBuilder, device: torch.device) -> MemoryColumn:
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
    return MemoryColumn(
        model=model,
        optimizer=optimizer,
        stored=saved.total,
        layers=saved.by_layer,
        other=held - model - optimizer,
        total=peak,
    )


def resident(field: str) -> int:
    """Return VmRSS, the resident memory of this process, or VmHWM, its peak, in bytes (Linux).

    Raises:
        ConfigError: The system does not tell the memory of a process.
    """
    try:
        found = memory.resident(field)
    except OSError as error:
        raise ConfigError(f"{memory.STATUS}: {error.strerror}; only Linux is measured") from None
    if found is None:
        raise ConfigError(f"{memory.STATUS}: has no {field}; only Linux is measured")
    return found


def restart_peak() -> None:
    """Make VmHWM start again from the memory that is resident now (Linux).

    Raises:
        ConfigError: The system does not permit it, so that VmHWM is older than the step.
    """
    try:
        CLEAR_REFS.write_text("5", encoding="ascii")
    except OSError as error:
        raise ConfigError(
            f"{CLEAR_REFS}: {error.strerror}; the peak of the step cannot be told from an older one"
        ) from None
