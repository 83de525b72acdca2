"""Check a .bin/.idx pair and print its contents.

    python tools/check_data.py PREFIX [--vocab-size N] [--eod ID] [--full] [--sha256]

If PREFIX.json of the data records the hash of both files (tools/preprocess_data.py writes it), both
files are read completely and compared; a run compares only their sizes when it starts.

Exit status: 0 a good pair, 2 a wrong command line, 3 a bad pair (one line on stderr gives the
reason).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.closed_pipe import end_with_reader  # noqa: E402
from megatron.config.fields import LARGEST_INTEGER, whole_number  # noqa: E402
from megatron.data.build import check_tokenizer  # noqa: E402
from megatron.data.indexed_dataset import (
    IndexedDataset,  # noqa: E402
    without_suffix,  # noqa: E402
)
from megatron.data.sidecar import (  # noqa: E402
    MAX_IDS,
    SUFFIXES,
    DataFileRecord,
    check_sizes,
    read_file_records,
    read_sidecar,
    sidecar_path,
)
from megatron.errors import EXIT_DONE, DataError  # noqa: E402

_CHUNK = 1 << 22


def main(argv: list[str] | None = None) -> int:
    """Run the tool and return its exit status."""
    options = _parse(argv)
    prefix = without_suffix(options.prefix)
    try:
        _report(prefix, options)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return EXIT_DONE


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check a .bin/.idx pair and say what it holds.")
    parser.add_argument("prefix", metavar="PREFIX", help="path of the pair; a suffix is ignored")
    parser.add_argument(
        "--vocab-size",
        type=whole_number,
        metavar="N",
        help="ids must lie in [0, N); implies --full",
    )
    parser.add_argument(
        "--eod",
        type=whole_number,
        metavar="ID",
        help="default: as the sidecar says; implies --full",
    )
    parser.add_argument("--full", action="store_true", help="read every token (also on its own)")
    parser.add_argument("--sha256", action="store_true", help="print the hash of both files")
    options = parser.parse_args(argv)
    if options.vocab_size is not None and not 1 <= options.vocab_size <= MAX_IDS:
        parser.error(f"--vocab-size: {options.vocab_size}: wanted 1 to {MAX_IDS}")
    if options.eod is not None and not 0 <= options.eod <= LARGEST_INTEGER:
        parser.error(f"--eod: {options.eod}: wanted an id, a whole number from 0")
    return options


def _report(prefix: str, options: argparse.Namespace) -> None:
    data = IndexedDataset(prefix)
    check_sizes(prefix)
    lengths = data.sequence_lengths
    print(f"prefix      {prefix}")
    print(f"documents   {data.num_documents}")
    print(f"sequences   {len(data)}")
    print(f"tokens      {data.num_tokens}")
    print(f"dtype       {data.dtype}")
    print(
        f"lengths     min {lengths.min()}, mean {data.num_tokens / len(data):.1f}, "
        f"max {lengths.max()} tokens per sequence"
    )
    sidecar = read_sidecar(prefix)
    print(f"tokenizer   {json.dumps(sidecar) if sidecar else 'unknown (no sidecar)'}")
    vocab_size, eod = options.vocab_size, options.eod
    if vocab_size is not None:
        check_tokenizer(data, vocab_size=vocab_size)
    vocab_size = _described(sidecar, "vocab_size") if vocab_size is None else vocab_size
    eod = _described(sidecar, "eod") if eod is None else eod
    if eod is not None:
        ended, filled = _ends(data, eod)
        print(
            f"eod         {ended} of {filled} documents end with {eod} "
            f"({100 * ended / filled:.1f} %); {data.num_documents - filled} are empty"
        )
    if options.full or options.vocab_size is not None or options.eod is not None:
        low, high = _scan(data, vocab_size)
        print(f"ids         min {low}, max {high}")
    recorded = read_file_records(prefix)
    print(f"recorded    {'size and sha256 of both files' if recorded else 'no sizes, no hashes'}")
    if options.sha256 or recorded:
        _check_files(prefix, recorded or {}, show=options.sha256)


def _check_files(prefix: str, recorded: Mapping[str, DataFileRecord], *, show: bool) -> None:
    """Hash both files. Raises `DataError` if a hash differs from the recorded one."""
    for suffix in SUFFIXES:
        path = f"{prefix}{suffix}"
        try:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        if show:
            print(f"sha256      {digest}  {Path(path).name}")
        if suffix in recorded and digest != recorded[suffix].sha256:
            raise DataError(
                f"{path}: sha256 {digest[:12]}, but {sidecar_path(prefix)} recorded "
                f"{recorded[suffix].sha256[:12]} when it was written; bring the file back or write "
                "the data again"
            )


def _described(sidecar: dict[str, object] | None, key: str) -> int | None:
    value = sidecar.get(key) if sidecar else None
    return value if isinstance(value, int) else None


def _ends(data: IndexedDataset, eod: int) -> tuple[int, int]:
    """Return the number of documents that end in `eod`, and of those that have a token."""
    tokens = data.read(0, data.num_tokens)
    ended = filled = 0
    for places in _last_tokens(data):
        filled += len(places)
        ended += int(np.count_nonzero(tokens[places] == eod))
    return ended, filled


def _last_tokens(data: IndexedDataset) -> Iterator[NDArray[np.int64]]:
    """Yield the positions in the file of the last token of each non-empty document, in blocks."""
    before = 0
    marks = data.document_indices
    for start in range(0, data.num_documents, _CHUNK):
        edges = np.asarray(marks[start : start + _CHUNK + 1])
        lengths = data.sequence_lengths[edges[0] : edges[-1]]
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]) + before
        borders = ends[edges - edges[0]]
        yield borders[1:][borders[1:] > borders[:-1]] - 1
        before = int(ends[-1])


def _scan(data: IndexedDataset, vocab_size: int | None) -> tuple[int, int]:
    """Return the smallest and the largest id.

    Raises `DataError` for a negative id, or for one of `vocab_size` or more (None: any).
    """
    low, high = int(data.read(0, 1)[0]), 0
    for start in range(0, data.num_tokens, _CHUNK):
        part = data.read(start, min(_CHUNK, data.num_tokens - start))
        low, high = min(low, int(part.min())), max(high, int(part.max()))
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            limit = high + 1 if vocab_size is None else vocab_size
            _refuse(data, start, part, limit)
    return low, high


def _refuse(data: IndexedDataset, start: int, part: NDArray, vocab_size: int) -> None:
    values = part.astype(np.int64)
    place = int(((values < 0) | (values >= vocab_size)).argmax())
    ends = np.cumsum(data.sequence_lengths, dtype=np.int64)
    sequence = int(np.searchsorted(ends, start + place, side="right"))
    document = int(np.searchsorted(data.document_indices, sequence, side="right")) - 1
    offset = start + place - (int(ends[sequence]) - int(data.sequence_lengths[sequence]))
    raise DataError(
        f"{data.prefix}: token id {values[place]} in document {document} (sequence {sequence}) at "
        f"offset {offset}; ids must lie in [0, {vocab_size})"
    )


if __name__ == "__main__":
    end_with_reader()
    sys.exit(main())
