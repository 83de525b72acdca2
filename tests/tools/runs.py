"""Run folders for the tests of tools, made by hand in milliseconds."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from megatron.checkpoint.store import save_checkpoint
from megatron.config import parse, resolve, to_yaml
from megatron.model.gpt import GPT
from pretrain_gpt import GRADIENT_PATHS
from tests.model.models import sharpen
from tools.run_model import CONFIG, PARAM, WORD_TABLE

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1e-3 "
    "--micro-batch-size 1 --train-iters 1 --mock-data"
)


def make_model_run(
    folder: Path,
    flags: str,
    *,
    vocab_size: int,
    favoured: int | None = None,
    diverged: bool = False,
) -> GPT:
    """A run folder with one checkpoint; the model that is in it, of weights that matter.

    The token `favoured` is made likelier everywhere. A model that `diverged` computes NaN.
    """
    torch.set_num_threads(1)
    config = resolve(parse(f"{FLAGS} {flags}".split(), paths=GRADIENT_PATHS), 1)
    model = GPT(config.model, vocab_size=vocab_size, seed=3, dtype=torch.float32, device="cpu")
    sharpen(model).eval()
    if favoured is not None:
        values = {name: value.clone() for name, value in model.logical_values().items()}
        towards = values[WORD_TABLE.removeprefix(PARAM)][favoured]
        values["final_norm.bias"] += 5 * towards / towards.norm()
        model.load_values(values)
    if diverged:
        values = {name: value.clone() for name, value in model.logical_values().items()}
        values["final_norm.bias"].fill_(math.nan)
        model.load_values(values)
    folder.mkdir()
    (folder / CONFIG).write_text(to_yaml(config))
    weights = {f"{PARAM}{name}": value.clone() for name, value in model.logical_values().items()}
    save_checkpoint(folder / "checkpoints", step=1, tensors=weights, state={})
    return model
