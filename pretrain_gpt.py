"""Pretrain a GPT: parse, build, train. The one place that names concrete classes.

Starts alone, under torchrun, srun or mpiexec. Importing it does nothing, so tools may.
"""

from __future__ import annotations

import faulthandler
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config import Config, parse, resolve, to_yaml
from megatron.data_parallel.bucket import ParamInfo
from megatron.data_parallel.interface import GradientPath, PathParts
from megatron.data_parallel.path import DensePath, ProductPath
from megatron.errors import EXIT_DONE, EXIT_REQUEUE, ConfigError, PeerError
from megatron.guards.failures import Failures
from megatron.guards.heartbeat import FOLDER, Heartbeat
from megatron.guards.requests import Requests
from megatron.guards.terminate import before_abort
from megatron.guards.watchdog import Watchdog
from megatron.launch import Launch, detect_launch
from megatron.metrics import check_trackers, cut_metrics
from megatron.mpi_world import leave_mpi, require_mpi
from megatron.run_folder import (
    announce,
    finish,
    keep_config,
    lock_run_dir,
    name_run_dir,
    prepare_run_dir,
    write_pictures,
)
from megatron.run_lock import check_free
from megatron.runtime import (
    Runtime,
    fault_request,
    job_environment,
    needs_mpi,
    set_cuda_variables,
    start,
    stop,
    wait_for_all,
)
from radius.baselines.paths import PowerSGDPath, TopKPath
from radius.path import RadiusPath
from samo.path import SamoPath

if TYPE_CHECKING:
    from megatron.data.vocabulary import Vocabulary
    from megatron.data_parallel.engine import GradientEngine
    from megatron.metrics import Metrics, Workload
    from megatron.optimizer.bucket_optimizer import BucketOptimizer
    from megatron.origin import Origin
    from megatron.parallel.groups import ProcessGroups
    from megatron.pipeline.runner import Pipeline
    from megatron.pipeline.stage import Stage
    from megatron.pipeline.transport import Transport
    from megatron.timers import Timers
    from megatron.training import Readers, Trainer

_SAMO, _RADIUS = SamoPath(), RadiusPath()
GRADIENT_PATHS: dict[str, GradientPath] = {
    path.name: path
    for path in (
        DensePath(),
        _SAMO,
        _RADIUS,
        ProductPath(_SAMO, _RADIUS),
        TopKPath(),
        PowerSGDPath(),
    )
}
"""What `--grad-path` may name. A new path is one folder and one entry here."""

USAGE = """\
usage: pretrain_gpt.py --config configs/gpt_tiny.yaml [--FLAG VALUE ...]
       a YAML file, flags under Megatron-LM's names, or both; a flag wins over the file
       --dry-run checks everything and prints the configuration; --help lists all flags
       several ranks: RANKS_PER_NODE=4 CONFIG=FILE scripts/launch.sh
"""
"""What a start without any argument is told."""

LEAST_BUCKET_ELEMENTS = 40_000_000
BUCKET_ELEMENTS_PER_RANK = 1_000_000
"""Megatron's default bucket: the larger of these two, so that each rank's share of a bucket is
long enough for the network to reach its rate."""


def main(argv: Sequence[str]) -> int:
    """Train as `argv` asks and return the exit code; a mistake of the user's is one
    line on stderr."""
    failures = Failures(argv=argv)
    with ExitStack() as held:
        return _main(argv, failures, held)


