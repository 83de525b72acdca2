"""Attention inside documents: with a mask of s x s, and without one.

    python -m tools.bench.document_attention.run [--rounds N] [--out FOLDER]     a minute
    python -m tools.bench.document_attention.run --smoke                         tiny sequences

Forward and backward of the attention of one layer of GPT 124M, 12 heads of 64, in fp32, for one
sample. Documents end at random, each token with a probability of 1 / mean length. Three ways take
turns:

    masked     torch's fused kernel with a mask, which is made once, as for all layers of a step
    documents  `causal_attention` with `Documents`, as the model runs it
    causal     the same kernel without a mask: one document, for information

Bytes are the peak of the tensors that operators return, by torch's MemTracker, in a step of its
own; the mask counts. Exit code 1 if the two contexts or gradients differ by more than rounding.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch.distributed._tools.mem_tracker import MemTracker

from megatron.documents import Documents
from megatron.model.causal_attention import causal_attention
from tools.bench.common.page_files import write_page

HEADS, HEAD_SIZE = 12, 64
LENGTHS, MEANS = (1024, 2048), (1024, 256, 64)
CPU = torch.device("cpu")
TOLERANCE = 1e-5
MASKED, DOCUMENTS, CAUSAL = "masked", "documents", "causal"


@dataclass(frozen=True, kw_only=True)
class DocumentRow:
    """One sequence: medians of seconds and the peak bytes by way, and `documents` over `masked`."""

    length: int
    documents: int
    pairs: float
    """The share of the causal scores that are inside documents."""
    seconds: Mapping[str, float]
    peak: Mapping[str, int]
    ratio: float
    """Median over rounds of the seconds of `documents` divided by those of `masked`."""
    difference: float
    """Largest difference of an entry of the context or of a gradient between the two."""


class TimedAttention:
    """The attention of one layer, one way."""

    def __init__(self, way: str, ids: NDArray[np.int64]) -> None:
        self.way, self.ids = way, ids
        generator = torch.Generator().manual_seed(0)
        shape = (*ids.shape, HEADS, HEAD_SIZE)
        self.heads = [torch.randn(shape, generator=generator).requires_grad_() for _ in range(3)]
        self.prepare()

    def prepare(self) -> None:
        """Make what all layers of a step share."""
        self.documents = Documents.of(self.ids, CPU) if self.way == DOCUMENTS else None
        self.mask = document_mask(self.ids) if self.way == MASKED else None

    def step(self) -> list[torch.Tensor]:
        """Run forward and backward; return the context and three gradients."""
        for heads in self.heads:
            heads.grad = None
        query, key, value = self.heads
        if self.mask is None:
            context = causal_attention(query, key, value, self.documents)
        else:
            parts = (heads.transpose(1, 2) for heads in self.heads)
            context = F.scaled_dot_product_attention(*parts, attn_mask=self.mask).transpose(1, 2)
        context.backward(torch.ones_like(context))
        return [context.detach(), *(heads.grad for heads in self.heads if heads.grad is not None)]

    def seconds(self) -> float:
        """Return the seconds of a step."""
        began = perf_counter()
        self.step()
        return perf_counter() - began

    def peak(self) -> int:
        """Return the peak bytes of a step, with what it shares with other layers."""
        self.documents = self.mask = None
        tracker = MemTracker()
        with tracker:
            self.prepare()
            self.step()
        return tracker.get_tracker_snapshot("peak")[CPU]["Total"]


def document_mask(ids: NDArray[np.int64]) -> torch.Tensor:
    """Return bool [b, 1, s, s] from document ids [b, s]: j <= i in the same document."""
    there = torch.from_numpy(ids)
    same = there[:, None, :, None] == there[:, None, None, :]
    return same & torch.ones(same.shape[-2:], dtype=torch.bool).tril_()


def measure(length: int, mean: int, rounds: int) -> DocumentRow:
    """Measure all ways on one sequence."""
    ends = np.random.default_rng(0).random((1, length)) < (1 / mean if mean < length else 0)
    ids = ends.cumsum(1)
    layers = [TimedAttention(way, ids) for way in (MASKED, DOCUMENTS, CAUSAL)]
    wanted, found = layers[0].step(), layers[1].step()
    pairs = zip(wanted, found, strict=True)
    difference = max(float((one - other).abs().max()) for one, other in pairs)
    seconds: dict[str, list[float]] = {layer.way: [] for layer in layers}
    for number in range(1 + rounds):
        first = number % len(layers)
        for layer in [*layers[first:], *layers[:first]]:
            took = layer.seconds()
            if number:
                seconds[layer.way].append(took)
    turns = zip(seconds[DOCUMENTS], seconds[MASKED], strict=True)
    lengths = np.unique(ids, return_counts=True)[1]
    return DocumentRow(
        length=length,
        documents=len(lengths),
        pairs=float((lengths * (lengths + 1)).sum() / (length * (length + 1))),
        seconds={way: median(each) for way, each in seconds.items()},
        peak={layer.way: layer.peak() for layer in layers},
        ratio=median(ours / theirs for ours, theirs in turns),
        difference=difference,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    lengths, means = ((48, 64), (64, 8)) if options.smoke else (LENGTHS, MEANS)
    rounds = 2 if options.smoke else options.rounds
    rows = [measure(length, mean, rounds) for length in lengths for mean in means]
    facts = _facts(rounds)
    text = "; ".join(f"{name} {value}" for name, value in facts.items()) + "\n\n" + _table(rows)
    print(text)
    values = {"facts": facts, "rows": [asdict(row) for row in rows]}
    write_page(options.out, text=text, values=values)
    return int(any(row.difference > TOLERANCE for row in rows))


def _table(rows: Sequence[DocumentRow]) -> str:
    lines = [
        "| s | documents | scores inside | masked, ms | documents, ms | ratio | causal, ms "
        "| masked, peak MB | documents, peak MB | ratio | largest difference |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        ms = {way: 1e3 * took for way, took in row.seconds.items()}
        mb = {way: peak / 1e6 for way, peak in row.peak.items()}
        lines.append(
            f"| {row.length} | {row.documents} | {row.pairs:.0%} | {ms[MASKED]:.1f} "
            f"| {ms[DOCUMENTS]:.1f} | {row.ratio:.2f} | {ms[CAUSAL]:.1f} | {mb[MASKED]:.1f} "
            f"| {mb[DOCUMENTS]:.1f} | {mb[DOCUMENTS] / mb[MASKED]:.2f} | {row.difference:.0e} |"
        )
    return "\n".join(lines) + "\n"


def _facts(rounds: int) -> dict[str, Any]:
    return {
        "heads": f"{HEADS} of {HEAD_SIZE}, fp32",
        "rounds": rounds,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": os.cpu_count(),
        "threads of torch": torch.get_num_threads(),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.document_attention.run",
        description="Time and memory of attention inside documents, with and without a mask.",
    )
    add = parser.add_argument
    add("--rounds", type=int, default=15, help="measured turns of each way")
    add("--out", type=Path, default=None, help="folder for README.md and results.json")
    add("--smoke", action="store_true", help="tiny sequences: does the tool work?")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
