"""Training of a task's model with one of several gradient paths: parse, build, train.

    pretrain --> parse, check --> run --> build_groups, build_trainer --> Trainer.train

A rank may be started alone, by torchrun, srun or mpiexec. Torch is loaded only after the
configuration was checked.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import resource
import secrets
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron.busy import busy
from megatron.checkpoint.compatibility import check_settings
from megatron.closed_pipe import end_with_reader
from megatron.config import Config, parse, resolve, to_yaml
from megatron.data_parallel.bucket import ParamInfo
from megatron.data_parallel.bucket_plan import bucket_elements
from megatron.data_parallel.gradient_path import GradientPath, PathParts
from megatron.errors import (
    EXIT_DONE,
    EXIT_REQUEUE,
    CheckpointError,
    ConfigError,
    DataError,
    PeerError,
)
from megatron.fault_tolerance.exit_signals import ExitSignals, ended_by_requests, leave_at_once
from megatron.fault_tolerance.failures import Failures
from megatron.fault_tolerance.flight_recorder import set_recorder_variables
from megatron.fault_tolerance.heartbeat import FOLDER, Heartbeat
from megatron.fault_tolerance.run_lock import check_free
from megatron.fault_tolerance.watchdog import EXIT_INTERRUPTED, Watchdog, before_abort
from megatron.launch import (
    Launch,
    Runtime,
    detect_launch,
    job_has_one_node,
    leave_mpi,
    needs_mpi,
    require_mpi,
    set_cuda_variables,
    start,
    stop,
    tell_launcher,
    wait_for_all,
)
from megatron.metrics import check_trackers, cut_metrics
from megatron.run_dir import (
    CONFIG,
    announce,
    finish,
    keep_config,
    keeps_status,
    lock_folders,
    name_run_dir,
    prepare_run_dir,
    write_pictures,
    writing_to,
)
from megatron.status import EndedStatus, node_name

if TYPE_CHECKING:
    from megatron.checkpoint.find import CheckpointSource
    from megatron.data_parallel.engine import GradientEngine
    from megatron.metrics import Metrics
    from megatron.optimizer.bucket_optimizer import BucketOptimizer
    from megatron.parallel.groups import ProcessGroups
    from megatron.pipeline.pass_marker import PassMarker
    from megatron.pipeline.runner import Pipeline
    from megatron.pipeline.stage import Stage
    from megatron.pipeline.transport import Transport
    from megatron.tasks.task import LoadedTask, Task
    from megatron.timers import Timers
    from megatron.training import Trainer

Paths = Mapping[str, GradientPath]
"""Gradient paths by the value of `--grad-path`."""

PRINTING = frozenset({"-h", "--help", "--help-compat", "--dry-run"})
"""Flags of a start that prints and trains nothing."""
USAGE = """\
usage: pretrain_{task}.py --config {example} [--FLAG VALUE ...]
       a YAML file, flags under Megatron-LM's names, or both; a flag wins over the file
       --dry-run checks everything and prints the configuration; --help lists all flags
       several ranks: {variables}RANKS_PER_NODE=4 CONFIG=FILE scripts/launch.sh
