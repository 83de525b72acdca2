"""The YAML file of a study, read as the runs that it declares.

    title: Does the width of values cost loss?
    flags: {config: configs/gpt_tiny.yaml, lr: 1.0e-3}     # of every run
    tokens: 204800
    seeds: [1, 2]
    baseline: dense
    runs:
      dense: {}
      "dense_{grad-wire}":
        grid: {grad-wire: [bf16, int8, int4]}
        fork: {run: dense, step: 80}
        ranks: 2

A grid makes one run of each combination of its values, and the name of the run, a template, tells
them apart. A value is that of a flag, or a name that stands for several flags. docs/studies.md
describes every key.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from megatron.config.fields import nearest
from megatron.config.parsing import read_small_file
from megatron.errors import ConfigError
from tools.evaluate import BITS_PER_BYTE, TASKS
from tools.evaluation.bits_per_byte import FIGURE_NAMES

Scalar = str | int | float | bool
FlagValue = Scalar | list[Scalar]

TOP = (
    "title",
    "entry",
    "vocabulary",
    "flags",
    "tokens",
    "seeds",
    "baseline",
    "reference",
    "runs",
    "pairs",
    "scores",
    "sha256",
)
RUN = ("flags", "grid", "fork", "ranks", "seeds", "tokens", "baseline")
FORK = ("run", "step")
SCORE = ("task", "file", "figure")
EVALUATED = {name: task.figure_names for name, task in TASKS.items()}
EVALUATED[BITS_PER_BYTE] = FIGURE_NAMES
"""Tasks of tools/evaluate.py, and the names of their figures."""
RESERVED = ("seed", "run-dir", "load", "save", "ckpt-step", "exit-interval")
"""Flags that the study sets for each run."""
TRAINS_NOTHING = ("help", "help-compat", "dry-run")
"""Flags with which a run would not train."""
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What PyYAML raises for values that do not fit their tag, such as a 13th month."""
DIGEST = re.compile(r"[0-9a-f]{64}")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
"""Names of runs, which are also names of folders, and of scores, which are parts of file names."""
ALLOWED = "use letters, digits, . _ -"


@dataclass(frozen=True, kw_only=True)
class Fork:
    """The run that another one continues, and the step whose checkpoint it loads."""

    run: str
    step: int


@dataclass(frozen=True)
class Score:
    """A figure of the trained model: `tools/evaluate.py` computes it on `file` for `task`."""

    name: str
    task: str
    file: str
    figure: str


@dataclass(frozen=True, kw_only=True)
class DeclaredRun:
    """One run: a group, which has a run for each seed, and the seed.

    `flags` are those of the entry script, without leading dashes. `tokens` is the length of the
    run; None if a flag gives it. `baseline` is the group whose loss is subtracted, None for that of
    the study.
    """

    group: str
    seed: int
    ranks: int
    fork: Fork | None
    flags: Mapping[str, FlagValue]
    tokens: int | None
    baseline: str | None

    @property
    def name(self) -> str:
        """Name of the run folder and of the row."""
        return f"{self.group}-seed{self.seed}"

    @property
    def base(self) -> str | None:
        """Name of the run that this one continues: that of the same seed."""
        return None if self.fork is None else f"{self.fork.run}-seed{self.seed}"


@dataclass(frozen=True, kw_only=True)
class DeclaredStudy:
    """A study: runs in the order in which they are made, and what is compared.

    `baseline` is the group whose loss is subtracted, seed by seed, from those of runs that name no
    other, and `reference` the group to whose bytes all are related. `pairs` are groups whose
    difference is reported. `scores` are figures of every model. `sha256` are digests of files that
    runs read. `vocabulary` is the size of the tokenizer that is trained on the text of the study,
    None if the flags name data that exist.
    """

    path: Path
    title: str
    entry: str
    vocabulary: int | None
    runs: tuple[DeclaredRun, ...]
    baseline: str
    reference: str | None
    pairs: tuple[tuple[str, str], ...]
    scores: tuple[Score, ...] = ()
    sha256: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups, in the order of the file."""
        return tuple(dict.fromkeys(run.group for run in self.runs))

    @property
    def baselines(self) -> dict[str, str]:
        """The baseline of each group, in the order of the file."""
        return {run.group: run.baseline or self.baseline for run in self.runs}

    def base(self, run: DeclaredRun) -> DeclaredRun:
        """Return the run that a fork continues."""
        return self.run(str(run.base))

    def run(self, name: str) -> DeclaredRun:
        """Return a run by its name."""
        return next(run for run in self.runs if run.name == name)


def read_study(path: Path) -> DeclaredStudy:
    """Read a study. Raises `ConfigError` naming file and key if something is wrong."""
    text = read_small_file(str(path), "a study is a YAML file")
    try:
        loader = _UniqueKeys(text)
        loader.name = path.name
        content = loader.get_single_data()
    except (yaml.YAMLError, *UNREADABLE) as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    try:
        return _study(path, _mapping("the file", content))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a repeated key, of which YAML would silently keep the last."""

    # Construction is too late: a merge (<<) adds keys to the node that it changes.
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise yaml.MarkedYAMLError(None, None, f"{min(twice)} is given twice", node.start_mark)
        return node


