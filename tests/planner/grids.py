"""Trainers on the ranks of a grid, with counts of bytes held and sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from megatron.config import GPTConfig, parse, resolve
from megatron.data_parallel.all_reduce import AllReduceReducer
from megatron.data_parallel.bucket_plan import bucket_elements
from megatron.data_parallel.node_reducer import NodeReducer
from megatron.data_parallel.outer_step import LocalReducer
from megatron.data_parallel.top_k_feedback import TopKFeedback
from megatron.memory_estimate import RankGrid
from megatron.optimizer.cpu_offload import OffloadedOptimizer
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from megatron.training import Trainer
from pretrain_gpt import GRADIENT_PATHS
from radius.baselines.feedback import FeedbackReducer
from radius.baselines.powersgd import PowerSGDReducer
from radius.bitmap_index import BitmapIndex
from radius.offset_index import OffsetIndex
from radius.reducer import RadiusReducer
from radius.residual import WireResidual
from samo.layout import CompressedLayout
from tests.ranks import Ranks
from tests.ranks import grid as groups_of
from tests.training.harness import make_trainer
from tools.bench.common.tensors import bytes_of

MODEL = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data "
    "--vocab-size 101 --make-vocab-size-divisible-by 8 --micro-batch-size 2 "
    "--global-batch-size 16 --train-iters 6 --lr 1e-3 --eval-iters 0 --log-interval 100 "
    "--ddp-bucket-size 6000 --attention-dropout 0 --hidden-dropout 0"
)


def planned(flags: str, world: int, *, vocabulary: int = 101) -> RankGrid:
    """Return the grid that the planner makes of these flags."""
    config = resolve(parse(flags.split(), paths=GRADIENT_PATHS), world)
    return grid_of(config, world, vocabulary)


def grid_of(config: GPTConfig, world: int, vocabulary: int) -> RankGrid:
    parallel = config.parallel
    dims = ParallelDims.from_world(
        world,
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        order=parallel.rank_order,
        dp_inner=parallel.dp_inner_size,
    )
    return RankGrid(
        config=config,
        dims=dims,
        path=GRADIENT_PATHS[config.gradient.grad_path],
        vocabulary=vocabulary,
        cap=bucket_elements(config, dims.dp),
        device="cpu",
    )


def on_rank(groups: ProcessGroups, flags: str, steps: int, run_dir: Path) -> dict[str, Any]:
    """Return the bytes that a rank of this run holds after some steps, and sent in each step."""
    config = resolve(parse(flags.split(), paths=GRADIENT_PATHS), groups.world.size)
    parallel = config.parallel
    groups = groups_of(
        groups,
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        inner=parallel.dp_inner_size,
    )
    trainer = make_trainer(groups, flags, run_dir)
    records = [trainer.train_step()[0] for _ in range(steps)]
    gathers = list(trainer.optimizer._updates._sent.values())
    trainer.optimizer.finish_param_gather()
    trainer.metrics.close()
    trainer.engine.detach()
    return {
        "gathered": sum(parts.nbytes for bucket, parts, _ in gathers if not bucket.lends_grad),
        "place": (groups.pp.rank, groups.tp.rank),
        "kept": held_bytes(trainer),
        "stored": stored_entries(trainer),
        "chosen": chosen_entries(trainer),
        "params": [
            (i.name, i.logical_shape, i.tp_shard, i.partial, i.tied, i.param.numel())
            for i in trainer.stage.parameter_infos()
        ],
        "buckets": [(tuple(b.slices.items()), b.numel) for b in trainer.engine.buckets],
        "sent": [record.bytes_sent for record in records],
        "axes": [dict(record.axis_bytes) for record in records],
    }


def saved_by(groups: ProcessGroups, flags: str, run_dir: Path) -> int:
    """Return the tensor bytes in the checkpoint of this run's last step."""
    trainer = make_trainer(groups, flags, run_dir)
    trainer.train()
    trainer.metrics.close()
    trainer.engine.detach()
    groups.world.barrier()
    files = (run_dir / "checkpoints").rglob("*.safetensors")
    return sum(_payload(file) for file in files)


def _payload(file: Path) -> int:
    """Return the bytes of a safetensors file without its header."""
    with file.open("rb") as opened:
        header = int.from_bytes(opened.read(8), "little")
    return file.stat().st_size - 8 - header


