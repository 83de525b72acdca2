"""Radius as a communication hook of `DistributedDataParallel`, for training loops of any kind.

    state = RadiusHook(optimizer, density=0.4, interval=200, start=10_000)
    model.register_comm_hook(state, radius_hook)

    backward:  bucket 0 -> radius_hook ... last bucket -> radius_hook     one all-reduce each
    (clipping, unscaling: the loop's affair; `param.grad` is the mean, zero where nothing was sent)
    optimizer.step:  commit; at a resample also the selection

Nothing else changes in the loop. DDP cuts its buckets anew after the first step, so everything is
kept by parameter. Every DDP option that leaves gradients dense works, `model.no_sync()` as well.
"""

# Annotations stay objects here: DDP compares those of the hook with the types themselves.
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Self

import torch
import torch.distributed as dist

from megatron.errors import ConfigError
from megatron.sparse.selection import select_largest
from radius.agreement import IndexChoice, take_first_choice
from radius.functional import exact_density, gather_sent
from radius.index import BucketIndex, keeps_bits, new_index, num_selected
from radius.torch_update import TorchUpdate

GradBucket = dist.GradBucket  # pyright: ignore[reportPrivateImportUsage]
APPLIED = "applied"


@dataclass
class MatrixState:
    """The state of Radius for one matrix, flat and in the order of its memory.

    `residual`: the gradients not sent yet, fp32, without loss scale; entries in the index mean
    nothing there. `local`: this rank's gradient from backward to step.
    """

    index: BucketIndex
    residual: torch.Tensor
    local: torch.Tensor

    @classmethod
    def of(cls, parameter: torch.Tensor, density: Fraction) -> Self:
        """Nothing chosen, nothing waiting."""
        bits = keeps_bits(parameter.device.type, density)
        return cls(
            index=new_index(parameter.numel(), parameter.device, bits=bits),
            residual=torch.zeros(parameter.numel(), device=parameter.device),
            local=torch.empty(parameter.numel(), dtype=parameter.dtype, device=parameter.device),
        )

    @property
    def rest(self) -> int:
        """Number of entries that are not chosen."""
        return self.residual.numel() - self.index.numel


class RadiusHook:
    """State of `radius_hook`: the schedule of Algorithm 1, residuals and indices of this rank.

    Steps are counted by t, the update of `optimizer` that they become. Until the first t from
    `start` on that `interval` divides, all gradients are sent as DDP does; at this t and every
    `interval` steps after it so are the residuals with them, and the share `density` of largest
    update is chosen in each matrix; in between only that is sent. Parameters of fewer than two
    dimensions or in no group of the optimizer are always sent whole. The paper starts after 15 to
    20 % of the training steps. Density 1 is DDP without the hook, bit for bit.

    Ranks choose on their own and compare a hash of what they chose. Where it differs, as between
    processors with different instruction sets, all take the choice of the group's first rank, so
    `optimizer.step` is collective over `group` at these steps.

    A step counts when `optimizer.step` has run. A backward after which it has not, or not really
    (`torch.amp.GradScaler`), is forgotten at the next one: residuals and indices stay as they were,
    and a resample is tried again. So call `model.no_sync()` around all but the last backward of a
    step, as DDP advises anyway. Whether to step is the loop's decision: as under DDP, a gradient
    that is not finite on one rank makes the mean of its parameter so on every rank, sent or not.

    Beside residual and index a copy of each matrix's gradient is kept from backward to step. A
    matrix that no rank uses in a resample keeps what waits and what is chosen only if its `grad`
    is None then, as `zero_grad` leaves it by default.

    `loss_scale`: the factor by which gradients are too large during backward and step,
    `scaler.get_scale` of a `GradScaler`. `applied`: updates that were taken before this. `group`:
    DDP's, None for all ranks. Raises `ConfigError` for other optimizers than AdamW, Adam and SGD.
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
        """Handed to all-reduce by this rank so far, and to broadcast where choices differed."""
        self.kept: dict[torch.Tensor, MatrixState] = {}
        self._loss_scale = loss_scale
        self._optimizer, self._update = optimizer, TorchUpdate(optimizer)
        self._under_way: list[tuple[torch.Tensor, MatrixState]] = []
        self._complete = False
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    @property
    def resamples(self) -> bool:
        """Return whether the step under way chooses anew."""
        t = self.applied + 1
        return self.density < 1 and t >= self.start and t % self.interval == 0

    # ---- backward ------------------------------------------------------------------------------

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Launch the mean of a bucket; buckets come in order of their numbers."""
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
        """One short vector for the bucket: what is chosen of matrices, all of the others."""
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
        # Divided first, as DDP does: a 16-bit sum can overflow where its mean does not.
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
        # Fused optimizers are called by a GradScaler in any case and skip on the device.
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
        """Return the state between steps, by place in the optimizer's groups.

        It holds the applied updates, packed index bits (equal on all ranks) and the residual (this
        rank's own: save it on each rank).
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
        """Take back what `state_dict` gave on this rank.

        Raises `ConfigError` where it is not of these parameters.
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
    """The communication hook to register on the DDP model, with a `RadiusHook`."""
    return state.reduce(bucket)


def _first(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]