def _main(argv: Sequence[str], failures: Failures, held: ExitStack) -> int:
    try:
        failures.launch = launch = detect_launch()
        if not argv:
            print(USAGE if launch.rank == 0 else "", end="", file=sys.stderr)
            return ConfigError.exit_code
        config = resolve(parse(argv, paths=GRADIENT_PATHS), launch.world_size)
        check_trackers(config.logging)
        if config.run.dry_run:
            if launch.rank == 0 and config.run.check_paths:
                check_files(config)
            print(to_yaml(config) if launch.rank == 0 else "", end="")
            return EXIT_DONE
        set_cuda_variables(config)
        if needs_mpi(config):
            require_mpi(launch, seconds=60 * config.parallel.distributed_timeout_minutes)
        failures.run_dir = run_dir = name_run_dir(config)
        if launch.world_size == launch.local_world_size:
            check_free(run_dir)
        return run(config, launch, run_dir, failures, held)
    except Exception as error:
        code = failures.report(error)
        if getattr(error, "shared", False):
            wait_for_all()
        return code


def check_files(config: Config) -> None:
    """Look at every file that the run will read; see `megatron.preflight`."""
    from megatron.planning.layout import logical_shapes
    from megatron.preflight import check_paths, vocabulary_size
    from samo.mask_file import check_mask_file

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    origin = check_paths(config, name_run_dir(config), say=say)
    masks = config.values().get("samo_mask_file")
    # A run that goes on has its masks in its checkpoint.
    if masks is not None and (origin is None or not origin.own):
        shapes = None
        if (size := vocabulary_size(config.data)) is not None:
            path = GRADIENT_PATHS[config.gradient.grad_path]
            shapes = logical_shapes(config, path, vocabulary=size)
        check_mask_file(Path(str(masks)), shapes)


def run(config: Config, launch: Launch, run_dir: Path, failures: Failures, held: ExitStack) -> int:
    """Train with a checked configuration; the exit code of a run that did not fail. What is
    `held` is let go by the caller, once it has told how the run ended."""
    requests = Requests(run_dir if launch.rank == 0 else None)
    # A scheduler's warning may come while torch is imported; the others may end a start that waits.
    requests.install(signal.SIGUSR1)
    runtime = start(launch, config)
    groups = build_groups(config, launch)
    # One name for this start on every rank: what earlier starts left behind is told by it.
    told = groups.world.gather_text(f"{secrets.token_hex(6)} {socket.gethostname()}")
    failures.attempt = told[0].split()[0]
    hosts = [text.partition(" ")[2] for text in told]
    failures.near = [rank for rank, host in enumerate(hosts) if host == hosts[launch.rank]]
    requests.install()
    notes: list[str] = []
    if runtime.is_writer:
        groups.world.agreed(lambda: held.callback(lock_run_dir(run_dir, say=notes.append)))
    else:
        groups.world.agreed(lambda: None)
    origin = open_run(config, runtime, groups, run_dir, failures.attempt, notes.append)
    failures.heartbeat = heartbeat = open_heartbeat(launch, run_dir, failures.attempt)
    if launch.world_size > 1:
        groups.listen(heartbeat.called)
        before_abort(lambda: failures.report(PeerError("a library that joins the ranks gave up")))
    with ExitStack() as stack:
        limit = 60 * config.parallel.distributed_timeout_minutes
        stack.callback(Watchdog(heartbeat, failures.causes(), limit=limit).watch())
        metrics = open_metrics(config, runtime, run_dir, origin)
        stack.callback(metrics.close)
        try:
            announce(metrics, config, runtime, groups)
            for note in notes:
                metrics.say(note)
            groups.connect(runtime.device)
            trainer = build_trainer(
                config, runtime, groups, run_dir, metrics, origin, heartbeat, requests
            )
            if runtime.is_writer:
                keep_config(config, run_dir)
                cut_metrics(run_dir, trainer.progress.iteration)
            trainer.peer_failure = failures.causes().known
            outcome = trainer.train()
            heartbeat.at("start")
            metrics.flush()
            means = metrics.throughput(trainer.workload)
            if runtime.is_writer:
                finish(outcome, trainer.progress, run_dir, means, attempt=failures.attempt)
                write_pictures(run_dir, metrics)
            if outcome.left:
                step = trainer.progress.iteration
                metrics.say(f"saved step {step} ({outcome.left}); the same command goes on")
            # Trackers may take long; once all are through, ranks leave together.
            metrics.close()
            groups.world.barrier()
            trainer.pipeline.transport.close()
        except BaseException as error:
            # Told before anything is closed, which may take long.
            failures.report(error)
            raise
    heartbeat.close()
    stop()
    return outcome.exit_code


