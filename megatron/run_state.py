"""What a run saves, and what it takes back when the same command is given again.

Each owner of state offers it by logical name; here the names meet files. State is saved once for
all data-parallel ranks, spread over them for speed, but for what each of them has of its own.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.checkpoint.background import Background
from megatron.checkpoint.files import FILES, Files
from megatron.checkpoint.keep import Keeper
from megatron.checkpoint.locate import CHECKPOINTS, checkpoints_folder, find_checkpoint
from megatron.checkpoint.store import (
    Checkpoint,
    Shard,
    of_rank,
    owner,
    save_checkpoint,
    snapshot,
    whole,
)
from megatron.config import Config
from megatron.data_parallel.engine import GradientEngine
from megatron.data_parallel.interface import ParamInfo
from megatron.errors import CheckpointError
from megatron.metrics import Metrics
from megatron.optimizer.bucket_optimizer import PARAM, BucketOptimizer
from megatron.optimizer.loss_scaler import LossScaler
from megatron.parallel.groups import ProcessGroups
from megatron.run_identity import (
    check_data,
    check_identity,
    check_path,
    path_differences,
    schedule,
)
from megatron.training import Progress

PATH, RESIDUAL, MASK = "path/", "residual/", "mask/"
"""Where checkpoints keep a gradient path's state: what all data-parallel ranks share, what each has
of its own, and which entries of parameters exist."""


def save_directory(config: Config, run_dir: Path) -> Path:
    """Where checkpoints of a run go."""
    return Path(config.checkpoint.save) if config.checkpoint.save else run_dir / CHECKPOINTS


@dataclass(frozen=True)
class Origin:
    """The step folder a run starts from. `own`: this very run saved it, and goes on; else it is
    another's, of which `--finetune` and `--no-load-optim` may leave out parts."""

    path: Path
    own: bool


@dataclass(frozen=True)
class Start:
    """The checkpoint a run starts from, as its gradient path may see it; a `Saved`."""

    checkpoint: Checkpoint
    same_path: bool

    def names(self, prefix: str = "") -> tuple[str, ...]:
        return self.checkpoint.names(prefix)

    def read(self, name: str) -> torch.Tensor:
        return self.checkpoint.read(name)


@contextmanager
def opened(
    origin: Origin | None, config: Config, identity: Mapping[str, Any]
) -> Iterator[Start | None]:
    """What `GradientPath.build` is given of the checkpoint a run starts from, None at step 0."""
    if origin is None:
        yield None
        return
    with Checkpoint.open(origin.path, verify=False) as saved:
        was = saved.state.get("identity", {})
        weights_only = config.checkpoint.finetune and not origin.own
        check_identity(was, identity, where=origin.path, model_only=weights_only)
        yield Start(saved, same_path=not path_differences(was, identity))


def locate_checkpoint(
    config: Config, run_dir: Path, *, say: Callable[[str], None]
) -> Origin | None:
    """Where to start from: the newest good checkpoint of this run, else of `--load`; None for
    step 0. One rank calls it for all.

    Raises `CheckpointError` where committed folders are there and none verifies, where `--load`
    names another place and nothing was ever committed there, and for `--ckpt-step` of this run's
    own folder when that is not its newest: two histories would share the steps after it.
    """
    asked = config.checkpoint
    own_place = save_directory(config, run_dir)
    elsewhere = asked.load is not None and (
        checkpoints_folder(Path(asked.load)).resolve() != own_place.resolve()
    )
    own_step = None if elsewhere else asked.ckpt_step
    own = None
    if own_place.exists() or own_step is not None:
        own = find_checkpoint(own_place, say=say, step=own_step, repair=own_step is None)
    if own is not None:
        _refuse_to_branch(own, own_place, own_step)
        return Origin(own, own=True)
    if asked.load is None:
        return None
    other = find_checkpoint(asked.load, say=say, step=asked.ckpt_step) if elsewhere else None
    if other is None and (elsewhere or asked.exit_on_missing_checkpoint):
        raise CheckpointError(
            f"{asked.load}: no checkpoint was ever committed there; check --load, or leave it "
            "out to start at step 0"
        )
    return Origin(other, own=False) if other is not None else None


