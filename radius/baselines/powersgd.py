"""`--grad-path powersgd`: low-rank gradients with error feedback (Vogels et al. 2020).

For each matrix M = residual + gradient, a x b, and Q, b x r, of the last step:

    P = M orth(Q)  --all-reduce-->  P^ = orth(P),  Q = M' P^  --all-reduce-->  M^ = P^ Q'
         (1)           (2)                 (3)                    (4)            (5)

(1) and (2) run when the bucket is full, during backward. (3) and (4) run for all buckets after
backward, so that the second sums overlap each other. (5) runs bucket by bucket. torch's hook for
DistributedDataParallel starts (4) in a callback of (2), so ranks may issue the sums of several
buckets in different orders; here all ranks use the order of the buckets.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from megatron.data_parallel.bucket import GradBucket, ParamInfo
from megatron.data_parallel.norm import PIECE
from megatron.data_parallel.reducer import PerEntryState, ReducedGrad, StepContext
from megatron.parallel.tensor_shard import ModelShard
from megatron.transfer import to_device
from radius.baselines.feedback import CompressedWork, FeedbackReducer
from radius.baselines.message_bytes import FactorRank, is_smaller

if TYPE_CHECKING:
    from megatron.data_parallel.exchange import Exchange, Transfer

AT_ONCE = {"cpu": PIECE, "cuda": 2 * 1024 * 1024}
"""Entries of a matrix that are decompressed at a time, by device type."""
WARM_START = "warm_start/"
"""Prefix, before a logical name, of the Q of the last step, equal on all data-parallel ranks."""


def first_q(seed: int, name: str, columns: int, rank: int) -> torch.Tensor:
    """Return the initial Q of a parameter, [columns, rank]: normal, from the arguments alone."""
    digest = hashlib.sha256(f"powersgd {seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randn(columns, rank, generator=generator)


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Return orthonormal columns, [n, r], whose span includes the columns of `matrix` [n, r].

    Householder's QR has full rank even if columns are dependent or 0. Gram-Schmidt would divide by
    0 there, and a Q that became 0 would stay 0.
    """
    return torch.linalg.qr(matrix).Q


@dataclass(frozen=True)
class _Matrix:
    """A compressed parameter, and the position of its factors among those of its bucket."""

    name: str
    rows: int
    columns: int
    p: slice
    q: slice


@dataclass
class _Plan:
    """The messages of one bucket: P of each matrix, then Q of each matrix.

    Parameters too small to compress (`whole`, by name) travel with P.
    """

    matrices: list[_Matrix] = field(default_factory=list)
    whole: dict[str, slice] = field(default_factory=dict)
    first_round: int = 0
    second_round: int = 0