def open_run(
    config: Config,
    runtime: Runtime,
    groups: ProcessGroups,
    run_dir: Path,
    attempt: str,
    say: Callable[[str], None],
) -> Origin | None:
    """Rank 0 opens the folder and decides for all where to start from. Collective."""
    from megatron.guards.sameness import compare_starts
    from megatron.origin import Origin, locate_checkpoint

    def locate() -> str:
        if not runtime.is_writer:
            return ""
        prepare_run_dir(run_dir, attempt=attempt)
        origin = locate_checkpoint(config, run_dir, say=say)
        return json.dumps([str(origin.path), origin.own] if origin else None)

    compare_starts(config, run_dir, groups.world)
    found = json.loads(groups.world.gather_text(groups.world.agreed(locate))[0])
    return Origin(Path(found[0]), own=found[1]) if found else None


def open_heartbeat(launch: Launch, run_dir: Path, attempt: str) -> Heartbeat:
    """This rank's whereabouts, where its peers can read them if there are any."""
    if launch.world_size == 1:
        return Heartbeat(attempt=attempt)
    return Heartbeat(
        run_dir / FOLDER,
        rank=launch.rank,
        attempt=attempt,
        across_hosts=launch.local_world_size < launch.world_size,
    )


def build_groups(config: Config, launch: Launch) -> ProcessGroups:
    """Process groups of the grid. Collective over the world."""
    from megatron.parallel.dims import ParallelDims
    from megatron.parallel.groups import ProcessGroups

    dims = ParallelDims.from_world(
        launch.world_size,
        tp=config.parallel.tensor_model_parallel_size,
        pp=config.parallel.pipeline_model_parallel_size,
        order=config.parallel.rank_order,
    )
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    return ProcessGroups.build(dims, rank=launch.rank, timeout=timeout)


def open_metrics(config: Config, runtime: Runtime, run_dir: Path, origin: Origin | None) -> Metrics:
    """Log, metrics files and trackers of the writing rank."""
    from megatron.checkpoint.verify import read_manifest
    from megatron.metrics import Metrics, NullMetrics
    from megatron.model.flops import FORMULA

    if not runtime.is_writer:
        return NullMetrics()
    start_iteration = 0
    if origin is not None and (origin.own or not config.checkpoint.finetune):
        start_iteration = read_manifest(origin.path).step
    return Metrics(
        run_dir,
        logging=config.logging,
        train_iters=config.total_iterations(),
        start_iteration=start_iteration,
        world_size=runtime.launch.world_size,
        name=config.name,
        formula=FORMULA,
        summary=config.values(),
        progress_dir=config.checkpoint.save,
        job_id=job_environment().get("SLURM_JOB_ID", ""),
    )


