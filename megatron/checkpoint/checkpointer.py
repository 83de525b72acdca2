"""Saves and restores a run with everything that it needs to resume bit by bit.

`Background` finishes a save in a thread while training goes on.
"""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from megatron.checkpoint.compatibility import (
    check_data,
    check_identity,
    check_path,
    check_schedule,
    path_differences,
    schedule,
    with_schedule,
)
from megatron.checkpoint.find import CheckpointSource, Keeper, finite_step, save_directory
from megatron.checkpoint.io import FILES, Files
from megatron.checkpoint.shared_verify import SharedVerification
from megatron.checkpoint.state_dict import RunStateDict
from megatron.checkpoint.store import Checkpoint, LocalShard, Snapshots, save_checkpoint, whole
from megatron.config import Config
from megatron.data_parallel.buffers import BufferSet
from megatron.data_parallel.engine import GradientEngine
from megatron.errors import CheckpointError, DataError, NumericsError
from megatron.metrics import Metrics
from megatron.optimizer.bucket_optimizer import BucketOptimizer
from megatron.optimizer.build import learning_rate
from megatron.optimizer.loss_scaler import LossScaler
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from megatron.training import TrainState

T = TypeVar("T")
REPLICAS = "replicas"
"""Key of the counters that each replica of a run with local steps has alone."""


class Background(Generic[T]):
    """A thread that runs one piece of work at a time."""

    def __init__(self) -> None:
        self._future: Future[T] | None = None

    @property
    def pending(self) -> bool:
        """True if work was started whose result has not been taken."""
        return self._future is not None

    @property
    def finished(self) -> bool:
        """True if the pending work has ended, successfully or not."""
        assert self._future is not None, "nothing is pending"
        return self._future.done()

    def start(self, work: Callable[[], T]) -> None:
        """Start `work`. The result of earlier work must have been taken."""
        assert self._future is None, "one at a time"
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self._future = future
        # A daemon thread, so that a rank whose peers are gone can exit in the middle of a save.
        threading.Thread(target=run, name="save-checkpoint", daemon=True).start()

    def take(self) -> T:
        """Wait for the work to end; return its result or raise its exception."""
        assert self._future is not None, "nothing is pending"
        try:
            return self._future.result()
        finally:
            self._future = None


@dataclass(frozen=True)
class StartingCheckpoint:
    """The checkpoint from which a run starts, as its gradient path sees it; a `CheckpointView`."""

    checkpoint: Checkpoint
    same_path: bool

    def names(self, prefix: str = "") -> tuple[str, ...]:
        return self.checkpoint.names(prefix)

    def read(
        self, name: str, start: Sequence[int] | None = None, stop: Sequence[int] | None = None
    ) -> torch.Tensor:
        return self.checkpoint.read(name, start, stop)


@contextmanager
def opened(
    origin: CheckpointSource | None, config: Config, identity: Mapping[str, Any]
) -> Iterator[StartingCheckpoint | None]:
    """Open the checkpoint from which a run starts for `GradientPath.build`; None at step 0."""
    if origin is None:
        yield None
        return
    with Checkpoint.open(origin.path, verify=False) as saved:
        was = saved.state.get("identity", {})
        asked = config.checkpoint
        check_identity(
            was,
            identity,
            where=origin.path,
            own=origin.own,
            model_only=asked.finetune and not origin.own,
            new_data=asked.accept_new_data,
        )
        yield StartingCheckpoint(saved, same_path=not path_differences(was, identity))


_COUNTERS = ("progress", "applied_updates", "loss_scaler")
"""Keys of `state` without which a run cannot go on."""


def _check_finite(shards: Iterable[LocalShard], progress: TrainState) -> None:
    """Raise `NumericsError` if a shard has an entry that is not finite."""
    names, largest = list[str](), list[torch.Tensor]()
    for shard in shards:
        if shard.tensor.is_floating_point() and shard.count:
            names.append(shard.name)
            # The largest magnitude takes no memory, and is NaN if an entry is.
            largest.append(torch.linalg.vector_norm(shard.entries(), math.inf).cpu().float())
    for name, is_finite in zip(names, torch.stack(largest).isfinite().tolist(), strict=True):
        if not is_finite:
            raise NumericsError(
                f"step {progress.iteration} is not saved: {name} is not finite. The last step "
                f"whose loss and gradients were finite is step {progress.finite_step}: go on from "
                "a checkpoint before it, which tools/status.py names, with a lower --lr"
            )


