"""The plan of a run before it starts: one configuration on one number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from megatron.config import GPTConfig
from megatron.config.compilation import choose_compilation
from megatron.config.gpt import check_vocabulary
from megatron.data_parallel.bucket_plan import BYTES, RankShapes
from megatron.data_parallel.gradient_path import GradientPath
from megatron.memory_estimate import (
    ActivationBytes,
    Activations,
    RankGrid,
    StateBytes,
    microbatches_of,
    state_bytes,
)
from megatron.model.flops import parameter_count
from megatron.parallel.dims import ParallelDims
from tools.planner.seconds import StepSeconds, evaluation_seconds, step_seconds
from tools.planner.site import GIB, Site
from tools.planner.traffic import StepBytes, step_bytes

RESERVE = {"cuda": 1.0 * GIB, "cpu": 0.4 * GIB}
"""Memory of context, libraries and communicators per device or process, in bytes; assumed."""
START_SECONDS = 180
"""Seconds from a job's start to its first step, and from its last step to its end; assumed."""


@dataclass(frozen=True)
class StagePlan:
    """The memory of the first tensor-parallel rank of a stage."""

    stage: int
    rank: RankShapes
    state: StateBytes
    activations: ActivationBytes
    gradient: int
    """Bytes of the largest dense gradient that backward makes before the engine takes it."""

    @cached_property
    def kinds(self) -> dict[str, int]:
        """Bytes on the device by kind."""
        found = {**self.state.kept, **self.activations.kinds, "one gradient": self.gradient}
        for kind, size in self.state.passing.items():
            found[kind] = found.get(kind, 0) + size
        return {kind: size for kind, size in found.items() if size}

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self.kinds.values())

    @property
    def host(self) -> dict[str, int]:
        """Bytes in the host's memory by kind."""
        found = {**self.state.host, "stage messages": self.activations.pinned}
        return {kind: size for kind, size in found.items() if size}


@dataclass(frozen=True)
class Queue:
    """Seconds of a whole run, without waiting in a queue, by purpose."""

    training: float
    evaluating: float
    saving: float

    @property
    def total(self) -> float:
        """Seconds of the run, with one start."""
        return self.training + self.evaluating + self.saving + START_SECONDS


