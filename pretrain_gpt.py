"""Pretrain a GPT. The gradient paths that `--grad-path` may name are listed here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megatron.data_parallel.dense_path import DensePath, ProductPath
from megatron.data_parallel.gradient_path import GradientPath
from megatron.data_parallel.local_steps import DilocoPath
from megatron.pretrain import begin, leave, pretrain
from megatron.tasks.gpt import GPTTask
from radius.baselines.demo import DeMoPath
from radius.baselines.lowrank_sparse_path import LowRankSparsePath
from radius.baselines.powersgd_path import PowerSGDPath
from radius.baselines.roundrobin import RoundRobinPath
from radius.baselines.topk import TopKPath
from radius.path import RadiusPath
from samo.path import SamoPath

if TYPE_CHECKING:
    import torch

    from megatron.config import GPTConfig
    from megatron.data.build import Datasets
    from megatron.data.vocabulary import Vocabulary
    from megatron.model.gpt import GPT
    from megatron.parallel.groups import ProcessGroups

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
        LowRankSparsePath(),
        RoundRobinPath(),
        DeMoPath(),
        DilocoPath(),
    )
}
"""Gradient paths by the value of `--grad-path`. A new path is one file and one entry here."""


def model_provider(
    config: GPTConfig,
    vocabulary: Vocabulary,
    groups: ProcessGroups,
    device: torch.device,
    *,
    layers: range,
    pre_process: bool = True,
    post_process: bool = True,
) -> GPT:
    """Build the model, or the part of it that one pipeline stage holds.

    Args:
        config: The checked configuration.
        vocabulary: The vocabulary of the run.
        groups: The process groups of this rank.
        device: The device of the parameters.
        layers: Global numbers of the layers.
        pre_process: Whether the part begins with the embedding.
        post_process: Whether the part ends with the output layer and the loss.
    """
    import torch

    from megatron.model.gpt import GPT

    return GPT(
        config.model,
        vocab_size=vocabulary.size,
        seed=config.training.seed,
        dtype=getattr(torch, config.precision.param_dtype),
        device=device,
        recompute=config.recompute,
        tp=groups.tp,
        sequence_parallel=config.parallel.sequence_parallel,
        layers=layers,
        has_embedding=pre_process,
        has_head=post_process,
    )


def train_valid_test_datasets_provider(
    config: GPTConfig,
    vocabulary: Vocabulary,
    samples: tuple[int, int | None, int | None],
    log: Callable[[str], None],
) -> Datasets:
    """Build the data sets of training, validation and test.

    `samples` has the least number of samples of each; None means each sample of the split once.

    Raises:
        DataError: Data are missing, damaged, too small or of another tokenizer.
    """
    from megatron.data.build import build_datasets

    data = config.data
    has_documents = data.eod_mask_loss or data.reset_position_ids or data.reset_attention_mask
    return build_datasets(
        data,
        seq_length=config.model.seq_length,
        seed=config.training.seed,
        samples=samples,
        vocab_size=vocabulary.size,
        log=log,
        tokenizer_fingerprint=vocabulary.fingerprint,
        mark=vocabulary.eod if has_documents else None,
    )


GPT_TASK = GPTTask(model_provider, train_valid_test_datasets_provider)


def main(argv: Sequence[str]) -> int:
    """Train as `argv` asks and return the exit code."""
    return pretrain(GPT_TASK, GRADIENT_PATHS, argv)


if __name__ == "__main__":
    leave(main(begin()))
