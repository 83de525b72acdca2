"""Every gradient path trains on the device as on the CPU, ordered by streams and events, and the
host waits only where it is allowed to."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
from pytest import approx

from radius.path import RadiusConfig
from tests.rehearsal.process import Rehearsal, needs_rehearsal
from tests.tiers import sampled

pytestmark = needs_rehearsal
RADIUS = "--grad-path radius --radius-interval 3 --radius-start-iter 1"
SAMO = "--samo-sparsity 0.8 --samo-pruning random"
DOCUMENTS = "--tokenizer-type NullTokenizer --reset-attention-mask"
CASES = {
    "dense-fp32": "",
    "dense-bf16-recompute": "--bf16 --recompute-granularity full --hidden-dropout 0.1",
    "dense-fp16-dropout": "--fp16 --initial-loss-scale 65536 --attention-dropout 0.1",
    "dense-llama": "--bf16 --swiglu --position-embedding-type rope --normalization RMSNorm "
    "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights",
    "documents-bf16": f"--bf16 {DOCUMENTS} --group-query-attention --num-query-groups 2",
    "documents-fp32": DOCUMENTS,
    "offload": "--bf16 --optimizer-cpu-offload --offload-bucket-size 65536 --clip-grad 0",
    "offload-clipped": "--bf16 --optimizer-cpu-offload --offload-bucket-size 65536",
    "radius-fp32": RADIUS,
    "radius-rolling-fp32": f"{RADIUS} --radius-schedule rolling",
    "radius-seeded-fp32": f"{RADIUS} --radius-select seeded",
    "radius-rolling-seeded-bf16": f"--bf16 {RADIUS} --radius-schedule rolling "
    "--radius-select seeded",
    "radius-gradient-fp32": f"{RADIUS} --radius-select gradient --radius-residual none",
    "radius-rolling-gradient-bf16": f"--bf16 {RADIUS} --radius-schedule rolling "
    "--radius-select gradient",
    "radius-bf16": f"--bf16 --accumulate-allreduce-grads-in-fp32 {RADIUS}",
    "samo-dsr-bf16": f"--bf16 --grad-path samo {SAMO} --dsr-interval 2",
    "samo-radius-fp16": "--fp16 --initial-loss-scale 65536 --grad-path samo+radius "
    f"--accumulate-allreduce-grads-in-fp32 {SAMO} --radius-interval 3 --radius-start-iter 1",
    "topk-bf16": "--bf16 --grad-path topk",
    "powersgd-bf16": "--bf16 --grad-path powersgd",
    "lowrank-sparse-bf16": "--bf16 --grad-path lowrank+sparse",
    "roundrobin-bf16": "--bf16 --grad-path roundrobin --roundrobin-interval 2",
    "demo-fp32": "--grad-path demo --demo-sign false",
}
ON_PUSH = (
    "dense-fp16-dropout", "offload-clipped", "radius-rolling-fp32", "samo-dsr-bf16",
)  # fmt: skip
"""A case of dropout, of states in host memory, of Radius and of SAMO."""
# What the host waits for in every step. It may need no more: each wait drains the device's queue.
HOST_WAITS = [
    "megatron/data_parallel/engine.py _agree: copy to the host",
    "megatron/data_parallel/engine.py _norm: item, int, float, bool or tolist",
    "megatron/training.py _means_over_ranks: copy to the host",
]
REWIRED = ("samo-dsr-bf16", 4)
"""The step after which the network is rewired, which the host plans."""


@pytest.mark.push
@pytest.mark.parametrize("name", sampled(CASES, ON_PUSH))
def test_steps_equal_those_on_the_cpu(name: str, rehearsal: Rehearsal) -> None:
    found = rehearsal.call("tests.rehearsal.training:compare", flags=CASES[name])
    assert found["wrong"] == []
    for step, waits in enumerate(found["waits"], start=1):
        more = [wait for wait in waits if wait not in HOST_WAITS]
        assert sorted(set(waits) - set(more)) == sorted(HOST_WAITS)
        assert len(waits) - len(more) == len(HOST_WAITS)
        if (name, step) == REWIRED:
            assert more and all(wait.startswith("samo/") for wait in more)
        else:
            assert more == [], f"step {step}"
    assert found["losses"] == loss_bound(name, found["wanted"])
    assert found["losses"][0] > 4  # of 100 tokens: the steps computed a loss


def test_every_choice_of_radius_is_rehearsed() -> None:
    """The cases of Radius take every schedule, selection and residual that the flags offer."""
    flags = [case.split() for case in CASES.values() if RADIUS in case]
    for field in ("radius_schedule", "radius_select", "radius_residual"):
        flag, default = "--" + field.replace("_", "-"), getattr(RadiusConfig(), field)
        taken = {case[case.index(flag) + 1] if flag in case else default for case in flags}
        assert taken == set(get_args(get_type_hints(RadiusConfig)[field])), field


def loss_bound(name: str, wanted: list[float]) -> Any:
    """Equal to losses on the device: in fp32 to a few units in the last place, in 16 bit to half of
    bf16's unit at 1. The CPU's own attention and products round elsewhere than the operations that
    the device is played by, and kinds of CPUs round differently."""
    return approx(wanted, rel=5e-7) if "fp32" in name else approx(wanted, abs=2e-3)
