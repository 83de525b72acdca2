"""Radius as a communication hook of `DistributedDataParallel`, for other training loops.

    state = RadiusHook(optimizer, density=0.4, interval=200, start=10_000)
    model.register_comm_hook(state, radius_hook)

    backward:  bucket 0 -> radius_hook ... last bucket -> radius_hook     one all-reduce each
    (clipping, unscaling: by the loop; `param.grad` is the mean, zero where nothing was sent)
    optimizer.step:  commit; at a resample also the selection

The loop needs no other change. DDP rebuilds its buckets after the first step, so all state is kept
by parameter. Every DDP option that leaves gradients dense works, as does `model.no_sync()`.
"""

# Annotations are not strings here: DDP compares the hook's annotations with the types themselves.
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Self

import torch
import torch.distributed as dist

from megatron.errors import ConfigError
from megatron.sparse.selection import select_largest
from radius.agreement import IndexChoice, take_first_choice
from radius.bucket_index import BucketIndex
from radius.functional import exact_density, gather_sent
from radius.index import keeps_bits, new_index, num_selected
from radius.torch_update import TorchUpdate

GradBucket = dist.GradBucket  # pyright: ignore[reportPrivateImportUsage]
APPLIED = "applied"


@dataclass
class MatrixState:
    """The state of Radius for one matrix, flat and in memory order.

    `residual` has the gradients not sent yet, fp32, without loss scale; its values at selected
    entries are meaningless. `local` is this rank's gradient from backward to step.
    """

    index: BucketIndex
    residual: torch.Tensor
    local: torch.Tensor

    @classmethod
    def of(cls, parameter: torch.Tensor, density: Fraction) -> Self:
        """Create the initial state: no selected entry, and a residual of zero."""
        bits = keeps_bits(parameter.device.type, density)
        return cls(
            index=new_index(parameter.numel(), parameter.device, bits=bits),
            residual=torch.zeros(parameter.numel(), device=parameter.device),
            local=torch.empty(parameter.numel(), dtype=parameter.dtype, device=parameter.device),
        )

    @property
    def rest(self) -> int:
        """Number of entries that are not selected."""
        return self.residual.numel() - self.index.numel


