"""Lines of the tasks LAMBADA, multiple choice and BLiMP."""

from __future__ import annotations

from megatron.errors import DataError
from tools.evaluation.example import (
    Ending,
    Example,
    Line,
    index_of,
    joined,
    string_of,
    text_of,
)


def lambada(line: Line, where: str) -> Example:
    """Read {"text": ...}, or {"context": ..., "continuation": ...}: the last word is predicted.

    The last word is what follows the last space, as in lm-evaluation-harness.
    """
    if "text" in line:
        context, _, word = text_of(line, "text", where).rstrip().rpartition(" ")
        if not context.strip():
            raise DataError(
                f"{where}: text: must be two or more words set apart by spaces, the last to be "
                "predicted"
            )
        bare = context.rstrip()
        ending = Ending(context=bare, text=f"{context[len(bare) :]} {word}")
        return Example(where=where, endings=(ending,))
    context = string_of(line, "context", where)
    return Example(where=where, endings=joined(context, [text_of(line, "continuation", where)]))


def multiple_choice(line: Line, where: str) -> Example:
    """Read {"context": ..., "choices": [...], "answer": 0}; the answer counts from 0."""
    choices = line.get("choices")
    if not isinstance(choices, list) or len(choices) < 2:
        raise DataError(f"{where}: choices: must be a list of two or more texts")
    if not all(isinstance(choice, str) and choice.strip() for choice in choices):
        raise DataError(f"{where}: choices: must be texts that are not empty")
    answer = index_of(line, "answer", where, count=len(choices))
    context = string_of(line, "context", where)
    return Example(where=where, endings=joined(context, choices), answer=answer)


_BLIMP_KEYS = {
    "good": "sentence_good",
    "bad": "sentence_bad",
    "paradigm": "UID",
    "phenomenon": "linguistics_term",
}
"""Keys of the files that were published, by those read here."""


def blimp(line: Line, where: str) -> Example:
    """Read {"paradigm": ..., "phenomenon": ..., "good": ..., "bad": ...}, or the published keys.

    Sentences are scored whole, with no context but the start of a document. A space precedes them,
    as in lm-evaluation-harness.
    """
    keys = {key: other if other in line else key for key, other in _BLIMP_KEYS.items()}
    texts = {key: text_of(line, found, where) for key, found in keys.items()}
    endings = tuple(Ending(context="", text=f" {texts[key]}") for key in ("good", "bad"))
    return Example(where=where, endings=endings, group=texts["phenomenon"])
