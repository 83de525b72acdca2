"""Numbers that the planner cannot take from where a run has them, since that loads torch or lies
above: equal, so that they do not drift apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.config import parse
from megatron.config.sections import OffloadConfig
from megatron.data_parallel.bucket import ALIGNMENT
from megatron.data_parallel.bucket_plan import BYTES, mean_traffic
from megatron.errors import ConfigError
from megatron.optimizer.build import update_rule
from megatron.optimizer.chunks import CPU_CHUNK, CUDA_CHUNK, SETS, offload_piece
from megatron.parallel.dims import ParallelDims
from pretrain_gpt import GRADIENT_PATHS
from tests.planner.shapes import rank_of
from tools.planner.seconds import collective_seconds, link_of
from tools.planner.site import Link, read_site
from tools.planner.traffic import state_width

RUN = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --mock-data "
    "--vocab-size 8 --micro-batch-size 1 --train-iters 1 --lr 1e-3"
)


@pytest.mark.parametrize("flags", ["--optimizer adam", "--optimizer sgd --sgd-momentum 0"])
def test_moments_are_those_of_the_rule(flags: str) -> None:
    config = parse(f"{RUN} {flags}".split(), paths=GRADIENT_PATHS)
    moments = update_rule(config).moments
    assert config.optimizer.num_moments == len(moments)
    assert state_width(config) == torch.float32.itemsize * (1 + len(moments))


@pytest.mark.parametrize(
    ("flags", "width"),
    [
        ("--bf16 --main-params-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", 6),
        ("--bf16 --main-params-dtype bf16 --main-params-rounding kahan", 12),
        ("--exp-avg-dtype int8 --exp-avg-sq-dtype int8", 6 + 8 / 256),
        ("--fp16 --optimizer sgd --exp-avg-dtype fp16", 6 + 4 / 256),
    ],
)
def test_bytes_of_an_entry_follow_the_state_formats(flags: str, width: float) -> None:
    config = parse(f"{RUN} {flags}".split(), paths=GRADIENT_PATHS)
    assert state_width(config) == width


def test_widths_are_torchs() -> None:
    assert {name: getattr(torch, name).itemsize for name in BYTES} == BYTES


@pytest.mark.parametrize("size", [128, 1000, 4_000_000, 5_555_555])
@pytest.mark.parametrize("coarsening", [1, 3])
def test_pieces_and_all_reduces_begin_where_slices_may(size: int, coarsening: int) -> None:
    offload = OffloadConfig(offload_bucket_size=size, offload_coarsening=coarsening)
    assert offload.chunk == size * coarsening // ALIGNMENT * ALIGNMENT
    assert 0 < SETS * offload_piece(size) <= size and offload_piece(size) % ALIGNMENT == 0
    assert CPU_CHUNK % ALIGNMENT == CUDA_CHUNK % ALIGNMENT == 0


def test_the_smallest_offload_bucket_has_room_for_its_sets() -> None:
    least = SETS * ALIGNMENT
    flags = f"{RUN} --bf16 --optimizer-cpu-offload --offload-bucket-size"
    assert parse(f"{flags} {least}".split(), paths=GRADIENT_PATHS).offload.optimizer_cpu_offload
    with pytest.raises(ConfigError, match="offload-bucket-size"):
        parse(f"{flags} {least - 1}".split(), paths=GRADIENT_PATHS)


def test_a_long_bucket_is_summed_in_pieces_that_make_it_up() -> None:
    rank = rank_of({"a": (100, 64), "b": (3, 64)}, ranks=3)
    (step,) = mean_traffic(rank, steps=1, grad_bytes=2, param_bytes=2, sharded=False, most=4096)
    sent = [(each.bucket, each.piece, each.nbytes) for each in step.sent]
    (numel,) = (bucket.numel for bucket in rank.buckets)
    assert sent == [(0, 0, 2 * 4096), (0, 1, 2 * (numel - 4096))]


def test_nodes_send_shards_only_between_them() -> None:
    """Each of 8 ranks sends half a bucket within its pair, and averages its half between pairs."""
    site = read_site(Path(__file__).resolve().parents[2] / "scripts" / "site", "perlmutter")
    dims = ParallelDims(tp=2, dp=8, pp=1, dp_inner=2)
    rank = rank_of({"a": (128, 64)}, ranks=8, device="cuda")
    (step,) = mean_traffic(rank, steps=1, grad_bytes=4, param_bytes=2, sharded=True, inner=2)
    half = 128 * 64 // 2
    sent = [(each.kind, each.bytes_sent(dims.dp)) for each in step.sent]
    assert sent == [
        ("reduce-scatter", 4 * half),
        ("all-reduce", 2 * 3 * 4 * half // 4),
        ("all-gather", 2 * half),
    ]
    everybody = site.link(dims, "dp")
    links = [link_of(each, site, dims, everybody) for each in step.sent]
    # Two tensor-parallel ranks of two data-parallel ranks fill a node of four GPUs.
    within = Link(site.link_latency, site.link_rate)
    # Between nodes all four send at once, each to the ranks with its own shard.
    apart = Link(everybody.latency, everybody.rate / 2)
    assert links == [within, apart, within] and everybody != within
    seconds = [collective_seconds(e, k, dims.dp) for e, k in zip(step.sent, links, strict=True)]
    assert seconds[1] == apart.ring(sent[1][1], 4, rounds=2)