@dataclass(frozen=True)
class Plan:
    """A resolved configuration on the ranks of a grid, and on the GPUs of a site."""

    grid: RankGrid
    site: Site

    @classmethod
    def of(
        cls,
        config: GPTConfig,
        *,
        world: int,
        path: GradientPath,
        vocabulary: int,
        cap: int,
        site: Site,
    ) -> Plan:
        """Plan a configuration that is resolved for `world` ranks.

        `cap`: entries of a gradient bucket. Raises `ConfigError` if a tensor-parallel rank would
        hold no token of the vocabulary.
        """
        check_vocabulary(config, vocabulary)
        parallel = config.parallel
        dims = ParallelDims.from_world(
            world,
            tp=parallel.tensor_model_parallel_size,
            pp=parallel.pipeline_model_parallel_size,
            order=parallel.rank_order,
            dp_inner=parallel.dp_inner_size,
        )
        device = config.run.device or site.device
        grid = RankGrid(
            config=config,
            dims=dims,
            path=path,
            vocabulary=vocabulary,
            cap=cap,
            device=device,
            cuda_aware_mpi=site.cuda_aware_mpi,
        )
        return cls(grid, site)

    # ---- memory --------------------------------------------------------------------------------

    @cached_property
    def stages(self) -> list[StagePlan]:
        """Memory per stage of the pipeline."""
        sizes = Activations(self.grid)
        each = BYTES[self.grid.config.precision.param_dtype]
        found: list[StagePlan] = []
        for stage in range(self.grid.dims.pp):
            rank = self.grid.rank(stage)
            largest = each * max(param.numel for param in rank.params.values())
            state = state_bytes(self.grid, rank)
            found.append(StagePlan(stage, rank, state, sizes.of_stage(stage), largest))
        return found

    @cached_property
    def fullest(self) -> StagePlan:
        """The stage that needs most memory."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def needed(self) -> float:
        """Bytes that the fullest stage needs on a device, with the reserve."""
        return self.fullest.total + RESERVE[self.grid.device]

    @property
    def host(self) -> int:
        """Bytes in host memory of the node that needs most."""
        dims, here = self.grid.dims, self.site.gpus_per_node
        each = [sum(stage.host.values()) for stage in self.stages]
        ranks = [each[dims.coordinates(rank).pp] for rank in range(dims.world_size)]
        return max(sum(ranks[first : first + here]) for first in range(0, len(ranks), here))

    @property
    def fits_device(self) -> bool:
        """Whether the device has enough memory."""
        return self.needed <= self.site.memory

    @property
    def fits_host(self) -> bool:
        """Whether the node has enough host memory."""
        return self.host <= self.site.host_memory

    @property
    def fits(self) -> bool:
        """Whether the run fits into the device's and the host's memory."""
        return self.fits_device and self.fits_host

    # ---- the run -------------------------------------------------------------------------------

    @property
    def parameters(self) -> int:
        """Number of logical parameters."""
        return parameter_count(self.grid.config.model, self.grid.vocabulary)

    @property
    def microbatches(self) -> int:
        """Number of microbatches of each pipeline in a step."""
        return microbatches_of(self.grid)

    @property
    def tokens(self) -> int:
        """Number of tokens of a step with the whole global batch."""
        config = self.grid.config
        return (config.training.global_batch_size or 0) * config.model.seq_length

    @property
    def steps(self) -> int:
        """Number of steps of the run, 0 if unknown."""
        return self.grid.config.total_iterations()

    @property
    def nodes(self) -> int:
        """Number of nodes that the ranks need."""
        return -(-self.grid.dims.world_size // self.site.gpus_per_node)

    @cached_property
    def traffic(self) -> list[StepBytes]:
        """Bytes that the first tensor-parallel rank of each stage sends in a step."""
        return [step_bytes(self.grid, stage.stage, stage.rank) for stage in self.stages]

    @cached_property
    def seconds(self) -> StepSeconds:
        """Seconds of an average step, by phase."""
        return step_seconds(self.grid, self.site, [stage.rank for stage in self.stages])

    # ---- disk and queue ------------------------------------------------------------------------

    @cached_property
    def checkpoint(self) -> int:
        """Upper bound of the bytes of a checkpoint's tensors."""
        config, dims = self.grid.config, self.grid.dims
        copies = 1 if config.checkpoint.no_save_optim else 1 + config.optimizer.num_moments
        shapes: dict[str, int] = {}
        path = 0
        for stage in self.stages:
            rank = stage.rank
            shapes |= {name: rank.total(name) for name in rank.params}
            own = self.grid.path.plan_bytes(config, rank)
            # A tied table has two copies, of which one is saved.
            path += dims.tp * (own.shared + dims.dp * own.own)
        return 4 * copies * sum(shapes.values()) + path

    @property
    def checkpoints(self) -> int:
        """Maximum number of checkpoints that the run keeps."""
        asked, steps = self.grid.config.checkpoint, self.steps
        count = -(-steps // asked.save_interval) if asked.save_interval else 1
        retain = asked.save_retain_interval
        if asked.keep_last is None and retain is None:
            return count
        retained = steps // retain if retain else 0
        return min(count, retained + (asked.keep_last or 1))

    @cached_property
    def queue(self) -> Queue:
        """Time of the whole run on these nodes."""
        config = self.grid.config
        asked, evaluation = config.checkpoint, config.evaluation
        saves = -(-self.steps // asked.save_interval) if asked.save_interval else 1
        writes = self.checkpoint / (self.site.disk_rate * self.nodes)
        # The last step is always evaluated, and the test set after it.
        times = -(-self.steps // evaluation.eval_interval) + evaluation.eval_at_start + 1
        each = evaluation.eval_iters * evaluation_seconds(self.grid, self.site)
        return Queue(self.steps * self.seconds.total, times * each, saves * writes)

    @property
    def notes(self) -> list[str]:
        """Sentences about what these numbers assume or leave out."""
        found: list[str] = []
        if self.grid.dims.tp > 1 and self.stages[0].rank.stored:
            found.append("which entries a mask leaves on a tensor-parallel rank is known once it is"
                         " drawn; each is taken to have its share")  # fmt: skip
        if choose_compilation(self.grid.config, self.grid.device, triton=True, compiler=True).on:
            found.append("activations are counted of layers that are not compiled,"
                         " as with --compile false")  # fmt: skip
        if self.grid.config.training.rampup_batch_size:
            found.append("the batch grows; the numbers of a step are of the whole global batch")
        if self.grid.config.evaluation.full_validation:
            found.append("an evaluation takes --eval-iters batches here: how many --full-validation"
                         " takes is known once the data are read")  # fmt: skip
        return found


def group_bytes(plan: Plan) -> Mapping[str, float]:
    """Return the bytes that a rank sends in a mean step, by group and to the host.

    The number of each group is that of the stage that sends most there.
    """
    dims, found = plan.grid.dims, {"dp": 0.0, "tp": 0.0, "pp": 0.0, "host": 0.0}
    for each in plan.traffic:
        steps = sum(kind.steps for kind in each.dp) or 1
        mean = sum((kind.steps or 1) * kind.bytes_sent(dims.dp) for kind in each.dp) / steps
        own = {"dp": mean, "tp": each.tp, "pp": each.pp, "host": each.host}
        found = {group: max(most, own[group]) for group, most in found.items()}
    return found