"""


def pretrain(task: Task, paths: Paths, argv: Sequence[str]) -> int:
    """Train a task as `argv` asks.

    A user's mistake is one line on stderr. Every failure is reported before this function returns.

    Args:
        task: The model and its data.
        paths: The gradient paths that `--grad-path` may name.
        argv: The command line without the name of the program.

    Returns:
        The exit code (docs/fault-tolerance.md).
    """
    failures = Failures(argv=argv)
    with ExitStack() as held:
        code = _pretrain(task, paths, argv, failures, held)
    tell_launcher(code, failures.reason)
    return code


def begin() -> Sequence[str]:
    """Prepare the process of an entry script and return the command line without its name.

    A crash of native code prints a traceback. A process that only prints ends with its reader, as
    in `pretrain_gpt.py --help | head`; another one that is asked to leave before it can save leaves
    at once, to be started again. The limit of open files is raised as far as it may be.
    """
    faulthandler.enable()
    _raise_open_files()
    argv = sys.argv[1:]
    if PRINTING.intersection(argv):
        end_with_reader()
    else:
        leave_at_once(_leave_start)
    return argv


def _leave_start() -> NoReturn:
    tell_launcher(EXIT_REQUEUE, "left while it started; the same command begins again")
    os._exit(EXIT_REQUEUE)


def _raise_open_files() -> None:
    """Raise the number of files that this process may have open to the most that it may ask for.

    A blend maps 11 files for each of its prefixes, and each rank of a large world is a connection,
    while the usual limit, for programs that call `select`, is 1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # A system that refuses leaves a limit with which most runs do well.
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def leave(code: int) -> NoReturn:
    """End this process with an exit code; successful MPI ranks leave together."""
    # Leaving MPI in order waits for the other ranks, so only successful ranks may do it. It ends
    # the process; without MPI the function continues below.
    if code in (EXIT_DONE, EXIT_REQUEUE):
        leave_mpi(code)
    # Everything is written and closed. `os._exit` is used because torch's threads sometimes abort
    # the interpreter while it shuts down.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _pretrain(
    task: Task, paths: Paths, argv: Sequence[str], failures: Failures, held: ExitStack
) -> int:
    try:
        failures.launch = launch = detect_launch()
        if not argv:
            print(usage(task.config) if launch.rank == 0 else "", end="", file=sys.stderr)
            return ConfigError.exit_code
        config = resolve(parse(argv, paths=paths, task=task.config), launch.world_size)
        failures.debug, failures.only_checks = config.run.debug, config.run.dry_run
        if launch.rank == 0:
            check_trackers(config.logging)  # No other rank opens a tracker.
        if config.training.memory_budget is not None:
            try:
                config = apply_budget(task, paths, config, launch.world_size)
            except DataError as error:
                # Only compute nodes may have the data; the run chooses there.
                if not config.run.dry_run or config.run.check_paths:
                    raise
                line = f"memory_budget: the run chooses when it starts ({error})"
                config = dataclasses.replace(config, notices=(*config.notices, line))
            if config.run.dry_run and launch.rank == 0:
                print(f"note: {config.notices[-1]}", file=sys.stderr)
        if config.run.dry_run:
            if launch.rank == 0 and config.run.check_paths:
                check_files(task, paths, config)
            print(to_yaml(config) if launch.rank == 0 else "", end="")
            return EXIT_DONE
        set_cuda_variables(config)
        if needs_mpi(config):
            with ended_by_requests():
                require_mpi(launch, seconds=60 * config.parallel.distributed_timeout_minutes)
        failures.run_dir = run_dir = name_run_dir(config)
        if launch.world_size > 1:
            set_recorder_variables(run_dir)
        if launch.world_size == launch.local_world_size:
            check_free(run_dir)
        return run(task, paths, config, launch, run_dir, failures, held)
    except KeyboardInterrupt:
        # Before the run notes the signal: while torch is imported, ranks meet, and a checkpoint is
        # hashed.
        return failures.report_interrupt(EXIT_INTERRUPTED)
    except SystemExit as error:
        if failures.run_dir is None:
            raise  # of --help, and of a wrong command line
        # A library that leaves with 0 in a run has not finished the run.
        return failures.report(error)
    except Exception as error:
        code = failures.report(error)
        if getattr(error, "shared", False):
            wait_for_all()
        return code


def usage(config: type[Config]) -> str:
    """Return the usage text for a start without arguments."""
    variables = "" if config.task == "gpt" else f"ENTRY=pretrain_{config.task}.py "
    return USAGE.format(task=config.task, example=config.example, variables=variables)


