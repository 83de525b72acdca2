"""Figures of a task with their standard errors, from the log-likelihoods of all endings.

The standard error of a mean is that of lm-evaluation-harness: the sample's standard deviation over
the root of its size. That of a perplexity follows from the mean by the delta method, that of an F1
from 1,000 bootstrap samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tools.evaluation.example import Example

if TYPE_CHECKING:
    from megatron.model.likelihood import Likelihood

    Scores = Sequence[Sequence[Likelihood]]
    """The likelihood of every ending of every example."""

BOOTSTRAP_SAMPLES = 1000


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure of a task and its standard error, None for a single example."""

    value: float
    stderr: float | None


Figures = Mapping[str, Estimate]
"""Figures by name: accuracy, perplexity, f1, ..."""


def plain(figures: Figures) -> dict[str, float | None]:
    """Return each figure and its standard error by name, None for what JSON cannot hold."""
    found: dict[str, float | None] = {}
    for name, estimate in figures.items():
        found |= {name: _finite(estimate.value), f"{name}_stderr": _finite(estimate.stderr)}
    return found


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def mean_of(values: Sequence[float]) -> Estimate:
    """Return the mean of values, at least one, with its standard error."""
    mean, count = math.fsum(values) / len(values), len(values)
    if count == 1:
        return Estimate(value=mean, stderr=None)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(value=mean, stderr=math.sqrt(variance / count))


def of_words(examples: Sequence[Example], scores: Scores) -> Figures:
    """Return the share of words that greedy decoding yields, and the perplexity of a word."""
    loss = mean_of([-found.log for (found,) in scores])
    perplexity = math.exp(loss.value) if loss.value < 700 else math.inf
    known = loss.stderr is not None and math.isfinite(perplexity)
    stderr = perplexity * (loss.stderr or 0.0) if known else None
    return {
        "accuracy": mean_of([float(found.greedy) for (found,) in scores]),
        "perplexity": Estimate(value=perplexity, stderr=stderr),
    }


def accuracy(examples: Sequence[Example], scores: Scores) -> Figures:
    """Return the share of examples whose likeliest ending is the right one."""
    right = [float(c == e.answer) for c, e in zip(choices(scores), examples, strict=True)]
    return {"accuracy": mean_of(right)}


def both_accuracies(examples: Sequence[Example], scores: Scores) -> Figures:
    """Return accuracies by log-likelihood and by log-likelihood per character of the ending."""
    right: list[float] = []
    for example, found in zip(examples, scores, strict=True):
        shares = [f.log / e.length for f, e in zip(found, example.endings, strict=True)]
        right.append(float(shares.index(max(shares)) == example.answer))
    return {**accuracy(examples, scores), "length_normalised_accuracy": mean_of(right)}


def preferences(examples: Sequence[Example], scores: Scores) -> Figures:
    """Return the share of pairs whose first sentence is likelier than the second, overall."""
    return {"accuracy": mean_of([float(first.log > other.log) for first, other in scores])}


def credits(examples: Sequence[Example], scores: Scores) -> Figures:
    """Return the mean credit of the likeliest endings, for each measure of the examples."""
    pairs = list(zip(choices(scores), examples, strict=True))
    return {
        name: mean_of([example.credits[name][choice] for choice, example in pairs])
        for name in examples[0].credits
    }


def accuracy_and_f1(examples: Sequence[Example], scores: Scores) -> Figures:
    """Return the accuracy and the F1 of the second of two endings."""
    return {**accuracy(examples, scores), "f1": f1(counts(examples, scores), _of_second)}


def accuracy_and_macro_f1(examples: Sequence[Example], scores: Scores) -> Figures:
    """Return the accuracy and the unweighted mean of the F1 of each ending."""
    return {**accuracy(examples, scores), "f1": f1(counts(examples, scores), _macro)}


FIGURE_NAMES: Mapping[Callable[[Sequence[Example], Scores], Figures], tuple[str, ...]] = {
    of_words: ("accuracy", "perplexity"),
    accuracy: ("accuracy",),
    both_accuracies: ("accuracy", "length_normalised_accuracy"),
    preferences: ("accuracy",),
    credits: ("f1", "exact_match"),
    accuracy_and_f1: ("accuracy", "f1"),
    accuracy_and_macro_f1: ("accuracy", "f1"),
}
"""The names of the figures that each function returns."""


def choices(scores: Scores) -> list[int]:
    """Return the index of the likeliest ending of each example, the first of equals."""
    return [max(range(len(found)), key=lambda i: found[i].log) for found in scores]


def counts(examples: Sequence[Example], scores: Scores) -> NDArray[np.int64]:
    """Return how often each right ending (row) met each chosen one (column)."""
    size = len(examples[0].endings)
    table = np.zeros((size, size), dtype=np.int64)
    for choice, example in zip(choices(scores), examples, strict=True):
        table[example.answer, choice] += 1
    return table


def f1(table: NDArray[np.int64], reduce: Callable[[NDArray[np.float64]], float]) -> Estimate:
    """Return an F1 of a table of counts.

    Drawing all examples again with replacement draws their counts from a multinomial distribution.
    """
    total = int(table.sum())
    shares = (table / total).reshape(-1)
    draws = np.random.default_rng(0).multinomial(total, shares, size=BOOTSTRAP_SAMPLES)
    found = [reduce(_by_class(draw.reshape(table.shape))) for draw in draws]
    stderr = None if total == 1 else float(np.std(found, ddof=1))
    return Estimate(value=reduce(_by_class(table)), stderr=stderr)


def _by_class(table: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the F1 of each class, 0 for one that neither occurs nor is chosen."""
    met = table.sum(0) + table.sum(1)
    return 2 * np.diag(table) / np.maximum(met, 1)


def _of_second(of_classes: NDArray[np.float64]) -> float:
    return float(of_classes[1])


def _macro(of_classes: NDArray[np.float64]) -> float:
    return float(of_classes.mean())