def _refuse_to_branch(found: Path, directory: Path, step: int | None) -> None:
    newest = find_checkpoint(directory, say=lambda text: None) if step is not None else found
    if newest != found:
        raise CheckpointError(
            f"ckpt_step: {step} is not the newest of {directory}; to go another way from there, "
            f"give --load {directory} --ckpt-step {step} and a new --run-dir"
        )


@dataclass(frozen=True, kw_only=True)
class _Written:
    """A committed save: its step and folder, and the seconds since training stopped for it."""

    iteration: int
    path: Path
    seconds: float


@dataclass(kw_only=True)
class RunState:
    """Saves and restores everything a run consists of; a `Saver`. Every rank calls all of it
    together. `data_files`: facts of the data sets, looked at by rank 0 alone.

    With `--async-save` a save copies this rank's shards and returns; a thread of its own writes
    them, and gathers over `channel`, a group that nobody else uses. Whether all ranks have
    finished is asked at each step boundary for as long as a save is pending, so that all of them
    tell of it, or fail, at the same step. The next save, and leaving, wait for it.
    """

    config: Config
    run_dir: Path
    groups: ProcessGroups
    engine: GradientEngine
    optimizer: BucketOptimizer
    scaler: LossScaler
    metrics: Metrics
    identity: dict[str, Any]
    data_files: dict[str, Any]
    files: Files = FILES
    _background: Background[_Written] = field(default_factory=Background)
    _notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        asked, world = self.config.checkpoint, self.groups.world
        self._directory = save_directory(self.config, self.run_dir)
        self._channel = world.apart() if asked.async_save else world
        self._keeper: Keeper | None = None
        if asked.keep_last is not None and world.rank == 0:
            self._keeper = Keeper(
                directory=self._directory,
                count=asked.keep_last,
                say=self._notes.append,
                files=self.files,
            )

    # ---- saving --------------------------------------------------------------------------------

    def save(self, progress: Progress, *, wait: bool) -> None:
        """Save the step just finished; what was there before stays until this one is committed.

        Raises the same `CheckpointError` on every rank where it, or the one that was still being
        written, cannot be.
        """
        began = time.perf_counter()
        self.settle(wait=True)
        self.metrics.flush()
        shards = list(self._shards())
        asynchronous = self.config.checkpoint.async_save and not wait
        if asynchronous:
            shards = [snapshot(shard) for shard in shards]
        work = partial(self._write, progress.iteration, shards, self._json(progress), began)
        if not asynchronous:
            self._conclude(work)
            return
        self._background.start(work)
        seconds = time.perf_counter() - began
        self.metrics.say(f"saving step {progress.iteration}: copied in {seconds:.1f} s")

    def settle(self, *, wait: bool = False) -> None:
        """Tell of a pending save that has ended on every rank, or `wait` for that; raises as
        `save` does."""
        if self._background.pending and (wait or self._ended_everywhere()):
            self._conclude(self._background.take)

    def _ended_everywhere(self) -> bool:
        ended = torch.tensor([float(self._background.finished)])
        self.groups.world.all_reduce(ended, dist.ReduceOp.MIN)
        return bool(ended.item())

    def _write(
        self, iteration: int, shards: list[Shard], state: dict[str, Any], began: float
    ) -> _Written:
        path = save_checkpoint(
            self._directory,
            step=iteration,
            tensors=shards,
            state=state,
            rank=self._channel.rank,
            world=self._channel.size,
            gather=self._channel.gather_text,
            grid=dataclasses.asdict(self.groups.dims),
            packages={"torch": torch.__version__},
            say=self._notes.append,
            files=self.files,
        )
        seconds = time.perf_counter() - began
        if self._keeper is not None:
            removed = [folder.name for folder in self._keeper.prune()]
            self._notes.extend([f"removed older checkpoints: {', '.join(removed)}"] * bool(removed))
        return _Written(iteration=iteration, path=path, seconds=seconds)

    def _conclude(self, work: Callable[[], _Written]) -> None:
        """Have the result of a save, or its error, on every rank alike, and tell of it."""
        try:
            written = self.groups.world.agreed(work)
        finally:
            while self._notes:
                self.metrics.say(self._notes.pop(0))
        self.metrics.saved(written.iteration)
        self.metrics.say(f"saved checkpoint {written.path} in {written.seconds:.1f} s")

    def _json(self, progress: Progress) -> dict[str, Any]:
        return {
            "progress": dataclasses.asdict(progress),
            "applied_updates": self.optimizer.applied,
            "moments_since": self.optimizer.moments_since,
            "loss_scaler": self.scaler.state(),
            "identity": self.identity,
            "data_files": self.data_files,
            "schedule": schedule(self.config),
        }

    def _shards(self) -> Iterator[Shard]:
        rank, size = self.groups.dp.rank, self.groups.dp.size
        shared = {part.name: part for part in self._shared()}
        owners = owner({name: part.nbytes for name, part in shared.items()}, size)
        for name, part in shared.items():
            if owners[name] == rank:
                yield part.make()
        for name, tensor in self.engine.reducer.state_tensors():
            own = whole(f"{RESIDUAL}{name}", tensor)
            yield of_rank(own, data_parallel_rank=rank, data_parallel_size=size)

    def _shared(self) -> Iterator[_Part]:
        """State equal on all data-parallel ranks. Of a parameter that is stored in part its mask
        is saved once, and of its weight and moments the entries there are."""
        for kind, name, flat in self.optimizer.tensors():
            info = self.engine.infos[name]
            if kind == PARAM and not _is_whole(info, flat):
                entries = math.prod(info.logical_shape)
                yield _Part(f"{MASK}{name}", entries, partial(self._mask_shard, info))
            if kind == PARAM or not self.config.checkpoint.no_save_optim:
                yield _Part(f"{kind}/{name}", flat.nbytes, partial(_shard, kind, info, flat))
        for name, tensor in self.engine.shared_tensors():
            yield _Part(f"{PATH}{name}", tensor.nbytes, partial(whole, f"{PATH}{name}", tensor))

    def _mask_shard(self, info: ParamInfo) -> Shard:
        mask = self.engine.layout.mask(info.name)
        assert mask is not None, "not all of it is stored"
        return whole(f"{MASK}{info.name}", _logical(info, mask))

    # ---- loading -------------------------------------------------------------------------------

    def restore(self, origin: Origin) -> Progress:
        """Take back a checkpoint that `locate_checkpoint` found.

        Raises `CheckpointError`, on every rank, for one that does not fit this run, naming the
        keys that differ.
        """
        asked = self.config.checkpoint
        weights_only = asked.finetune and not origin.own
        fresh_moments = (asked.finetune or asked.no_load_optim) and not origin.own
        with Checkpoint.open(origin.path, verify=False) as saved:
            self.groups.world.agreed(lambda: self._check(saved, weights_only, origin.own))
            self.groups.world.agreed(lambda: self._take(saved, fresh_moments))
            if not weights_only and self._goes_on(saved, origin.own):
                self._take_path(saved)
            if not self.config.training.skip_train:
                self._announce_changes(saved)
        progress = Progress() if weights_only else Progress(**saved.state["progress"])
        self.groups.world.agreed(lambda: self._check_rest(progress, origin))
        self.metrics.say(f"loaded checkpoint {origin.path} of step {saved.step}")
        return progress

    def _check(self, saved: Checkpoint, weights_only: bool, own: bool) -> None:
        asked = self.config.checkpoint
        was = saved.state.get("identity", {})
        check_identity(was, self.identity, where=saved.path, model_only=weights_only)
        if not weights_only:
            check_path(
                was,
                self.identity,
                where=saved.path,
                own=own,
                reset=asked.reset_grad_state,
                say=self.metrics.say,
            )
        if not weights_only and self.groups.world.rank == 0:
            check_data(
                saved.state.get("data_files", {}),
                self.data_files,
                where=saved.path,
                accept=asked.accept_new_data,
                say=self.metrics.say,
            )

    def _check_rest(self, progress: Progress, origin: Origin) -> None:
        """Raise `CheckpointError` where the gradient path would do nothing in what is left of the
        run. A run that goes on, and may have lost its chance to skipped steps, is told."""
        applied, left = self.optimizer.applied, self.config.total_iterations() - progress.iteration
        if self.config.training.skip_train or left <= 0:
            return
        idle = self.engine.why_idle(applied + 1, applied + left)
        if idle and not origin.own:
            raise CheckpointError(f"{origin.path}: with {left} steps left, {idle}")
        if idle:
            self.metrics.say(f"the gradient path will not do what it is for: {idle}")

    def _announce_changes(self, saved: Checkpoint) -> None:
        was = saved.state.get("schedule", {})
        for key, value in schedule(self.config).items():
            if was.get(key) != value:
                self.metrics.say(f"{key}: {was.get(key)} in the checkpoint, {value} from here on")

    def _take(self, saved: Checkpoint, fresh_moments: bool) -> None:
        stored = set(saved.names())
        for kind, name, flat in self.optimizer.tensors():
            if kind != PARAM and fresh_moments:
                continue
            if f"{kind}/{name}" not in stored:
                raise CheckpointError(
                    f"{saved.path}: has no {kind}/{name}: it was saved without optimizer state or "
                    "by another optimizer; give --load and --no-load-optim to start that from "
                    "nothing"
                )
            self._fill(self.engine.infos[name], flat, saved.read(f"{kind}/{name}"))
        self.optimizer.loaded()
        if not fresh_moments:
            self.optimizer.applied = int(saved.state["applied_updates"])
            self.optimizer.moments_since = int(saved.state.get("moments_since", 0))
            self.scaler.load(saved.state["loss_scaler"])

    def _fill(self, info: ParamInfo, flat: torch.Tensor, logical: torch.Tensor) -> None:
        """Write a tensor of a checkpoint to a state's stored entries."""
        if _is_whole(info, flat):
            _logical(info, flat).copy_(logical)
            return
        padded = logical.new_zeros(info.param.shape)
        padded.view(-1)[: logical.numel()] = logical.view(-1)
        self.engine.layout.gather(info.name, padded.to(flat.device), flat)

    def _take_path(self, saved: Checkpoint) -> None:
        shared = {name.removeprefix(PATH): saved.read(name) for name in saved.names(PATH)}
        own = self.groups.world.agreed(lambda: dict(self._own(saved)))
        self.engine.load_state_tensors(own, shared)

    def _goes_on(self, saved: Checkpoint, own: bool) -> bool:
        """Whether the gradient path continues from the checkpoint, rather than starting there."""
        same = not path_differences(saved.state.get("identity", {}), self.identity)
        # A run that is started again and again by one command leaves its path once.
        return same and (own or not self.config.checkpoint.reset_grad_state)

    def _own(self, saved: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's share of per-rank state; for another number of ranks the mean of the old
        ones, which keeps the update that is pending in them."""
        rank, size = self.groups.dp.rank, self.groups.dp.size
        for name in saved.names(RESIDUAL):
            ranks, *rest = saved.shape(name)
            if ranks == size:
                whole_box = [rank] + [0] * len(rest), [rank + 1, *rest]
                value = saved.read(name, *whole_box)[0]
            else:
                value = saved.read(name).mean(0)
            yield name.removeprefix(RESIDUAL), value


@dataclass(frozen=True)
class _Part:
    """A tensor to save: the rank it falls to makes its shard."""

    name: str
    nbytes: int
    make: Callable[[], Shard]


def _shard(kind: str, info: ParamInfo, flat: torch.Tensor) -> Shard:
    """Padding rows of the vocabulary are left out: they lie at the end of a slice that is stored
    whole, and have no entries in one that is not."""
    name, shape = f"{kind}/{info.name}", info.logical_shape
    if _is_whole(info, flat):
        return whole(name, _logical(info, flat))
    return Shard(name, flat, shape, (0,) * len(shape), shape, mask=f"{MASK}{info.name}")


def _is_whole(info: ParamInfo, flat: torch.Tensor) -> bool:
    """Whether a state has all entries of its parameter."""
    return flat.numel() == info.param.numel()


def _logical(info: ParamInfo, flat: torch.Tensor) -> torch.Tensor:
    entries = math.prod(info.logical_shape)
    return flat[:entries].view(info.logical_shape)
