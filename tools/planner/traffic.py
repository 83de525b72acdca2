"""Bytes that a rank sends in a step, on each group, as a run counts and logs them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron.config import GPTConfig
from megatron.data_parallel.bucket import STATE_BLOCK
from megatron.data_parallel.bucket_plan import (
    BYTES,
    RankShapes,
    StepTraffic,
    main_bytes,
    moment_bytes,
    ring_all_reduce_bytes,
)
from megatron.low_memory.checkpoint_interval import layers_again
from megatron.memory_estimate import Activations, RankGrid, microbatches_of

NUMBER = 8
"""Bytes of an fp64 number, such as the norm and the loss that a copy of the model sums."""


@dataclass(frozen=True)
class TensorTraffic:
    """Traffic of one microbatch on the tensor-parallel group.

    `forward`, `again` (recomputed forwards) and `backward` are the bytes that a rank sends, and
    the fields in `_rounds` the trips round the ring. A sum takes two trips, a gather or a scattered
    sum one.
    """

    forward: int = 0
    again: int = 0
    backward: int = 0
    forward_rounds: int = 0
    again_rounds: int = 0
    backward_rounds: int = 0

    @property
    def total(self) -> int:
        """Bytes that a rank sends in all three parts."""
        return self.forward + self.again + self.backward


@dataclass(frozen=True)
class StepBytes:
    """Bytes sent by a rank of one stage.

    `dp` has the collectives by kind of step. `tp` and `pp` are sent in every step; they leave out
    what a gradient path sends to other ranks of its copy of the model. `host` is the size of the
    offloaded states, which move once each way.
    """

    dp: list[StepTraffic]
    tp: int
    pp: int
    host: int = 0


def step_bytes(grid: RankGrid, stage: int, rank: RankShapes) -> StepBytes:
    """Return the bytes that `rank`, a rank of the stage, sends in a step."""
    config = grid.config
    states = sum(
        main_bytes(config, bucket.numel, matrix=bucket.kind.matrix)
        + moment_bytes(config, bucket.numel, matrix=bucket.kind.matrix)
        for bucket in rank.buckets
    )
    return StepBytes(
        dp=list(grid.path.plan_traffic(config, rank)),
        tp=_on_tensor_group(grid, stage, rank),
        pp=_on_pipeline(grid, stage, rank),
        host=states if config.offload.optimizer_cpu_offload else 0,
    )


def state_width(config: GPTConfig) -> float:
    """Return the bytes of the main parameter and the moments of an entry of a matrix.

    Scales of a block count in part for each of its entries.
    """
    block = main_bytes(config, STATE_BLOCK, matrix=True)
    block += moment_bytes(config, STATE_BLOCK, matrix=True)
    return block / STATE_BLOCK


def tensor_traffic(grid: RankGrid, stage: int) -> TensorTraffic:
    """Return the traffic of one microbatch through all chunks of a stage."""
    ranks = grid.dims.tp
    if ranks == 1:
        return TensorTraffic()
    # A gather or its reverse sends half the bytes of a sum of the whole.
    cuts = grid.config.parallel.sequence_parallel
    whole = Activations(grid).hidden * (ranks if cuts else 1)
    unit = (ranks - 1) * whole // ranks if cuts else ring_all_reduce_bytes(whole, ranks)
    split = grid.split[stage]
    layers = sum(map(len, split))
    again = sum(layers_again(len(run), grid.config.recompute)[0] for run in split)
    # Columns: f gathers, and backward gathers again and scatters a sum; rows the other way round.
    each_forward, each_backward = (4, 6) if cuts else (2, 2)
    forward, backward, again = each_forward * layers, each_backward * layers, each_forward * again
    if grid.holds_embedding(stage):
        forward, backward = forward + 1, backward + cuts
    if grid.holds_head(stage):
        forward, backward = forward + cuts, backward + (2 if cuts else 1)
    each = 1 if cuts else 2
    sent, rounds = forward * unit, each * forward
    if grid.holds_head(stage):
        config = grid.config
        rows = config.training.micro_batch_size * config.model.seq_length
        # For each token the largest logit; then the sum of exponentials and the target's logit.
        sent += sum(ring_all_reduce_bytes(4 * count * rows, ranks) for count in (1, 2))
        rounds += 4
    return TensorTraffic(sent, again * unit, backward * unit, rounds, each * again, each * backward)


def _on_tensor_group(grid: RankGrid, stage: int, rank: RankShapes) -> int:
    ranks = grid.dims.tp
    if ranks == 1:
        return 0
    grad = BYTES[grid.config.precision.grad_dtype]
    each = tensor_traffic(grid, stage)
    sums = [grad * bucket.numel for bucket in rank.buckets if bucket.kind.partial]
    return microbatches_of(grid) * each.total + _summed([*sums, NUMBER], ranks)


def _on_pipeline(grid: RankGrid, stage: int, rank: RankShapes) -> int:
    stages = grid.dims.pp
    if stages == 1:
        return 0
    chunks = len(grid.split[stage])
    # Every chunk sends its output and its input's gradient, except at the model's ends: Eq. 9 and
    # 10 of the SAMO paper, which count receives, too.
    ends = grid.holds_embedding(stage) + grid.holds_head(stage)
    messages = microbatches_of(grid) * (2 * chunks - ends)
    grad = BYTES[grid.config.precision.grad_dtype]
    tied = [grad * bucket.numel for bucket in rank.buckets if bucket.kind.tied]
    # The norm of the gradient, and the loss.
    numbers = _summed([NUMBER, NUMBER], stages)
    return messages * Activations(grid).hidden + _summed(tied, 2) + numbers


def _summed(payloads: Iterable[int], ranks: int) -> int:
    return sum(ring_all_reduce_bytes(payload, ranks) for payload in payloads)