def apply_budget(task: Task, paths: Paths, config: Config, world_size: int) -> Config:
    """Return the configuration that `--memory-budget` chooses, with a notice of the choice.

    Every rank computes it alone, from the same files. A run that is resumed keeps the choice of its
    saved configuration.

    Raises:
        ConfigError: Nothing fits, or the memory of the model is not planned.
    """
    from megatron.checkpoint.find import locate_checkpoint
    from megatron.low_memory.memory_budget import vocabularies_of, within_budget

    run_dir, saved = name_run_dir(config), None
    if (run_dir / CONFIG).is_file():
        origin = locate_checkpoint(config, run_dir, log=lambda line: None, look=True)
        if origin is not None and origin.own:
            saved = parse(["--config", str(run_dir / CONFIG)], paths=paths, task=task.config)
    if saved is not None and saved.training.memory_budget is None:
        saved = None
    return within_budget(
        config,
        paths[config.gradient.grad_path],
        world=world_size,
        vocabularies=vocabularies_of(config),
        saved=saved,
    )


def check_files(task: Task, paths: Paths, config: Config) -> None:
    """Check every file that the run will read; see `megatron.preflight`."""
    path = paths[config.gradient.grad_path]

    def log(text: str) -> None:
        print(text, file=sys.stderr)

    origin = task.check_files(config, name_run_dir(config), log=log)
    if origin is not None:
        check_settings(config, origin)
    # A resumed run has the state of its gradient path in its checkpoint.
    if origin is None or not origin.own:
        path.check_files(config, lambda: task.logical_shapes(config, path))


def run(
    task: Task,
    paths: Paths,
    config: Config,
    launch: Launch,
    run_dir: Path,
    failures: Failures,
    held: ExitStack,
) -> int:
    """Train with a checked configuration and return the exit code of a run that did not fail.

    The caller closes `held` after it has reported how the run ended.
    """
    requests = ExitSignals(run_dir if launch.rank == 0 else None)
    # A scheduler's warning may come while torch is imported. The other signals are not caught yet,
    # so they end a start that waits for ranks.
    requests.install(signal.SIGUSR1)
    with _busy(launch, f"import of torch, meeting of {launch.world_size} rank(s)"):
        runtime = start(launch, config)
        groups = build_groups(config, launch)
    failures.before = EndedStatus.read(run_dir)
    # mpiexec gives all ranks the variables of its own node.
    node = node_name() if launch.launcher == "srun" or job_has_one_node() else ""
    # All ranks agree on one name for this start, which distinguishes it from what earlier starts
    # wrote.
    names = (secrets.token_hex(6), socket.gethostname(), node)
    told = [text.split(" ") for text in groups.world.all_gather_str(" ".join(names))]
    failures.attempt = told[0][0]
    hosts = [host for _, host, _ in told]
    failures.near = [rank for rank, host in enumerate(hosts) if host == hosts[launch.rank]]
    failures.nodes = [node for *_, node in told]
    # Ctrl-C ends a start that hashes a checkpoint, for as long as no watchdog counts a second one.
    requests.install(signal.SIGUSR1, signal.SIGTERM)
    notes: list[str] = []
    if runtime.is_writer:
        groups.world.raise_on_all_ranks(
            lambda: lock_folders(config, run_dir, held, log=notes.append)
        )
    else:
        groups.world.raise_on_all_ranks(lambda: None)
    with _busy(launch, "check of the run folder and its newest checkpoint"):
        origin, heartbeat = open_run(
            config, runtime, groups, run_dir, failures.attempt, notes.append
        )
    failures.heartbeat = heartbeat
    if launch.world_size > 1:
        groups.listen(heartbeat.called)
        before_abort(lambda: failures.report(PeerError("a library that joins the ranks gave up")))
    with ExitStack() as stack:
        limit = 60 * config.parallel.distributed_timeout_minutes
        stack.callback(Watchdog(heartbeat, failures.causes(), limit=limit).watch())
        requests.install()
        has_ended = failures.before is not None
        metrics = open_metrics(task, config, runtime, run_dir, origin, held=has_ended)
        stack.callback(metrics.close)
        try:
            announce(metrics, config, runtime, groups)
            for note in notes:
                metrics.log(note)
            groups.connect(runtime.device)
            with metrics.busy("opening of the data, building of the model"):
                trainer = build_trainer(
                    task, paths, config, runtime, groups, run_dir, metrics, origin, heartbeat,
                    requests,
                )  # fmt: skip
            failures.has_begun = True
            step = trainer.progress.iteration
            groups.world.raise_on_all_ranks(
                lambda: (
                    begin_writing(config, runtime, run_dir, metrics, step)
                    if runtime.is_writer
                    else None
                )
            )
            trainer.peer_failure = failures.causes().known
            outcome = trainer.train()
            heartbeat.at("start")
            metrics.flush()
            means = metrics.throughput(trainer.workload)
            if runtime.is_writer and not keeps_status(config, run_dir, attempt=failures.attempt):
                finish(outcome, trainer.progress, run_dir, means, attempt=failures.attempt)
            if outcome.left:
                metrics.log(told_of_leaving(config, trainer.progress.iteration, outcome.left))
            # The time that is left before a limit is for saving: 100,000 steps take 10 s to draw.
            in_a_hurry = outcome.exit_code == EXIT_REQUEUE or requests.pending().leaves

            def close_metrics() -> None:
                if runtime.is_writer and in_a_hurry:
                    command = shlex.join(["python", "tools/report.py", str(run_dir)])
                    metrics.log(f"no report is drawn now: {command}")
                elif runtime.is_writer:
                    write_pictures(run_dir, metrics)
                metrics.close()

            groups.run_beyond_timeout(close_metrics)
            trainer.pipeline.transport.close()
        except BaseException as error:
            # Report before anything is closed, since closing may take long.
            failures.report(error)
            if failures.refuses(error):
                heartbeat.close()
            else:
                metrics.release()
            raise
    heartbeat.close()
    stop()
    return outcome.exit_code