def _study(path: Path, content: Mapping[str, Any]) -> DeclaredStudy:
    _refuse_unknown("", content, TOP)
    for key in ("title", "runs"):
        if key not in content:
            raise ConfigError(f"{key}: is missing")
    common = DeclaredRun(
        group="",
        seed=0,
        ranks=1,
        fork=None,
        flags=_flags("flags", content.get("flags", {})),
        tokens=_optional_count("tokens", content.get("tokens")),
        baseline=None,
    )
    seeds = _seeds("seeds", content.get("seeds", [1]))
    groups: dict[str, list[DeclaredRun]] = {}
    for template, settings in _mapping("runs", content["runs"]).items():
        where = f"runs.{template}"
        for group in _groups(
            where,
            str(template),
            _mapping(where, {} if settings is None else settings),
            common,
            seeds,
        ):
            if group[0].group in groups:
                raise ConfigError(f"{where}: a second run is named {group[0].group}")
            groups[group[0].group] = group
    if not groups:
        raise ConfigError("runs: declares no run")
    _check_forks(groups)
    for name, (run, *_) in groups.items():
        if run.baseline is not None:
            _require_group(f"runs.{name}.baseline", run.baseline, groups)
    baseline = str(content.get("baseline", next(iter(groups))))
    _require_group("baseline", baseline, groups)
    reference = content.get("reference")
    if reference is not None:
        _require_group("reference", str(reference), groups)
        if groups[str(reference)][0].ranks == 1:
            raise ConfigError(f"reference: {reference} runs on one rank, which sends nothing")
    return DeclaredStudy(
        path=path,
        title=_text("title", content["title"]),
        entry=_text("entry", content.get("entry", "pretrain_gpt.py")),
        vocabulary=_optional_count("vocabulary", content.get("vocabulary")),
        runs=tuple(_in_order(groups.values())),
        baseline=baseline,
        reference=None if reference is None else str(reference),
        pairs=tuple(_pairs(content.get("pairs", []), groups)),
        scores=tuple(_scores(_mapping("scores", content.get("scores", {})))),
        sha256=_digests(_mapping("sha256", content.get("sha256", {}))),
    )


def _groups(
    where: str,
    template: str,
    settings: Mapping[str, Any],
    common: DeclaredRun,
    seeds: Sequence[int],
) -> Iterator[list[DeclaredRun]]:
    """Yield the runs of each combination of the grid, a run for each seed."""
    _refuse_unknown(where, settings, RUN)
    run = replace(
        common,
        ranks=_count(f"{where}.ranks", settings.get("ranks", 1)),
        fork=_fork(f"{where}.fork", settings.get("fork")),
        flags={**common.flags, **_flags(f"{where}.flags", settings.get("flags", {}))},
        tokens=_optional_count(f"{where}.tokens", settings.get("tokens", common.tokens)),
        baseline=None if settings.get("baseline") is None else str(settings["baseline"]),
    )
    seeds = _seeds(f"{where}.seeds", settings.get("seeds", list(seeds)))
    grid = _mapping(f"{where}.grid", settings.get("grid", {}))
    for key, values in grid.items():
        if not isinstance(values, list | dict) or not values:
            raise ConfigError(
                f"{where}.grid.{key}: must be a list of values, or a mapping of names to flags"
            )
        if f"{{{key}}}" not in template:
            raise ConfigError(f"{where}: the name must hold {{{key}}}, which tells the runs apart")
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        name = _named(where, template, chosen)
        tokens = _optional_count(f"{where}.grid.tokens", chosen.pop("tokens", run.tokens))
        added = _of_grid(f"{where}.grid", chosen, grid)
        if twice := added.keys() & _flags(f"{where}.flags", settings.get("flags", {})).keys():
            raise ConfigError(f"{where}.flags.{min(twice)}: the grid gives it too")
        flags = {**run.flags, **added}
        yield [replace(run, group=name, seed=s, flags=flags, tokens=tokens) for s in seeds]


def _of_grid(
    where: str, chosen: Mapping[str, Any], grid: Mapping[str, Any]
) -> dict[str, FlagValue]:
    """Return the flags of one combination: its values, or those that its names stand for."""
    found: dict[str, FlagValue] = {}
    for key, value in chosen.items():
        named, place = isinstance(grid[key], dict), f"{where}.{key}.{value}"
        flags = _flags(place, grid[key][value]) if named else _flags(where, {key: value})
        if twice := found.keys() & flags.keys():
            raise ConfigError(f"{place}: the grid gives {min(twice)} twice")
        found |= flags
    return found


