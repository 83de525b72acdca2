"""Tokens per second and memory on one GPU: our training step and a plain compiled PyTorch GPT.

    python -m tools.bench.gpu.step SECTION --out FOLDER [--peak-tflops 989] [--smoke]
    python -m tools.bench.gpu.step --table FOLDER

SECTION is step124m, step355m or step2b, or paths355m, which has our gradient paths in place of the
plain GPT. The contenders train one after the other, so that each has all the memory;
FOLDER/SECTION.json is updated after each. `--smoke`: tiny, and on the CPU without a GPU. `--table`
prints the results in FOLDER.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from megatron.model.flops import FORMULA, flops_per_token
from megatron.parallel.dims import ParallelDims
from megatron.parallel.groups import ProcessGroups
from tools.bench.common.contenders import Batches, Ours, Shape
from tools.bench.common.device_phases import DevicePhases
from tools.bench.common.plain_gpt import PlainLoop
from tools.bench.common.side_by_side import Contender

GPT2_VOCABULARY = 50304
SHAPES = {
    "step124m": Shape(layers=12, hidden=768, heads=12, sequence=1024, batch=16),
    "step355m": Shape(layers=24, hidden=1024, heads=16, sequence=1024, batch=16),
    "step2b": Shape(layers=24, hidden=2560, heads=32, sequence=1024, batch=8),
    "paths355m": Shape(layers=24, hidden=1024, heads=16, sequence=1024, batch=16),
}
PATH_SECTIONS = ("paths355m",)
PATHS = {
    "radius": "--grad-path radius --radius-start-iter 1 --radius-interval {interval}",
    "radius, rolling": "--grad-path radius --radius-start-iter 1 --radius-interval {interval} "
    "--radius-schedule rolling",
    "samo": "--grad-path samo --samo-sparsity 0.9 --samo-pruning random",
}
"""Contenders of paths355m beside dense gradients, all without --compile.