def run(ranks: Ranks, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run a function on one rank in this process, with the interface of `Ranks.run`."""
    if world > 1:
        return ranks.run(world, function, *args)
    return [function(ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=1), rank=0), *args)]


def held_bytes(trainer: Trainer) -> dict[str, int]:
    """Return the bytes of the storages of each kind, each under the first kind that has it."""
    engine, optimizer = trainer.engine, trainer.optimizer
    reducer, layout = engine.reducer, engine.layout
    offloaded = isinstance(optimizer, OffloadedOptimizer)
    states = optimizer._sets if offloaded else optimizer.states
    kinds: dict[str, Iterable[torch.Tensor]] = {
        "master": [tensor for state in states for tensor in state.vectors[0].tensors],
        "moments": [t for state in states for each in state.vectors[1:] for t in each.tensors],
        "gradients": [bucket.grad for bucket in engine.buckets],
        "parameters": [leaf for info in engine.infos.values() for leaf in info.leaves],
        "scratch": [optimizer._scratch],
    }
    found: dict[str, int] = {}
    known: set[int] = set()
    for kind, tensors in kinds.items():
        sizes = {at: size for at, size in bytes_of(tensors).items() if at not in known}
        known |= sizes.keys()
        found[kind] = sum(sizes.values())
    if isinstance(optimizer, OffloadedOptimizer):
        found["offload buckets"] = found.pop("master") + found.pop("moments")
        assert found["offload buckets"] + found["scratch"] == optimizer.device_bytes
    index = layout.nbytes if isinstance(layout, CompressedLayout) else 0
    if isinstance(reducer, NodeReducer):
        reducer = reducer.between
    if isinstance(reducer, RadiusReducer):
        own = [each for each in reducer._own if each.index is not None]
        waits = [each.residual.waiting(each.index) for each in own]
        index += sum(
            i.nbytes for each in own if isinstance(i := each.index, OffsetIndex | BitmapIndex)
        )
        apart = [w for w in waits if w is not None and w.data_ptr() not in known]
        found["residual"] = sum(bytes_of(apart).values())
        found["values"] = sum(v.nbytes for each in reducer._own for v in each._kept.values())
        wires = [r for each in reducer._own if isinstance(r := each.residual, WireResidual)]
        spare = [each._spare for each in wires if each._spare is not None]
        found["wire feedback"] = sum(each.nbytes for each in spare)
    if isinstance(reducer, AllReduceReducer):
        kept = [t for each in reducer._feedback.values() for t in (each._kept, each._lost)]
        found["wire feedback"] = sum(t.nbytes for t in kept if t is not None)
    if isinstance(reducer, FeedbackReducer):
        buffers = (*reducer._residual.values(), *reducer.offered.values())
        found["residual"] = sum(tensor.nbytes for tensor in buffers)
    if isinstance(reducer, LocalReducer):
        velocities = [a.velocity for a in reducer.anchors if a.velocity is not None]
        found["anchor"] = sum(anchor.weights.nbytes for anchor in reducer.anchors)
        own = [a.feedback for a in reducer.anchors if isinstance(a.feedback, TopKFeedback)]
        found["unsent"] = sum(each.unsent.nbytes for each in own)
        found["outer momentum"] = sum(velocity.nbytes for velocity in velocities)
    if isinstance(reducer, PowerSGDReducer):
        found["warm start"] = sum(tensor.nbytes for tensor in reducer.q.values())
    return found | ({"index": index} if index else {})


def stored_entries(trainer: Trainer) -> dict[str, int]:
    """Return the number of stored entries of each partly stored parameter."""
    layout = trainer.engine.layout
    return {
        info.name: layout.numel(info.name, info.param)
        for info in trainer.engine.infos.values()
        if layout.mask(info.name) is not None
    }


def chosen_entries(trainer: Trainer) -> int:
    """Return the entries that Radius has selected on this rank."""
    reducer = trainer.engine.reducer
    if isinstance(reducer, NodeReducer):
        reducer = reducer.between
    own = reducer._own if isinstance(reducer, RadiusReducer) else []
    return sum(each.index.numel for each in own if each.index is not None)
