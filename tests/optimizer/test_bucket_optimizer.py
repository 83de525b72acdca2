"""Flat-bucket updates against torch's own optimizers, chunk cuts, and the corrected update."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron.data_parallel.reducer import StepContext
from megatron.errors import ConfigError
from megatron.optimizer import bucket_optimizer
from megatron.optimizer.bucket_optimizer import BucketOptimizer
from megatron.optimizer.update_rules import SGD, AdamW, ApexAdamW, Hyper, UpdateRule
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from tests.contract.harness import PATHS, Toy, gradients, same

ALONE = ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=1), rank=0)


def toy(rule: UpdateRule | None = None, **options: object) -> Toy:
    made = Toy(ALONE, PATHS[0], **options)  # type: ignore[arg-type]
    if rule is not None:
        made.optimizer = BucketOptimizer(made.engine, rule)
    return made


def test_equals_torch_adamw_with_clipping_over_many_steps() -> None:
    ours = toy(lr=1e-2)
    params = {info.name: info.param.detach().clone().requires_grad_() for info in ours.infos}
    decayed = [p for p in params.values() if p.dim() > 1]
    plain = [p for p in params.values() if p.dim() == 1]
    reference = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.99),
        eps=1e-8,
    )
    for number in range(10):
        wanted = gradients(number)
        step = ours.step([wanted], clip_norm=1.0)
        for name, param in params.items():
            param.grad = wanted[name].clone()
        norm = torch.nn.utils.clip_grad_norm_(list(params.values()), 1.0)
        assert step.norm == pytest.approx(norm.item(), rel=1e-6)
        reference.step()
    for info in ours.infos:
        torch.testing.assert_close(info.param, params[info.name], rtol=1e-5, atol=1e-6)


def test_sgd_is_momentum_with_decoupled_decay() -> None:
    ours = toy(SGD(momentum=0.9), lr=0.1)
    name = "first.weight"
    weight = next(i.param for i in ours.infos if i.name == name).detach().clone()
    velocity = torch.zeros_like(weight)
    for number in range(4):
        wanted = gradients(number)
        ours.step([wanted])
        velocity = 0.9 * velocity + wanted[name]
        weight = weight - 0.1 * (velocity + 0.1 * weight)
    param = next(i.param for i in ours.infos if i.name == name)
    torch.testing.assert_close(param.detach(), weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_coupled_sgd_is_torchs(momentum: float, nesterov: bool) -> None:
    if nesterov and momentum == 0:
        pytest.skip("torch refuses Nesterov without momentum")
    ours = toy(SGD(momentum=momentum, nesterov=nesterov, coupled=True), lr=0.1)
    params = {info.name: info.param.detach().clone().requires_grad_() for info in ours.infos}
    options = {"lr": 0.1, "momentum": momentum, "nesterov": nesterov}
    reference = torch.optim.SGD(params.values(), weight_decay=0.1, **options)
    for number in range(10):
        wanted = gradients(number)
        ours.step([wanted])
        for name, param in params.items():
            param.grad = wanted[name].clone()
        reference.step()
    for info in ours.infos:
        torch.testing.assert_close(info.param, params[info.name], rtol=1e-6, atol=1e-7)
    # Vectors decay, too, as in torch.
    assert {param.dim() for param in params.values()} >= {1, 2}


def test_nesterov_with_decoupled_decay_by_the_formula() -> None:
    rule = SGD(momentum=0.9, nesterov=True)
    hyper = Hyper(t=1, lr=0.1, weight_decay=0.2)
    weight, velocity = torch.tensor([2.0, -1.0]), torch.tensor([0.5, 1.0])
    grad = torch.tensor([1.0, 3.0])
    after = 0.9 * velocity + grad
    expected = weight * (1 - 0.1 * 0.2) - 0.1 * (grad + 0.9 * after)
    moment = velocity.clone()
    rule.apply(weight, grad.clone(), [moment], hyper)
    torch.testing.assert_close(weight, expected)
    torch.testing.assert_close(moment, after)


def test_chunk_cuts_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = toy()
    monkeypatch.setattr(bucket_optimizer, "CPU_CHUNK", 128)
    cut = toy()
    assert cut.optimizer._chunk == 128
    for number in range(5):
        whole.step([gradients(number)], clip_norm=0.7)
        cut.step([gradients(number)], clip_norm=0.7)
    assert same(whole.state(), cut.state()) == []


def test_16_bit_parameters_are_rounded_masters() -> None:
    ours = toy(dtype=torch.bfloat16, lr=1e-4)
    for number in range(20):
        ours.step([gradients(number)])
    masters = {name: t for kind, name, t in ours.optimizer.tensors() if kind == "param"}
    moved = 0
    for info in ours.infos:
        rounded = masters[info.name].view(info.param.shape).bfloat16()
        assert torch.equal(info.param.detach(), rounded)
        moved += int((masters[info.name].view(info.param.shape) != rounded.float()).sum())
    assert moved, "updates smaller than a bf16 step must add up in the masters"


def test_fp32_parameters_are_views_of_their_masters() -> None:
    ours = toy()
    masters = {name: t for kind, name, t in ours.optimizer.tensors() if kind == "param"}
    for info in ours.infos:
        for leaf in info.leaves:
            assert leaf.data_ptr() == masters[info.name].data_ptr()


def test_16_bit_gradients_are_widened_before_they_are_scaled() -> None:
    wide = toy(grad_dtype=torch.float32)
    narrow = toy(grad_dtype=torch.bfloat16)
    rounded = {name: g.bfloat16().float() for name, g in gradients(3).items()}
    for _ in range(3):
        wide.step([rounded])
        narrow.step([rounded])
    assert same(wide.state(), narrow.state()) == []


@pytest.mark.parametrize("rule", [AdamW(beta1=0.9, beta2=0.99, eps=1e-8), SGD(momentum=0.9)])
def test_corrected_update_is_what_the_rate_multiplies(rule: UpdateRule) -> None:
    ours = toy(rule, lr=0.5)
    ours.engine.reducer.wants_update = lambda step: True  # type: ignore[method-assign]
    for number in range(3):
        before = {info.name: info.param.detach().clone() for info in ours.infos}
        ours.backward([gradients(number)])
        step = ours.finish()
        ours.optimizer.step(step, lr=0.5, weight_decay=0.1)
        for info, bucket, where in ours.engine.slices():
            update = where.of(step.reduced[bucket.index].values).view(info.param.shape)
            expected = before[info.name] - 0.5 * update
            torch.testing.assert_close(info.param.detach(), expected, rtol=1e-4, atol=1e-5)
        ours.engine.commit(step)


def test_a_skipped_step_counts_no_update() -> None:
    ours = toy()
    ours.step([gradients(0)])
    bad = gradients(1)
    bad["norm.weight"][0] = float("nan")
    ours.step([bad])
    assert ours.optimizer.applied == 1
    ours.engine.begin(StepContext(t=2))


def test_apex_absent_names_the_extra() -> None:
    with pytest.raises(ConfigError, match=r"apex.*not installed.*sparsetron\[gpu\]"):
        ApexAdamW(beta1=0.9, beta2=0.99, eps=1e-8)


def test_apex_kernel_gets_its_arguments_in_apex_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with multi_tensor_adam's signature that computes AdamW the slow way."""

    def adam(chunk, flag, lists, lr, b1, b2, eps, step, mode, correct, decay):  # type: ignore[no-untyped-def]
        assert (mode, correct) == (1, 1) and flag.dtype == torch.int32
        for g, p, m, v in zip(*lists, strict=True):
            m.mul_(b1).add_(g, alpha=1 - b1)
            v.mul_(b2).addcmul_(g, g, value=1 - b2)
            update = (m / (1 - b1**step)) / ((v / (1 - b2**step)).sqrt() + eps) + decay * p
            p.sub_(update, alpha=lr)

    amp, apex, applier = ModuleType("amp_C"), ModuleType("apex"), ModuleType("x")
    amp.multi_tensor_adam = adam  # type: ignore[attr-defined]
    applier.multi_tensor_applier = lambda op, flag, lists, *rest: op(65536, flag, lists, *rest)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "amp_C", amp)
    monkeypatch.setitem(sys.modules, "apex", apex)
    monkeypatch.setitem(sys.modules, "apex.multi_tensor_apply", applier)
    rules = [kind(beta1=0.9, beta2=0.99, eps=1e-8) for kind in (AdamW, ApexAdamW)]
    start = torch.randn(640)
    states = [
        SimpleNamespace(w=start.clone(), m=torch.zeros(640), v=torch.zeros(640)) for _ in "ab"
    ]
    for t in range(1, 5):
        grad = torch.randn(640)
        hyper = Hyper(t=t, lr=1e-2, weight_decay=0.1)
        for rule, s in zip(rules, states, strict=True):
            rule.apply(s.w, grad.clone(), [s.m, s.v], hyper)
    torch.testing.assert_close(states[0].w, states[1].w)