def build_trainer(
    config: Config,
    runtime: Runtime,
    groups: ProcessGroups,
    run_dir: Path,
    metrics: Metrics,
    origin: Origin | None,
    heartbeat: Heartbeat | None = None,
    requests: Requests | None = None,
) -> Trainer:
    """Put a run together, at the state of `origin` if there is one. Collective."""
    from megatron.config.parallel_rules import check_vocabulary
    from megatron.data.vocabulary import data_prefixes, find_vocabulary
    from megatron.guards.sameness import compare_data
    from megatron.model.flops import flops_per_token, parameter_count
    from megatron.optimizer.build import learning_rate, loss_scaler, weight_decay
    from megatron.profiling import Profiler
    from megatron.run_identity import data_files, identity
    from megatron.run_state import RunState
    from megatron.training import Progress, Trainer

    on_cuda = runtime.device.type == "cuda"

    def vocabulary_of_run() -> Vocabulary:
        hub = "tokenizer_model" in config.from_flags
        found = find_vocabulary(config.data, data_prefixes(config.data), hub=hub)
        check_vocabulary(config, found.size)
        return found

    vocabulary = groups.world.agreed(vocabulary_of_run)
    readers = build_readers(config, runtime, groups, vocabulary, metrics.say)
    compare_data(vars(readers), groups.world)
    heartbeat = heartbeat or Heartbeat()
    timers = build_timers(config, on_cuda=on_cuda)
    stage = build_stage(config, runtime, groups, vocabulary)
    infos = stage.parameter_infos()
    own_identity = identity(config, vocabulary)
    parts = build_parts(config, infos, groups, origin, own_identity)
    engine = build_engine(config, infos, parts, groups)
    optimizer, how = build_optimizer(config, engine)
    scaler = loss_scaler(config)
    state = RunState(
        config=config,
        run_dir=run_dir,
        groups=groups,
        engine=engine,
        optimizer=optimizer,
        scaler=scaler,
        metrics=metrics,
        identity=own_identity,
        data_files=data_files(config) if runtime.is_writer else {},
    )
    count = parameter_count(config.model, vocabulary.size)
    metrics.say(f"model: {count:,} parameters, vocabulary {vocabulary.size:,}")
    metrics.say(f"gradient path {config.gradient.grad_path}: {len(engine.buckets)} buckets")
    for note in (*parts.notes, *how):
        metrics.say(note)
    if origin is None:
        metrics.say("no checkpoint was ever committed here: starting at step 0")
    progress = state.restore(origin) if origin is not None else Progress()
    trainer = Trainer(
        config=config,
        device=runtime.device,
        groups=groups,
        pipeline=build_pipeline(config, runtime, groups, stage, engine, timers, heartbeat),
        engine=engine,
        optimizer=optimizer,
        learning_rate=learning_rate(config),
        weight_decay=weight_decay(config),
        scaler=scaler,
        readers=readers,
        metrics=metrics,
        timers=timers,
        profiler=Profiler(config, rank=groups.world.rank, run_dir=run_dir, on_cuda=on_cuda),
        flops_per_token=flops_per_token(config.model, vocabulary.size),
        workload=workload(config, vocabulary),
        saver=state,
        progress=progress,
        heartbeat=heartbeat,
        requests=requests or Requests(),
    )
    if (faults := fault_request()) is not None:
        from megatron.guards.faults import arm, parse_faults

        arm(trainer, parse_faults(faults))
    return trainer


def workload(config: Config, vocabulary: Vocabulary) -> Workload:
    """What a sample is, for the figures at the end of a run."""
    from megatron.metrics import Workload
    from megatron.model.flops import flops_per_token, recomputing_flops_per_token

    recompute = config.recompute
    full = recompute.recompute_granularity == "full" and recompute.recompute_method != "block"
    count = recomputing_flops_per_token if full else flops_per_token
    return Workload(
        seq_length=config.model.seq_length,
        flops_per_token=count(config.model, vocabulary.size),
        recomputed=full,
    )


def build_engine(
    config: Config, infos: Sequence[ParamInfo], parts: PathParts, groups: ProcessGroups
) -> GradientEngine:
    """What takes this rank's gradients to their means. Collective over the world."""
    import torch

    from megatron.data_parallel.engine import GradientEngine

    return GradientEngine(
        infos,
        parts,
        groups,
        cap=bucket_elements(config, groups.dp.size),
        grad_dtype=getattr(torch, config.precision.grad_dtype),
        overlap=config.parallel.overlap_grad_reduce,
        stream=config.offload.optimizer_cpu_offload,
    )


