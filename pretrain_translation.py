"""Pretrain a DC-Transformer on sentence pairs, with the gradient paths of `pretrain_gpt.py`."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.pretrain import begin, leave, pretrain
from megatron.tasks.translation import TranslationTask
from pretrain_gpt import GRADIENT_PATHS

TRANSLATION_TASK = TranslationTask()


def main(argv: Sequence[str]) -> int:
    """Train as `argv` asks and return the exit code."""
    return pretrain(TRANSLATION_TASK, GRADIENT_PATHS, argv)


if __name__ == "__main__":
    leave(main(begin()))
