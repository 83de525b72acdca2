"""The page of the combination study: memory of every declared setting, accuracy where one ran."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from megatron.low_memory.planned_memory import MemoryColumn
from tools.bench.combination.figure import draw
from tools.bench.combination.memory import (
    MemoryBytes,
    comparable,
    nearest,
    paper_memory,
    planned_memory,
)
from tools.bench.combination.settings import (
    MICROBATCHES,
    MODELS,
    NONZEROS,
    RESIDUAL_1,
    MemorySetting,
    ModelName,
    figures,
    printed,
    settings,
    wrn,
)
from tools.bench.combination.training import (
    STEPS,
    TEST_IMAGES,
    baselines,
    runs,
    trained,
)
from tools.bench.common.page_files import FIGURE, table, write_page
from tools.bench.common.rows import Row
from tools.planner.paper_accounting import MB, NONE, TABLE_3, TABLE_4, PaperRow
from tools.studies.statistics import standard_error

paper_of = cache(paper_memory)
planned_of = cache(planned_memory)


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Test accuracies of the runs of a setting, in per cent, by seed.

    `gaps` are differences to the dense network in 32 bits and whole microbatches of the same seed.
    """

    setting: MemorySetting
    by_seed: Mapping[int, float]
    gaps: Sequence[float]

    @property
    def mean(self) -> float:
        """Mean of the seeds."""
        return statistics.fmean(self.by_seed.values())

    @property
    def error(self) -> float | None:
        """Standard error of the mean; None with one seed."""
        values = list(self.by_seed.values())
        return standard_error(values) if len(values) > 1 else None