class RadiusHook:
    """State of `radius_hook`: the schedule of Algorithm 1, residuals and indices of this rank.

    A step is numbered by t, the optimizer's update that it becomes. The first resample is the first
    multiple of `interval` from `start` on; before it gradients are sent as DDP sends them. A
    resample sends gradients plus residuals and selects, in each matrix, the share `density` of
    entries with the largest update. Other steps send the selected entries only. Parameters with
    fewer than two dimensions, or in no group of the optimizer, are always sent whole. The paper
    starts after 15 to 20 % of the training steps. Density 1 equals DDP without the hook, bit for
    bit.

    Ranks select on their own and compare a hash of the selection. If it differs, as between
    processors with different instruction sets, all ranks use the selection of the group's first
    rank. So `optimizer.step` is collective over `group` at resamples.

    A step counts when `optimizer.step` has run. If it has not run, or skipped the update
    (`torch.amp.GradScaler`), the next backward drops the step: residuals and indices stay
    unchanged, and a resample is repeated. So call `model.no_sync()` around all but the last
    backward of a step, as DDP advises. The loop decides whether to step: as under DDP, a non-finite
    gradient on one rank makes the mean of its parameter non-finite on every rank, whether or not
    the entry is sent.

    In addition to residual and index, a copy of each matrix's gradient is kept from backward to
    step. A matrix that no rank uses in a resample keeps its residual and selection only if its
    `grad` is None then, which is the default of `zero_grad`.

    Args:
        optimizer: AdamW, Adam or SGD of torch.
        start: First t at which a resample may happen.
        density: Share of each matrix that is sent between resamples.
        interval: Steps between resamples.
        group: DDP's group; None for all ranks.
        loss_scale: Returns the factor by which gradients are too large during backward and step,
            such as `scaler.get_scale` of a `GradScaler`.
        applied: Updates that were applied before.

    Raises:
        ConfigError: Another optimizer, or a value out of range.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        start: int,
        density: float = 0.4,
        interval: int = 200,
        group: dist.ProcessGroup | None = None,
        loss_scale: Callable[[], float] = lambda: 1.0,
        applied: int = 0,
    ) -> None:
        for name, value in (("start", start), ("interval", interval)):
            if value < 1:
                raise ConfigError(f"{name}={value}: must be at least 1 step")
        self.density = exact_density(density)
        self.interval, self.start, self.group = interval, start, group
        self.applied = applied
        self.payload_bytes = 0
        """Bytes that this rank passed to all-reduce, and to broadcast where selections differed."""
        self.kept: dict[torch.Tensor, MatrixState] = {}
        self._loss_scale = loss_scale
        self._optimizer, self._update = optimizer, TorchUpdate(optimizer)
        self._under_way: list[tuple[torch.Tensor, MatrixState]] = []
        self._complete = False
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    @property
    def resamples(self) -> bool:
        """True if the current step selects entries."""
        t = self.applied + 1
        return self.density < 1 and t >= self.start and t % self.interval == 0

    # ---- backward ------------------------------------------------------------------------------

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the mean of a bucket and return its future, which gives the bucket's buffer.

        DDP calls this method in bucket order.
        """
        if bucket.index() == 0:
            self._under_way = []
        self._complete = bucket.is_last()
        pairs = [(p, self.kept.get(p)) for p in bucket.parameters()]
        under_way = [(parameter, kept) for parameter, kept in pairs if kept is not None]
        self._under_way += under_way
        if not under_way:
            return self._mean(bucket.buffer()).then(_first)
        parts = [gradient.view(-1) for gradient in bucket.gradients()]
        matrices = [kept for _, kept in pairs]
        if not self.resamples:
            return self._reduce_chosen(bucket.buffer(), parts, matrices)
        scale = self._loss_scale()
        for part, kept in zip(parts, matrices, strict=True):
            if kept is not None:
                kept.index.clear(kept.residual)
                part.add_(kept.residual, alpha=scale)
        return self._mean(bucket.buffer()).then(_first)

    def _reduce_chosen(
        self, buffer: torch.Tensor, parts: list[torch.Tensor], matrices: list[MatrixState | None]
    ) -> torch.futures.Future[torch.Tensor]:
        """Reduce one short vector: the selected entries of matrices, all entries of the others."""
        sizes = [
            part.numel() if kept is None else kept.index.numel
            for part, kept in zip(parts, matrices, strict=True)
        ]
        values = buffer.new_empty(sum(sizes))
        for part, kept, out in zip(parts, matrices, values.split(sizes), strict=True):
            if kept is None:
                out.copy_(part)
            else:
                kept.local.copy_(part)
                gather_sent(part, kept.index, out)

        def place(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            received = future.value()[0].split(sizes)
            for part, kept, mean in zip(parts, matrices, received, strict=True):
                if kept is None:
                    part.copy_(mean)
                else:
                    kept.index.place(mean, part)
            return buffer

        return self._mean(values).then(place)

    def _mean(self, values: torch.Tensor) -> torch.futures.Future[list[torch.Tensor]]:
        # Divide first, as DDP does: a 16-bit sum can overflow where its mean does not.
        values.mul_(1.0 / dist.get_world_size(self.group))
        self.payload_bytes += values.nbytes
        work = dist.all_reduce(values, group=self.group, async_op=True)
        assert work is not None, "this rank is in the group"
        return work.get_future()

    # ---- step ----------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.resamples:
            self._update.before_step()

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # GradScaler always calls fused optimizers, which skip the update on the device.
        found_inf = getattr(optimizer, "found_inf", None)
        if self._complete and (found_inf is None or float(found_inf) == 0):
            self._commit()
        self._under_way, self._complete = [], False
        self._update.forget()

    def _commit(self) -> None:
        if self.resamples:
            for parameter, kept in self._under_way:
                if parameter.grad is not None:
                    kept.residual.zero_()
            self._select()
        elif self._under_way:
            alpha = 1.0 / self._loss_scale()
            for _, kept in self._under_way:
                kept.residual.add_(kept.local, alpha=alpha)
        self.applied += 1

    def _select(self) -> None:
        for parameter, update in self._update.matrices():
            if parameter not in self.kept:
                self.kept[parameter] = MatrixState.of(parameter, self.density)
            count = num_selected(self.density, update.numel())
            self.kept[parameter].index.choose(0, select_largest(update, count))
        # Groups list parameters in the same order on every rank.
        chosen = [(p, self.kept[p]) for p in self._parameters() if p in self.kept]
        if chosen:
            choices = [IndexChoice(kept.index, 0, parameter.numel()) for parameter, kept in chosen]
            device = chosen[0][0].device
            self.payload_bytes += take_first_choice(choices, self.group, device)

    # ---- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state between steps, by position in the optimizer's groups.

        It has the number of applied updates, packed index bits (equal on all ranks) and this rank's
        residual of the unselected entries (fp32, 1-D), so save it on each rank.
        """
        found = {APPLIED: torch.tensor(self.applied)}
        for number, parameter in enumerate(self._parameters()):
            if parameter in self.kept:
                kept = self.kept[parameter]
                waiting = kept.residual.new_empty(kept.rest)
                kept.index.gather_rest(kept.residual, waiting, 0, parameter.numel())
                found[f"index.{number}"] = kept.index.packed(0, parameter.numel())
                found[f"residual.{number}"] = waiting
        return found

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the state that `state_dict` returned on this rank.

        Raises `ConfigError` if it does not fit the optimizer's parameters.
        """
        kept: dict[torch.Tensor, MatrixState] = {}
        unknown = set(state) - {APPLIED}
        for number, parameter in enumerate(self._parameters()):
            names = f"index.{number}", f"residual.{number}"
            if unknown.isdisjoint(names):
                continue
            kept[parameter] = self._loaded(parameter, *names, state)
            unknown -= set(names)
        if unknown or APPLIED not in state:
            wrong = min(unknown) + ": there is no such parameter" if unknown else f"no {APPLIED!r}"
            raise ConfigError(f"{wrong}; load what state_dict gave for the same optimizer groups")
        self.applied, self.kept = int(state[APPLIED]), kept
        self._under_way, self._complete = [], False

    def _loaded(
        self, parameter: torch.Tensor, index: str, residual: str, state: Mapping[str, torch.Tensor]
    ) -> MatrixState:
        """Return the saved state of one matrix."""
        kept = MatrixState.of(parameter, self.density)
        entries = parameter.numel()
        if index not in state or residual not in state:
            raise ConfigError(f"{index}, {residual}: one is missing; load the whole state_dict")
        if state[index].numel() != -(-entries // 8):
            raise ConfigError(
                f"{index}: {state[index].numel()} bytes for {entries} entries; must be a bit for "
                "each; load what state_dict gave for a parameter of this shape"
            )
        kept.index.load(0, entries, state[index].cpu())
        if state[residual].numel() != kept.rest:
            raise ConfigError(
                f"{residual}: {state[residual].numel()} entries; must be the {kept.rest} that "
                f"{index} has not chosen; load both from one state_dict"
            )
        kept.index.place_rest(state[residual].to(kept.residual), kept.residual, 0, entries)
        return kept

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]


def radius_hook(state: RadiusHook, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket. Register this hook on the DDP model, with a `RadiusHook` as its state."""
    return state.reduce(bucket)


def _first(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]
