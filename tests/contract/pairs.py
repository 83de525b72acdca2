"""The cases of the contract tests: a pairwise table of settings, or every legal combination.

A row consists of a gradient path with its options (a line of `harness.PATHS`), the wire, the place
of the optimizer states, and the number of ranks. The program decides what goes together: a row is
legal if `parse` and `resolve` accept its flags. `table` has every line, and every legal pair of
values of two factors in at least one row: path, wire, place of the states, number of ranks.
`product`, for `--all`, has every legal row, thus every option of a path with each wire and each
place. The own parameters of a law, such as the dtype, are a factor of the table too (`in_turns`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple, TypeVar

import pytest

from megatron.config import GradientConfig, parse, resolve
from megatron.config.fields import flag_name, specs_of
from megatron.errors import ConfigError
from pretrain_gpt import GRADIENT_PATHS
from tests.contract.harness import PATHS, TOTAL_ITERATIONS, WORLDS, PathCase, case_id

T = TypeVar("T")

WIRES = (None, *specs_of(GradientConfig, "gradient")["grad_wire"].choices)
STATES: tuple[dict[str, Any], ...] = ({}, {"sharded": True}, {"inner": 2}, {"offloaded": True})
"""Places of the optimizer states, as fields of a `PathCase`."""
RUN = f"--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --mock-data --lr 1 \
--micro-batch-size 1 --global-batch-size 4 --train-iters {TOTAL_ITERATIONS} --eval-iters 0 \
--check-weight-hash-across-dp-replicas-interval none --optimizer sgd --sgd-momentum 0 --clip-grad 0"
"""A run that takes any gradient path, with rounds of any length."""


Values = tuple[tuple[str, object], str | None, str, int]
"""A path with its options, the wire, the place of the states, and the number of ranks of a row."""


class Row(NamedTuple):
    """A case and the number of ranks on which it is tested."""

    case: PathCase
    world: int

    @property
    def values(self) -> Values:
        """The path with its options, the wire, the place of the states, and the number of ranks."""
        case = self.case
        options = tuple(case.options.items())
        return (case.name, options), case.wire, case.states, self.world

    @property
    def pairs(self) -> frozenset[Any]:
        """The pairs of values of two factors that the row tests.

        One rank neither sends nor shards, so that its rows test pairs with the number of ranks
        only.
        """
        factors = (self.case.name, *self.values[1:])
        pairs = combinations(enumerate(factors), 2)
        ranks = len(factors) - 1
        return frozenset(pair for pair in pairs if self.world > 1 or pair[1][0] == ranks)


def cases(
    which: Callable[[PathCase, int], bool] = lambda case, world: True, *, four: bool = False
) -> pytest.MarkDecorator:
    """Return the mark of a test that runs for the rows of the table that `which` accepts.

    A test without the parameter `world` runs once for each case of these rows. A test with this
    parameter runs on four ranks, which take three times as long as two, with `--all`, with `four`,
    or where two are too few for a case.
    """
    return pytest.mark.cases(which=which, four=four)


def choices(*values: object) -> pytest.MarkDecorator:
    """Return the mark of a test with `cases` whose own parameter has these values.

    As the parameter `choices`, the test gets all values that its row is tested with, so that it
    computes only once what each of them is compared with.
    """
    return pytest.mark.parametrize("choices", [values], ids=["choices"], indirect=True)


def refusals(case: PathCase) -> dict[int, str]:
    """Return the program's error for the settings of a case, by the numbers of ranks it holds for.

    Legal numbers of ranks are left out.
    """
    return _refusals(tuple(_flags(case)))


@cache
def _refusals(flags: tuple[str, ...]) -> dict[int, str]:
    try:
        config = parse(flags, paths=GRADIENT_PATHS)
    except ConfigError as error:
        return dict.fromkeys(WORLDS, str(error))
    found = dict[int, str]()
    for world in WORLDS:
        try:
            resolve(config, world)
        except ConfigError as error:
            found[world] = str(error)
    return found


def _flags(case: PathCase) -> list[str]:
    settings: dict[str, Any] = {"grad_path": case.name} | case.options
    settings |= {"grad_wire": case.wire} if case.wire else {}
    settings |= {"dp_inner_size": case.inner} if case.inner > 1 else {}
    settings |= {"use_distributed_optimizer": True} if case.sharded else {}
    # The parameters of an offloaded run have 16 bits.
    settings |= {"optimizer_cpu_offload": True, "bf16": True} if case.offloaded else {}
    flags = RUN.split()
    for name, value in settings.items():
        flags += [flag_name(name), str(value).lower() if isinstance(value, bool) else str(value)]
    return flags


def combined() -> Iterator[PathCase]:
    """Yield every path and options of `PATHS` with every wire and every place of the states."""
    seen = list[tuple[str, dict[str, Any]]]()
    for line in PATHS:
        if (line.name, line.options) in seen:
            continue
        seen.append((line.name, line.options))
        assert line.is_plain, f"{case_id(line)}: the first line of these options has no others"
        for wire in WIRES:
            yield from (replace(line, wire=wire, **states) for states in STATES)


@cache
def product() -> tuple[Row, ...]:
    """Return every legal row."""
    rows = list[Row]()
    for case in combined():
        refused = refusals(case)
        rows += [Row(case, world) for world in WORLDS if world not in refused]
    return tuple(rows)


@cache
def lines() -> tuple[Row, ...]:
    """Return the rows of the lines of `PATHS`.

    The first line of a path is a row on every number of ranks, lines with other options of it on
    one and on two, and lines with other settings on two, or on four where two are too few.
    """
    legal = {row.values: row for row in product()}
    chosen = list[Row]()
    for line in PATHS:
        values = [Row(line, world).values for world in WORLDS]
        found = [legal[each] for each in values if each in legal]
        several = [row for row in found if row.world > 1]
        assert several, f"{case_id(line)}: {refusals(line)}"
        if line.is_variant:
            found = [row for row in found if row.world == 1 and line.is_plain] + several[:1]
        chosen += found
    return tuple(chosen)


@cache
def table(*, four: bool = True) -> tuple[Row, ...]:
    """Return legal rows that have every legal pair of values of two factors, and all `lines`.

    Without `four`, only cases for which two ranks are too few have rows of four ranks, and the
    pairs are those of the remaining rows.
    """
    on_two = {row.values[:3] for row in product() if row.world == 2}
    legal = [r for r in product() if four or r.world < 4 or r.values[:3] not in on_two]
    numbers = {row.values: number for number, row in enumerate(legal)}
    first = [numbers[row.values] for row in lines() if row.values in numbers]
    return tuple(legal[number] for number in sorted(covering([r.pairs for r in legal], first)))


def in_turns(choices: Mapping[Values, Sequence[T]]) -> Iterator[T]:
    """Yield the choices of a law's own parameters for each row, which is given by its values."""
    for number, (values, found) in enumerate(choices.items()):
        yield from turn(number, values, found)