def _busy(launch: Launch, what: str) -> AbstractContextManager[None]:
    """Let rank 0 print messages on stderr while the body takes long."""
    if launch.rank:
        return nullcontext()
    return busy(what, lambda text: print(text, file=sys.stderr, flush=True))


def told_of_leaving(config: Config, step: int, left: str) -> str:
    """Return the line on a run that leaves early after `step` for the reason `left`."""
    if config.training.skip_train:
        return f"left the evaluation ({left}); the same command evaluates again"
    if not step:
        return f"left before step 1 ({left}); the same command begins again"
    if config.checkpoint.no_save_optim:
        return f"saved step {step} ({left}) without the state of the optimizer"
    return f"saved step {step} ({left}); the same command resumes the run"


def begin_writing(
    config: Config, runtime: Runtime, run_dir: Path, metrics: Metrics, iteration: int
) -> None:
    """Write to the files of the run folder, once this start is sure to train or to evaluate.

    The configuration is kept, and metrics of steps after `iteration` are moved out of the way.
    """
    keep_config(config, run_dir, runtime.facts())
    # An evaluation computes no step again.
    if not config.training.skip_train:
        with writing_to(run_dir):
            cut_metrics(run_dir, iteration)
    metrics.begin()


def open_run(
    config: Config,
    runtime: Runtime,
    groups: ProcessGroups,
    run_dir: Path,
    attempt: str,
    log: Callable[[str], None],
) -> tuple[CheckpointSource | None, Heartbeat]:
    """Open the run folder and the heartbeats, and choose on rank 0 the checkpoint to start from.

    All ranks share the hashing of the checkpoint. Collective over the world.
    """
    from megatron.checkpoint.find import CheckpointSource, locate_checkpoint
    from megatron.checkpoint.shared_verify import SharedVerification
    from megatron.fault_tolerance.consistency import compare_starts

    world = groups.world
    verification = SharedVerification(world.rank, world.all_gather_str)

    def locate() -> str:
        keep_status = keeps_status(config, run_dir, attempt=attempt)
        nccl = "nccl" in runtime.backend
        if hung := prepare_run_dir(run_dir, attempt=attempt, nccl=nccl, keep_status=keep_status):
            log(f"collectives of an earlier start: {hung}")
        origin = locate_checkpoint(config, run_dir, log=log, verify=verification.verify)
        return json.dumps([str(origin.path), origin.own] if origin else None)

    compare_starts(config, run_dir, world)
    heartbeat = world.raise_on_all_ranks(lambda: open_heartbeat(runtime.launch, run_dir, attempt))
    try:
        located = world.raise_on_all_ranks(lambda: verification.lead(locate))
    except (CheckpointError, ConfigError):
        heartbeat.close()
        raise
    found = json.loads(world.all_gather_str(located or "")[0])
    return CheckpointSource(Path(found[0]), own=found[1]) if found else None, heartbeat