@dataclass(frozen=True, kw_only=True)
class _Written:
    """A committed save: step, folder, and the seconds from its start to its commit.

    Training goes on during most of these seconds if the save is asynchronous.
    """

    iteration: int
    path: Path
    seconds: float


@dataclass(kw_only=True)
class Checkpointer:
    """Saves and restores the whole state of a run; a `Saver`.

    All ranks call every method together. `data_files` has facts about the data files, read on rank
    0 only. `order` is that of the reader of training data (`OrderedReader.order`), None for data
    whose order does not depend on the length of the run.

    With `--async-save` a save copies this rank's shards and returns. A thread writes them and
    communicates over `channel`, a process group of its own. While a save is pending, the ranks
    check at each step boundary whether all of them have finished, so that all report it, or fail,
    at the same step. The next save and the end of the run wait for it.
    """

    config: Config
    run_dir: Path
    groups: ProcessGroups
    engine: GradientEngine
    optimizer: BucketOptimizer
    buffers: BufferSet
    scaler: LossScaler
    metrics: Metrics
    identity: dict[str, Any]
    data_files: dict[str, Any]
    order: Callable[[int], str] | None = None
    files: Files = FILES
    _background: Background[_Written] = field(default_factory=Background)
    _snapshots: Snapshots = field(default_factory=Snapshots)
    _notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tensors = RunStateDict(
            groups=self.groups,
            engine=self.engine,
            optimizer=self.optimizer,
            buffers=self.buffers,
        )
        asked, world = self.config.checkpoint, self.groups.world
        self._directory = save_directory(self.config, self.run_dir)
        self._channel = world.new_gloo_group() if asked.async_save else world
        self._verification = SharedVerification(
            self._channel.rank, self._channel.all_gather_str, self.files
        )
        self._keeper: Keeper | None = None
        if asked.keep_last is not None or asked.save_retain_interval is not None:
            self._keeper = Keeper(
                directory=self._directory,
                count=asked.keep_last or 1,
                interval=asked.save_retain_interval,
                log=self._notes.append,
                verify=self._verification.verify,
                files=self.files,
            )

    # ---- saving --------------------------------------------------------------------------------

    def save(self, progress: TrainState, *, wait: bool) -> None:
        """Save the step just finished; older checkpoints stay at least until this one is committed.

        Raises:
            CheckpointError: This save, or the pending one, failed; on every rank.
            NumericsError: A weight or a state is not finite, and nothing is saved; on every rank.
        """
        began = time.perf_counter()
        self.settle(wait=True)
        self.metrics.flush()
        shards = list(self._tensors.shards(moments=not self.config.checkpoint.no_save_optim))
        read = [whole(info.name, info.param) for info in self.engine.infos.values()]
        self.groups.world.raise_on_all_ranks(partial(_check_finite, [*shards, *read], progress))
        asynchronous = self.config.checkpoint.async_save and not wait
        if asynchronous:
            # A rank without memory for its copies must fail on all ranks, or the others would wait.
            shards = self.groups.world.raise_on_all_ranks(partial(self._snapshots.take, shards))
        work = partial(self._write, progress.iteration, shards, self._json(progress), began)
        if not asynchronous:
            self._conclude(work)
            return
        self._background.start(work)
        seconds = time.perf_counter() - began
        self.metrics.log(f"saving step {progress.iteration}: copied in {seconds:.1f} s")

    def settle(self, *, wait: bool = False) -> None:
        """Finish a pending save that has ended on every rank; with `wait`, wait until it has.

        Raises as `save` does.
        """
        if self._background.pending and (wait or self._ended_everywhere()):
            self._conclude(self._background.take)

    def _ended_everywhere(self) -> bool:
        running = torch.tensor([float(not self._background.finished)])
        return not self.groups.max_over_world(running).item()

    def _write(
        self, iteration: int, shards: list[LocalShard], state: dict[str, Any], began: float
    ) -> _Written:
        path = save_checkpoint(
            self._directory,
            step=iteration,
            tensors=shards,
            state=state,
            rank=self._channel.rank,
            world=self._channel.size,
            gather=self._channel.all_gather_str,
            grid=self.groups.dims.sizes,
            packages={"torch": torch.__version__},
            log=self._notes.append,
            files=self.files,
        )
        if self._keeper is not None:
            folders = self._verification.lead(self._keeper.prune) or []
            removed = [folder.name for folder in folders]
            self._notes.extend([f"removed older checkpoints: {', '.join(removed)}"] * bool(removed))
        # With the check of the files that `prune` makes, which all ranks share.
        seconds = time.perf_counter() - began
        return _Written(iteration=iteration, path=path, seconds=seconds)

    def _conclude(self, work: Callable[[], _Written]) -> None:
        """Run `work`, which ends a save, and log the save; an error is raised on all ranks."""
        try:
            written = self.groups.world.raise_on_all_ranks(work)
        finally:
            while self._notes:
                self.metrics.log(self._notes.pop(0))
        self.metrics.log(f"saved checkpoint {written.path} in {written.seconds:.1f} s")

    def _json(self, progress: TrainState) -> dict[str, Any]:
        """Return the state that is no tensor. Collective if replicas take local steps."""
        return {
            **self._of_replicas(progress),
            "progress": dataclasses.asdict(progress),
            "applied_updates": self.optimizer.applied,
            "loss_scaler": self.scaler.state(),
            "identity": self.identity,
            "data_files": self.data_files,
            "data_order": self._order(progress.consumed_samples),
            "schedule": schedule(self.config),
        }

    def _order(self, samples: int) -> str:
        """Return `order` of the samples that were read, on rank 0, which writes it; "" elsewhere.

        Data that cannot be read are no reason to lose a checkpoint.
        """
        if self.groups.world.rank or self.order is None:
            return ""
        try:
            return self.order(samples)
        except (OSError, DataError) as error:
            self.metrics.log(f"no digest of the data that were read: {error}")
            return ""

    def _of_replicas(self, progress: TrainState) -> dict[str, Any]:
        """Return the counters of each replica that takes local steps, by data-parallel rank."""
        if self.engine.local_steps is None:
            return {}
        mine = {
            "applied_updates": self.optimizer.applied,
            "loss_scaler": self.scaler.state(),
            "skipped_in_row": progress.skipped_in_row,
        }
        return {
            REPLICAS: [json.loads(each) for each in self.groups.dp.all_gather_str(json.dumps(mine))]
        }

    # ---- loading -------------------------------------------------------------------------------

    def restore(self, origin: CheckpointSource) -> TrainState:
        """Load a checkpoint that `locate_checkpoint` found, and return how far its run had come.

        Raises `CheckpointError`, on every rank, if it does not fit this run; the error names the
        keys that differ.
        """
        asked = self.config.checkpoint
        weights_only = asked.finetune and not origin.own
        fresh_moments = (asked.finetune or asked.no_load_optim) and not origin.own
        with Checkpoint.open(origin.path, verify=False) as saved:
            self.groups.world.raise_on_all_ranks(
                lambda: self._check(saved, weights_only, fresh_moments, origin.own)
            )
            self.groups.world.raise_on_all_ranks(lambda: self._take(saved, fresh_moments))
            # Collective for sharded states, so all ranks must have come this far.
            self.optimizer.finish_load()
            if not weights_only and self._goes_on(saved, origin.own):
                self._tensors.take_path(saved)
            self._announce_grid(saved)
            if not self.config.training.skip_train:
                self._announce_changes(saved)
                if not weights_only:
                    self._announce_learning_rate(saved)
        progress = TrainState()
        if not weights_only:
            finite = finite_step(saved.step, saved.state)
            progress = TrainState(**{"finite_step": finite} | saved.state["progress"])
        if not weights_only and (mine := self._own_counters(saved)):
            progress.skipped_in_row = int(mine["skipped_in_row"])
        self.groups.world.raise_on_all_ranks(lambda: self._check_rest(progress, origin))
        self.metrics.log(f"loaded checkpoint {origin.path} of step {saved.step}")
        if (local := self.engine.local_steps) is not None and local.is_left:
            self.metrics.log(
                "it is inside a round of local steps: evaluations use the average with which the "
                "round began"
            )
        return progress

    def _check(self, saved: Checkpoint, weights_only: bool, fresh_moments: bool, own: bool) -> None:
        asked = self.config.checkpoint
        needed = () if weights_only else ("progress",) if fresh_moments else _COUNTERS
        if missing := [key for key in needed if key not in saved.state]:
            raise CheckpointError(
                f"{saved.path}: state.{missing[0]}: missing, so that no run can go on from it; "
                "give --finetune to take its weights alone"
            )
        was = saved.state.get("identity", {})
        check_identity(
            was,
            self.identity,
            where=saved.path,
            own=own,
            model_only=weights_only,
            new_data=asked.accept_new_data,
            log=self.metrics.log,
        )
        check_schedule(saved.state.get("schedule", {}), self.config, where=saved.path)
        if not weights_only:
            check_path(
                was,
                self.identity,
                where=saved.path,
                own=own,
                reset=asked.reset_grad_state,
                log=self.metrics.log,
            )
        if not weights_only and self.groups.world.rank == 0:
            check_data(
                was,
                self.identity,
                (saved.state.get("data_files", {}), self.data_files),
                where=saved.path,
                own=own,
                accept=asked.accept_new_data,
                log=self.metrics.log,
            )
            self._announce_order(saved)

    def _check_rest(self, progress: TrainState, origin: CheckpointSource) -> None:
        """Raise `CheckpointError` if the gradient path would do nothing in the remaining steps.

        A resumed run, which may have lost its chance to skipped steps, only gets a warning.
        """
        applied, left = self.optimizer.applied, self.config.total_iterations() - progress.iteration
        if self.config.training.skip_train or left <= 0:
            return
        idle = self.engine.inactive_reason(applied + 1, applied + left)
        if idle and not origin.own:
            raise CheckpointError(f"{origin.path}: with {left} steps left, {idle}")
        if idle:
            self.metrics.log(f"the gradient path will have no effect: {idle}")

    def _announce_order(self, saved: Checkpoint) -> None:
        """Log if a run of this length has other samples in the places of those that were read."""
        read = int(saved.state.get("progress", {}).get("consumed_samples", 0))
        was, now = saved.state.get("data_order"), self._order(read)
        if was and now and now != was:
            self.metrics.log(
                f"a run of this length reads its data in another order: its first {read} samples "
                "are not those that were read, so that some are read again and others never; with "
                "the length of before the order stays"
            )

    def _announce_grid(self, saved: Checkpoint) -> None:
        now = self.groups.dims.sizes
        was = {axis: saved.world.get(axis, 1) for axis in now}
        if was != now:
            saved_dims = ParallelDims(tp=was["tp"], dp=was["dp"], pp=was["pp"])
            self.metrics.log(
                f"the checkpoint is of {saved_dims}, this run of {self.groups.dims}: the "
                "state is equal, and later steps are equal up to rounding"
            )

    def _announce_changes(self, saved: Checkpoint) -> None:
        was = saved.state.get("schedule", {})
        for key, value in schedule(self.config).items():
            if key in was and was[key] != value:
                self.metrics.log(f"{key}: {was[key]} in the checkpoint, {value} from here on")

    def _announce_learning_rate(self, saved: Checkpoint) -> None:
        """Log a jump of the learning rate, since the settings that cause it may not name it."""
        was, options = saved.state.get("schedule", {}), self.config.optimizer
        samples = int(saved.state["progress"]["applied_samples"])
        before = learning_rate(with_schedule(self.config, was)).at(samples)
        now = learning_rate(self.config).at(samples)
        if before == now:
            return
        follows = ""
        if not (options.lr_decay_iters or options.lr_decay_samples):
            unit = "samples" if self.config.training.train_samples else "iters"
            follows = f": its decay follows --train-{unit} unless --lr-decay-{unit} is given"
        self.metrics.log(
            f"learning rate at step {saved.step + 1}: {before:.2e} by the checkpoint's settings, "
            f"{now:.2e} from here on{follows}"
        )

    def _take(self, saved: Checkpoint, fresh_moments: bool) -> None:
        encoded = self._tensors.take(saved, moments=not fresh_moments)
        if encoded:
            self.metrics.log(
                f"{', '.join(sorted(encoded))}: the checkpoint has another format or other blocks, "
                "so that these states are encoded again: the run goes on equal up to rounding"
            )
        if not fresh_moments:
            state = self._own_counters(saved) or saved.state
            self.optimizer.applied = int(state["applied_updates"])
            self.scaler.load(state["loss_scaler"])

    def _own_counters(self, saved: Checkpoint) -> Mapping[str, Any]:
        """Return the counters of this rank's replica; empty if the checkpoint is of no such one."""
        replicas = saved.state.get(REPLICAS, [])
        is_same = self.engine.local_steps is not None and len(replicas) == self.groups.dp.size
        return replicas[self.groups.dp.rank] if is_same else {}

    def _goes_on(self, saved: Checkpoint, own: bool) -> bool:
        """Return whether the gradient path loads its saved state; if not, it starts empty."""
        same = not path_differences(saved.state.get("identity", {}), self.identity)
        # A run that is restarted again and again by one command must leave the old path only once.
        return same and (own or not self.config.checkpoint.reset_grad_state)