def turn(number: int, values: Values, choices: Sequence[T]) -> Sequence[T]:
    """Return the choices of a law's own parameters for one of its rows, given by its values.

    They are a factor as well: the first line of a path has all of them on two ranks, every other
    row has one, in turns by the number of the row, so that each choice is tested beside many values
    of the other factors. The number of ranks is 0 for a law that runs once for each case.
    """
    return choices if values in _complete() else [choices[number % len(choices)]]


@cache
def _complete() -> frozenset[Values]:
    """The values of the rows that have all choices of a law's own parameters."""
    firsts = [row.values for row in lines() if not row.case.is_variant and row.world == 2]
    return frozenset(values for first in firsts for values in (first, (*first[:3], 0)))


def covering(rows: Sequence[Collection[Any]], first: Iterable[int] = ()) -> set[int]:
    """Return numbers of rows that together have every item of all rows, with `first` among them.

    The row with most missing items is added next, the first one of those with equally many; fewer
    ranks, which take less time, come first in `product`.
    """
    chosen = set(first)
    missing = {item for row in rows for item in row}
    missing -= {item for number in chosen for item in rows[number]}
    while missing:
        gains = [len(missing.intersection(row)) for row in rows]
        best = gains.index(max(gains))
        chosen.add(best)
        missing -= set(rows[best])
    return chosen
