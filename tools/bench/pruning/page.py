"""The page of the pruning study: the cost of each way to prune, and the cheapest."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron.report.charts import BLUE, GREEN, ORANGE, PURPLE, RED
from tools.bench.convergence.groups import RunGroup, gaps_of, title_of
from tools.bench.convergence.model import parameters, stored
from tools.bench.convergence.plot import Panel
from tools.bench.convergence.report import (
    ReportedFinding,
    Study,
    gap_and_error,
    loss_cells,
    size_of,
    table,
)
from tools.bench.convergence.rows import Row
from tools.bench.convergence.study import EARLY_BIRD_DISTANCE, SGD, StudyPlan
from tools.bench.pruning.study import (
    DSR_INTERVAL,
    EARLY_BIRD_INTERVAL,
    REWIRED,
    SMALL_SHAPE,
    SPARSITY,
    early_bird,
    from_scratch,
    pruned,
    small,
    study,
    with_radius,
)
from tools.studies.statistics import scatter_of, standard_error

COLUMNS = ("run", "seeds", "p", "f", "validation loss", "gap", "error", "bytes", "ticket")
MAGNITUDE, RANDOM, EARLY_BIRD = pruned("magnitude"), pruned("random"), early_bird()
PAIRS = (
    (MAGNITUDE, RANDOM),
    (EARLY_BIRD, RANDOM),
    (pruned("magnitude", optimizer="sgd"), pruned("random", optimizer="sgd")),
    (MAGNITUDE, small()),
    (EARLY_BIRD, small()),
    *((from_scratch(p, rewired=True), from_scratch(p, rewired=False)) for p in REWIRED),
)
"""Runs that are compared: whether the loss of the first is below that of the second."""


@dataclass(frozen=True, kw_only=True)
class PruningComparison:
    """A comparison of the losses of two ways to prune.

    `difference` is the mean, over the seeds that both have, of the other's validation loss minus
    this one's. `error` is its standard error (with one seed from the scatter of all groups that
    have several, None if there are none).
    """

    name: str
    against: str
    seeds: tuple[int, ...]
    difference: float
    error: float | None

    @property
    def below(self) -> bool:
        """Whether the difference exceeds twice the error."""
        return self.error is not None and self.difference > 2 * self.error

    @property
    def line(self) -> str:
        """The verdict in words."""
        known = self.error is not None
        error = f"{'~' * (len(self.seeds) == 1)}{self.error:.4f}" if known else "not known"
        seeds = f"seed{'s' * (len(self.seeds) > 1)} {', '.join(map(str, self.seeds))}"
        verdict = f"{title_of(self.name)} below {title_of(self.against)}"
        answer = "yes" if self.below else "no"
        return f"{verdict}: {answer} (difference {self.difference:+.4f}, error {error}; {seeds})"


@dataclass(frozen=True, kw_only=True)
class Pruning:
    """The pruning of a group.

    `stored` is the share of the shared model's parameters that it trains, `tickets` the step after
    which each of its seeds drew its mask, None for never.
    """

    sparsity: float | None
    stored: float
    tickets: tuple[int | None, ...]


def tell(rows: Sequence[Row], groups: Sequence[RunGroup]) -> ReportedFinding:
    """Return the table and the verdicts."""
    facts = {group.name: pruning_of(group.name, rows) for group in groups}
    comparisons = comparisons_of(rows)
    lines = table(COLUMNS, (_cells(group, facts[group.name]) for group in groups))
    if comparisons:
        lines += ["", "Yes: beyond twice the error.", ""]
    lines += [f"- {comparison.line}" for comparison in comparisons]
    values = {
        "pruning": {name: asdict(fact) for name, fact in facts.items()},
        "comparisons": [{**asdict(each), "below": each.below} for each in comparisons],
    }
    return ReportedFinding(lines=lines, values=values)


def comparisons_of(rows: Sequence[Row]) -> list[PruningComparison]:
    """Compare the `PAIRS` whose groups both have finished runs with a common seed.

    Runs of one seed share their dense run, so the difference of losses is the difference of gaps.
    """
    gaps = gaps_of(rows)
    scatter, found = scatter_of(gaps.values()), []
    for ours, theirs in PAIRS:
        mine, other = gaps.get(ours.group, {}), gaps.get(theirs.group, {})
        seeds = tuple(sorted(mine.keys() & other.keys()))
        if not seeds:
            continue
        differences = [other[seed] - mine[seed] for seed in seeds]
        error = None if scatter is None else math.sqrt(2) * scatter
        if len(seeds) > 1:
            error = standard_error(differences)
        found.append(
            PruningComparison(
                name=ours.group,
                against=theirs.group,
                seeds=seeds,
                difference=statistics.fmean(differences),
                error=error,
            )
        )
    return found


def pruning_of(name: str, rows: Sequence[Row]) -> Pruning:
    """Return the pruning facts of a group, from its rows in the order of seeds."""
    members = sorted((row for row in rows if row["group"] == name), key=lambda row: row["seed"])
    return Pruning(
        sparsity=members[0].get("sparsity"),
        stored=members[0].get("stored", 1.0),
        tickets=tuple(row["ticket"] for row in members if "ticket" in row),
    )


def _cells(group: RunGroup, facts: Pruning) -> list[str]:
    tickets = ["none" if ticket is None else str(ticket) for ticket in facts.tickets]
    if len(set(tickets)) == 1:
        del tickets[1:]
    cells = [group.title, ", ".join(map(str, group.seeds))]
    cells += ["" if facts.sparsity is None else f"{facts.sparsity:g}", f"{facts.stored:.4f}"]
    return [*cells, *loss_cells(group), f"{group.payload:.4f}", ", ".join(tickets)]


def _preface(plan: Mapping[str, Any]) -> str:
    sequence, (layers, hidden), scaled = plan["sequence"], SMALL_SHAPE, StudyPlan(**plan).scaled
    return (
        f"{size_of(plan)} Runs called sgd: SGD with momentum 0.9, learning rate {SGD['lr']} to "
        f"{SGD['min-lr']}, weight decay {SGD['weight-decay']}. p: sparsity of each matrix and "
        f"embedding; f: parameters trained over the {parameters(sequence):,} of the model. "
        "Magnitude and random are pruned where they leave the dense run of their seed and "
        "optimizer, at 20 % of the steps; the early bird leaves it at 5 %, draws a mask every "
        f"{scaled(EARLY_BIRD_INTERVAL)} steps and is pruned when five in a row differ by less than "
        f"{EARLY_BIRD_DISTANCE:g}. {title_of(small().variant)}: a dense model of {layers} layers x "
        f"{hidden} from the beginning, {parameters(sequence, SMALL_SHAPE):,} parameters, the "
        f"nearest to the {stored(sequence, SPARSITY):,} that are stored at p = {float(SPARSITY):g}."
        " From scratch: masks drawn at random before the first step, which stay or (dsr) are "
        f"rewired every {scaled(DSR_INTERVAL)} steps at first, with all moments starting anew or "
        "(kept moments) only those of new weights. Runs of one seed see the same "
        f"batches. {gap_and_error(plan)} Bytes: sent over those of a dense fp32 step, mean of the "
        "steps after the fork, for the early bird also of those before its ticket. Ticket: the "
        "step after which the mask was drawn, by seed where it differs."
    )


PRUNING = Study(
    folder="pruning",
    runs=study(),
    preface=_preface,
    tell=tell,
    panels=(
        Panel(
            title=f"p = {float(SPARSITY):g}: training loss less dense",
            groups=(
                *(run.group for run in (MAGNITUDE, RANDOM, EARLY_BIRD, with_radius(), small())),
            ),
        ),
        Panel(
            title="from scratch: training loss less dense",
            groups=(
                *(from_scratch(p, rewired=dsr).group for p in REWIRED[:2] for dsr in (True, False)),
                from_scratch(SPARSITY, rewired=True, keep_moments=True).group,
            ),
        ),
    ),
    colors={"magnitude": BLUE, "random": ORANGE, "early": GREEN, "dense": PURPLE, "dsr": RED},
)
