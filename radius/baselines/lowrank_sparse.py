"""`--grad-path lowrank+sparse`: PowerSGD, and the largest entries of what the factors leave (ours).

After PowerSGD has subtracted its mean M^ from M = residual + gradient, every rank sends the largest
entries of the rest R = M - M^ exactly, and keeps the others:

    R's largest entries  --all-gather-->  their mean S,  gradient = M^ + S,  residual = R - sent
         (6)                 (7)              (8)

(6) needs M^, so these messages follow the second sums of all buckets, in the order of the buckets.
Summed over n ranks, n (M^ + S) and the new residuals are the gradients and the old residuals.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.data_parallel.bucket import GradBucket, ParamInfo
from megatron.data_parallel.exchange import Exchange
from megatron.data_parallel.reducer import ReducedGrad, StepContext
from megatron.parallel.tensor_shard import ModelShard
from radius.baselines.feedback import CompressedWork
from radius.baselines.largest_entries import add_mean, check_positions, take_largest
from radius.baselines.message_bytes import count
from radius.baselines.powersgd import PowerSGDReducer, PowerSGDWork


class LowRankSparseWork(PowerSGDWork):
    """The rounds of PowerSGD, then the entries of every rank."""

    _reducer: LowRankSparseReducer

    def start_third_round(self) -> None:
        """Wait for Q and send the largest entries of the rest (6, 7), in order of the buckets."""
        reducer = self._reducer
        self._read_mean()
        rest = {matrix.name: reducer.offered[matrix.name] for matrix in self._plan.matrices}
        self._message, self._count = take_largest(
            self._bucket, rest, density=reducer.density, loss_scale=self._scale
        )
        # The message must not change before the collective has read it.
        self._pending = reducer.exchange.gather(self._message)

    def wait(self) -> ReducedGrad:
        self._reducer.start_third_rounds()
        grad, received = self._bucket.grad, self._pending.wait()
        exact = grad.float()  # the gradient itself if it is fp32
        add_mean(received, self._count, exact, grad.dtype)  # (8)
        if exact is not grad:
            grad.copy_(exact)
            self._keep(exact.sub_(grad).div_(self._scale))
        return ReducedGrad(values=grad)

    def _keep(self, lost: torch.Tensor) -> None:
        """Add what a 16-bit gradient rounded off, fp32 [bucket], to the residuals of matrices."""
        for matrix in self._plan.matrices:
            offered = self._reducer.offered[matrix.name]
            offered.add_(self._bucket.slices[matrix.name].of(lost)[: offered.numel()])


class LowRankSparseReducer(PowerSGDReducer):
    """Reducer that sends two factors of each matrix, and the largest entries of the rest.

    `density` is the share of each matrix's entries that every rank sends; at 1 everything is sent
    as on the dense path. Entries are sent in the dtype of the gradient; their rounding errors stay
    in the residual. A matrix that the factors would not make smaller is sent whole.
    """

    name = "lowrank+sparse"
    prefix = "lowrank"

    def __init__(
        self,
        infos: Sequence[ParamInfo],
        exchange: Exchange,
        *,
        rank: int,
        density: float,
        seed: int,
        start_iter: int = 0,
        model_shard: ModelShard | None = None,
    ) -> None:
        super().__init__(
            infos, exchange, rank=rank, seed=seed, start_iter=start_iter, model_shard=model_shard
        )
        self.density = density

    @property
    def sends_all_by(self) -> str:
        return "--lowrank-density 1" if self.density >= 1 else ""

    def plan(self, bucket: GradBucket) -> Sequence[str]:
        check_positions(bucket, self.name)
        return () if self.sends_all_by else super().plan(bucket)

    def compress(self, bucket: GradBucket, step: StepContext) -> CompressedWork:
        plan = self._plans[bucket.index]
        work = LowRankSparseWork(bucket, plan, step, self)
        work.entries += sum(
            count(self.density, matrix.rows * matrix.columns) for matrix in plan.matrices
        )
        self.first_rounds.append(work)
        return work

    def start_third_rounds(self) -> None:
        """Start the second and then the third round of every bucket, unless they have started."""
        works = list(self.first_rounds)
        self.start_second_rounds()
        for work in works:
            assert isinstance(work, LowRankSparseWork)
            work.start_third_round()
