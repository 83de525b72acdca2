"""Optimizer offloading: master weights and moments in host memory (AxoNN, section V-B).

The device holds 16-bit parameters and gradients, and state buffers for two pieces of half a bucket
(`--offload-bucket-size`): one piece is copied while the other is updated.

    copied in        0  1     2  3
    updated             0  1     2  3
    copied out             0  1     2  3        alternating between two sets of buffers

An entry of the bucket needs 4 bytes for the master weight, 8 for moments and 2 for the widened
gradient, where the paper counts 4. Updated values, in the parameters' dtype, overwrite the
gradients of their bucket until they are scattered to the parameters. No gradient is overwritten
before it was read, since no gradient begins at an earlier byte than its updated value.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from megatron.data_parallel.bucket import ALIGNMENT, GradBucket
from megatron.data_parallel.engine import GradientEngine
from megatron.data_parallel.reducer import ReducedGrad, Step
from megatron.optimizer.bucket_optimizer import BucketOptimizer, BucketState
from megatron.optimizer.chunks import SETS, offload_piece
from megatron.optimizer.pinned_memory import pinned_zeros
from megatron.optimizer.state_formats import (
    StateFormat,
    StateFormats,
    vector_of,
    write_all,
)
from megatron.optimizer.update_rules import Hyper, UpdateRule


class Lanes(Protocol):
    """Copies concurrent with computation; each buffer set is copied in, updated, copied out."""

    def coming(self, number: int) -> AbstractContextManager[None]:
        """Return a context for copies into set `number`, which complete before later operations."""
        ...

    def going(self, number: int) -> AbstractContextManager[None]:
        """Return a context for copies out of set `number`, which wait for earlier operations."""
        ...

    def settle(self) -> None:
        """Block until all copies to host memory are complete."""
        ...


class OneLane:
    """Synchronous copies on a CPU."""

    def coming(self, number: int) -> AbstractContextManager[None]:
        return nullcontext()

    def going(self, number: int) -> AbstractContextManager[None]:
        return nullcontext()

    def settle(self) -> None:
        pass


class CudaLanes:
    """Streams for copies in and out, concurrent with the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._came, self._updated, self._left = (
            [torch.cuda.Event() for _ in range(SETS)] for _ in range(3)
        )
        # Earlier operations may still use the memory of the new buffers.
        self._in.wait_stream(torch.cuda.current_stream(device))

    @contextmanager
    def coming(self, number: int) -> Iterator[None]:
        with torch.cuda.stream(self._in):
            # Copies out are in order, so all copies before this set's are complete, too.
            self._in.wait_event(self._left[number])
            yield
            self._came[number].record(self._in)
        torch.cuda.current_stream(self._in.device).wait_event(self._came[number])

    @contextmanager
    def going(self, number: int) -> Iterator[None]:
        self._updated[number].record(torch.cuda.current_stream(self._out.device))
        with torch.cuda.stream(self._out):
            self._out.wait_event(self._updated[number])
            yield
            self._left[number].record(self._out)

    def settle(self) -> None:
        self._out.synchronize()