def build_optimizer(config: Config, engine: GradientEngine) -> tuple[BucketOptimizer, list[str]]:
    """What keeps and updates this rank's states, and sentences for the log."""
    from megatron.optimizer.bucket_optimizer import BucketOptimizer
    from megatron.optimizer.build import update_rule
    from megatron.optimizer.offload import OffloadedOptimizer

    rule = update_rule(config)
    if not config.offload.optimizer_cpu_offload:
        return BucketOptimizer(engine, rule), []
    optimizer = OffloadedOptimizer(engine, rule, bucket_size=config.offload.offload_bucket_size)
    order = "each bucket is updated as soon as its sum is there"
    if config.optimizer.clip_grad > 0.0:
        order = "updates wait for the norm of all gradients (--clip-grad 0 overlaps them with sums)"
    return optimizer, [
        f"optimizer states: {optimizer.host_bytes / 1e6:.1f} MB in this rank's host memory, "
        f"{optimizer.device_bytes / 1e6:.1f} MB of buffers on its device; {order}"
    ]


def build_timers(config: Config, *, on_cuda: bool) -> Timers:
    """Stopwatches of the detail that is asked for."""
    import torch

    from megatron.timers import Timers

    # Not the device: its other streams may wait for messages that neighbours send later.
    synchronize = (lambda: torch.cuda.current_stream().synchronize()) if on_cuda else None
    return Timers(config.logging.timing_log_level, synchronize=synchronize)


def build_stage(
    config: Config, runtime: Runtime, groups: ProcessGroups, vocabulary: Vocabulary
) -> Stage:
    """The layers of this rank, with the embedding before the first and the head behind the last."""
    import torch

    from megatron.config.compilation import choose_compilation
    from megatron.model.gpt import GPT
    from megatron.pipeline.stage import Stage

    split = config.parallel.layer_split(config.model.num_layers)
    stage, stages = groups.pp.rank, groups.pp.size
    chunks = [
        GPT(
            config.model,
            vocab_size=vocabulary.size,
            seed=config.training.seed,
            dtype=getattr(torch, config.precision.param_dtype),
            device=runtime.device,
            recompute=config.recompute,
            tp=groups.tp,
            sequence_parallel=config.parallel.sequence_parallel,
            layers=layers,
            has_embedding=stage == 0 and number == 0,
            has_head=stage == stages - 1 and number == len(split[stage]) - 1,
        )
        for number, layers in enumerate(split[stage])
    ]
    if choose_compilation(config, runtime.device.type).on:
        for chunk in chunks:
            # Dropout draws what it draws without the compiler, so that grids agree.
            chunk.compile_layers(options={"fallback_random": True})
    return Stage(chunks)


def build_pipeline(
    config: Config,
    runtime: Runtime,
    groups: ProcessGroups,
    stage: Stage,
    engine: GradientEngine,
    timers: Timers,
    heartbeat: Heartbeat,
) -> Pipeline:
    """What runs a batch through this rank's stage and those of its pipeline. Collective."""
    from megatron.pipeline.course import MessageDriven
    from megatron.pipeline.runner import Pipeline
    from megatron.pipeline.schedule import Place
    from megatron.pipeline.transport import ArrivalTransport

    chunks = len(stage.chunks)
    transport = open_stage_transport(config, runtime, groups, chunks=chunks)
    place = Place(stage=groups.pp.rank, stages=groups.pp.size, chunks=chunks)

    def at(phase: str) -> None:
        # Looked up each time: faults on purpose put another in its place.
        heartbeat.at(phase)

    driven = None
    if config.parallel.pipeline_schedule == "message-driven":
        assert isinstance(transport, ArrivalTransport), "it is opened for this schedule"
        driven = MessageDriven(
            place,
            limit=config.parallel.pipeline_limit,
            transport=transport,
            tp=groups.tp,
            device=runtime.device,
            timers=timers,
            at=at,
        )
    return Pipeline(
        stage=stage,
        place=place,
        transport=transport,
        engine=engine,
        timers=timers,
        at=at,
        driven=driven,
    )