def open_heartbeat(launch: Launch, run_dir: Path, attempt: str) -> Heartbeat:
    """Open the heartbeat of this rank; with several ranks it is a file that peers can read.

    Raises `ConfigError` if the file cannot be written.
    """
    if launch.world_size == 1:
        return Heartbeat(attempt=attempt)
    with writing_to(run_dir):
        return Heartbeat(
            run_dir / FOLDER,
            rank=launch.rank,
            attempt=attempt,
            across_hosts=launch.local_world_size < launch.world_size,
        )


def build_groups(config: Config, launch: Launch) -> ProcessGroups:
    """Build the process groups of the grid. Collective over the world."""
    from megatron.parallel.dims import ParallelDims
    from megatron.parallel.groups import ProcessGroups

    dims = ParallelDims.from_world(
        launch.world_size,
        tp=config.parallel.tensor_model_parallel_size,
        pp=config.parallel.pipeline_model_parallel_size,
        order=config.parallel.rank_order,
        dp_inner=config.parallel.dp_inner_size,
    )
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    return ProcessGroups.build(dims, rank=launch.rank, timeout=timeout)


def open_metrics(
    task: Task,
    config: Config,
    runtime: Runtime,
    run_dir: Path,
    origin: CheckpointSource | None,
    *,
    held: bool = False,
) -> Metrics:
    """Open the log, the metrics files and the trackers; other ranks than the writer get none.

    With `held`, files and trackers stay as they are until `Metrics.begin`.
    """
    from megatron.checkpoint.verify import read_manifest
    from megatron.metrics import Metrics, NullMetrics

    if not runtime.is_writer:
        return NullMetrics()
    start_iteration = start_samples = 0
    if origin is not None and (origin.own or not config.checkpoint.finetune):
        manifest = read_manifest(origin.path)
        start_iteration = manifest.step
        start_samples = int(manifest.state.get("progress", {}).get("consumed_samples", 0))
    return Metrics(
        run_dir,
        logging=config.logging,
        train_iters=config.total_iterations(),
        start_iteration=start_iteration,
        start_samples=start_samples,
        only_evaluates=config.training.skip_train,
        start=runtime.facts(),
        name=config.name,
        formula=task.formula,
        summary=config.values(),
        held=held,
    )


