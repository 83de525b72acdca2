"""The two ways in which Radius moves entries on a CPU, side by side: kernels in C, and torch.

    python -m tools.bench.native_kernels.run --out FOLDER        a minute, one thread, 1 GB

By density, nanoseconds for each entry of a bucket, chosen or not: to gather what is sent; to take
it, which is to gather it and then to clear it; to place it chunk by chunk for an update rule that
then does nothing. In C by a bitmap, in torch by int32 offsets; they take turns. Writes README.md
and results.json where the best instruction set is AVX-512, avx2.md and avx2.json where it is AVX2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from megatron.data_parallel.reducer import ReducedGrad
from megatron.errors import ConfigError, SparsetronError
from megatron.optimizer.update_rules import Hyper
from megatron.processor import processor_model
from megatron.sparse.selection import draw_seeded, select_largest
from radius.bitmap_index import BitmapIndex
from radius.native_library import INSTRUCTION_SETS, instruction_sets
from radius.offset_index import OffsetIndex
from tools.bench.common.page_files import write_page

CASES = (
    *((density, "largest") for density in (0.9, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0625, 0.03)),
    *((density, "seeded") for density in (0.4, 0.2, 0.1)),
)
"""Densities, and how entries are selected: the largest of random values, or a draw of blocks."""
COMPILED, TORCH = "compiled", "torch"
WORK = ("gather", "take", "place")
STEP = ("gather", "place")
"""Operations of a sparse step with a separate residual."""


@dataclass(frozen=True, kw_only=True)
class NativeKernelRow:
    """Minimum nanoseconds per entry by operation, and bytes per entry of each index."""

    density: float
    select: str
    took: Mapping[str, Mapping[str, float]]
    index_bytes: Mapping[str, float]

    @property
    def ratio(self) -> float:
        """Time of the operations of a step, compiled divided by torch."""
        compiled, plain = (sum(self.took[work][who] for work in STEP) for who in (COMPILED, TORCH))
        return compiled / plain


class Nothing:
    """An update rule without arithmetic, which may record the gradients that it receives."""

    moments: tuple[str, ...] = ()
    adamw = None

    def __init__(self, noted: list[torch.Tensor] | None = None) -> None:
        self._noted = noted

    def apply(self, weight: torch.Tensor, grad: torch.Tensor, *_: Any) -> None:
        """Change nothing."""
        if self._noted is not None:
            self._noted.append(grad.clone())


class Mover:
    """One kind of index, with the operations of a step."""

    def __init__(self, index: BitmapIndex | OffsetIndex, flat: torch.Tensor) -> None:
        self.index, self._flat, self._left = index, flat, flat.clone()
        self.values = torch.empty(index.numel)
        self._rule: Any = Nothing()
        self._reduced = ReducedGrad(values=self.values, index=index)

    def prepare(self) -> None:
        """Restore the entries that `take` cleared."""
        self._left.copy_(self._flat)

    def gather(self) -> None:
        """Write the selected values to `values`."""
        self.index.gather(self._flat, self.values)

    def take(self) -> None:
        """Gather, and then set the gathered entries to zero."""
        self.index.gather(self._left, self.values)
        self.index.clear(self._left)

    def place(self) -> None:
        """Pass `values` to an update rule, chunk by chunk, with zeros elsewhere."""
        hyper = Hyper(t=1, lr=0.0, weight_decay=0.0)
        self.index.apply(self._rule, self._reduced, self._flat, (), hyper, factor=0.5)

    def results(self) -> list[torch.Tensor]:
        """Return the results, which must be equal for all contenders."""
        placed: list[torch.Tensor] = []
        self.gather()
        gathered = self.values.clone()
        self.take()
        self._rule = Nothing(placed)
        self.place()
        self._rule = Nothing()
        return [gathered, self.values.clone(), self._left.clone(), torch.cat(placed)]


def measure(density: float, select: str, *, entries: int, rounds: int) -> NativeKernelRow:
    """Measure one case. Raises `SparsetronError` if the contenders' results differ."""
    flat, wanted = torch.randn(entries), int(density * entries)
    if select == "largest":
        selection = select_largest(torch.randn(entries), wanted)
    else:
        selection = draw_seeded(entries, wanted, seed=1, step=1, name="bench")
    indices = {COMPILED: BitmapIndex(entries, flat.device), TORCH: OffsetIndex(entries)}
    for index in indices.values():
        index.choose(0, selection)
    movers = {who: Mover(index, flat) for who, index in indices.items()}
    pairs = zip(*(mover.results() for mover in movers.values()), strict=True)
    if not all(torch.equal(compiled, plain) for compiled, plain in pairs):
        raise SparsetronError(f"density {density}: the two do not move the same")
    seconds: dict[str, dict[str, list[float]]] = {work: {w: [] for w in movers} for work in WORK}
    for number in range(rounds + 1):
        turns = list(movers.items())
        for who, mover in turns if number % 2 else reversed(turns):
            mover.prepare()
            for work in WORK:
                took = _timed(getattr(mover, work))
                if number:
                    seconds[work][who].append(took)
    return NativeKernelRow(
        density=density,
        select=select,
        took={
            work: {who: 1e9 * min(each) / entries for who, each in by_who.items()}
            for work, by_who in seconds.items()
        },
        index_bytes={who: mover.index.nbytes / entries for who, mover in movers.items()},
    )


