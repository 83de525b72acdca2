"""Measure what each `--recompute-granularity` stores and computes again, against none of them.

    python -m tools.bench.low_memory.strategies [--model gpt|wide-resnet|dc-transformer]

The program runs one training step on real tensors for what autograd stores, and one on fake tensors
for the activations at the peak and for FLOPs, by the ledger of `tools/profile_memory.py`. Every row
is divided by the row without recomputation of the same model in the same run. Stored and computed
numbers do not depend on the machine, but for the kernels that it has: the table names its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.config import parse, resolve
from megatron.data.vocabulary import Vocabulary
from megatron.low_memory.dry_run import DryTranslation
from megatron.low_memory.ledger import MemoryLedger, memory_ledger
from megatron.tasks.gpt import LoadedGPT
from pretrain_gpt import GPT_TASK, GRADIENT_PATHS
from pretrain_translation import TRANSLATION_TASK
from pretrain_vision import VISION_TASK

VOCABULARY = 8192
DICTIONARIES = (8848, 6632)
"""Entries of IWSLT'14's dictionaries."""
MODELS = {
    "gpt": "--num-layers 6 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --mock-data "
    f"--vocab-size {VOCABULARY} --micro-batch-size 2 --attention-dropout 0 --hidden-dropout 0 "
    "--train-iters 5 --lr 1e-3",
    "wide-resnet": "--mock-data --num-classes 10 --img-h 32 --img-w 32 --micro-batch-size 20 "
    "--train-iters 5 --lr 1e-2 --optimizer sgd",
    "dc-transformer": "--max-tokens 500 --micro-batch-size 1 --train-iters 5 --lr 1e-3",
}
"""A small GPT, WRN-28-2, and the DC-Transformer of the report, in fp32."""
STRATEGIES = {
    "none": "",
    "full": "full",
    "selective": "selective",
    "ops": "ops",
    "no-norm": "no-norm",
    "every, m = 3": "every --recompute-num-layers 3",
    "residual, m = 1": "residual",
    "residual, m = 2": "residual --recompute-num-layers 2",
    "residual-star, m = 1": "residual-star",
    "residual-star, m = 2": "residual-star --recompute-num-layers 2",
}
REFUSED = {"wide-resnet": ("full", "selective"), "dc-transformer": ("selective",)}
"""Granularities that a model does not have."""


@dataclass(frozen=True, kw_only=True)
class StrategyRow:
    """Bytes and FLOPs of one microbatch, without the embedding and the head of a GPT.

    Attributes:
        stored: What the forward pass stores in layers, measured.
        peak: Activations at the peak of the step on fake tensors, recomputation among them.
        flops: FLOPs of forward, backward and recomputation.
    """

    stored: int
    peak: int
    flops: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table for each model; return 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, help="The only model to measure (none = all).")
    asked = parser.parse_args(arguments).model
    for model in [asked] if asked else MODELS:
        print(f"{model}\n")
        print("\n".join(table(rows(model))), flush=True)
        print()
    return 0


def rows(model: str, names: Sequence[str] = tuple(STRATEGIES)) -> Mapping[str, StrategyRow]:
    """Measure strategies of a model by their names in `STRATEGIES`."""
    names = [name for name in names if name not in REFUSED.get(model, ())]
    return {name: _row(_ledger(model, STRATEGIES[name])) for name in names}


def table(found: Mapping[str, StrategyRow]) -> Iterator[str]:
    """Yield a Markdown table of ratios to the row "none"."""
    none = found["none"]
    yield "| strategy | stored | activations at the peak | FLOPs |"
    yield "|---|---:|---:|---:|"
    for name, row in found.items():
        ratios = (row.stored / none.stored, row.peak / none.peak, row.flops / none.flops)
        yield f"| {name} | " + " | ".join(f"{ratio:.3f}" for ratio in ratios) + " |"


def _row(ledger: MemoryLedger) -> StrategyRow:
    tracked, measured, flops = ledger.columns["tracked"], ledger.columns["measured"], ledger.flops
    assert flops is not None and tracked.forward is not None and tracked.backward is not None
    outside = ("head", "embedding") if "layers.0" in measured.layers else ()
    return StrategyRow(
        stored=sum(size for name, size in measured.layers.items() if name not in outside),
        peak=tracked.forward + tracked.backward,
        flops=flops.forward + flops.backward + flops.recomputed,
    )


def _ledger(model: str, strategy: str) -> MemoryLedger:
    flags = MODELS[model].split()
    if strategy:
        flags += ["--recompute-granularity", *strategy.split()]
    if model == "gpt":
        gpt = resolve(parse(flags, paths=GRADIENT_PATHS), 1)
        opened = LoadedGPT(GPT_TASK, gpt, Vocabulary(size=VOCABULARY))
        return memory_ledger(opened, gpt, GRADIENT_PATHS, vocabulary=VOCABULARY)
    if model == "wide-resnet":
        vision = resolve(parse(flags, paths=GRADIENT_PATHS, task=VISION_TASK.config), 1)
        return memory_ledger(VISION_TASK.open(vision), vision, GRADIENT_PATHS)
    config = resolve(parse(flags, paths=GRADIENT_PATHS, task=TRANSLATION_TASK.config), 1)
    return memory_ledger(DryTranslation(config, *DICTIONARIES), config, GRADIENT_PATHS)


if __name__ == "__main__":
    sys.exit(main())