def build_trainer(
    task: Task,
    paths: Paths,
    config: Config,
    runtime: Runtime,
    groups: ProcessGroups,
    run_dir: Path,
    metrics: Metrics,
    origin: CheckpointSource | None,
    heartbeat: Heartbeat | None = None,
    requests: ExitSignals | None = None,
) -> Trainer:
    """Build everything a run needs, and load the checkpoint `origin` if given.

    Collective over the world.
    """
    from megatron.checkpoint.checkpointer import Checkpointer
    from megatron.data.batches import OrderedReader
    from megatron.data.prefetch import choose_reading_device
    from megatron.data_parallel.buffers import BufferSet
    from megatron.fault_tolerance.consistency import compare_data
    from megatron.optimizer.build import learning_rate, loss_scaler, weight_decay
    from megatron.pipeline.stage import Stage
    from megatron.profiling import Profiler
    from megatron.training import Trainer, TrainState

    on_cuda = runtime.device.type == "cuda"

    opened = groups.world.raise_on_all_ranks(lambda: task.open(config))
    reading_device = choose_reading_device(runtime.device, stages=groups.pp.size)
    readers = opened.readers(groups, reading_device, log=metrics.log)
    compare_data(readers, groups.world)
    heartbeat = heartbeat or Heartbeat()
    timers = build_timers(config, on_cuda=on_cuda)
    stage = Stage(opened.chunks(groups, runtime.device))
    infos = stage.parameter_infos()
    own_identity = opened.identity()
    path = paths[config.gradient.grad_path]
    parts = build_parts(path, config, infos, groups, origin, own_identity)
    engine = build_engine(config, infos, parts, groups)
    optimizer, how = build_optimizer(config, engine, stage)
    buffers = BufferSet(stage.buffer_infos(), groups.dp)
    scaler = loss_scaler(config)
    state = Checkpointer(
        config=config,
        run_dir=run_dir,
        groups=groups,
        engine=engine,
        optimizer=optimizer,
        buffers=buffers,
        scaler=scaler,
        metrics=metrics,
        identity=own_identity,
        data_files=opened.data_files() if runtime.is_writer else {},
        order=readers.train.order if isinstance(readers.train, OrderedReader) else None,
    )
    metrics.log(f"model: {opened.summary}")
    metrics.log(f"gradient path {config.gradient.grad_path}: {len(engine.buckets)} buckets")
    for note in (*parts.notes, *how):
        metrics.log(note)
    if origin is None:
        metrics.log("no checkpoint was ever committed here: starting at step 0")
    progress = state.restore(origin) if origin is not None else TrainState()
    return Trainer(
        config=config,
        device=runtime.device,
        groups=groups,
        pipeline=build_pipeline(
            task, config, runtime, groups, opened, stage, engine, timers, heartbeat
        ),
        engine=engine,
        optimizer=optimizer,
        buffers=buffers,
        learning_rate=learning_rate(config),
        weight_decay=weight_decay(config),
        scaler=scaler,
        readers=readers,
        reading_device=reading_device,
        measures=task.measures,
        metrics=metrics,
        timers=timers,
        profiler=Profiler(config, rank=groups.world.rank, run_dir=run_dir, on_cuda=on_cuda),
        flops_per_sample=opened.flops_per_sample,
        workload=opened.workload,
        saver=state,
        began=runtime.launch.began,
        progress=progress,
        heartbeat=heartbeat,
        requests=requests or ExitSignals(),
    )


def build_engine(
    config: Config, infos: Sequence[ParamInfo], parts: PathParts, groups: ProcessGroups
) -> GradientEngine:
    """Build the gradient engine of this rank.

    Collective over the world.
    """
    import torch

    from megatron.data_parallel.bucket_plan import slice_alignment
    from megatron.data_parallel.engine import GradientEngine

    return GradientEngine(
        infos,
        parts,
        groups,
        cap=bucket_elements(config, groups.dp.size),
        grad_dtype=getattr(torch, config.precision.grad_dtype),
        overlap=config.parallel.overlap_grad_reduce,
        # Clipping needs the norm of all sums before the first update.
        stream=config.offload.optimizer_cpu_offload and not config.optimizer.clip_grad,
        alignment=slice_alignment(config),
    )


def build_optimizer(
    config: Config, engine: GradientEngine, stage: Stage
) -> tuple[BucketOptimizer, list[str]]:
    """Build the optimizer of this rank; also return sentences for the log."""
    from megatron.optimizer.bucket_optimizer import BucketOptimizer
    from megatron.optimizer.build import state_formats, update_rule
    from megatron.optimizer.cpu_offload import OffloadedOptimizer

    rule, formats = update_rule(config), state_formats(config)
    if not config.offload.optimizer_cpu_offload:
        plain = BucketOptimizer(engine, rule, formats=formats)
        if config.parallel.overlap_param_gather and plain.is_sharded:
            plain.overlap_param_gather(stage.modules)
        return plain, []
    bucket_size = config.offload.offload_bucket_size
    optimizer = OffloadedOptimizer(engine, rule, bucket_size=bucket_size, formats=formats)
    order = "each bucket is updated as soon as its sum has arrived"
    if config.optimizer.clip_grad > 0.0:
        order = "updates wait for the norm of all gradients (--clip-grad 0 overlaps them with sums)"
    return optimizer, [
        f"optimizer states: {optimizer.host_bytes / 1e6:.1f} MB in this rank's host memory, "
        f"{optimizer.device_bytes / 1e6:.1f} MB of buffers on its device; {order}"
    ]