def accuracies(rows: Sequence[Row]) -> list[Accuracy]:
    """Return the accuracies of the trained settings that have a row, in declared order."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        group = row["name"].rpartition("-seed")[0]
        found.setdefault(group, {})[row["seed"]] = 100 * row["valid_accuracy"]
    dense = found.get(trained()[0].name, {})
    groups: list[Accuracy] = []
    for setting in trained():
        if mine := dict(sorted(found.get(setting.name, {}).items())):
            gaps = [value - dense[seed] for seed, value in mine.items() if seed in dense]
            groups.append(Accuracy(setting=setting, by_seed=mine, gaps=gaps))
    return groups


def write(out: Path | None, rows: Sequence[Row]) -> None:
    """Write the page, its numbers and its figure to `out`."""
    reached = accuracies(rows)
    where: dict[str, list[str]] = {name: [] for name in settings()}
    for title, group in figures().items():
        for name in dict.fromkeys(each.name for each in group):
            where[name].append(title)
    declared = settings() | {each.name: each for each in trained()}
    values = {
        "settings": [
            {
                "name": name,
                "figures": where.get(name, ["trained"]),
                "paper": _paper_data(paper_of(each)),
                "planned": planned_of(each).kinds | {"total": planned_of(each).total},
            }
            for name, each in declared.items()
        ],
        "accuracy": [
            {"name": each.setting.name, "mean": each.mean, "error": each.error}
            | {"by_seed": each.by_seed, "gaps": each.gaps}
            for each in reached
        ],
    }
    points = [(each.setting, each.mean, each.error, paper_of(each.setting)) for each in reached]
    write_page(
        out,
        text="\n".join([*_page(rows, reached), ""]),
        values=values,
        draw=lambda file: draw(file, points, paper_of, planned_of),
    )


def _paper_data(counted: MemoryBytes) -> dict[str, Any]:
    return asdict(counted) | {"total": counted.total}


def _page(rows: Sequence[Row], reached: Sequence[Accuracy]) -> Iterator[str]:
    yield (
        "MB are 10^6 bytes. Paper: the accounting of the report. Planned: the peak that "
        "`tools/profile_memory.py` plans for a run of ours with the same flags, on a CPU. "
        "`results.json` has model, optimizer and activations of each setting in both."
    )
    yield f"\n![Accuracy by memory, and memory by setting]({FIGURE})\n"
    yield from _trained(rows, reached)
    yield "\n### Table 3: WRN-28-2\n"
    yield from _printed(TABLE_3, "wrn")
    yield "\n### Table 4: DC-Transformer, activations fitted\n"
    yield from _printed(TABLE_4, "dc")
    yield "\n### Figures 3 and 6: WRN-28-2, 100 images, no recomputation\n"
    by_bits = {f"{bits} bit": {"bits": bits} for bits in (32, 16)}
    yield from _cross(wrn(), by_bits)
    yield "\n### Figure 4: WRN-28-2, dense, 32 bit, by microbatch\n"
    yield from _kinds([wrn(microbatch=each) for each in MICROBATCHES])
    yield "\n### Figure 7: WRN-28-2, 16 bit, RESIDUAL-2\\*, by microbatch\n"
    by_microbatch = {f"{each} images": {"microbatch": each} for each in MICROBATCHES}
    yield from _cross(figures()["Fig. 7"][0], by_microbatch)
    yield "\n### Figure 8: sparse, shallow and narrow WRNs, 16 bit, RESIDUAL-2\\*\n"
    yield from _against(figures()["Fig. 8"])
    yield "\n### Figure 9: DC-Transformer, 250 tokens, RESIDUAL-1, activations fitted\n"
    yield from _cross(figures()["Fig. 9"][0], by_bits)
    yield "\n### Figure 10: sparse, shallow and narrow DC-Transformers, 16 bit\n"
    yield (
        "Bytes of the paper's columns are those of model and optimizer: no rule of the report "
        "gives activations of other sizes.\n"
    )
    yield from _against(figures()["Fig. 10"])
    yield "\n### GPT of 124 million parameters, sequences of 1,024 tokens\n"
    yield from _kinds(figures()["GPT"])
    yield "\n### Sparse, shallow and narrow GPTs, 16 bit, 1 sequence, RESIDUAL-1\n"
    yield from _against(figures()["GPT, smaller"])


def _trained(rows: Sequence[Row], reached: Sequence[Accuracy]) -> Iterator[str]:
    yield "### What was trained: WRN-16-1, CIFAR-10 from JPEG images\n"
    every = runs()
    done = {row["name"] for row in rows}
    yield (
        f"{STEPS} steps of {every[0].setting.microbatch} images, {TEST_IMAGES:,} test images after "
        f"the last step. {sum(run.name in done for run in every)} of {len(every)} runs are in. "
        "16 bit: bf16 weights without an fp32 copy (stochastic rounding), bf16 gradients, momentum "
        "and activations. Sparse: random masks from the first step, four rewirings by DSR. Memory "
        "is that with RESIDUAL-2\\*, which changes no number of a run; the runs did without it. "
        "Error: standard error of the mean over seeds. Gap: mean difference to the first row of "
        "the same seed, with its standard error.\n"
    )
    header = ["network, % nonzeros, bits, images", "paper, MB", "planned, MB", "seeds"]
    header += ["accuracy, %", "error", "gap", "error"]
    yield from table(header, [_accuracy_cells(each) for each in reached])
    yield from _effects(reached)
    yield from _equal_bytes(reached)
    if missing := [run.name for run in every if run.name not in done]:
        yield f"\nNot run yet: {', '.join(missing)}."


def _accuracy_cells(each: Accuracy) -> list[str]:
    gap_error = standard_error(each.gaps) if len(each.gaps) > 1 else None
    total = paper_of(each.setting).total
    assert total is not None, "the report has rules for every WRN"
    return [
        f"{_network(each.setting)}, {each.setting.nonzeros}, {each.setting.bits}, "
        f"{each.setting.microbatch}",
        f"{total / MB:.3f}",
        f"{planned_of(each.setting).total / MB:.3f}",
        ", ".join(map(str, each.by_seed)),
        f"{each.mean:.2f}",
        _or_empty(each.error),
        f"{statistics.fmean(each.gaps):+.2f}" if each.gaps else "",
        _or_empty(gap_error),
    ]


def _effects(reached: Sequence[Accuracy]) -> Iterator[str]:
    """Yield what each technique does alone: differences over all pairs that differ in it."""
    known = {each.setting: each for each in reached}
    whole = trained()[0]
    effects: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "30 % nonzeros, not 100": ({"nonzeros": 30}, {"nonzeros": 100}),
        "10 % nonzeros, not 100": ({"nonzeros": 10}, {"nonzeros": 100}),
        "16 bit, not 32": ({"bits": 16}, {"bits": 32}),
        f"microbatches of {whole.microbatch // 10}, not {whole.microbatch}": (
            {"microbatch": whole.microbatch // 10},
            {"microbatch": whole.microbatch},
        ),
    }
    lines: list[list[str]] = []
    for name, (change, back) in effects.items():
        pairs = [
            (each, known[other])
            for setting, each in known.items()
            for other in [replace(setting, **back)]
            if setting.size == whole.size and replace(setting, **change) == setting
            if other in known
        ]
        differences = _by_seed(pairs)
        if len(differences) > 1:
            mean, error = statistics.fmean(differences), standard_error(differences)
            lines.append(
                [name, str(len(pairs)), str(len(differences)), f"{mean:+.2f}", f"{error:.2f}"]
            )
    if lines:
        yield "\nOne technique alone, mean of all pairs of settings that differ in it:\n"
        yield from table(
            ("technique", "pairs", "seeds", "difference of accuracy, %", "error"), lines
        )


def _equal_bytes(reached: Sequence[Accuracy]) -> Iterator[str]:
    """Yield each sparse network less the smaller networks of the nearest bytes, seed by seed."""
    known = {each.setting: each for each in reached}
    lines: list[list[str]] = []
    for setting, each in known.items():
        smaller_ones = baselines([setting]) if setting.nonzeros < 100 else []
        for other in (known[found] for found in smaller_ones if found in known):
            differences = _by_seed([(each, other)])
            if len(differences) > 1:
                lines.append(
                    [
                        f"{setting.nonzeros} % of {_network(setting)}, {_network(other.setting)}",
                        *(f"{comparable(s) / MB:.3f}" for s in (setting, other.setting)),
                        str(len(differences)),
                        f"{statistics.fmean(differences):+.2f}",
                        f"{standard_error(differences):.2f}",
                    ]
                )
    if lines:
        yield "\nSparse networks less the shallower and the narrower network nearest in bytes:\n"
        header = ["networks", "sparse, MB", "smaller, MB", "seeds", "difference of accuracy, %"]
        yield from table([*header, "error"], lines)


def _by_seed(pairs: Sequence[tuple[Accuracy, Accuracy]]) -> list[float]:
    """Return the mean difference over the pairs, by seed that all settings have."""
    if not pairs:
        return []
    seeds = set.intersection(*(set(each.by_seed) for pair in pairs for each in pair))
    return [
        statistics.fmean(one.by_seed[seed] - other.by_seed[seed] for one, other in pairs)
        for seed in sorted(seeds)
    ]


def _or_empty(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _printed(rows: Sequence[PaperRow], model: ModelName) -> list[str]:
    """Return the table of rows that the report prints, beside both of our columns."""
    header = ["% nonzeros, bits, microbatch, strategy", "printed, MB", "paper, MB", "difference"]
    header += ["planned, MB"]
    lines: list[list[str]] = []
    for row in rows:
        setting = printed(row, model)
        total = paper_of(setting).total
        assert total is not None, "a printed row has activations"
        lines.append(
            [
                f"{setting.nonzeros}, {row.bits}, {row.microbatch}, {_strategy(setting)}",
                f"{row.printed_mb:g}",
                f"{total / MB:.3f}",
                f"{total / MB - row.printed_mb:+.3f}",
                f"{planned_of(setting).total / MB:.3f}",
            ]
        )
    return table(header, lines)


def _cross(base: MemorySetting, columns: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the totals by nonzeros (rows) and by another part of the setting (columns)."""
    header = ["% nonzeros", *(f"{name}: {way}" for name in columns for way in ("paper", "planned"))]
    lines: list[list[str]] = []
    for nonzeros in NONZEROS:
        cells = [str(nonzeros)]
        for change in columns.values():
            setting = replace(base, nonzeros=nonzeros, **change)
            cells += [_mb(paper_of(setting).total), _mb(planned_of(setting).total)]
        lines.append(cells)
    return table(header, lines)