def _named(where: str, template: str, values: Mapping[str, Any]) -> str:
    """Return the template with the grid's values in place of {key}."""
    name = template
    for key, value in values.items():
        name = name.replace(f"{{{key}}}", _shown(value))
    if not NAME.fullmatch(name):
        raise ConfigError(f"{where}: {name!r} is no name of a folder; {ALLOWED}")
    return name


def _in_order(groups: Iterable[Sequence[DeclaredRun]]) -> Iterator[DeclaredRun]:
    """Yield the runs, all groups of one seed before the next seed.

    A study that is stopped then has whole seeds to compare.
    """
    found = [run for group in groups for run in group]
    for seed in dict.fromkeys(run.seed for run in found):
        yield from (run for run in found if run.seed == seed)


def _check_forks(groups: Mapping[str, Sequence[DeclaredRun]]) -> None:
    for name, (run, *_) in groups.items():
        if run.fork is None:
            continue
        where = f"runs.{name}.fork.run"
        _require_group(where, run.fork.run, groups)
        base = groups[run.fork.run]
        if base[0].fork is not None:
            raise ConfigError(f"{where}: {run.fork.run} is a fork itself; name the run it forks")
        if missing := {each.seed for each in groups[name]} - {each.seed for each in base}:
            raise ConfigError(f"{where}: {run.fork.run} has no seed {min(missing)}")


def _require_group(where: str, name: str, groups: Mapping[str, object]) -> None:
    if name not in groups:
        raise ConfigError(f"{where}: no run is named {name}{nearest(name, groups)}")


def _pairs(value: Any, groups: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for number, pair in enumerate(_list("pairs", value)):
        where = f"pairs[{number}]"
        if len(_list(where, pair)) != 2:
            raise ConfigError(f"{where}: must be a list of two runs")
        for name in pair:
            _require_group(where, str(name), groups)
        yield str(pair[0]), str(pair[1])


def _scores(content: Mapping[str, Any]) -> Iterator[Score]:
    for name, settings in content.items():
        where = f"scores.{name}"
        if not NAME.fullmatch(str(name)):
            raise ConfigError(f"{where}: {str(name)!r} is no name of a score; {ALLOWED}")
        given = _mapping(where, settings)
        _refuse_unknown(where, given, SCORE)
        for key in SCORE:
            if key not in given:
                raise ConfigError(f"{where}.{key}: is missing")
        score = Score(str(name), *(_text(f"{where}.{key}", given[key]) for key in SCORE))
        if score.task not in EVALUATED:
            raise ConfigError(f"{where}.task: {score.task}{nearest(score.task, EVALUATED)}")
        names = EVALUATED[score.task]
        if score.figure not in names:
            raise ConfigError(f"{where}.figure: {score.figure}; must be one of {', '.join(names)}")
        yield score


def _digests(content: Mapping[str, Any]) -> dict[str, str]:
    for name, digest in content.items():
        if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
            raise ConfigError(f"sha256.{name}: must be 64 hexadecimal digits")
    return {str(name): digest for name, digest in content.items()}


def _fork(where: str, value: Any) -> Fork | None:
    if value is None:
        return None
    content = _mapping(where, value)
    _refuse_unknown(where, content, FORK)
    for key in FORK:
        if key not in content:
            raise ConfigError(f"{where}.{key}: is missing")
    return Fork(run=str(content["run"]), step=_count(f"{where}.step", content["step"]))


def _flags(where: str, value: Any) -> dict[str, FlagValue]:
    found: dict[str, FlagValue] = {}
    for key, flag in _mapping(where, value).items():
        name = str(key).replace("_", "-")
        if name in RESERVED:
            raise ConfigError(f"{where}.{key}: the study sets it for each run; leave it out")
        if name in TRAINS_NOTHING:
            raise ConfigError(f"{where}.{key}: the run would not train; leave it out")
        if name in found:
            raise ConfigError(f"{where}.{key}: is given twice")
        values = flag if isinstance(flag, list) else [flag]
        if not values or not all(isinstance(each, str | int | float | bool) for each in values):
            raise ConfigError(f"{where}.{key}: must be a value, or a list of values")
        found[name] = flag
    return found


def _optional_count(where: str, value: Any) -> int | None:
    return None if value is None else _count(where, value)


def _seeds(where: str, value: Any) -> list[int]:
    seeds = [_count(where, seed, least=0) for seed in _list(where, value)]
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"{where}: must be a list of different whole numbers")
    return seeds


def _count(where: str, value: Any, *, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{where}: {_shown(value)}; must be a whole number, at least {least}")
    return value


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where}: must be text")
    return value.strip()


def _mapping(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: must be a mapping of keys to values")
    return value


def _list(where: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"{where}: must be a list")
    return value


def _refuse_unknown(where: str, content: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in content:
        if key not in known:
            name = f"{where}.{key}" if where else str(key)
            raise ConfigError(f"{name}: no such key{nearest(str(key), known)}")


def _shown(value: Any) -> str:
    """Return a value as a command line has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
