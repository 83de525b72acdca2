"""The update that torch's optimizers have just made, from their states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.errors import ConfigError
from radius.ddp_hook import RadiusHook
from radius.torch_update import TorchUpdate, in_memory_order


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=1.0, weight_decay=0.3),
        lambda p: torch.optim.AdamW(p, lr=1.0, weight_decay=0.3, amsgrad=True, maximize=True),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(1.0), weight_decay=0.3, fused=True),
        lambda p: torch.optim.Adam(p, lr=1.0, weight_decay=0.3),
        lambda p: torch.optim.SGD(p, lr=1.0, weight_decay=0.3),
        lambda p: torch.optim.SGD(p, lr=1.0, weight_decay=0.3, momentum=0.9, dampening=0.5),
        lambda p: torch.optim.SGD(p, lr=1.0, weight_decay=0.3, maximize=True),
        lambda p: torch.optim.SGD(p, lr=1.0, weight_decay=0.3, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9, nesterov=True, foreach=True),
        lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9, nesterov=True, maximize=True),
    ],
)
def test_update_is_what_the_step_takes_off_the_weights(
    make: Callable[[Any], torch.optim.Optimizer],
) -> None:
    parameters = [
        torch.nn.Parameter(torch.randn(6, 7)),
        torch.nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)),
        torch.nn.Parameter(torch.randn(9)),
        torch.nn.Parameter(torch.randn(2, 2)),
    ]
    optimizer = make(parameters)
    update = TorchUpdate(optimizer)
    for _ in range(3):
        for parameter in parameters[:3]:  # the last never gets a gradient
            parameter.grad = torch.randn_like(parameter)
        old = [parameter.detach().clone() for parameter in parameters]
        update.before_step()
        optimizer.step()
        found = dict(update.matrices())
        assert list(found) == parameters[:2]
        for before, parameter in zip(old[:2], parameters, strict=False):
            step = in_memory_order((before - parameter.detach()).abs())
            torch.testing.assert_close(found[parameter].abs(), step, rtol=1e-5, atol=1e-5)


def test_an_optimizer_whose_update_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="optimizer=Adagrad.*functional"):
        RadiusHook(torch.optim.Adagrad([torch.nn.Parameter(torch.zeros(3, 5))]), start=1)