class PowerSGDWork(CompressedWork):
    """The two rounds of one bucket: [P | whole], then [Q]."""

    _pending: Transfer

    def __init__(
        self, bucket: GradBucket, plan: _Plan, step: StepContext, reducer: PowerSGDReducer
    ) -> None:
        self._bucket, self._plan, self._reducer = bucket, plan, reducer
        self._scale = step.loss_scale
        self._first = torch.empty(plan.first_round, dtype=torch.float32, device=bucket.grad.device)
        self._second = self._first.new_empty(plan.second_round)
        self._bases: list[torch.Tensor] = []
        for matrix in plan.matrices:  # (1)
            basis = orthonormal(reducer.q[matrix.name])
            reducer.offer(bucket, matrix.name, step)
            torch.mm(self._offered(matrix), basis, out=self._p(matrix))
        for name, place in plan.whole.items():
            gradient = bucket.slices[name].of(bucket.grad)
            self._first[place].copy_(gradient).mul_(1.0 / self._scale)
        self.entries = plan.first_round + plan.second_round
        self._pending = reducer.exchange.mean(self._first)  # (2)

    def start_second_round(self) -> None:
        """Wait for P and send Q. All ranks call this method in index order of the buckets."""
        self._end_round()
        for matrix in self._plan.matrices:  # (3)
            basis = orthonormal(self._p(matrix))
            torch.mm(self._offered(matrix).T, basis, out=self._q(matrix))
            self._bases.append(basis)
        self._pending = self._reducer.exchange.mean(self._second)  # (4)

    def wait(self) -> ReducedGrad:
        self._reducer.start_second_rounds()
        self._read_mean()
        return ReducedGrad(values=self._bucket.grad)

    def _read_mean(self) -> None:
        """Wait for Q, write the mean to the gradient and leave the unsent part."""
        self._end_round()
        for matrix, basis in zip(self._plan.matrices, self._bases, strict=True):  # (5)
            self._decompress(matrix, basis)
        for name, place in self._plan.whole.items():
            gradient = self._bucket.slices[name].of(self._bucket.grad)
            gradient.copy_(self._first[place].mul_(self._scale))

    def drop(self) -> None:
        self._reducer.first_rounds.clear()
        self._end_round()

    def commit(self) -> None:
        for matrix in self._plan.matrices:
            self._reducer.q[matrix.name].copy_(self._q(matrix))

    def _decompress(self, matrix: _Matrix, basis: torch.Tensor) -> None:
        """Write M^ to the gradient, and subtract M^ as rounded there from the offered buffer."""
        grad = self._bucket.slices[matrix.name].of(self._bucket.grad)
        mean = grad[: matrix.rows * matrix.columns].view(matrix.rows, matrix.columns)
        offered = self._offered(matrix)
        q = (self._q(matrix) * self._scale).T
        at_once = max(1, AT_ONCE[grad.device.type] // matrix.columns)
        for rows in (slice(i, i + at_once) for i in range(0, matrix.rows, at_once)):
            mean[rows].copy_(basis[rows] @ q)
            offered[rows].sub_(mean[rows], alpha=1.0 / self._scale)

    def _end_round(self) -> None:
        self._pending.wait()

    def _offered(self, matrix: _Matrix) -> torch.Tensor:
        return self._reducer.offered[matrix.name].view(matrix.rows, matrix.columns)

    def _p(self, matrix: _Matrix) -> torch.Tensor:
        return self._first[matrix.p].view(matrix.rows, -1)

    def _q(self, matrix: _Matrix) -> torch.Tensor:
        return self._second[matrix.q].view(matrix.columns, -1)


class PowerSGDReducer(FeedbackReducer):
    """Reducer that sends each matrix as the product of two factors of rank `rank`.

    With `rank_share` the rank is that share of the shorter side of the matrix, rounded up. Factors
    are computed and sent in fp32. A matrix that they would not make smaller is sent whole with the
    first factor. Each rank subtracts M^, the mean that all ranks get, from its residual + gradient,
    as torch's hook does: the mean of the residuals is then the mean of what was not sent. Parts of
    a tensor-parallel parameter are matrices of their own.
    """

    name = "powersgd"

    def __init__(
        self,
        infos: Sequence[ParamInfo],
        exchange: Exchange,
        *,
        rank: int = 4,
        rank_share: float | None = None,
        seed: int,
        start_iter: int = 0,
        model_shard: ModelShard | None = None,
    ) -> None:
        super().__init__(infos, exchange, start_iter=start_iter, model_shard=model_shard)
        self.factors, self.seed = FactorRank(rank, rank_share), seed
        self.q: dict[str, torch.Tensor] = {}
        self.first_rounds: list[PowerSGDWork] = []
        self._plans: dict[int, _Plan] = {}

    def plan(self, bucket: GradBucket) -> Sequence[str]:
        self._plans[bucket.index] = plan = _Plan()
        for name, where in bucket.slices.items():
            rows, *others = self.infos[name].local_shape
            columns = math.prod(others)
            rank = self.factors.of(self.infos[name].logical_shape)
            p, q = rank * rows, rank * columns
            if not self._is_worth_it(name):
                plan.whole[name] = slice(plan.first_round, plan.first_round + where.numel)
                plan.first_round += where.numel
                continue
            p_place = slice(plan.first_round, plan.first_round + p)
            q_place = slice(plan.second_round, plan.second_round + q)
            plan.matrices.append(_Matrix(name, rows, columns, p_place, q_place))
            plan.first_round, plan.second_round = p_place.stop, q_place.stop
            self.q[name] = to_device(first_q(self.seed, name, columns, rank), bucket.grad.device)
        return [matrix.name for matrix in plan.matrices]

    def _is_worth_it(self, name: str) -> bool:
        """Return whether factors are smaller than the smallest part of the parameter on any rank.

        The smallest part decides, so that either all ranks of a parameter have a residual or none.
        """
        info, tp = self.infos[name], self.model_shard.tp
        ranks = 1 if tp is None else tp.size
        least = list(info.local_shape)
        if info.tp_shard is not None:
            least[info.tp_shard.axis] = info.tp_shard.block // ranks * info.tp_shard.blocks
        return is_smaller(least[0], math.prod(least[1:]), self.factors.of(info.logical_shape))

    def compress(self, bucket: GradBucket, step: StepContext) -> CompressedWork:
        plan = self._plans[bucket.index]
        work = PowerSGDWork(bucket, plan, step, self)
        self.first_rounds.append(work)
        return work

    def start_second_rounds(self) -> None:
        """Start the second round of every bucket whose first round is in progress.

        The first call in a step starts all of them, later calls none.
        """
        while self.first_rounds:
            self.first_rounds.pop(0).start_second_round()

    def shared_tensors(self) -> Iterator[tuple[str, torch.Tensor | PerEntryState]]:
        if self.began:
            yield from ((self._warm_start(name), q) for name, q in self.q.items())

    def load_state_tensors(
        self, own: Mapping[str, torch.Tensor], shared: Mapping[str, torch.Tensor]
    ) -> None:
        super().load_state_tensors(own, shared)
        for name, q in self.q.items():
            # Factors of other parts do not fit this rank's part, which starts from the initial Q.
            if self._warm_start(name) in shared:
                q.copy_(shared[self._warm_start(name)])

    def _warm_start(self, name: str) -> str:
        """Return the name of Q in a checkpoint; that of a tensor shard ends with its range."""
        shard = self.infos[name].tp_shard
        part = f"@{shard.axis}:{shard.start}-{shard.stop}" if shard is not None else ""
        return f"{WARM_START}{name}{part}"