def build_timers(config: Config, *, on_cuda: bool) -> Timers:
    """Build the timers of the requested level."""
    import torch

    from megatron.timers import Timers

    # Not the whole device: its other streams may wait for messages that neighbours send later.
    synchronize = (lambda: torch.cuda.current_stream().synchronize()) if on_cuda else None
    return Timers(config.logging.timing_log_level, synchronize=synchronize)


def build_pipeline(
    task: Task,
    config: Config,
    runtime: Runtime,
    groups: ProcessGroups,
    opened: LoadedTask,
    stage: Stage,
    engine: GradientEngine,
    timers: Timers,
    heartbeat: Heartbeat,
) -> Pipeline:
    """Build the pipeline that runs a batch through this rank's stage.

    Collective over the world.
    """
    from megatron.pipeline.message_driven import MessageDriven
    from megatron.pipeline.runner import Pipeline
    from megatron.pipeline.schedule import StagePosition
    from megatron.pipeline.transport import ArrivalTransport

    chunks = len(stage.chunks)
    shape = opened.message_shape(groups)
    transport = open_stage_transport(config, runtime, groups, shape=shape, chunks=chunks)
    place = StagePosition(stage=groups.pp.rank, stages=groups.pp.size, chunks=chunks)

    def at(phase: str) -> None:
        # The attribute is looked up at each call: tests wrap it after the pipeline is built.
        heartbeat.at(phase)

    driven = None
    if config.parallel.pipeline_schedule == "message-driven":
        assert isinstance(transport, ArrivalTransport), "it is opened for this schedule"
        driven = MessageDriven(
            place,
            limit=config.parallel.pipeline_limit,
            transport=transport,
            tp=groups.tp,
            marker=_connect_marker(stage, runtime),
            timers=timers,
            at=at,
        )
    return Pipeline(
        stage=stage,
        place=place,
        transport=transport,
        engine=engine,
        timers=timers,
        sums=len(task.measures.sums),
        at=at,
        driven=driven,
    )


def _connect_marker(stage: Stage, runtime: Runtime) -> PassMarker | None:
    """Return the marker that the models of a stage set; None on a CPU."""
    from megatron.model.chunk import ModelChunk
    from megatron.pipeline.pass_marker import PassMarker

    if runtime.device.type != "cuda":
        return None
    marker = PassMarker(runtime.device)
    for chunk in stage.chunks:
        if isinstance(chunk, ModelChunk):
            chunk.before_last_layer = marker.mark
    return marker


def open_stage_transport(
    config: Config,
    runtime: Runtime,
    groups: ProcessGroups,
    *,
    shape: tuple[int, ...],
    chunks: int,
) -> Transport:
    """Open the transport between this rank's stage and its neighbours.

    Collective over the world.
    """
    import torch

    dtype = getattr(torch, config.precision.param_dtype)
    if config.parallel.pipeline_schedule == "message-driven":
        from megatron.pipeline.mpi_transport import open_mpi_transport

        seconds = 60 * config.parallel.distributed_timeout_minutes
        return open_mpi_transport(
            groups, shape=shape, dtype=dtype, device=runtime.device, seconds=seconds
        )
    from megatron.pipeline.transport import open_transport

    return open_transport(groups, shape=shape, dtype=dtype, device=runtime.device, chunks=chunks)


def build_parts(
    path: GradientPath,
    config: Config,
    infos: Sequence[ParamInfo],
    groups: ProcessGroups,
    origin: CheckpointSource | None,
    identity: Mapping[str, Any],
) -> PathParts:
    """Build the parts of the gradient path for a run that starts from `origin`.

    Collective: a checkpoint of another model fails on every rank alike.
    """
    from megatron.checkpoint.checkpointer import opened

    with ExitStack() as stack:
        # Opened apart from the build, in which a path may communicate: a rank that failed to open
        # the checkpoint would leave the others waiting there.
        start = groups.world.raise_on_all_ranks(
            lambda: stack.enter_context(opened(origin, config, identity))
        )
        return groups.world.raise_on_all_ranks(lambda: path.build(config, infos, groups, start))
