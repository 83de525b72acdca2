"""Raw text to token pairs: workers encode batches, one writer per key keeps their order.

Output is the same bytes for any number of workers: a batch is a function of the input alone, and
results are written in the order the batches were read.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.data.encode import Encoded, EncodeOptions, encode, load_tokenizer
from megatron.data.index_file import bin_path, idx_path
from megatron.data.indexed import IndexedDatasetWriter, optimal_dtype
from megatron.data.local_file import is_folder, stat_of
from megatron.data.records import Batch
from megatron.data.sidecar import sidecar_path
from megatron.data.workers import Crew, WorkerError, describe_error
from megatron.errors import ConfigError, DataError, SparsetronError


@dataclass(kw_only=True)
class Counts:
    """How far a run is."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    bad: int = 0
    position: int = 0  # of the input, see `Batch.position`


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A finished run: the prefixes written, one per key, and what is in them together."""

    prefixes: tuple[str, ...]
    dtype: np.dtype
    counts: Counts


def preprocess(
    batches: Iterable[Batch],
    *,
    options: EncodeOptions,
    output_prefix: str,
    workers: int,
    max_bad_lines: int = 0,
    say: Callable[[str], None],
    watch: Callable[[Counts], None],
) -> Outcome:
    """Write `{output_prefix}_{key}_document.{bin,idx,json}` for each key.

    Nothing appears under these names before all of it is complete. `watch` is called after each
    batch, `say` with a line for each record left out. DataError: more than `max_bad_lines` bad
    records, a worker that fails, or no tokens at all.
    """
    tokenizer = load_tokenizer(options.tokenizer)
    dtype = optimal_dtype(tokenizer.vocab_size)
    prefixes = output_prefixes(output_prefix, options.keys)
    counts = Counts()
    with ExitStack() as stack:
        writers = [stack.enter_context(IndexedDatasetWriter(prefix, dtype)) for prefix in prefixes]
        results = stack.enter_context(closing(_encoded(batches, options, workers=workers)))
        tokens = [0] * len(writers)
        for batch, encoded in results:
            _report_bad(batch, encoded.bad, counts, allowed=max_bad_lines, say=say)
            for key, writer in enumerate(writers):
                _write(writer, encoded.tokens[key], encoded.lengths[key])
                tokens[key] += len(encoded.tokens[key])
            counts.documents += len(encoded.lengths[0])
            counts.text_bytes += encoded.text_bytes
            counts.tokens = sum(tokens)
            counts.position = batch.position
            watch(counts)
        if not counts.documents:
            bad = f" but {counts.bad} bad lines" if counts.bad else ""
            raise DataError(f"--input: holds no documents{bad}; nothing was written")
        for key, total in zip(options.keys, tokens, strict=True):
            if total == 0:
                raise DataError(
                    f"--input: {counts.documents} documents, but no text under {key!r}; nothing "
                    "was written"
                )
        for writer in writers:
            writer.close(tokenizer=tokenizer.describe())
    return Outcome(prefixes=prefixes, dtype=dtype, counts=counts)


def output_prefixes(output_prefix: str, keys: Sequence[str]) -> tuple[str, ...]:
    """Megatron's names, one per JSON key; ConfigError for a key that cannot be part of one."""
    for key in keys:
        if not re.fullmatch(r"[\w.-]+", key):
            raise ConfigError(f"--json-keys: {key!r}; a key names a file: letters, digits, . _ -")
    if len(set(keys)) != len(keys):
        raise ConfigError(f"--json-keys: {' '.join(keys)}: a key is given twice")
    return tuple(f"{output_prefix}_{key}_document" for key in keys)


def check_outputs(prefixes: Iterable[str], *, inputs: Iterable[Path], overwrite: bool) -> None:
    """Make the output folder and clear what a killed run left there.

    ConfigError if an output exists and may not be overwritten, or is one of the inputs.
    """
    sources = {os.path.realpath(path) for path in inputs}
    for prefix in prefixes:
        outputs = (bin_path(prefix), idx_path(prefix), sidecar_path(prefix))
        for path in outputs:
            if os.path.realpath(path) in sources:
                raise ConfigError(f"--output-prefix: {path} is one of the inputs; choose another")
            if is_folder(path):
                raise ConfigError(f"--output-prefix: {path} is a folder; choose another")
            if stat_of(path) is not None and not overwrite:
                raise ConfigError(
                    f"--output-prefix: {path} exists; choose another or add --overwrite"
                )
        try:
            bin_path(prefix).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{bin_path(prefix).parent}: {error.strerror}") from error
        for path in outputs:
            _remove_stale(path)


def _remove_stale(path: Path) -> None:
    """Remove temporary files of `path` whose process is gone."""
    pattern = re.compile(re.escape(path.name) + r"\.(\d+)\.tmp")
    for other in path.parent.iterdir():
        match = pattern.fullmatch(other.name)
        if match and not _is_running(int(match[1])):
            other.unlink(missing_ok=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _report_bad(
    batch: Batch,
    bad: Sequence[tuple[int, str]],
    counts: Counts,
    *,
    allowed: int,
    say: Callable[[str], None],
) -> None:
    for number, reason in bad:
        counts.bad += 1
        place = f"{batch.source}:{number}"
        if counts.bad > allowed:
            raise DataError(
                f"{place}: {reason}; that is bad line {counts.bad}, and --max-bad-lines allows "
                f"{allowed}"
            )
        say(f"left out {place}: {reason}")


def _write(writer: IndexedDatasetWriter, tokens: NDArray, lengths: Sequence[int]) -> None:
    start = 0
    for length in lengths:
        writer.add_document(tokens[start : start + length])
        start += length


def _encoded(
    batches: Iterable[Batch], options: EncodeOptions, *, workers: int
) -> Generator[tuple[Batch, Encoded], None, None]:
    """Batches with their tokens, in order, made here by one worker or elsewhere by several."""
    work = functools.partial(encode, options=options)
    try:
        if workers > 1:
            with Crew(work, size=workers) as crew:
                yield from crew.map(batches)
            return
        for batch in batches:
            yield batch, _here(work, batch)
    except WorkerError as error:
        assert isinstance(error.task, Batch)
        numbers = f"{error.task.records[0][0]}-{error.task.records[-1][0]}"
        place = f"{error.task.source}:{numbers}"
        if error.died:
            raise DataError(
                f"{place}: {error.reason} near here (killed for memory?); lower --workers"
            ) from error
        raise DataError(f"{place}: the tokenizer failed: {error.reason}") from error


def _here(work: Callable[[Batch], Encoded], batch: Batch) -> Encoded:
    try:
        return work(batch)
    except SparsetronError:
        raise
    except Exception as error:
        raise WorkerError(batch, describe_error(error), died=False) from error
