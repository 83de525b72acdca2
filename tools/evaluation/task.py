"""A task: how its file is read, and which figures it has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.errors import DataError
from tools.evaluation.example import Example, Reader
from tools.evaluation.figures import FIGURE_NAMES, Figures

if TYPE_CHECKING:
    from tools.evaluation.figures import Scores


@dataclass(frozen=True, kw_only=True)
class EvaluationTask:
    """The functions of a task.

    `read` makes an example of a line and of its place in the file. `figures` computes the figures
    by name from all examples and the likelihoods of their endings.
    """

    read: Reader
    figures: Callable[[Sequence[Example], Scores], Figures]

    @property
    def figure_names(self) -> tuple[str, ...]:
        """The names of the figures."""
        return FIGURE_NAMES[self.figures]


def read_examples(path: Path, read: Reader, *, limit: int | None = None) -> list[Example]:
    """Return the examples of a file, at most `limit`.

    Raises:
        DataError: The file is empty, cannot be read or has a bad line.
    """
    examples = list(islice(_examples(path, read), limit))
    if not examples:
        raise DataError(f"{path}: holds no line")
    return examples


def _examples(path: Path, read: Reader) -> Iterator[Example]:
    for where, line in read_lines(path):
        yield read(line, where)


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place, FILE:NUMBER, and the object of each line of a file of JSON lines.

    Raises:
        DataError: The file cannot be read or has a line that is no JSON object.
    """
    from megatron.data.raw_text import find_inputs, format_of, read_batches

    files = find_inputs([str(path)], log=lambda text: None)
    for file in files:
        if format_of(file) == "parquet":
            raise DataError(f"{file}: is Parquet; write it as JSON lines (to_json of `datasets`)")
    for batch in read_batches(files, keys=(), text_unit="line"):
        for number, record in batch.records:
            where = f"{batch.source}:{number}"
            if not isinstance(record, bytes):
                raise DataError(f"{where}: not a line of JSON")
            yield where, _parsed(record, where)


def _parsed(record: bytes, where: str) -> dict[str, Any]:
    try:
        line = json.loads(record)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    if not isinstance(line, dict):
        raise DataError(f"{where}: must be a JSON object")
    return line
