"""Settings that keep the planned memory of a run within a budget (`--memory-budget`). No torch.

    given configuration --> BudgetSearch.candidates, fastest first --> the first one that fits

A candidate changes the given configuration in up to four ways, each of which saves memory:

    microbatch   micro_batch_size, a divisor of the given one; the global batch stays
    recompute    recompute_granularity, recompute_method and recompute_num_layers
    states       bf16 moments, and weights without an fp32 copy
    offload      optimizer_cpu_offload, but not with `--device cpu`

The order of candidates, by which the fastest is found: fewer FLOPs of products, recomputed ones
included; of equally many those without offload; of these fp32 states before 16-bit moments, and
these before 16-bit weights; then larger microbatches; then the strategies as `_recomputations`
lists them. The given configuration is the first. FLOPs stand for time, which is not estimated.

A setting of the command line stays as it is, except for the size of a microbatch, which every run
must give and which is the largest of the search. A combination that the rules of a configuration
refuse is no candidate.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from megatron.config import Config, GPTConfig, check, resolve
from megatron.config.byte_size import parse_bytes, show_bytes
from megatron.config.validate import check_pairs
from megatron.data_parallel.gradient_path import GradientPath
from megatron.errors import ConfigError, DataError
from megatron.low_memory.checkpoint_interval import factors
from megatron.low_memory.planned_memory import planned_activations, planned_column
from megatron.low_memory.recomputed_flops import recomputed_share
from megatron.parallel.dims import Coordinates, ParallelDims
from megatron.tasks.translation_config import TranslationConfig
from megatron.tasks.vision_config import VisionConfig

T = TypeVar("T")
Changes = Mapping[str, Any]
"""Values by the name of the field."""
Values = tuple[Any, ...]
RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")
ACTIVATIONS = ("micro_batch_size", *RECOMPUTE)
FORMATS = ("main_params_dtype", "main_params_rounding", "exp_avg_dtype", "exp_avg_sq_dtype")
STATES = (*FORMATS, "optimizer_cpu_offload")
SEARCHED = (*ACTIVATIONS, *STATES)
"""Settings that a budget may change, and that a resumed run takes from its saved configuration."""
BLOCK_PARTS = 8
"""Parts of a stage's layers in which `recompute_method block` is tried."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A configuration that the search considers.

    Attributes:
        config: The resolved configuration.
        changes: The settings that differ from the given configuration.
        peak: Planned peak of the fullest rank, in bytes.
        flops: FLOPs of a step divided by those without recomputation.
    """

    config: Config
    changes: Changes
    peak: int
    flops: float

    @property
    def flags(self) -> str:
        """The flags that turn the given configuration into this one."""
        return " ".join(_flag(self.config, name) for name in self.changes)

    @property
    def changes_numbers(self) -> bool:
        """Whether the run computes other numbers: other microbatches, states or buckets."""
        return any(name in ("micro_batch_size", *STATES) for name in self.changes)


@dataclass(frozen=True)
class BudgetSearch:
    """The candidates of a configuration that is resolved for `world` ranks.

    `vocabularies` has the entries of a GPT's vocabulary, or of a translation's two dictionaries.
    """

    given: Config
    path: GradientPath
    world: int
    vocabularies: Sequence[int] = ()

    @cached_property
    def candidates(self) -> Sequence[Candidate]:
        """All legal candidates, the fastest first; the given configuration is the first.

        Raises:
            ConfigError: The model or its recomputation has no planned memory.
        """
        given = self.given
        parts = (_microbatches(given), _recomputations(given), _states(given), _offloads(given))
        # Before the FLOPs, whose refusal of a network does not name the budget.
        self._activations[_values(given, ACTIVATIONS)] = self._activations_as_given
        least = recomputed_share(given, self.vocabularies)
        found: dict[tuple[Any, ...], Candidate] = {}
        for places in itertools.product(*(range(len(part)) for part in parts)):
            wanted = {
                k: v for part, at in zip(parts, places, strict=True) for k, v in part[at].items()
            }
            config = self._checked(wanted)
            if config is None:
                continue
            share = round(recomputed_share(config, self.vocabularies), 6)
            if share < round(least, 6):
                continue
            microbatch, recompute, states, offload = places
            order = (share, offload, states, microbatch, recompute)
            found[order] = Candidate(
                config=config,
                changes=_differences(given, config),
                peak=self._peak(config),
                flops=1 + share,
            )
        return [found[order] for order in sorted(found)]

    @property
    def front(self) -> Sequence[Candidate]:
        """The candidates that some budget chooses: each needs less than all that are faster."""
        front: list[Candidate] = []
        for candidate in self.candidates:
            if not front or candidate.peak < front[-1].peak:
                front.append(candidate)
        return front

    def fastest(self, budget: int) -> Candidate | None:
        """Return the first candidate with a planned peak of at most `budget` bytes, if any."""
        return next((each for each in self.candidates if each.peak <= budget), None)

    def choose(self, budget: int) -> Candidate:
        """Return the fastest candidate that fits.

        Raises:
            ConfigError: None fits; the message has the smallest planned peak and its flags.
        """
        if (found := self.fastest(budget)) is not None:
            return found
        least = min(self.candidates, key=lambda each: each.peak)
        how = f"with {least.flags}" if least.changes else "with the settings as given"
        raise ConfigError(
            f"memory_budget: no settings fit into {show_bytes(budget)}; the smallest planned peak "
            f"is {show_bytes(least.peak)}, {how}; give --memory-budget {show_bytes(least.peak)}"
        )

    def peak(self, config: Config) -> int:
        """Return the planned peak of the fullest rank of a configuration, in bytes."""
        return max(self._totals(config))

    def _checked(self, changes: Changes) -> Config | None:
        """Return the resolved configuration, or None if it is refused or has a fixed setting."""
        config = self.given.with_values(changes)
        if _differences(self.given, config).keys() & (self.given.from_flags - {"micro_batch_size"}):
            return None
        try:
            return checked(config, self.path, self.world)
        except ConfigError:
            return None

    def _peak(self, config: Config) -> int:
        """Return the planned peak from two parts, each planned once for equal settings.

        Activations depend on microbatch and recomputation, states on optimizer and offload.
        """
        active, stated = (_values(config, names) for names in (ACTIVATIONS, STATES))
        if active not in self._activations:
            self._activations[active] = self._by_stage(planned_activations, config)
        if stated not in self._states:
            own = dataclasses.replace(
                self.given, optimizer=config.optimizer, offload=config.offload
            )
            self._states[stated] = self._totals(own)
        parts = (self._activations[active], self._states[stated], self._activations_as_given)
        return max(mine + states - given for mine, states, given in zip(*parts, strict=True))

    @cached_property
    def _activations(self) -> dict[Values, Sequence[int]]:
        return {}

    @cached_property
    def _states(self) -> dict[Values, Sequence[int]]:
        return {}

    @cached_property
    def _activations_as_given(self) -> Sequence[int]:
        return self._by_stage(planned_activations, self.given)

    def _totals(self, config: Config) -> Sequence[int]:
        return [column.total for column in self._by_stage(planned_column, config)]

    def _by_stage(self, plan: Callable[..., T], config: Config) -> list[T]:
        """Return what is planned for the first rank of each stage, which needs the most of it."""
        parallel = config.parallel
        dims = ParallelDims.from_world(
            self.world,
            tp=parallel.tensor_model_parallel_size,
            pp=parallel.pipeline_model_parallel_size,
            order=parallel.rank_order,
        )
        ranks = (dims.rank(Coordinates(tp=0, dp=0, pp=stage)) for stage in range(dims.pp))
        try:
            return [
                plan(config, dims, self.path, rank=rank, vocabularies=self.vocabularies)
                for rank in ranks
            ]
        except ConfigError as error:
            raise ConfigError(f"memory_budget: {error}; leave out --memory-budget") from None


def within_budget(
    config: Config,
    path: GradientPath,
    *,
    world: int,
    vocabularies: Sequence[int],
    saved: Config | None = None,
) -> Config:
    """Return a configuration whose planned memory keeps to its budget, with a notice that says so.

    Args:
        config: Resolved for `world` ranks, with a `memory_budget`.
        path: The gradient path.
        world: The number of ranks.
        vocabularies: Entries of a GPT's vocabulary, or of the two dictionaries of a translation.
        saved: The configuration of the run that is resumed, whose budget and choice are kept
            except for settings of the command line; None to search.

    Raises:
        ConfigError: Nothing fits, or the model has no planned memory.
    """
    budget = config.training.memory_budget
    assert budget is not None
    if saved is not None:
        return _kept(config, path, saved, world, vocabularies)
    search = BudgetSearch(config, path, world, vocabularies)
    return _noted(search.choose(parse_bytes(budget)).config, describe_choice(search))


def describe_choice(search: BudgetSearch) -> str:
    """Return a line on the choice: the flags, the planned peak, and what they cost."""
    budget = search.given.training.memory_budget
    assert budget is not None
    given, chosen = search.candidates[0], search.choose(parse_bytes(budget))
    if not chosen.changes:
        return (
            f"memory_budget {budget}: the settings fit as they are, with a planned peak of "
            f"{show_bytes(chosen.peak)}"
        )
    more = chosen.flops / given.flops - 1
    line = (
        f"memory_budget {budget}: the run takes {chosen.flags}, with a planned peak of "
        f"{show_bytes(chosen.peak)} instead of {show_bytes(given.peak)} and {more:.1%} more FLOPs"
    )
    if chosen.changes_numbers:
        line += "; smaller microbatches, 16-bit states and offload change the numbers of the run"
    return line


def checked(config: Config, path: GradientPath, world: int) -> Config:
    """Return a configuration resolved for `world` ranks, after the checks of a parsed one.

    Raises:
        ConfigError: The configuration breaks a rule.
    """
    check(config, {})
    check_pairs(config, path.refused_pairs)
    path.check(config)
    return resolve(config, world)


def vocabularies_of(config: Config) -> Sequence[int]:
    """Return the sizes of vocabularies on which a model's memory depends, from the data's files.

    Raises:
        ConfigError, DataError: The files or settings do not give the size.
    """
    if isinstance(config, GPTConfig):
        from megatron.data.vocabulary import data_prefixes, find_vocabulary

        hub = "tokenizer_model" in config.from_flags and not config.run.dry_run
        try:
            return (find_vocabulary(config.data, data_prefixes(config.data), hub=hub).size,)
        except DataError:
            # A dry run where only compute nodes have the data.
            if config.data.vocab_size is None:
                raise
            return (config.data.vocab_size,)
    if isinstance(config, TranslationConfig):
        from megatron.data.pair_dataset import PairVocabulary
        from megatron.tasks.translation import pair_paths

        if config.data.data_path is None:
            raise ConfigError("memory_budget: needs the dictionaries; give --data-path")
        found = PairVocabulary.load(pair_paths(config))
        return len(found.source), len(found.target)
    return ()


def _kept(
    config: Config, path: GradientPath, saved: Config, world: int, vocabularies: Sequence[int]
) -> Config:
    """Return the configuration with the saved choice and the saved budget."""
    names = set(SEARCHED) - (config.from_flags - {"micro_batch_size"})
    if config.from_flags & set(RECOMPUTE):
        # Values of one strategy, which do not go with another granularity.
        names -= set(RECOMPUTE)
    if config.parallel.use_distributed_optimizer:
        # Refused together.
        names.discard("optimizer_cpu_offload")
    values = {name: value for name, value in saved.values().items() if name in names}
    values["micro_batch_size"] = _fitting(saved.training.micro_batch_size, config, world)
    asked, first = config.training.memory_budget, saved.training.memory_budget
    assert first is not None, "the caller checked"
    kept = checked(config.with_values(values | {"memory_budget": first}), path, world)
    peak = BudgetSearch(kept, path, world, vocabularies).peak(kept)
    flags = " ".join(_flag(kept, name) for name in _differences(config, kept)) or "no change"
    line = (
        f"memory_budget {asked}: the resumed run keeps what {first} chose, {flags}, with a planned "
        f"peak of {show_bytes(peak)}"
    )
    if peak > parse_bytes(first):
        line += f", which is more than {first}; --memory-budget none and other settings need less"
    return _noted(kept, line)


def _fitting(size: int, config: Config, world: int) -> int:
    """Return the largest divisor of a microbatch that divides what each data-parallel rank gets."""
    batches = [config.training.global_batch_size or size]
    if config.training.rampup_batch_size is not None:
        batches += config.training.rampup_batch_size[:2]
    ranks = config.data_parallel_size(world)
    return math.gcd(size, *(batch // ranks for batch in batches))


def _noted(config: Config, line: str) -> Config:
    return dataclasses.replace(config, notices=(*config.notices, line))


def _value(config: Config, name: str) -> Any:
    return getattr(getattr(config, config.specs()[name].section), name)


def _values(config: Config, names: Sequence[str]) -> Values:
    return tuple(_value(config, name) for name in names)


def _differences(given: Config, other: Config) -> Changes:
    """Return the searched settings of the other configuration that differ from the given ones."""
    found = dict(zip(SEARCHED, _values(other, SEARCHED), strict=True))
    return {name: value for name, value in found.items() if value != _value(given, name)}


def _flag(config: Config, name: str) -> str:
    value, flag = _value(config, name), config.specs()[name].flag
    if isinstance(value, bool):
        return flag if value else f"{flag} false"
    return f"{flag} {'none' if value is None else shlex.quote(str(value))}"


# ---- what the search changes, the given settings first ------------------------------------------


def _microbatches(config: Config) -> Sequence[Changes]:
    """Return smaller microbatches, the largest first.

    Statistics of a batch normalization stay those of as many images: its microbatches are multiples
    of `simulated_micro_batch_size`, and are not changed without it.
    """
    size, step = config.training.micro_batch_size, 1
    if isinstance(config, VisionConfig):
        step = config.model.simulated_micro_batch_size or size
    divisors = [divisor for divisor in reversed(factors(size)) if divisor % step == 0]
    return [{"micro_batch_size": divisor} for divisor in divisors]


def _recomputations(config: Config) -> Sequence[Changes]:
    """Return the given recomputation and the strategies of the model that can be planned."""
    given: Changes = {name: getattr(config.recompute, name) for name in RECOMPUTE}
    others: list[Changes] = [
        dict(zip(RECOMPUTE, values, strict=True)) for values in _strategies(config)
    ]
    return [given, *(each for each in others if each != given)]


Recomputation = tuple[str | None, str | None, int | None]
"""Granularity, method and number of layers."""


def _strategies(config: Config) -> Iterator[Recomputation]:
    """Yield the strategies of a model; `residual` of a transformer stores what `full` does."""
    yield None, None, None
    if isinstance(config, TranslationConfig):
        # Layers of the encoder and of the decoder, whose numbers may differ.
        layers = max(len(config.model.encoder_kernels), len(config.model.decoder_kernels))
        yield from map(_full, factors(layers))
        return
    yield from ((name, None, None) for name in ("no-norm", "ops"))
    if isinstance(config, VisionConfig):
        blocks = (config.model.depth - 4) // 2 + 1
        for name in ("residual", "residual-star"):
            yield from ((name, None, _several(count)) for count in range(1, blocks))
    if isinstance(config, GPTConfig):
        layers = config.parallel.longest_run(config.model.num_layers)
        yield "selective", None, None
        parts = {layers * part // BLOCK_PARTS for part in range(1, BLOCK_PARTS)} - {0, layers}
        yield from (("full", "block", count) for count in sorted(parts))
        yield from map(_full, factors(layers))
        yield from (("residual-star", None, _several(count)) for count in factors(layers))


def _full(count: int) -> Recomputation:
    return "full", None if count == 1 else "uniform", _several(count)


def _several(count: int) -> int | None:
    return None if count == 1 else count


def _states(config: Config) -> Sequence[Changes]:
    """Return the given states, then bf16 moments, then also weights without an fp32 copy."""
    optimizer, precision = config.optimizer, config.precision
    moments = {
        name: "bf16"
        for name, count in (("exp_avg_dtype", 1), ("exp_avg_sq_dtype", 2))
        if optimizer.num_moments >= count and getattr(optimizer, name) == "fp32"
    }
    found: list[Changes] = [{}]
    if moments:
        found.append(moments)
    if optimizer.main_params_dtype == "fp32" and (precision.bf16 or precision.fp16):
        found.append(moments | {"main_params_dtype": "bf16" if precision.bf16 else "fp16"})
    return found


def _offloads(config: Config) -> Sequence[Changes]:
    # Where the device is a CPU, the host's memory is the same.
    if config.offload.optimizer_cpu_offload or config.run.device == "cpu":
        return [{}]
    return [{}, {"optimizer_cpu_offload": True}]