def _timed(work: Callable[[], None]) -> float:
    began = perf_counter()
    work()
    return perf_counter() - began


def page_part(instruction_set: str) -> str:
    """Return the `part` of `write_page` for an instruction set.

    A run on one kind of CPU keeps the pages of others.
    """
    return "" if instruction_set == INSTRUCTION_SETS[-1] else instruction_set.lower()


def as_markdown(rows: Sequence[NativeKernelRow], options: argparse.Namespace, load: float) -> str:
    """Return the table, with the ratio for a step."""
    columns = [f"{work}, {who}" for work in WORK for who in (COMPILED, TORCH)]
    lines = [
        f"{processor_model()}, kernels with {instruction_sets()[-1]}; torch {torch.__version__}; "
        f"one thread of {os.cpu_count()} cores, load {load} at the start; a bucket of "
        f"{options.entries:,} fp32 entries. Nanoseconds an entry, the least of "
        f"{options.rounds} rounds, and bytes an entry of index.",
        "",
        f"| density | chosen | {' | '.join(columns)} | index, compiled | index, torch "
        "| gather and place, compiled / torch |",
        "|---:|---|" + "---:|" * (len(columns) + 3),
    ]
    for row in rows:
        cells = [row.took[work][who] for work in WORK for who in (COMPILED, TORCH)]
        numbers = [*cells, row.index_bytes[COMPILED], row.index_bytes[TORCH], row.ratio]
        told = " | ".join(f"{number:.3f}" for number in numbers)
        lines.append(f"| {row.density} | {row.select} | {told} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--entries", type=int, default=1 << 25, help="of the bucket (33554432)")
    parser.add_argument("--rounds", type=int, default=9, help="of which the least time counts (9)")
    parser.add_argument("--out", type=Path, help="folder for the page and its .json")
    options = parser.parse_args(arguments)
    for name in ("entries", "rounds"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} {getattr(options, name)}: must be at least 1")
    if not instruction_sets():
        raise ConfigError(
            "the kernels of radius/native.c are not here: they take an x86-64 with AVX2, and a "
            "C compiler when the package is installed; run pip install again"
        )
    load = round(os.getloadavg()[0], 1)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [measure(*case, entries=options.entries, rounds=options.rounds) for case in CASES]
    text = as_markdown(rows, options, load)
    print(text)
    found = {
        "cpu": processor_model(),
        "entries": options.entries,
        "rows": [asdict(row) for row in rows],
    }
    part = page_part(instruction_sets()[-1])
    write_page(options.out, text=text, values=found, part=part, indent=None)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SparsetronError as error:
        print(f"native_kernels: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
