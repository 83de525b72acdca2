"""The credit that ReCoRD gives a predicted entity: SQuAD's F1 and exact match.

Rajpurkar et al. 2016: texts are compared without case, punctuation, articles and extra white
space, and the best of all accepted answers counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(entity: str, answers: Sequence[str]) -> float:
    """Return 1 if the entity equals one of the answers, else 0."""
    return float(any(_words(entity) == _words(answer) for answer in answers))


def token_f1(entity: str, answers: Sequence[str]) -> float:
    """Return the largest F1 of the entity's words against the words of an answer."""
    return max(_f1(_words(entity), _words(answer)) for answer in answers)


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _f1(found: list[str], wanted: list[str]) -> float:
    if not found or not wanted:
        return float(found == wanted)
    shared = sum((Counter(found) & Counter(wanted)).values())
    return 2 * shared / (len(found) + len(wanted))
