"""Modules wait for the parameters that they read, and for no others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron.config import parse, resolve
from megatron.data_parallel.all_reduce import AllReduceReducer
from megatron.data_parallel.bucket import BucketShard, GradBucket, Slice
from megatron.data_parallel.engine import GradientEngine
from megatron.data_parallel.exchange import Exchange
from megatron.data_parallel.gradient_path import PathParts
from megatron.data_parallel.layout import BucketLayout, DenseLayout
from megatron.data_parallel.reducer import StepContext
from megatron.low_memory.dry_run import DryTranslation, dry_batch
from megatron.optimizer.bucket_optimizer import BucketOptimizer
from megatron.optimizer.update_rules import AdamW
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ALONE, ProcessGroups
from megatron.pipeline.stage import Stage
from megatron.tasks.task import Task
from pretrain_gpt import GPT_TASK, GRADIENT_PATHS
from pretrain_translation import TRANSLATION_TASK
from pretrain_vision import VISION_TASK

pytestmark = pytest.mark.push

CPU = torch.device("cpu")
GROUPS = ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=1), rank=0)
RUN = "--micro-batch-size 2 --global-batch-size 2 --train-iters 2 --lr 1e-2 --device cpu "
GPT = (
    f"{RUN} --num-layers 3 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --mock-data "
    "--vocab-size 50"
)
VISION = f"{RUN} --mock-data --mock-images 8 --num-classes 4 --img-h 32 --img-w 32"
TRANSLATION = (
    f"{RUN} --micro-batch-size 1 --encoder-layers 1 --decoder-layers 1 --embed-dim 16 "
    "--attention-heads 2 --max-tokens 24 --data-path none"
)
CASES: dict[str, tuple[Task, str]] = {
    "gpt": (GPT_TASK, GPT),
    "gpt, rope, untied": (
        GPT_TASK,
        f"{GPT} --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights "
        "--normalization RMSNorm --qk-layernorm",
    ),
    **{
        f"gpt, {kind}": (GPT_TASK, f"{GPT} --recompute-granularity {kind}")
        for kind in ("full", "selective", "ops", "no-norm", "every", "residual-star")
    },
    "wide resnet": (VISION_TASK, f"{VISION} --num-layers 10 --width-factor 0.5"),
    "vgg": (VISION_TASK, f"{VISION} --vision-backbone-type vgg19 --width-factor 0.125"),
    "translation": (TRANSLATION_TASK, TRANSLATION),
    "translation, ops": (TRANSLATION_TASK, f"{TRANSLATION} --recompute-granularity ops"),
}


class Arrival:
    """A gather that completes when it is waited for, and not before."""

    def __init__(self, parts: torch.Tensor) -> None:
        self._parts, self._values = parts, parts.clone()
        parts.fill_(torch.nan)

    def wait(self) -> None:
        self._parts.copy_(self._values)


class OwnerOfAll(AllReduceReducer):
    """A reducer whose only rank has all shards, which nevertheless are gathered."""

    def attach(self, buckets: Sequence[GradBucket], layout: BucketLayout) -> None:
        super().attach(buckets, layout)
        for bucket in buckets:
            whole = Slice(0, bucket.numel)
            bucket.shard = BucketShard(where=whole, length=bucket.numel, exchange=self)
            bucket.storage, bucket.lends_grad = bucket.grad, True

    def gather(self, parts: torch.Tensor) -> Arrival:
        return Arrival(parts)

    def fill(self, flat: torch.Tensor) -> None:
        pass


class Rank:
    """A rank whose parameters are not a number until they were waited for."""

    def __init__(self, task: Task, flags: str, *, cap: int = 1000, backend: str = "") -> None:
        config = parse(flags.split(), paths=GRADIENT_PATHS, task=task.config)
        self.config: Any = resolve(config, 1)
        opened: Any = (
            DryTranslation(self.config, source_size=20, target_size=20)
            if task is TRANSLATION_TASK
            else task.open(self.config)
        )
        chunks = opened.chunks(GROUPS, CPU)
        if backend:
            chunks[0].compile_layers(backend=backend)
        self.stage = Stage(chunks)
        infos = self.stage.parameter_infos()
        parts = PathParts(layout=DenseLayout(), reducer=OwnerOfAll(Exchange(ALONE)))
        self.engine = GradientEngine(infos, parts, GROUPS, cap=cap, grad_dtype=torch.float32)
        self.optimizer = BucketOptimizer(self.engine, AdamW(beta1=0.9, beta2=0.99, eps=1e-8))
        self.optimizer.overlap_param_gather(self.stage.modules)
        self.gather: Any = self.optimizer._updates

    def step(self) -> torch.Tensor:
        """Train on a batch, and return its sums; parameters are spoilt until they are gathered."""
        self.engine.begin(StepContext(t=self.optimizer.applied + 1))
        self.engine.expect_last_backward()
        sums = self.stage.forward(0, dry_batch(self.config, 0, CPU))
        self.stage.backward(0, 1.0)
        self.optimizer.finish_param_gather()
        step = self.engine.finish(tag=self.optimizer.applied, clip_norm=1.0)
        assert step.ok
        for info in self.stage.parameter_infos():
            info.param.detach().fill_(torch.nan)
        self.optimizer.step(step, lr=1e-2, weight_decay=0.1)
        self.engine.commit(step)
        return sums

    @property
    def pending(self) -> set[str]:
        """The parameters that are still being gathered."""
        return {name for index in self.gather._sent for name in self.engine.buckets[index].names}


@pytest.mark.parametrize("name", CASES)
def test_every_module_waits_for_what_it_reads(name: str) -> None:
    rank = Rank(*CASES[name], cap=1)
    first = rank.step()
    assert rank.pending == rank.engine.infos.keys(), "all stay in progress"
    second = rank.step()
    assert torch.isfinite(second).all() and second[0] < first[0]


def test_what_no_module_waits_for_does_not_stay_in_progress() -> None:
    rank = Rank(GPT_TASK, GPT, cap=1)
    # A function could read these parameters in the same way.
    rank.stage.modules[0].get_submodule("final_norm")._forward_pre_hooks.clear()
    rank.step()
    received = rank.engine.infos.keys() - rank.pending
    assert {"final_norm.weight", "final_norm.bias"} <= received
    assert "layers.1.mlp.dense_h_to_4h.weight" in rank.pending
    assert torch.isfinite(rank.step()).all()


def test_gathers_arrive_in_the_order_of_the_forward_pass() -> None:
    rank = Rank(GPT_TASK, GPT)
    rank.step()
    assert len(rank.gather._sent) == len(rank.engine.buckets) > 4
    waiting, layers = [len(rank.gather._sent)], rank.stage.modules[0].layers

    def note(*_: Any) -> None:
        waiting.append(len(rank.gather._sent))

    for layer in layers:  # type: ignore[union-attr]
        layer.register_forward_hook(note)
    sent = list(rank.gather._sent)
    rank.stage.forward(0, dry_batch(rank.config, 0, CPU))
    assert sorted(waiting, reverse=True) == waiting and len(set(waiting)) == len(waiting)
    assert waiting[-1] == 0 and waiting[1] > 1, "the last layers arrive while the first computes"
    assert sent == [each.index for each in rank.gather.buckets] != sorted(sent)


# torch's own tracing looks at `.grad` of tensors that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_layers_wait_outside_of_what_is_compiled() -> None:
    flags = f"{GPT} --num-layers 1"
    plain, compiled = Rank(GPT_TASK, flags), Rank(GPT_TASK, flags, backend="eager")
    for _ in range(2):
        assert torch.equal(plain.step(), compiled.step())
    assert compiled.pending == set(compiled.engine.infos)


def test_whole_weights_are_read_after_one_call() -> None:
    rank = Rank(GPT_TASK, GPT)
    rank.step()
    assert rank.pending and rank.stage.modules[0].layers  # type: ignore[truthy-bool]
    with rank.optimizer.shared_weights():
        assert not rank.pending
        assert all(torch.isfinite(each.param).all() for each in rank.stage.parameter_infos())
    assert not any(torch.count_nonzero(gap) for gap in gaps(rank.engine)), "gradients add to them"


def gaps(engine: GradientEngine) -> list[torch.Tensor]:
    """The entries of buckets between parameters."""
    found = []
    for bucket in engine.buckets:
        starts = [where.start for where in bucket.slices.values()]
        for where, past in zip(bucket.slices.values(), [*starts[1:], bucket.numel], strict=True):
            found.append(bucket.grad[where.start + where.numel : past])
    return found