def _kinds(group: Sequence[MemorySetting]) -> list[str]:
    """Return both columns of some settings by kind."""
    kinds = ("model", "optimizer", "activations", "total")
    header = ["% nonzeros, bits, microbatch, strategy"]
    header += [f"{way}: {kind}" for way in ("paper", "planned") for kind in kinds]
    lines: list[list[str]] = []
    for setting in group:
        counted, planned = paper_of(setting), planned_of(setting)
        paper = (counted.model, counted.optimizer, counted.activations, counted.total)
        lines.append(
            [
                f"{setting.nonzeros}, {setting.bits}, {setting.microbatch}, {_strategy(setting)}",
                *map(_mb, paper),
                *map(_mb, _planned_kinds(planned)),
            ]
        )
    return table(header, lines)


def _planned_kinds(planned: MemoryColumn) -> list[int]:
    return [*planned.kinds.values(), planned.total]


def _against(group: Sequence[MemorySetting]) -> list[str]:
    """Return each network beside the shallower and the narrower one of the nearest bytes."""
    header = ["network, % nonzeros, microbatch", "paper, MB", "planned, MB"]
    header += ["nearest shallower", "paper, MB", "nearest narrower", "paper, MB"]
    lines: list[list[str]] = []
    for setting in group:
        whole = MODELS[setting.model].size
        label = f"{_network(setting)}, {setting.nonzeros}, {setting.microbatch}"
        cells = [label, _mb(comparable(setting)), _mb(planned_of(setting).total)]
        for place in (0, 1):
            others = [
                each
                for each in group
                if each.microbatch == setting.microbatch and each.size[place] < whole[place]
            ]
            if setting.size == whole:
                found = nearest(setting, others)
                cells += [_network(found), _mb(comparable(found))]
            else:
                cells += ["", ""]
        lines.append(cells)
    return table(header, lines)


def _network(setting: MemorySetting) -> str:
    layers, width = setting.size
    name = "WRN" if setting.model in ("wrn", "small") else MODELS[setting.model].title
    separator = "-" if name == "WRN" else " "
    return f"{name}{separator}{layers}{'-' if name == 'WRN' else ' x '}{width:g}"


def _strategy(setting: MemorySetting) -> str:
    if setting.strategy == NONE:
        return "NONE"
    return "RESIDUAL-1" if setting.strategy == RESIDUAL_1 else f"RESIDUAL-{setting.strategy.m}\\*"


def _mb(size: int | None) -> str:
    return "" if size is None else f"{size / MB:,.2f}"
