"""The training loop. One step reads top to bottom; the loop calls down and nothing calls back up.

train --> train_step --> pipeline: forwards and backwards       (gradients go to the engine)
      |              --> engine.finish                           (agreement, means, norm)
      |              --> verdict                                 (is the step good?)
      |              --> optimizer.step, engine.commit           (or abort, on every rank)
      '-> guard, evaluate, save, leave
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from megatron.config import Config
from megatron.data.batches import Batch, Reader, Readers
from megatron.data.prefetch import Prefetcher, copy_to
from megatron.data_parallel.buffers import BufferSet
from megatron.data_parallel.engine import GradientEngine
from megatron.data_parallel.reduce_scatter import sums_gradients
from megatron.data_parallel.reducer import Step, StepContext
from megatron.errors import EXIT_DONE, EXIT_REQUEUE, NumericsError, PeerError
from megatron.fault_tolerance.exit_signals import ExitRequest, ExitSignals
from megatron.fault_tolerance.heartbeat import Heartbeat
from megatron.fault_tolerance.loss_spikes import is_spike, remember
from megatron.fault_tolerance.replicas import compare_replicas
from megatron.metrics import Evaluation, Measures, Metrics, NullMetrics, StepRecord, Workload
from megatron.metrics.memory import peak_memory_bytes, restart_peak_memory
from megatron.optimizer.bucket_optimizer import BucketOptimizer
from megatron.optimizer.loss_scaler import LossScaler
from megatron.optimizer.lr import LearningRate, WeightDecay
from megatron.parallel.groups import ProcessGroups
from megatron.pipeline.runner import Pipeline
from megatron.pipeline.stage import Stage
from megatron.profiling import Profiler
from megatron.timers import Timers


@dataclass
class TrainState:
    """The progress of a run.

    `iteration` counts all steps; `applied_samples` counts samples of applied steps only, and
    schedules follow it, so that a skipped step does not advance them. `skipped_in_row` is the
    current number of skipped steps in a row for `--max-skipped-steps`; `finite_step` is the last
    step whose loss and gradients were finite, so that the weights before it were sound; `losses`
    has the latest losses if loss spikes are skipped. With local steps, a replica may skip a step
    that others apply: `applied_samples` counts all steps, and `skipped_in_row` those of this rank's
    replica.
    """

    iteration: int = 0
    consumed_samples: int = 0
    applied_samples: int = 0
    skipped_in_row: int = 0
    finite_step: int = 0
    losses: list[float] = field(default_factory=list[float])


@dataclass(frozen=True)
class TrainOutcome:
    """The outcome of `train`; `left` is the reason for leaving early, None for a complete run."""

    exit_code: int
    left: str | None = None


class Saver(Protocol):
    """A writer of checkpoints. Every rank calls it at the same step boundaries."""

    def save(self, progress: TrainState, *, wait: bool) -> None:
        """Save the current step; with `wait` the checkpoint is committed when this returns."""
        ...

    def settle(self, *, wait: bool = False) -> None:
        """Finish an asynchronous save that has ended, and raise its error; called after each step.

        With `wait`, wait until the save has ended.
        """
        ...


@dataclass(kw_only=True)
class Trainer:
    """The training loop with everything that it needs, built by `megatron.pretrain`.

    `measures` names the unit that batches count and the sums of the last chunk. `buffers` are the
    model's tensors that training updates without gradients. `readers` make batches for
    `reading_device`: `device`, or the CPU. `workload` has the sizes for the throughput at the end.
    `began` is the time of the monotonic clock from which `--exit-duration-in-mins` counts.
    `heartbeat` publishes this rank's phase, `requests` has the requests to save or to leave, and
    `peer_failure` returns the failure that another rank reported, or None.
    """

    config: Config
    device: torch.device
    groups: ProcessGroups
    pipeline: Pipeline
    engine: GradientEngine
    optimizer: BucketOptimizer
    buffers: BufferSet
    learning_rate: LearningRate
    weight_decay: WeightDecay
    scaler: LossScaler
    readers: Readers
    reading_device: torch.device
    measures: Measures
    metrics: Metrics | NullMetrics
    timers: Timers
    profiler: Profiler
    flops_per_sample: float
    workload: Workload
    saver: Saver
    began: float = field(default_factory=time.monotonic)
    progress: TrainState = field(default_factory=TrainState)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    requests: ExitSignals = field(default_factory=ExitSignals)
    peer_failure: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        self.total_iterations = self.config.total_iterations()
        train = self.readers.train
        self._prefetcher = None if train is None else Prefetcher(train, self.reading_device)
        self._is_local = self.engine.local_steps is not None
        self._replicas_skipped = 0

    @property
    def stage(self) -> Stage:
        """The stage of this rank."""
        return self.pipeline.stage

    # ---- the run -------------------------------------------------------------------------------

    def train(self) -> TrainOutcome:
        """Train to the end or until a reason to leave; the last step is always saved."""
        try:
            return self._run()
        finally:
            if self._prefetcher is not None:
                self._prefetcher.close()
            self.profiler.close()

    def _run(self) -> TrainOutcome:
        request, evaluate = ExitRequest.NONE, self._evaluate
        if self.config.training.skip_train:
            request = self._evaluate("valid", self.readers.valid)
        elif self.progress.iteration >= self.total_iterations:
            by_samples = self.config.training.train_samples is not None
            length = "--train-samples" if by_samples else "--train-iters"
            self.metrics.log(
                f"all {self.total_iterations} steps are done; raise {length} to continue, or give "
                "--skip-train to evaluate again"
            )
            # Weights of a round that ends here have not been evaluated.
            evaluate = self._evaluate if self._end_round() else self._evaluate_if_missing
            request = evaluate("valid", self.readers.valid)
        elif (left := self._train_steps_and_settle()) is not None:
            return left
        if not request.leaves:
            request = evaluate("test", self.readers.test)
        if request is ExitRequest.STOP:
            self.requests.left()
        return _left_by(request) or TrainOutcome(EXIT_DONE)

    def _end_round(self) -> bool:
        """Average and save the replicas of a run that was left inside a round and is shorter now.

        Return whether it was. Collective over the world if the run takes local steps.
        """
        local = self.engine.local_steps
        if local is None or not self._on_any_rank(local.is_left):
            return False
        self.optimizer.end_round()
        self.metrics.log("the round of local steps that was left ends here")
        self._save(ExitRequest.NONE, wait=True)
        return True

    def _train_steps_and_settle(self) -> TrainOutcome | None:
        try:
            return self._train_steps()
        except NumericsError:
            # All ranks are here, and a save in progress began before the error.
            self.heartbeat.at("save")
            self.saver.settle(wait=True)
            raise

    def _train_steps(self) -> TrainOutcome | None:
        begins = self.config.evaluation.eval_at_start and self.progress.iteration == 0
        if begins or self._lacks_evaluation():
            request = self._evaluate("valid", self.readers.valid)
            if (outcome := _left_by(request)) is not None:
                self._obeyed(request)
                return outcome
        first = self.progress.iteration
        while self.progress.iteration < self.total_iterations:
            self.profiler.before_step(self.progress.iteration + 1)
            # It may compile, and lines come at log intervals.
            is_first = self.progress.iteration == first
            with self.metrics.busy("first step") if is_first else nullcontext():
                record, request = self.train_step()
            # Batch step 15: record, save, evaluate.
            self.metrics.step(record)
            self.saver.settle()
            self.profiler.after_step(self.progress.iteration)
            self._check_health()
            if (outcome := self._end_step(request)) is not None:
                return outcome
        return None

    def _end_step(self, request: ExitRequest) -> TrainOutcome | None:
        """Save and evaluate if it is time; return the outcome if the run leaves after this step."""
        iteration, interval = self.progress.iteration, self.config.checkpoint.save_interval
        last = iteration == self.total_iterations
        due = last or bool(interval and iteration % interval == 0)
        if due:  # Before the evaluation, which may fail or take hours.
            self._save(request, wait=last)
        evaluated = ExitRequest.NONE
        if last or iteration % self.config.evaluation.eval_interval == 0:
            evaluated = self._evaluate("valid", self.readers.valid)
        request = max(request, evaluated)
        # After the last step, only an interrupted evaluation is left for another start.
        outcome = _left_by(evaluated) if last else self._reason_to_leave(request)
        if outcome is not None or request is ExitRequest.SAVE:
            if not due:
                self._save(request, wait=True)
            else:
                self._end_save(request)
        self._obeyed(request)
        return outcome

    def _reason_to_leave(self, request: ExitRequest) -> TrainOutcome | None:
        interval = self.config.training.exit_interval
        if interval and self.progress.iteration % interval == 0:
            return TrainOutcome(EXIT_DONE, "exit-interval")
        return _left_by(request)

    def _save(self, request: ExitRequest, *, wait: bool) -> None:
        self.heartbeat.at("save")
        self._rule_out_failure(request)
        self._compare_replicas()
        with self.timers("save-checkpoint"), self.metrics.busy("save"):
            self.saver.save(self.progress, wait=wait)

    def _end_save(self, request: ExitRequest) -> None:
        """Wait for a save of this step that began before the request."""
        self.heartbeat.at("save")
        self._rule_out_failure(request)
        self.saver.settle(wait=True)

    def _obeyed(self, request: ExitRequest) -> None:
        """Remove the file of a request to save or to leave, which has been obeyed."""
        if request is ExitRequest.SAVE:
            self.requests.saved()
        elif request is ExitRequest.STOP:
            self.requests.left()

    def _rule_out_failure(self, request: ExitRequest) -> None:
        """Raise `PeerError` if a launcher sent SIGTERM because another rank failed."""
        if request is not ExitRequest.SIGTERM:
            return
        self.requests.wait_out_sigterm()

        def check() -> None:
            if self.peer_failure() is not None:
                raise PeerError("SIGTERM came with another rank's failure: nothing is saved")

        self.groups.world.raise_on_all_ranks(check)

    def _check_health(self) -> None:
        """Raise `NumericsError`, on every rank, if further training would hide wrong numbers."""
        limit = self.config.training.max_skipped_steps
        if self._most_skipped_in_row() >= limit:
            error = NumericsError(
                f"{limit} steps in a row were skipped, up to step {self.progress.iteration}: their "
                "losses or gradients were not finite, or their losses too far out; it is not "
                f"saved. The last finite step is {self.progress.finite_step}: go on from a "
                "checkpoint before it, which tools/status.py names, with a lower --lr; or raise "
                "--max-skipped-steps"
            )
            error.shared = True
            raise error
        interval = self.config.parallel.check_weight_hash_across_dp_replicas_interval
        if interval and self.progress.iteration % interval == 0:
            self._compare_replicas()

    def _most_skipped_in_row(self) -> int:
        """Return the number of steps in a row that a replica skipped, the largest of all replicas.

        Collective over the world if replicas skip steps on their own and one skipped the last step.
        """
        mine = self.progress.skipped_in_row
        if not self._replicas_skipped:
            return mine
        most = torch.tensor([mine])
        return int(self.groups.max_over_world(most).item())

    def _compare_replicas(self) -> None:
        with self.optimizer.shared_weights():
            compare_replicas(
                self.optimizer, self.groups, step=self.progress.iteration, buffers=self.buffers
            )

    # ---- one step ------------------------------------------------------------------------------

    def train_step(self) -> tuple[StepRecord, ExitRequest]:
        """Train on one global batch (Algorithm 1 of AxoNN).

        Returns the record of the step, and the most urgent request of all ranks.
        """
        began = time.perf_counter()
        self._take_bytes_sent()  # Those sent before the step are not counted.
        restart_peak_memory(self.device)
        progress = self.progress
        progress.iteration += 1
        self.heartbeat.at("data", progress.iteration)
        batch_size = self.config.batch_size_at(progress.consumed_samples)
        lr = self.learning_rate.at(progress.applied_samples)

        loss_scale = self.scaler.scale
        context = StepContext(
            t=self.optimizer.applied + 1, loss_scale=loss_scale / self._share_of_ranks()
        )
        self.engine.begin(context)
        with self.timers("forward-backward", level=1):
            sums, counted = self._forward_backward(batch_size, context.loss_scale)
        # A module that no microbatch came to has not waited for its parameters, which arrive in the
        # memory of their gradients.
        self.optimizer.finish_param_gather()
        self.heartbeat.at("reduce")
        with self.timers("all-grads-sync", level=1):
            step = self.engine.finish(
                tag=progress.iteration,
                clip_norm=self.config.optimizer.clip_grad,
                request=self._pending(),
            )
            # The sum of losses queues behind gradient sums that are still arriving, so it is
            # computed last, unless the step depends on the loss.
            loss_last = step.arriving and self.config.training.skip_loss_spikes is None
            means = None if loss_last else self._means_over_ranks(sums, counted)
            self.pipeline.wait_for_sends()
        good = self._decide(step, means)
        self._replicas_skipped = step.replicas_skipped
        num_zeros = self._num_zeros(step)
        self.heartbeat.at("optimizer")
        with self.timers("optimizer", level=1):
            if good:
                self._apply(step, lr)
            else:
                self._drop()
            self.optimizer.end_step(progress.iteration)
            if good or self._is_local:
                progress.applied_samples += batch_size
            if means is None:
                means = self._means_over_ranks(sums, counted)
            self._count_skips(step, good, loss=means[0])
            self.scaler.update(overflow=not step.ok)
        progress.consumed_samples += batch_size

        record = self._record(
            step, means, good=good, lr=lr, counted=counted, num_zeros=num_zeros, began=began,
            batch_size=batch_size, loss_scale=loss_scale,
        )  # fmt: skip
        return record, ExitRequest(step.request)

    def _decide(self, step: Step, means: Sequence[float] | None) -> bool:
        """Return whether to apply the step, from numbers that all ranks of a model share.

        `means` may only be None if spikes of the loss are not skipped. Updates the latest losses.
        """
        progress, sigmas = self.progress, self.config.training.skip_loss_spikes
        good = step.ok
        if good and sigmas is not None:
            assert means is not None, "the loss is computed before the decision"
            good = not is_spike(means[0], progress.losses, sigmas=sigmas)
            remember(progress.losses, means[0])
        return good

    def _count_skips(self, step: Step, good: bool, *, loss: float) -> None:
        """Count the step if it was skipped and a lower loss scale would not have helped.

        No loss scale changes the loss, so that a loss that is not finite counts at any scale.
        """
        progress, is_finite = self.progress, math.isfinite(loss)
        if step.ok and is_finite:
            progress.finite_step = progress.iteration
        if good:
            progress.skipped_in_row = 0
        elif step.ok or self.scaler.is_lowest or not is_finite:
            progress.skipped_in_row += 1

    def _apply(self, step: Step, lr: float) -> None:
        """Update the parameters, and commit the step in everything that keeps state."""
        weight_decay = self.weight_decay.at(self.progress.applied_samples)
        self.optimizer.step(step, lr=lr, weight_decay=weight_decay)
        self.engine.commit(step)
        self.buffers.commit()
        self.optimizer.update_masks()

    def _drop(self) -> None:
        """Restore the state before the step in everything that keeps state."""
        self.engine.abort()
        self.buffers.abort()
        if self._is_local:
            # Other replicas may have applied the step, and average their buffers with this one's.
            self.buffers.commit()

    def _record(
        self,
        step: Step,
        means: Sequence[float],
        *,
        good: bool,
        lr: float,
        counted: int,
        num_zeros: int | None,
        began: float,
        batch_size: int,
        loss_scale: float,
    ) -> StepRecord:
        """Return the record of the finished step. Collective if the step is logged."""
        stats = self.engine.stats(full=self._is_logged())
        for note in stats.notes:
            self.metrics.log(note)
        return StepRecord(
            iteration=self.progress.iteration,
            train_iters=self.total_iterations,
            consumed_samples=self.progress.consumed_samples,
            means=dict(zip(self.measures.means, means, strict=True)),
            lr=lr,
            grad_norm=step.norm if step.ok else None,
            step_seconds=time.perf_counter() - began,
            counted=counted,
            unit=self.measures.unit,
            bytes_sent=stats.bytes_sent,
            density=stats.density,
            # The loss is a mean over all replicas.
            skipped=not good or step.replicas_skipped > 0,
            loss_scale=loss_scale,
            global_batch_size=batch_size,
            peak_memory_bytes=peak_memory_bytes(self.device),
            flops=self.flops_per_sample * batch_size,
            world_size=self.groups.world.size,
            num_zeros=num_zeros,
            params_norm=self._params_norm(),
            timers=self._timings(),
            wait_seconds=stats.wait_seconds,
            path={**stats.extra, **self._replica_counts(step)},
            axis_bytes=self._take_bytes_sent(),
        )

    def _replica_counts(self, step: Step) -> dict[str, float]:
        return {"replicas_skipped": step.replicas_skipped} if self._is_local else {}

    def _share_of_ranks(self) -> int:
        """Return the divisor that turns the loss scale into the scale of a mean over ranks.

        In fp16 backward begins with the same scale on every grid, so that the same steps overflow
        on all of them; the mean over ranks is then smaller than the sum by this factor.
        """
        means = self.config.precision.fp16 and not sums_gradients(self.config)
        return self.groups.dp.size if means else 1

    def _forward_backward(self, batch_size: int, loss_scale: float) -> tuple[torch.Tensor, int]:
        """Compute the gradients of the mean loss over the global batch, times `loss_scale`.

        Returns this rank's sums, fp64 [sums], which are 0 except on the last stage, and the number
        of tokens or images that the global batch counts.
        """
        with self.timers("batch-generator", level=2):
            batches = self._read(batch_size)
        counted = self._count(batches)
        # A mean over ranks divides by their number, so each rank's part is multiplied by it first;
        # a sum needs no factor.
        summed = sums_gradients(self.config)
        scale = loss_scale * (1 if summed else self.groups.dp.size) / counted
        iteration = self.progress.iteration
        sums = self.pipeline.forward_backward(batches, iteration=iteration, scale=scale)
        return sums, counted

    def _read(self, batch_size: int) -> Sequence[Batch]:
        """Return this rank's microbatches of the step, and begin to read those of the next step."""
        assert self._prefetcher is not None, "a run that trains has data to train on"
        first = self.progress.consumed_samples
        # Batch step 1: read this rank's microbatches.
        batches = self._on_device(self._prefetcher.read(first, batch_size))
        following = first + batch_size
        ahead = self.config.training.prefetch_batches
        if ahead and self.progress.iteration < self.total_iterations:
            self._prefetcher.prefetch(following, self.config.batch_size_at(following))
        return batches

    def _on_device(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return batches of a reader on the device of this rank."""
        if self.reading_device.type == self.device.type:
            return batches
        return [copy_to(batch, self.device) for batch in batches]

    # ---- evaluation ----------------------------------------------------------------------------

    @torch.no_grad()
    def _evaluate(self, kind: str, reader: Reader | Mapping[str, Reader] | None) -> ExitRequest:
        """Evaluate the first `eval_iters` global batches of a split, or all of it; log the means.

        Of several sets, the means over all sets come first, each set with the same weight, then
        those of each set. Every evaluation reads the same samples, so that the evaluations of a run
        are comparable. Returns the most urgent request of all ranks. If it asks to leave, all ranks
        stop without a result.
        """
        sets = reader if isinstance(reader, Mapping) else {"": reader} if reader else {}
        sets = {name: each for name, each in sets.items() if self._batches_of(each)}
        request, found = ExitRequest.NONE, dict[str, list[float]]()
        if not sets:
            return request
        self.stage.train(False)
        what = f"evaluation of the {kind} set"
        with self.optimizer.shared_weights(), self.metrics.busy(what):
            for name, each in sets.items():
                request, found[name] = self._evaluate_set(each)
                if request.leaves:
                    break
        self.stage.train(True)
        if not request.leaves:
            over_sets = [sum(values) / len(found) for values in zip(*found.values(), strict=True)]
            means = dict(zip(self.measures.means, over_sets, strict=True))
            for name, values in found.items() if len(found) > 1 else ():
                names = (f"{mean} {name}" for mean in self.measures.means)
                means |= zip(names, values, strict=True)
            self.metrics.evaluation(
                Evaluation(
                    iteration=self.progress.iteration,
                    kind=kind,
                    means=means,
                    perplexity_of=self.measures.perplexity,
                )
            )
        return request

    def _evaluate_set(self, reader: Reader) -> tuple[ExitRequest, list[float]]:
        """Return the most urgent request of all ranks and the means, none if it asks to leave."""
        total = torch.zeros(len(self.measures.sums), dtype=torch.float64, device=self.device)
        counted, batch_size = 0, self.config.training.global_batch_size or 0
        request = ExitRequest.NONE
        for number in range(self._batches_of(reader)):
            self.heartbeat.at("evaluate")
            batches = self._on_device(list(reader.read(number * batch_size, batch_size)))
            counted += self._count(batches)
            total += self.pipeline.forward(batches, iteration=self.progress.iteration)
            request = self._agree_on(self._pending(), tag=number)
            if request.leaves:
                return request, []
        return request, self._means_over_ranks(total, counted)

    def _batches_of(self, reader: Reader) -> int:
        """Return the number of global batches of an evaluation, a last partial one included."""
        evaluation, size = self.config.evaluation, self.config.training.global_batch_size or 1
        whole = -(-reader.samples // size)
        return whole if evaluation.full_validation else min(evaluation.eval_iters, whole)

    def _lacks_evaluation(self) -> bool:
        """Return whether an earlier start of the run left in the evaluation after its last step.

        Collective over the world.
        """
        iteration = self.progress.iteration
        if not iteration or iteration % self.config.evaluation.eval_interval:
            return False
        # A run that begins with another run's checkpoint has not trained the step.
        trained = self.metrics.has_step(iteration)
        return self._on_any_rank(trained and not self.metrics.has_evaluation(iteration, "valid"))

    def _evaluate_if_missing(
        self, kind: str, reader: Reader | Mapping[str, Reader] | None
    ) -> ExitRequest:
        """Evaluate a split unless an earlier start of the run did so. Collective over the world."""
        known = self.metrics.has_evaluation(iteration=self.progress.iteration, kind=kind)
        if self._on_any_rank(known):
            return ExitRequest.NONE
        return self._evaluate(kind, reader)

    def _on_any_rank(self, mine: bool) -> bool:
        """Return whether `mine` is true on any rank, such as the one that writes the metrics."""
        return bool(self.groups.max_over_world(torch.tensor([int(mine)])).item())

    # ---- helpers -------------------------------------------------------------------------------

    def _count(self, batches: Sequence[Batch]) -> int:
        """Return the number of tokens or images of the global batch whose losses count.

        The data-parallel ranks add up their counts only if these may differ (`Batch.uneven`).
        """
        mine = sum(batch.counted for batch in batches)
        if not any(batch.uneven for batch in batches):
            return mine * self.groups.dp.size
        # Counted on the CPU: the host would have to wait for a GPU to return it.
        count = torch.tensor([mine], dtype=torch.int64)
        self.groups.dp.all_reduce(count, dist.ReduceOp.SUM)
        return max(1, int(count.item()))

    def _means_over_ranks(self, sums: torch.Tensor, counted: int) -> list[float]:
        """Return the mean of each sum, equal on every rank, from the last stages' sums (Eq. 1)."""
        sums = sums.clone()
        self.groups.dp.all_reduce(sums, dist.ReduceOp.SUM)
        # Stages other than the last add 0, which changes no bit.
        self.groups.pp.all_reduce(sums, dist.ReduceOp.SUM)
        return [total / counted for total in sums.tolist()]

    def _take_bytes_sent(self) -> dict[str, int]:
        """Return and reset the bytes sent to model-parallel ranks since the last call, by axis.

        The gradient path counts the bytes of the data-parallel axis.
        """
        axes = {"bytes_tp": self.groups.tp, "bytes_pp": self.groups.pp}
        sent = {name: group.traffic.take() for name, group in axes.items()}
        return {name: count for name, count in sent.items() if axes[name].size > 1}

    def _pending(self) -> ExitRequest:
        """Return the most urgent request that reached this rank."""
        minutes = self.config.training.exit_duration_in_mins
        time_is_up = bool(minutes) and time.monotonic() - self.began > minutes * 60
        return max(
            self.requests.pending(), ExitRequest.DURATION if time_is_up else ExitRequest.NONE
        )

    def _agree_on(self, request: ExitRequest, *, tag: int) -> ExitRequest:
        """Return the most urgent request of all ranks; raise `PeerError` if their `tag`s differ."""
        vote = torch.tensor([int(request), tag, -tag], dtype=torch.int64)
        self.groups.max_over_world(vote, about=f"vote {tag}")
        most_urgent, newest, oldest = map(int, vote.tolist())
        if newest != -oldest:
            raise PeerError(
                f"ranks are out of step: this rank is at evaluation batch {tag}, others between "
                f"{-oldest} and {newest}; a collective was skipped or repeated"
            )
        return ExitRequest(most_urgent)

    def _is_logged(self) -> bool:
        every = self.config.logging.log_interval
        return self.progress.iteration % every == 0

    def _num_zeros(self, step: Step) -> int | None:
        wanted = self.config.logging.log_num_zeros_in_grad and self._is_logged() and step.ok
        return self.engine.count_zeros(step) if wanted else None

    def _params_norm(self) -> float | None:
        wanted = self.config.logging.log_params_norm and self._is_logged()
        return self.optimizer.params_norm() if wanted else None

    def _timings(self) -> dict[str, list[float]]:
        """Return the seconds of each timer since the last logged step, one value per rank."""
        if not self.config.logging.timing_log_level or not self._is_logged():
            return {}
        mine = self.timers.elapsed()
        names = sorted(mine)
        seconds = torch.zeros(self.groups.world.size, len(names), dtype=torch.float64)
        seconds[self.groups.world.rank] = torch.tensor([mine[name] for name in names])
        self.groups.world.all_reduce(seconds, dist.ReduceOp.SUM)
        return {name: seconds[:, i].tolist() for i, name in enumerate(names)}


def _left_by(request: ExitRequest) -> TrainOutcome | None:
    """Return the outcome of a run that leaves as asked; None if nothing asks it to leave."""
    return TrainOutcome(EXIT_REQUEUE, request.left) if request.leaves else None
