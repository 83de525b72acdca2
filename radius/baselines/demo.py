"""`--grad-path demo`: large DCT coefficients of decoupled momentum (Peng et al. 2024, DeMo).

Each rank has a momentum m of its own for each matrix (arXiv 2411.19870, Algorithm 1):

    m <- beta m + gradient of this rank
    q  = the k largest coefficients of each chunk of DCT(m)     --all-gather-->   Q, the mean of q
    m <- m - IDCT(q),   reduced gradient = sign(IDCT(Q))

The optimizer applies the learning rate, which the authors' program multiplies into m. Q is the mean
over all ranks, so that with beta = 1 and without the sign nothing is lost; the authors' program
averages a coefficient over the ranks that sent it. 1-D parameters, and all parameters before the
first compressed step, are averaged whole. That is the method with k = all, which leaves no
momentum, so the sign is applied to these means too.

All ranks decode all messages in rank order with equal operations on equal shapes, so that on equal
machines the weights of all ranks stay bit-equal. The chunks of a tensor-parallel parameter are
those of the rank's shard.

This file is the whole path: settings, reducer, and bytes for the planner.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.config import at_least, between, option, options_of, refused_pair, section
from megatron.data_parallel.bucket_plan import (
    BYTES,
    BucketPlan,
    PathBytes,
    RankShapes,
    StepTraffic,
)
from megatron.data_parallel.gradient_path import GradientPath
from radius.baselines.feedback import BASELINE_PAIRS, CompressedWork, FeedbackReducer, check_start
from radius.baselines.message_bytes import gathered_plan, gathered_traffic, message_bytes

if TYPE_CHECKING:
    import torch

    from megatron.config import Config
    from megatron.data_parallel.bucket import GradBucket, ParamInfo
    from megatron.data_parallel.exchange import Exchange, Transfer
    from megatron.data_parallel.reducer import ReducedGrad, StepContext, Work
    from megatron.parallel.groups import ProcessGroups
    from megatron.parallel.tensor_shard import ModelShard

LONGEST_SIDE = 181
"""Longest side of a chunk whose positions fit an int16."""
POSITION_BYTES = 2
BAND = 1024 * 1024
"""Number of entries that are transformed at a time."""


@section
class DeMoConfig:
    """Options of DeMo."""

    demo_chunk: int = option(
        default=64,
        help="Side of the square chunks of a matrix, of which the DCT is computed; the sides of a "
        "matrix that it does not divide get the same number of smaller chunks.",
        within=between(1, LONGEST_SIDE),
    )
    demo_k: int = option(
        default=32,
        help="Coefficients of each chunk, the largest, that every rank sends (the square of "
        "demo_chunk = send all, as the dense path).",
        within=at_least(1),
    )
    demo_decay: float = option(
        default=0.999,
        help="Decay of the momentum that every rank keeps of its own gradients.",
        within=between(0, 1),
    )
    demo_sign: bool = option(
        default=True,
        help="Give the optimizer the sign of the mean of what the ranks sent, of each entry of all "
        "parameters (false = the mean itself). Clipping and SGD's momentum must be off.",
    )
    demo_start_iter: int = option(
        default=0,
        help="First compressed step; earlier steps are dense (0 = compress from the first step).",
        within=at_least(0),
    )

    @property
    def sends_all(self) -> bool:
        """Whether every coefficient is sent."""
        return self.demo_k >= self.demo_chunk**2


class DeMoPath(GradientPath):
    """Every rank's large DCT coefficients of its own momentum go to every other rank."""

    name = "demo"
    sections = {"demo": DeMoConfig}
    refused_pairs = (
        *BASELINE_PAIRS,
        refused_pair(
            "demo_sign with optimizer adam",
            lambda c: options_of(c, DeMoConfig).demo_sign and c.optimizer.optimizer != "sgd",
            "Adam would divide signs by the root of their mean square, which is about 1",
            "give --optimizer sgd --sgd-momentum 0 --clip-grad 0, or --demo-sign false",
        ),
        refused_pair(
            "demo_sign with sgd_momentum",
            lambda c: (
                options_of(c, DeMoConfig).demo_sign
                and c.optimizer.optimizer == "sgd"
                and c.optimizer.sgd_momentum != 0
            ),
            "DeMo has a momentum of its own, and the sign is the update",
            "give --sgd-momentum 0, or --demo-sign false",
        ),
        refused_pair(
            "demo_sign with clip_grad",
            lambda c: options_of(c, DeMoConfig).demo_sign and c.optimizer.clip_grad > 0,
            "a sign has no length to clip, and the norm is that of the mean before the sign",
            "give --clip-grad 0, or --demo-sign false",
        ),
        refused_pair(
            "grad_path demo with fp16 without accumulate_allreduce_grads_in_fp32",
            lambda c: c.precision.grad_dtype == "float16",
            "a coefficient sums a chunk of the momentum of many steps times the loss scale, "
            "which overflows in 16 bit however far the scale falls",
            "give --accumulate-allreduce-grads-in-fp32, or another --grad-path",
        ),
    )

    def check(self, config: Config) -> None:
        check_start(config, "demo_start_iter", options_of(config, DeMoConfig).demo_start_iter)

    def reducer(
        self,
        config: Config,
        infos: Sequence[ParamInfo],
        groups: ProcessGroups,
        exchange: Exchange,
    ) -> DeMoReducer:
        from megatron.parallel.tensor_shard import ModelShard

        options = options_of(config, DeMoConfig)
        return DeMoReducer(infos, exchange, options, model_shard=ModelShard(infos, groups))

    def plan_bytes(self, config: Config, rank: RankShapes) -> PathBytes:
        """Return the bytes of the momentum, a residual, and of the messages."""
        return gathered_plan(rank, self._message(config, rank))

    def plan_traffic(self, config: Config, rank: RankShapes) -> Sequence[StepTraffic]:
        return gathered_traffic(
            rank,
            self._message(config, rank),
            start=options_of(config, DeMoConfig).demo_start_iter,
            steps=config.total_iterations(),
            value_bytes=BYTES[config.precision.grad_dtype],
        )

    def _message(self, config: Config, rank: RankShapes) -> Callable[[BucketPlan], int] | None:
        """Return the function of a bucket's message; None if everything is sent."""
        options, value_bytes = options_of(config, DeMoConfig), BYTES[config.precision.grad_dtype]

        def message(bucket: BucketPlan) -> int:
            grids = [ChunkGrid.of(rank.params[n].local_shape, options) for n in bucket.slices]
            return message_bytes(sum(grid.sent for grid in grids), value_bytes, POSITION_BYTES)

        return None if options.sends_all else message