class OffloadedOptimizer(BucketOptimizer):
    """A `BucketOptimizer` with states in host memory (pinned for a GPU) and bit-identical results.

    `bucket_size` is the number of entries whose states fit in the device buffers; a CPU uses
    smaller pieces, which fit in cache. Master weights that are not fp32 are in host memory, too.
    Sharded buckets, sparse gradients and reducers that want the update are not supported.
    """

    def __init__(
        self,
        engine: GradientEngine,
        rule: UpdateRule,
        *,
        bucket_size: int,
        formats: StateFormats | None = None,
    ) -> None:
        assert bucket_size >= SETS * ALIGNMENT
        self._lanes: Lanes = OneLane()
        super().__init__(engine, rule, most=offload_piece(bucket_size), formats=formats)

    @property
    def states(self) -> list[BucketState]:
        self._lanes.settle()
        return self._states

    @property
    def device_bytes(self) -> int:
        """Bytes on the device in addition to parameters and gradients."""
        buffers = [tensor for each in self._sets for tensor in each.tensors]
        return sum(tensor.nbytes for tensor in (*buffers, self._scratch))

    @property
    def host_bytes(self) -> int:
        """Bytes of all states."""
        return sum(tensor.nbytes for state in self._states for tensor in state.tensors)

    def step(self, step: Step, *, lr: float, weight_decay: float) -> None:
        # Each piece uses the same set in every step, so its copy in follows its last copy out.
        self._piece = 0
        super().step(step, lr=lr, weight_decay=weight_decay)

    def _allocate(self, bucket: GradBucket) -> BucketState:
        def zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
            if bucket.grad.is_cuda:
                return pinned_zeros(numel, dtype)
            return torch.zeros(numel, dtype=dtype)

        assert bucket.shard is None, "optimizer_cpu_offload is refused with sharded states"
        formats = self._formats(bucket)
        return BucketState(tuple(vector_of(each, bucket.numel, zeros) for each in formats))

    def _size_scratch(self) -> None:
        super()._size_scratch()
        self._buffers_of: dict[tuple[StateFormat, ...], list[BucketState]] = {}
        lengths: dict[tuple[StateFormat, ...], int] = {}
        for bucket, state in zip(self.engine.buckets, self._states, strict=True):
            longest = self._chunk if state.is_fp32 else self._coded_chunk
            length = max(lengths.get(state.formats, 0), min(longest, bucket.numel))
            lengths[state.formats] = length
        for formats, length in lengths.items():
            self._buffers_of[formats] = [self._device_buffers(formats, length) for _ in range(SETS)]
        if self._device.type == "cuda":
            self._lanes = CudaLanes(self._device)
            # Buffers and pinned memory must outlive the copies between them, even if the optimizer
            # is freed before the process ends.
            weakref.finalize(self, self._lanes.settle).atexit = False

    @property
    def _sets(self) -> list[BucketState]:
        """The device buffers of all formats."""
        return [state for sets in self._buffers_of.values() for state in sets]

    def _device_buffers(self, formats: Sequence[StateFormat], length: int) -> BucketState:
        def empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(numel, dtype=dtype, device=self._device)

        return BucketState(tuple(vector_of(each, length, empty) for each in formats))

    def _bind(self, name: str, flat: torch.Tensor) -> None:
        """Bind as `BucketLayout.bind` does, with the still unused gradient memory as scratch."""
        bucket, where = self.engine.place(name)
        param, layout = self.engine.infos[name].param.detach(), self.engine.layout
        stored = where.of(bucket.grad)
        layout.gather(name, param, stored)
        flat.copy_(stored)
        if where.numel < param.numel():
            param.zero_()
            layout.scatter(name, stored, param)
        stored.zero_()

    def _update(
        self,
        bucket: GradBucket,
        reduced: ReducedGrad,
        factor: float,
        hyper: Hyper,
        out: torch.Tensor | None = None,
    ) -> None:
        assert reduced.index is None and reduced.part is None and out is None
        assert not self.engine.wants_update, "its place is taken"
        host, values = self._states[bucket.index], self._values(bucket)
        for name, cut in self._pieces(bucket):
            number = self._piece % SETS
            self._piece += 1
            there = host.cut(cut.start, cut.stop)
            here = self._buffers(bucket, number, cut)
            with self._lanes.coming(number):
                _copy(there.tensors, here.tensors)
            reduced.wait_until(cut.stop)
            states = [vector.read() for vector in here.vectors]
            weight, *moments = states
            self.rule.apply(weight, self._scaled(reduced.values[cut], factor), moments, hyper)
            if not host.is_fp32:
                write_all(here.vectors, states, self._random_bits(bucket, name, cut, hyper.t))
            values[cut].copy_(here.master)
            with self._lanes.going(number):
                _copy(here.tensors, there.tensors)
        self._expand(bucket, values)

    def _copy_all_to_params(self) -> None:
        for bucket, host in zip(self.engine.buckets, self.states, strict=True):
            values = self._values(bucket)
            for _, cut in self._pieces(bucket):
                weight = self._buffers(bucket, 0, cut).master
                with self._lanes.coming(0):
                    _copy([host.master[cut]], [weight])
                values[cut].copy_(weight)
                with self._lanes.going(0):
                    pass  # the host copy is unchanged
            self._expand(bucket, values)

    def _pieces(self, bucket: GradBucket) -> Iterator[tuple[str, slice]]:
        """Yield the pieces of a bucket, each of one parameter unless all states are fp32."""
        if not self._states[bucket.index].is_fp32:
            yield from self._coded_cuts(bucket, bucket.numel)
            return
        for start in range(0, bucket.numel, self._chunk):
            yield "", slice(start, min(start + self._chunk, bucket.numel))

    def _buffers(self, bucket: GradBucket, number: int, cut: slice) -> BucketState:
        """Return the device buffers for the master weights and moments of a piece."""
        formats = self._states[bucket.index].formats
        return self._buffers_of[formats][number].cut(0, cut.stop - cut.start)

    def _values(self, bucket: GradBucket) -> torch.Tensor:
        """Return a view of the gradient memory for updated values in the parameters' dtype."""
        dtype = self.engine.infos[bucket.names[0]].param.dtype
        assert dtype.itemsize <= bucket.grad.element_size(), "gradients are no narrower"
        return bucket.grad.view(dtype)[: bucket.numel]

    def _expand(self, bucket: GradBucket, values: torch.Tensor) -> None:
        """Scatter updated values to the parameters, and restore the zeros of the bucket."""
        for name, where in bucket.slices.items():
            self._copy_to_param(name, where.of(values))
        bucket.zero_gaps()


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)
