"""fp32 linear layers on a CPU: products by torch (MKL) and by oneDNN.

    python -m tools.bench.products.run [--rounds N] [--out FOLDER]     a minute
    python -m tools.bench.products.run --smoke                         tiny layers

Forward and backward of one layer with a bias, on one thread. The two take turns. Exit code 2 if
torch has no oneDNN.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F

from megatron.processor import processor_model, vector_instructions
from megatron.tensor_parallel.products import one_dnn_linear, uses_one_dnn
from tools.bench.common.page_files import table, write_page

ROWS = 2048
"""Tokens of a microbatch."""
LAYERS = ((128, 384), (128, 512), (512, 128), (128, 2048), (768, 3072), (3072, 768))
"""Inputs and outputs: a GPT of width 128, and the MLP of GPT 124M."""
TORCH, ONE_DNN = "torch", "oneDNN"


@dataclass(frozen=True, kw_only=True)
class ProductRow:
    """One layer: medians of seconds, and those of oneDNN over torch's."""

    inputs: int
    outputs: int
    seconds: Mapping[str, float]
    ratio: float
    """Median over rounds of the seconds of oneDNN divided by those of torch."""
    gflops: Mapping[str, float]
    chosen: str
    """What a training step uses."""


def seconds_of(way: str, leaves: Sequence[torch.Tensor], upstream: torch.Tensor) -> float:
    """Return the seconds of a forward and a backward pass."""
    inputs, weight, bias = leaves
    began = perf_counter()
    if way == ONE_DNN:
        out = one_dnn_linear(inputs, weight, bias)
    else:
        out = F.linear(inputs, weight, bias)
    torch.autograd.grad(out, leaves, upstream)
    return perf_counter() - began


def measure(rows: int, inputs: int, outputs: int, rounds: int) -> ProductRow:
    """Measure a layer after one unmeasured round."""
    shapes = ((rows, inputs), (outputs, inputs), (outputs,))
    leaves = [torch.randn(shape).requires_grad_() for shape in shapes]
    upstream = torch.randn(rows, outputs)
    taken = [
        {way: seconds_of(way, leaves, upstream) for way in (TORCH, ONE_DNN)}
        for _ in range(rounds + 1)
    ][1:]
    seconds = {way: median(each[way] for each in taken) for way in (TORCH, ONE_DNN)}
    return ProductRow(
        inputs=inputs,
        outputs=outputs,
        seconds=seconds,
        ratio=median(each[ONE_DNN] / each[TORCH] for each in taken),
        gflops={way: 6e-9 * rows * inputs * outputs / took for way, took in seconds.items()},
        chosen=ONE_DNN if uses_one_dnn(*leaves[:2]) else TORCH,
    )


def as_markdown(rows: Sequence[ProductRow]) -> str:
    """Return the table of the page."""
    header = ["layer", "torch, ms", "oneDNN, ms", "oneDNN / torch", "GFLOP/s, torch", "oneDNN"]
    lines = [
        [
            f"{row.inputs} to {row.outputs}",
            *(f"{1e3 * row.seconds[way]:.2f}" for way in (TORCH, ONE_DNN)),
            f"{row.ratio:.2f}",
            *(f"{row.gflops[way]:.0f}" for way in (TORCH, ONE_DNN)),
            row.chosen,
        ]
        for row in rows
    ]
    return "\n".join(table([*header, "used"], lines, texts=["layer", "used"])) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Measure every layer, print the table and write the page."""
    parser = argparse.ArgumentParser(description="fp32 products by torch and by oneDNN.")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, help="folder of the page")
    parser.add_argument("--smoke", action="store_true", help="tiny layers, two rounds")
    options = parser.parse_args(arguments)
    if not torch.backends.mkldnn.is_available():
        print("error: this build of torch has no oneDNN", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers, rows, rounds = LAYERS, ROWS, options.rounds
    if options.smoke:
        layers, rows, rounds = ((16, 24),), 32, 2
    found = [measure(rows, *layer, rounds) for layer in layers]
    text = as_markdown(found)
    print(text)
    facts = {
        "cpu": processor_model(),
        "instructions": vector_instructions(),
        "torch": torch.__version__,
        "rows": rows,
    }
    told = f"{facts['cpu']}, {facts['instructions']}, one thread; torch {facts['torch']}; "
    values = {"facts": facts, "rows": [asdict(row) for row in found]}
    write_page(options.out, text=f"{told}{rows} tokens.\n\n{text}", values=values)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