A rank alone sends nothing: these steps show what selecting, gathering and updating take. Their mean
is over whole intervals, since a step that resamples takes longer than others.
"""
INTERVAL = 10
MICROBATCHES = 4
SMOKE = Shape(layers=2, hidden=64, heads=2, sequence=32, vocabulary=512, batch=2, microbatches=2)
H200_PEAK_TFLOPS = 989.0
"""Dense bf16 peak of an H200 by its data sheet; an H100 SXM has the same."""
OURS, OURS_COMPILED, PLAIN_COMPILED = "ours", "ours, --compile", "plain PyTorch, compiled"
RATIO_TARGETS = {OURS: 0.85, OURS_COMPILED: 1.0}
MFU_TARGETS = {"step2b": 0.45}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    options = _arguments(arguments)
    if options.table is not None:
        print(table(options.table))
        return 0
    if not options.smoke and not torch.cuda.is_available():
        print("error: no CUDA device is seen; --smoke runs on the CPU", file=sys.stderr)
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = dataclasses.replace(
        SHAPES[options.section], vocabulary=GPT2_VOCABULARY, microbatches=MICROBATCHES
    )
    measure(
        options.section,
        SMOKE if options.smoke else shape,
        device=device,
        steps=3 if options.smoke else options.steps,
        peak_tflops=options.peak_tflops,
        out=options.out,
        compiled=not options.no_compile,
    )
    return 0


def measure(
    section: str,
    shape: Shape,
    *,
    device: torch.device,
    steps: int,
    peak_tflops: float,
    out: Path,
    compiled: bool = True,
) -> dict[str, Any]:
    """Time every contender and write FOLDER/SECTION.json.

    `compiled` False leaves out contenders that need torch.compile. Returns the written values.
    """
    out.mkdir(parents=True, exist_ok=True)
    on_cuda = device.type == "cuda"
    report: dict[str, Any] = {
        "section": section,
        "shape": dataclasses.asdict(shape),
        "device": torch.cuda.get_device_name() if on_cuda else "cpu",
        "torch": torch.__version__,
        "peak_tflops": peak_tflops,
        "formula": FORMULA,
        "note": "bf16 parameters on both sides; ours also keeps fp32 gradients, master weights "
        "and moments, the plain one has everything in bf16",
        "contenders": {},
    }
    groups = ProcessGroups.build(ParallelDims(tp=1, dp=1, pp=1), rank=0)
    contenders = _contenders(shape, groups, device, compiled=compiled)
    average, warm = statistics.median, 4
    if section in PATH_SECTIONS:
        interval = min(INTERVAL, steps)
        contenders = _paths(shape, groups, device, interval)
        average, warm = statistics.fmean, interval + 1
    for name, build in contenders:
        with tempfile.TemporaryDirectory() as folder, _quiet(Path(folder) / "console"):
            if on_cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            contender = build(Path(folder))
            found = _time(contender, shape, steps=steps, device=device, average=average, warm=warm)
            del contender
        torch.compiler.reset()
        gc.collect()
        report["contenders"][name] = found | {
            "mfu": found["tokens_per_second"] * _flops(shape) / (peak_tflops * 1e12)
        }
        (out / f"{section}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def table(folder: Path) -> str:
    """Return the results of a folder's sections as one markdown table with the targets.

    The peer is the plain compiled GPT, and dense gradients among gradient paths.
    """
    lines = ["| section | contender | tokens/s | MFU | of the peer | peak memory, GiB |"]
    lines[0] += " first step, s | time by phase, ms |"
    lines += ["|---|---|---:|---:|---:|---:|---:|---|"]
    for file in sorted([*folder.glob("step*.json"), *folder.glob("paths*.json")]):
        report = json.loads(file.read_text(encoding="utf-8"))
        is_path = report["section"] in PATH_SECTIONS
        peer, targets = (OURS, {}) if is_path else (PLAIN_COMPILED, RATIO_TARGETS)
        plain = report["contenders"].get(peer, {}).get("tokens_per_second")
        for name, found in report["contenders"].items():
            ratio = found["tokens_per_second"] / plain if plain else None
            phases = ", ".join(f"{k} {1e3 * v:.1f}" for k, v in found["phases"].items())
            mfu = _against(found["mfu"], MFU_TARGETS.get(report["section"]), ".1%")
            lines.append(
                f"| {report['section']} | {name} | {found['tokens_per_second']:,.0f} | {mfu} | "
                f"{_against(ratio, targets.get(name), '.3f')} | "
                f"{found['peak_memory_bytes'] / 2**30:.1f} | {found['first_step_seconds']:.1f} | "
                f"{phases} |"
            )
    return "\n".join(lines)


def _against(value: float | None, target: float | None, form: str) -> str:
    if value is None:
        return ""
    text = format(value, form)
    return text if target is None else f"{text} (aim {format(target, form)})"


def _contenders(
    shape: Shape, groups: ProcessGroups, device: torch.device, *, compiled: bool
) -> Iterator[tuple[str, Callable[[Path], Contender]]]:
    def ours(folder: Path, *extra: str) -> Ours:
        return Ours(shape.flags(dtype="bf16", extra=extra), groups, folder / "run", device=device)

    def plain(folder: Path) -> PlainLoop:
        reader = Ours(_reader_flags(shape), groups, folder / "run", device=device).trainer
        return PlainLoop(
            shape,
            dtype=torch.bfloat16,
            device=device,
            batches=Batches(reader),
            compiled=compiled,
        )

    yield OURS, lambda folder: ours(folder, "--compile", "false")
    if compiled:
        yield OURS_COMPILED, lambda folder: ours(folder, "--compile")
    yield PLAIN_COMPILED if compiled else "plain PyTorch", plain


def _paths(
    shape: Shape, groups: ProcessGroups, device: torch.device, interval: int
) -> Iterator[tuple[str, Callable[[Path], Contender]]]:
    for name, more in {OURS: "", **PATHS}.items():
        extra = ["--compile", "false", *more.format(interval=interval).split()]
        yield (
            name,
            lambda folder, extra=extra: Ours(
                shape.flags(dtype="bf16", extra=extra), groups, folder / "run", device=device
            ),
        )


def _reader_flags(shape: Shape) -> list[str]:
    """Return the flags of the smallest model that reads the same batches."""
    small = dataclasses.replace(shape, layers=1, hidden=8, heads=1)
    return small.flags(dtype="bf16")


def _time(
    contender: Contender,
    shape: Shape,
    *,
    steps: int,
    device: torch.device,
    average: Callable[[Sequence[float]], float],
    warm: int,
) -> dict[str, Any]:
    """Return the figures of a contender's steps after the first and `warm` more.

    Every step reads the loss, which waits for the GPU.
    """
    began = perf_counter()
    losses = [contender.step()]
    first = perf_counter() - began
    for _ in range(warm):
        losses.append(contender.step())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(steps):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = perf_counter()
        losses.append(contender.step())
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    phases = {}
    if isinstance(contender, Ours):
        with DevicePhases(contender.trainer) as stopwatch:
            contender.step()
        phases = stopwatch.seconds()
    return {
        "tokens_per_second": shape.batch * shape.microbatches * shape.sequence / average(seconds),
        "mean_step_seconds": statistics.fmean(seconds),
        "median_step_seconds": statistics.median(seconds),
        "least_step_seconds": min(seconds),
        "first_step_seconds": first,
        "peak_memory_bytes": peak,
        "losses": [losses[0], losses[-1]],
        "phases": phases,
    }


def _flops(shape: Shape) -> float:
    from megatron.config import parse
    from pretrain_gpt import GRADIENT_PATHS

    config = parse(shape.flags(dtype="bf16"), paths=GRADIENT_PATHS)
    return flops_per_token(config.model, shape.vocabulary)


@contextlib.contextmanager
def _quiet(console: Path) -> Iterator[None]:
    with open(console, "w", encoding="utf-8") as stream, contextlib.redirect_stdout(stream):
        yield


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.gpu.step",
        description="Tokens/s of a training step on one GPU beside plain torch.",
    )
    add = parser.add_argument
    add("section", nargs="?", default="step124m", choices=list(SHAPES), help="model to train")
    add("--out", type=Path, default=Path("gpu-bench"), help="folder for SECTION.json")
    add("--steps", type=int, default=20, help="measured steps of each contender")
    add("--peak-tflops", type=float, default=H200_PEAK_TFLOPS, help="of the device, in bf16")
    add("--no-compile", action="store_true", help="leave out what needs torch.compile")
    add("--smoke", action="store_true", help="a tiny model, on the CPU if need be")
    add("--table", type=Path, default=None, help="print what this folder holds and stop")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
