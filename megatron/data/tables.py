"""Documents kept in table columns: Parquet files, and what the `datasets` package loads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.data.records import Batch, Payload
from megatron.errors import DataError, missing_extra

_ROWS = 256


def read_parquet(path: Path, *, keys: Sequence[str], before: int) -> Iterator[Batch]:
    """Batches of rows of the columns `keys`; `position` grows with the rows read."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise missing_extra("pyarrow", "data") from error
    size = path.stat().st_size
    first = 1
    try:
        with parquet.ParquetFile(path) as file:
            _check_columns(str(path), keys, file.schema_arrow.names)
            total = max(file.metadata.num_rows, 1)
            for part in file.iter_batches(batch_size=_ROWS, columns=list(keys)):
                columns = [part.column(key).to_pylist() for key in keys]
                done = before + size * (first - 1 + part.num_rows) // total
                yield _rows(str(path), columns, first=first, position=done)
                first += part.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error


def read_dataset(name: str, *, split: str, keys: Sequence[str]) -> Iterator[Batch]:
    """Rows of a data set that the `datasets` package knows by name, or of a folder of its own.

    A name that is not a local folder is fetched from the hub, before this returns. `position`
    counts rows.
    """
    try:
        import datasets
    except ImportError as error:
        raise missing_extra("datasets", "data") from error
    try:
        found: Any
        if any((Path(name) / mark).is_file() for mark in ("state.json", "dataset_dict.json")):
            found = datasets.load_from_disk(name)
            found = found[split] if isinstance(found, datasets.DatasetDict) else found
        else:
            found = datasets.load_dataset(name, split=split)
    except Exception as error:  # the package, the hub and the network raise what they like
        reason = str(error).strip().split("\n")[0]
        raise DataError(f"--dataset {name}: split {split!r} cannot be loaded: {reason}") from error
    _check_columns(name, keys, found.column_names)
    return _slices(name, found, keys)


def _slices(name: str, found: Any, keys: Sequence[str]) -> Iterator[Batch]:
    for start in range(0, len(found), _ROWS):
        part = found[start : start + _ROWS]
        columns = [list(part[key]) for key in keys]
        yield _rows(name, columns, first=start + 1, position=start + len(columns[0]))


def _check_columns(source: str, keys: Sequence[str], names: Sequence[str]) -> None:
    missing = [key for key in keys if key not in names]
    if missing:
        raise DataError(
            f"{source}: no column {missing[0]!r}; it has {', '.join(names)}; choose one of them "
            "with --json-keys"
        )


def _rows(source: str, columns: list[list[object]], *, first: int, position: int) -> Batch:
    records: list[tuple[int, Payload]] = [
        (first + at, row) for at, row in enumerate(zip(*columns, strict=True))
    ]
    return Batch(source=source, kind="row", records=records, position=position)