def open_stage_transport(
    config: Config, runtime: Runtime, groups: ProcessGroups, *, chunks: int
) -> Transport:
    """What carries messages between this rank's stage and its neighbours. Collective."""
    import torch

    length = config.model.seq_length
    if config.parallel.sequence_parallel:
        length //= groups.tp.size
    shape = (config.training.micro_batch_size, length, config.model.hidden_size)
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
    config: Config,
    infos: Sequence[ParamInfo],
    groups: ProcessGroups,
    origin: Origin | None,
    identity: Mapping[str, Any],
) -> PathParts:
    """What the gradient path brings to a run that starts from `origin`. Collective: a checkpoint of
    another model fails on every rank alike."""
    from megatron.run_state import opened

    path = GRADIENT_PATHS[config.gradient.grad_path]
    with ExitStack() as stack:
        # By itself: a path may ask other ranks while it is built, and must find them all there.
        start = groups.world.agreed(lambda: stack.enter_context(opened(origin, config, identity)))
        return groups.world.agreed(lambda: path.build(config, infos, groups, start))


def build_readers(
    config: Config,
    runtime: Runtime,
    groups: ProcessGroups,
    vocabulary: Vocabulary,
    say: Callable[[str], None],
) -> Readers:
    """The three data sets, cut for this rank. Rank 0 builds first and fills the index cache."""
    from megatron.data.build import Datasets, build_datasets
    from megatron.data.loader import BatchReader
    from megatron.data.sampler import CollateOptions, MicrobatchSampler
    from megatron.errors import DataError
    from megatron.training import Readers

    batch_size = config.training.global_batch_size
    assert batch_size is not None, "resolve fills it in"
    evaluated = config.evaluation.eval_iters * batch_size

    def build() -> Datasets:
        return build_datasets(
            config.data,
            seq_length=config.model.seq_length,
            seed=config.training.seed,
            samples=(config.total_samples(), evaluated, evaluated),
            vocab_size=vocabulary.size,
            say=say,
            tokenizer_fingerprint=vocabulary.fingerprint,
        )

    sampler = MicrobatchSampler(config.training.micro_batch_size, groups.dp.rank, groups.dp.size)
    options = CollateOptions(
        eod=vocabulary.eod,
        eod_mask_loss=config.data.eod_mask_loss,
        reset_position_ids=config.data.reset_position_ids,
        reset_attention_mask=config.data.reset_attention_mask,
    )
    mine = groups.world.agreed(lambda: build() if runtime.is_writer else None)
    sets = groups.world.agreed(lambda: mine or build())

    def reader(dataset) -> BatchReader | None:  # noqa: ANN001
        if dataset is None:
            return None
        return BatchReader(dataset=dataset, sampler=sampler, options=options, device=runtime.device)

    if sets.train is None and not config.training.skip_train:
        raise DataError("split: leaves no documents for training; give training a share")
    return Readers(train=reader(sets.train), valid=reader(sets.valid), test=reader(sets.test))


def bucket_elements(config: Config, data_parallel_size: int) -> int:
    """Entries of a gradient bucket: `--ddp-bucket-size`, else Megatron's default; AxoNN's k x bsize
    where the optimizer is offloaded."""
    if config.offload.optimizer_cpu_offload:
        return config.offload.chunk
    default = max(LEAST_BUCKET_ELEMENTS, BUCKET_ELEMENTS_PER_RANK * data_parallel_size)
    return config.parallel.ddp_bucket_size or default


if __name__ == "__main__":
    faulthandler.enable()
    code = main(sys.argv[1:])
    # Only ranks that all ended well may leave MPI in order: an orderly end waits for the others. It
    # ends the process; without MPI the process goes on below.
    if code in (EXIT_DONE, EXIT_REQUEUE):
        leave_mpi(code)
    # All is written and closed, and torch's own threads sometimes abort an interpreter that takes
    # itself apart.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
