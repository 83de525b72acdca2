"""A small model sharded over ranks, and whole gradients assembled from its shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron.config import RecomputeConfig
from megatron.model.gpt import GPT
from megatron.parallel.groups import ALONE, Group, ProcessGroups
from megatron.parallel.tensor_shard import TensorShard
from tests.model.models import sharpen, small_config

LENGTH = 16
LLAMA: dict[str, Any] = {
    "num_attention_heads": 8,
    "position_embedding_type": "rope",
    "swiglu": True,
    "ffn_hidden_size": 64,
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "group_query_attention": True,
    "num_query_groups": 4,
}
DROPOUT: dict[str, Any] = {"hidden_dropout": 0.3, "attention_dropout": 0.2}


@dataclass(frozen=True, kw_only=True)
class GridCase:
    """A model to run: `changes` to the small configuration, and how the model is sharded."""

    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    vocab_size: int = 97
    sequence_parallel: bool = False
    recompute: RecomputeConfig | None = None
    dtype: torch.dtype = torch.float32
    batch: int = 2


@dataclass(frozen=True)
class GridResult:
    """The loss on one rank, and each gradient with its shard (None: whole)."""

    loss: torch.Tensor
    grads: dict[str, tuple[TensorShard | None, torch.Tensor]]


def build(case: GridCase, tp: Group = ALONE, **stage: Any) -> GPT:
    """Build the model of a case; its values leave every linear range, however it is sharded."""
    torch.set_num_threads(1)
    config = small_config(**{"make_vocab_size_divisible_by": 8, **case.changes})
    common: dict[str, Any] = {"vocab_size": case.vocab_size, "seed": 5, "device": "cpu"}
    whole = sharpen(GPT(config, dtype=torch.float32, **common))
    model = GPT(
        config,
        dtype=case.dtype,
        recompute=case.recompute,
        tp=tp,
        sequence_parallel=case.sequence_parallel,
        **common,
        **stage,
    )
    model.load_values(whole.logical_values())
    return model


def batch(case: GridCase, *, seed: int = 0) -> dict[str, Any]:
    """Return arguments of `GPT.loss`: packed documents, and a mask."""
    generator = torch.Generator().manual_seed(seed)
    shape = (case.batch, LENGTH)
    tokens, labels = torch.randint(0, case.vocab_size, (2, *shape), generator=generator)
    position_ids = torch.cat([torch.arange(9), torch.arange(LENGTH - 9)]).expand(shape)
    return {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": torch.rand(shape, generator=generator).round(),
        "position_ids": position_ids,
        "document_ids": np.tile(np.arange(LENGTH) >= 9, (case.batch, 1)),
    }


def found(model: GPT, loss: torch.Tensor) -> GridResult:
    """Return the gradients as the engine sees them.

    Leaves are summed, and partial gradients are summed over ranks.
    """
    grads: dict[str, tuple[TensorShard | None, torch.Tensor]] = {}
    for info in model.parameter_infos():
        total = torch.stack([g for leaf in info.leaves if (g := leaf.grad) is not None]).sum(0)
        if info.partial:
            model.tp.group.all_reduce(total, dist.ReduceOp.SUM)
        rows = info.local_shape[0]
        assert not total[rows:].any(), "padding takes no gradient"
        assert not info.param[rows:].any(), "padding is zero"
        grads[info.name] = (info.tp_shard, total[:rows])
    return GridResult(loss.detach(), grads)


def loss_and_gradients(groups: ProcessGroups, case: GridCase) -> GridResult:
    """Run forward and backward on each of the ranks that share the layers."""
    model = build(case, groups.world)
    # As in a pipeline, another microbatch's forward runs before this backward.
    model.streams.at(3, 1)
    loss = model.loss(**batch(case))
    model.streams.at(3, 2)
    model.loss(**batch(case, seed=1))
    loss.backward()
    return found(model, loss)


def whole_gradients(parts: list[GridResult]) -> dict[str, torch.Tensor]:
    """Return gradients of logical tensors, assembled from the shards of all ranks.

    Asserts that copies on several ranks are equal bit for bit.
    """
    result: dict[str, torch.Tensor] = {}
    for name, (cut, grad) in parts[0].grads.items():
        if cut is None:
            assert all(torch.equal(part.grads[name][1], grad) for part in parts), name
            result[name] = grad
            continue
        whole = torch.full(cut.shape, torch.nan, dtype=grad.dtype)
        for part in parts:
            mine, local = part.grads[name]
            assert mine is not None
            for (low, high), (low_here, high_here) in mine.boxes():
                whole[_box(low, high)] = local[_box(low_here, high_here)]
        assert not whole.isnan().any(), name
        result[name] = whole
    return result


@contextmanager
def noted(group: Group) -> Iterator[list[str]]:
    """Record the collectives that a group issues, as "kind of entries and dtype"."""
    calls: list[str] = []
    group.calls.tell = lambda _, what, name: calls.append(what)
    try:
        yield calls
    finally:
        group.calls.tell = None


def _box(low: tuple[int, ...], high: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in zip(low, high, strict=True))