@dataclass(frozen=True)
class ChunkGrid:
    """The chunks of a matrix of `shape` (rows, columns).

    There are `down` x `across` chunks of `height` x `width` entries, as equal as possible; zeros
    fill the last ones. `k` coefficients of each chunk are sent.
    """

    shape: tuple[int, int]
    down: int
    across: int
    height: int
    width: int
    k: int

    @classmethod
    def of(cls, shape: Sequence[int], options: DeMoConfig) -> ChunkGrid:
        """Return the chunks of a parameter of this shape, whose first axis has the rows."""
        rows, columns = shape[0], math.prod(shape[1:])
        down, across = (-(-side // options.demo_chunk) for side in (rows, columns))
        height, width = -(-rows // max(down, 1)), -(-columns // max(across, 1))
        k = min(options.demo_k, height * width)
        return cls((rows, columns), down, across, height, width, k)

    @property
    def sent(self) -> int:
        """Number of coefficients that are sent."""
        return self.down * self.across * self.k

    def bands(self) -> Iterator[tuple[slice, slice]]:
        """Yield the rows of the matrix and the chunks of each part that is transformed at once."""
        at_once = max(1, BAND // (self.height * self.width * self.across))
        for first in range(0, self.down, at_once):
            last = min(first + at_once, self.down)
            rows = slice(first * self.height, min(last * self.height, self.shape[0]))
            yield rows, slice(first * self.across, last * self.across)


def dct_matrix(n: int) -> torch.Tensor:
    """Return the orthonormal DCT-II of n numbers as a matrix, fp32 [n, n]."""
    import torch

    frequency, place = torch.arange(n, dtype=torch.float64).unsqueeze(1), torch.arange(n) + 0.5
    matrix = torch.cos(math.pi / n * frequency * place) * math.sqrt(2 / n)
    matrix[0] = math.sqrt(1 / n)
    return matrix.float()


@dataclass(frozen=True)
class _ChunkedMatrix:
    """A compressed parameter, and the place of its coefficients in the message of its bucket."""

    name: str
    grid: ChunkGrid
    at: int
    columns_dct: torch.Tensor  # [height, height], of each column of a chunk
    rows_dct: torch.Tensor  # [width, width]

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the matrix that a 1-D tensor begins with."""
        rows, columns = self.grid.shape
        return flat[: rows * columns].view(rows, columns)

    def of(self, message: torch.Tensor) -> torch.Tensor:
        """Return the part of the values or positions of a message, [chunks, k]."""
        return message[self.at : self.at + self.grid.sent].view(-1, self.grid.k)

    def transform(self, band: torch.Tensor) -> torch.Tensor:
        """Return the coefficients [chunks, height * width] of some rows of the matrix."""
        import torch

        grid, down = self.grid, -(-len(band) // self.grid.height)
        lacking = (grid.across * grid.width - band.shape[1], down * grid.height - len(band))
        padded = torch.nn.functional.pad(band, (0, lacking[0], 0, lacking[1]))
        half = self.columns_dct @ padded.view(down, grid.height, -1)
        done = half.unflatten(2, (grid.across, grid.width)) @ self.rows_dct.T
        return done.transpose(1, 2).reshape(down * grid.across, -1)

    def inverse(self, coefficients: torch.Tensor, rows: int) -> torch.Tensor:
        """Return the `rows` rows of the matrix that have these coefficients."""
        grid = self.grid
        chunks = coefficients.view(-1, grid.across, grid.height, grid.width).transpose(1, 2)
        half = (chunks @ self.rows_dct).flatten(2)
        return (self.columns_dct.T @ half).flatten(0, 1)[:rows, : grid.shape[1]]


def split_message(
    raw: torch.Tensor, entries: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the values and of the positions (int16) of a message (uint8)."""
    import torch

    head = entries * dtype.itemsize
    positions = raw[head : head + entries * POSITION_BYTES]
    return raw[:head].view(dtype), positions.view(torch.int16)


@dataclass
class _DeMoWork(CompressedWork):
    bucket: GradBucket
    matrices: Sequence[_ChunkedMatrix]
    message: torch.Tensor  # must not change before the collective has read it
    received: Transfer  # [ranks, bytes]
    entries: int

    def wait(self) -> ReducedGrad:
        import torch

        from megatron.data_parallel.reducer import ReducedGrad

        mean = self.bucket.grad.zero_()
        messages = [split_message(raw, self.entries, mean.dtype) for raw in self.received.wait()]
        for matrix in self.matrices:
            out = matrix.view(self.bucket.slices[matrix.name].of(mean))
            area = matrix.grid.height * matrix.grid.width
            for rows, chunks in matrix.grid.bands():
                total = torch.zeros(chunks.stop - chunks.start, area, device=mean.device)
                for values, positions in messages:
                    places = matrix.of(positions)[chunks].long()
                    total.scatter_add_(1, places, matrix.of(values)[chunks].float())
                band = out[rows]
                band.copy_(matrix.inverse(total.div_(len(messages)), len(band)))
        return ReducedGrad(values=mean)

    def drop(self) -> None:
        self.received.wait()


@dataclass
class _SignWork:
    """A reduction of which the sign is taken; the norm remains that of the mean."""

    mean: Work
    loss_scale: float

    def wait(self) -> ReducedGrad:
        from megatron.data_parallel.norm import sum_of_squares

        reduced = self.mean.wait()
        squares = sum_of_squares(reduced.values)
        signs = reduced.values.sign_().mul_(self.loss_scale)
        return dataclasses.replace(reduced, values=signs, squared_norm=squares)

    def drop(self) -> None:
        self.mean.drop()


class DeMoReducer(FeedbackReducer):
    """Reducer that sends the largest DCT coefficients of each chunk of this rank's momentum.

    The residual of the base class is the momentum. Coefficients are sent in the gradient's dtype;
    the rounding error stays in the momentum. If all coefficients are to be sent, matrices are
    averaged as on the dense path.
    """

    name = "demo"

    def __init__(
        self,
        infos: Sequence[ParamInfo],
        exchange: Exchange,
        options: DeMoConfig,
        *,
        model_shard: ModelShard | None = None,
    ) -> None:
        start = options.demo_start_iter
        super().__init__(infos, exchange, start_iter=start, model_shard=model_shard)
        self.options = options
        self._matrices: dict[int, list[_ChunkedMatrix]] = {}

    @property
    def sends_all_by(self) -> str:
        options = self.options
        flags = f"--demo-k {options.demo_k} with --demo-chunk {options.demo_chunk}"
        return flags if options.sends_all else ""

    def plan(self, bucket: GradBucket) -> Sequence[str]:
        from megatron.transfer import to_device

        if self.sends_all_by:
            return ()
        self._matrices[bucket.index] = found = list[_ChunkedMatrix]()
        at, device = 0, bucket.grad.device
        # A tensor-parallel rank may have nothing but padding of a parameter.
        for name in filter(lambda name: self.infos[name].local_entries, bucket.names):
            grid = ChunkGrid.of(self.infos[name].local_shape, self.options)
            sides = (to_device(dct_matrix(side), device) for side in (grid.height, grid.width))
            found.append(_ChunkedMatrix(name, grid, at, *sides))
            at += grid.sent
        return bucket.names

    def offer(self, bucket: GradBucket, name: str, step: StepContext) -> torch.Tensor:
        """Return beta m + gradient of the logical entries, fp32, unscaled."""
        offered = super().offer(bucket, name, step)
        return offered.add_(self._residual[name], alpha=self.options.demo_decay - 1.0)

    def reduce(self, bucket: GradBucket, step: StepContext) -> Work:
        work = super().reduce(bucket, step)
        return _SignWork(work, step.loss_scale) if self.options.demo_sign else work

    def compress(self, bucket: GradBucket, step: StepContext) -> CompressedWork:
        import torch

        planned, grad = self._matrices[bucket.index], bucket.grad
        entries = sum(matrix.grid.sent for matrix in planned)
        length = message_bytes(entries, grad.element_size(), POSITION_BYTES)
        raw = torch.zeros(length, dtype=torch.uint8, device=grad.device)
        values, positions = split_message(raw, entries, grad.dtype)
        for matrix in planned:
            momentum = matrix.view(self.offer(bucket, matrix.name, step))
            for rows, chunks in matrix.grid.bands():
                found = matrix.transform(momentum[rows])
                chosen = found.abs().topk(matrix.grid.k, dim=1, sorted=False).indices
                sent = matrix.of(values)[chunks]
                sent.copy_(found.gather(1, chosen).mul_(step.loss_scale))
                matrix.of(positions)[chunks] = chosen.to(torch.int16)
                taken = torch.zeros_like(found)
                taken.scatter_(1, chosen, sent.float() / step.loss_scale)
                band = momentum[rows]
                band.sub_(matrix.inverse(taken, len(band)))
        return _DeMoWork(bucket, planned, raw, self.exchange.gather(raw), entries)
