"""Compiled layers, the default on a device, compared with layers that are not compiled."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron.config import parse, resolve
from megatron.config.compilation import choose_compilation
from pretrain_gpt import GRADIENT_PATHS
from tests.gpu.test_training_on_cuda import FLAGS, losses, make_trainer


def test_they_are_the_default(device: torch.device) -> None:
    config = resolve(parse(FLAGS.replace("--compile false", "").split(), paths=GRADIENT_PATHS), 1)
    choice = choose_compilation(config, device.type)
    assert choice.on == (device.type == "cuda"), choice


def test_compiled_layers_learn_as_others_do(device: torch.device, tmp_path: Path) -> None:
    for number, flags in enumerate(("", "--recompute-granularity full", "--bf16")):
        plain = make_trainer(device, tmp_path / f"plain{number}", flags)
        compiled = make_trainer(device, tmp_path / f"compiled{number}", f"{flags} --compile none")
        bound = 3e-2 if flags == "--bf16" else 1e-3
        for mine, wanted in zip(losses(compiled, 4), losses(plain, 4), strict=True):
            assert abs(mine - wanted) < bound


def test_compiled_layers_repeat_the_dropout(device: torch.device, tmp_path: Path) -> None:
    flags = "--attention-dropout 0.1 --hidden-dropout 0.1 --compile none"
    plain = make_trainer(device, tmp_path / "plain", flags)
    again = make_trainer(device, tmp_path / "again", f"{flags} --recompute-granularity full")
    for mine, wanted in zip(losses(again, 3), losses(plain, 3), strict=True):
        assert abs(mine - wanted) < 1e-3
